#!/usr/bin/env python3
"""Compare the captures of diff.sh: how often noise was read as change, and how often B found."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from waitfold.capture import Naming, open_capture
from waitfold.diff import Row, Side, compare, read_side
from waitfold.show.diff import label


def main() -> None:
    """Print a line for each pair that is not as it must be, and how many were."""
    captures = sorted(Path(sys.argv[1]).iterdir())
    sides = [read_side(open_capture(path, Naming()), "event") for path in captures]
    rates = [side.rate or 0.0 for side in sides]
    thirds = [rates[i::3] for i in range(3)]
    for name, of in zip(("A", "A", "B"), thirds, strict=True):
        print(f"{name}: {min(of):.0f} to {max(of):.0f} transactions a second")
    for unit in ("transaction", "second"):
        false, first, found, ratios = 0, 0, 0, []
        for i in range(0, len(sides), 3):
            rows = judge(sides[i], sides[i + 1], unit)
            false += bool(rows)
            if rows:
                print(f"  by {unit}, A against A: {'; '.join(map(said, rows))}")
            rows = judge(sides[i + 1], sides[i + 2], unit)
            names = [label(row.key) for row in rows]
            first += names[:1] == ["IO:WALSync"]
            found += "IO:WALSync" in names
            if names[:1] != ["IO:WALSync"]:
                print(f"  by {unit}, B against A: {'; '.join(map(said, rows[:3])) or 'no change'}")
            ratios += [row.mean.ratio for row in rows if label(row.key) == "IO:WALSync"]
        pairs = len(sides) // 3
        print(f"by {unit}: A against A, {false} of {pairs} pairs with a significant row; ", end="")
        print(
            f"B against A, IO:WALSync significant in {found} of {pairs}, first in {first}", end=""
        )
        low, middle, high = np.quantile(ratios or [np.nan], (0, 0.5, 1))
        print(f", each {middle:.2f} times as long ({low:.2f} to {high:.2f})")


def judge(before: Side, after: Side, unit: str) -> list[Row]:
    """Return the significant rows, the first first."""
    return [row for row in compare(before, after, unit == "transaction") if row.significant]


def said(row: Row) -> str:
    """Return a row in short, the significant ratios with a star."""
    ratios = [
        f"{name} {change.ratio or 0:.2f}{'*' * change.significant}"
        for name, change in (("time", row.time), ("number", row.count), ("each", row.mean))
        if change.before is not None
    ]
    return f"{label(row.key)} ({', '.join(ratios)})"


if __name__ == "__main__":
    main()
