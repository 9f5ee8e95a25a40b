"""``python tests/real_modules [--only NAME]`` prints the table, measured now."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch  # noqa: E402

from real_modules.table import FROM_GOOD_TO_BAD, Refused, in_words, rows, today  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    wanted = parser.parse_args().only
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    chosen = [row for row in rows() if wanted in row.name]
    counts: dict[str, Counter[str]] = {}
    print("| module | like | windows: should | today | split: should | today |\n| --- | --- | --- | --- | --- | --- |")
    for row in chosen:
        cells = [row.name, row.like]
        for how in ("windows", "split"):
            outcome, holds = today(row, how)
            short = f"**{in_words(outcome)}{', not exact with that' * (type(outcome) is type(row.expected(how)) is Refused)}**"
            cells += [in_words(row.expected(how)), "as it should" if holds else short]
            counts.setdefault(f"{how}, should", Counter())[type(row.expected(how)).__name__] += 1
            counts.setdefault(f"{how}, today", Counter())[type(outcome).__name__] += 1
            counts.setdefault(f"{how}, today", Counter())["as it should"] += holds
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{len(chosen)} modules")
    for name, count in counts.items():
        kinds = ", ".join(f"{count[kind.__name__]} {kind.__name__.lower()}" for kind in FROM_GOOD_TO_BAD if count[kind.__name__])
        print(f"{name}: {kinds}" + (f"; {count['as it should']} as it should" if "as it should" in count else ""))


if __name__ == "__main__":
    main()
