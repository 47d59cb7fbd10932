#!/usr/bin/env python3
"""See whether a recording holds, or says that it lost, all that was made."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from waitfold.capture import Naming, open_capture
from waitfold.events import STORE, transitions

DATA_FILE_READ = 0x0A00000E


@dataclass(frozen=True)
class Recorded:
    """What a capture holds: transitions by thread, starts of reads, what was lost, the time."""

    by_tid: dict[int, int]
    reads: int
    lost: int
    seconds: float
    bytes_: int

    @property
    def transitions(self) -> int:
        """All of them."""
        return sum(self.by_tid.values())


def recorded(path: Path) -> Recorded:
    """Read a capture."""
    capture = open_capture(path, Naming())
    stream = transitions(capture.files, capture.rule)
    tids: list[np.ndarray] = []
    reads = 0
    for batch in stream:
        stored = batch.mark == STORE
        tids.append(batch.tid[stored])
        reads += int((batch.value[stored] == DATA_FILE_READ).sum())
    tid, count = np.unique(np.concatenate(tids), return_counts=True)
    return Recorded(
        dict(zip(tid.tolist(), count.tolist(), strict=True)),
        reads,
        stream.lost,
        ((stream.last_ns or 0) - (stream.first_ns or 0)) / 1e9,
        sum(
            file.stat().st_size
            for file in path.iterdir()
            if file.name.startswith(("perf.data", "trace.dat"))
        ),
    )


def made(name: str, path: Path, counts: Path) -> bool:
    """Compare with what the program says that it made: lines of pid, transitions, ns."""
    rows = [line.split() for line in counts.read_text().splitlines() if line != "done"]
    of = {int(pid): int(count) for pid, count, _ in rows}
    total, took = sum(of.values()), max(int(ns) for *_, ns in rows) / 1e9
    got = recorded(path)
    by_tid = {pid: got.by_tid.get(pid, 0) for pid in of}
    mine = sum(by_tid.values())
    whole = total == mine + got.lost and (got.lost > 0 or by_tid == of)
    print(
        f"{name}: made {total} in {took:.1f} s ({total / took:.0f} a second), recorded {mine}, "
        f"lost by its own account {got.lost}: "
        f"{'all accounted for' if whole else f'DIFFERS by {total - mine - got.lost}'}; "
        f"{got.bytes_ / got.transitions:.1f} bytes each"
    )
    return whole


def read(name: str, path: Path, blocks: int) -> bool:
    """Compare with the blocks that the server says it read."""
    got = recorded(path)
    print(
        f"{name}: recorded {got.transitions} in {got.seconds:.1f} s "
        f"({got.transitions / got.seconds:.0f} a second), lost by its own account {got.lost}; "
        f"blocks read by the server's account {blocks}, waits for them {got.reads}; "
        f"{got.bytes_ / got.transitions:.1f} bytes each"
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
