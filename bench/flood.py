#!/usr/bin/env python3
"""See whether a recording holds, or says that it lost, all that was made."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from truth import once, read_capture

from waitfold.capture import Naming, open_capture


@dataclass(frozen=True)
class Recorded:
    """What a capture holds: transitions by thread, starts of reads, what was lost, the time."""

    by_tid: dict[int, int]
    reads: int
    lost: int
    twice: int
    seconds: float
    bytes_: int

    @property
    def transitions(self) -> int:
        """All of them."""
        return sum(self.by_tid.values())


def recorded(path: Path) -> Recorded:
    """Read a capture; what perf wrote twice counts once."""
    columns, lost = read_capture(path)
    (time, tid, value), twice = once(columns)
    label = open_capture(path, Naming()).events.label
    reads = [code for code in np.unique(value).tolist() if label(code) == ("IO", "DataFileRead")]
    tids, counts = np.unique(tid, return_counts=True)
    return Recorded(
        dict(zip(tids.tolist(), counts.tolist(), strict=True)),
        int(np.isin(value, reads).sum()),
        lost,
        twice,
        float(time[-1] - time[0]) / 1e9,
        sum(
            file.stat().st_size
            for file in (path / "perf.data", path / "trace.dat")
            if file.exists()
        ),
    )


def made(name: str, path: Path, counts: Path) -> bool:
    """Compare with what the program says that it made: lines of pid, transitions, ns, ns of CPU."""
    rows = [line.split() for line in counts.read_text().splitlines()]
    of = {int(pid): int(count) for pid, count, *_ in rows}
    total, took = sum(of.values()), max(int(row[2]) for row in rows) / 1e9
    got = recorded(path)
    by_tid = {pid: got.by_tid.get(pid, 0) for pid in of}
    missing = total - sum(by_tid.values())
    verdict = "all recorded"
    if missing or got.lost:
        verdict = (
            "lost as shown" if missing == got.lost else f"{got.lost - missing} more shown lost"
        )
    whole = 0 <= missing <= got.lost and (got.lost > 0 or by_tid == of)
    print(
        f"{name}: made {total} in {took:.1f} s ({total / took:.0f} a second), recorded "
        f"{total - missing}, missing {missing}, lost by its own account {got.lost}: "
        f"{verdict if whole else 'DIFFERS'}; "
        f"{got.bytes_ / (got.transitions + got.twice):.1f} bytes each, {got.twice} of them twice"
    )
    return whole


def read(name: str, path: Path, blocks: int) -> bool:
    """Compare with the blocks that the server says it read."""
    got = recorded(path)
    print(
        f"{name}: recorded {got.transitions} in {got.seconds:.1f} s "
        f"({got.transitions / got.seconds:.0f} a second), lost by its own account {got.lost}; "
        f"blocks read by the server's account {blocks}, waits for them {got.reads}; "
        f"{got.bytes_ / (got.transitions + got.twice):.1f} bytes each, {got.twice} of them twice"
    )
    return blocks <= got.reads + got.lost


def main() -> int:
    """Do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["made", "read"])
    parser.add_argument("name")
    parser.add_argument("capture", type=Path)
    parser.add_argument("account", help="a file of what was made, or a number of blocks")
    options = parser.parse_args()
    if options.verb == "made":
        return not made(options.name, options.capture, Path(options.account))
    return not read(options.name, options.capture, int(options.account))


if __name__ == "__main__":
    sys.exit(main())
