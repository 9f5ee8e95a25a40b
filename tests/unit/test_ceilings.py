"""The size of the project has ceilings: each part of the rebuilding lowers them, and nothing raises them.

In the end the package has at most 8,500 lines of code and 13,000 lines in all, at a width of 100, in at most 90 files, none over
350 lines, and the tests have at most 22,000 lines.
"""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import lightning_accum

PACKAGE = Path(lightning_accum.__file__).parent
TESTS = Path(__file__).parents[1]
PUBLIC = "fabric|ray|testing|pytorch_lightning"
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

CEILINGS = {
    "lines of code": 13_495,
    "lines of the package": 19_225,
    "files of the package": 98,
    "width of the package": 132,
    "lines of its largest file": 350,
    "files outside trainer/ that import Lightning": 0,
    "assignments to an attribute of another object": 109,
    "lines of tests": 22_465,
    "lines of tests in files that import private modules": 56,
}


@cache
def sources(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def lines(source: str) -> int:
    return source.count("\n")


def lines_of_code(source: str) -> int:
    """Without blank lines, comments and docstrings; imports count."""
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    documentation = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return len(code - documentation)


def assignments_to_others(source: str) -> int:
    """``x.y = z``, ``x.y += z`` and ``del x.y``, where x is not the object whose method it stands in."""
    stored = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    ]
    return sum(not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")) for node in stored)


def imports(source: str, modules: str) -> bool:
    return re.search(rf"^\s*(from|import) ({modules})", source, re.MULTILINE) is not None


@cache
def measured() -> dict[str, int]:
    package, tests = sources(PACKAGE), sources(TESTS)
    outside = [source for path, source in package.items() if path.relative_to(PACKAGE).parts[0] != "trainer"]
    lightning = r"lightning\.pytorch|pytorch_lightning"
    private = [source for source in tests.values() if imports(source, rf"lightning_accum\.(?!{PUBLIC})")]
    return {
        "lines of code": sum(map(lines_of_code, package.values())),
        "lines of the package": sum(map(lines, package.values())),
        "files of the package": len(package),
        "width of the package": max(len(line) for source in package.values() for line in source.splitlines()),
        "lines of its largest file": max(map(lines, package.values())),
        "files outside trainer/ that import Lightning": sum(imports(source, lightning) for source in outside),
        "assignments to an attribute of another object": sum(map(assignments_to_others, package.values())),
        "lines of tests": sum(map(lines, tests.values())),
        "lines of tests in files that import private modules": sum(map(lines, private)),
    }


@pytest.mark.parametrize("what", CEILINGS)
def test_it_stays_under_its_ceiling(what: str) -> None:
    assert measured()[what] <= CEILINGS[what]


def test_a_ceiling_is_lowered_with_what_it_is_over() -> None:
    """One that is far above what is there would hold nothing."""
    assert {what: CEILINGS[what] - found for what, found in measured().items() if CEILINGS[what] > 1.03 * found + 3} == {}


if __name__ == "__main__":
    for what, found in measured().items():
        print(f"{what}: {found:,} of {CEILINGS[what]:,}")
