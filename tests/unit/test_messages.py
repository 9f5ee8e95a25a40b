"""What the package says to its users stands in one table, ``tests/messages.txt``: no other test depends on its wording.

After a change of a message: ``python tests/unit/test_messages.py``, and read what has changed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_accum

TABLE = Path(__file__).parents[1] / "messages.txt"


def sentences_of(tree: ast.AST) -> Iterator[str]:
    """All strings but docstrings that are several words; what is put in at run time is shown in braces."""
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    left_out |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        text = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}" for part in node.values]
            text = "".join(map(str, parts))
        if text is not None and text.count(" ") >= 3:
            yield " ".join(text.split())


def messages() -> list[str]:
    files = Path(lightning_accum.__file__).parent.rglob("*.py")
    return sorted({text for file in files for text in sentences_of(ast.parse(file.read_text(encoding="utf-8")))})


def test_the_table_has_every_message_and_no_other() -> None:
    assert TABLE.read_text(encoding="utf-8").splitlines() == messages(), f"run: python {Path(__file__).name}, and read what changed"


if __name__ == "__main__":
    TABLE.write_text("\n".join(messages()) + "\n", encoding="utf-8")
