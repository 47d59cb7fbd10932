#!/usr/bin/env python3
"""What a capture says of each backend's time, against its wall time and the kernel's own count.

account.py watch POSTMASTER SECONDS FILE   what the kernel counts of each child, twice
account.py head                            the table's head
account.py check NAME WITH CAPTURE FILE    a line of the table; 1 where something is wrong
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from waitfold.backends import CLIENT
from waitfold.capture import Naming, open_capture
from waitfold.join import ON_CPU, RUN_QUEUE, UNKNOWN, UNSEEN, Joined, join

LOCK_RELATION = 0x0300_0000
MOST_RESIDUAL, SHARE, POINTS = 0.01, 7 / 8, 0.03

HEAD = """\
                            back-  wall  residual % on CPU kernel's    in run kernel's    Lock:
workload     with            ends  time  most  mean      % most off   queue % most off relation"""


def children(pid: int) -> list[int]:
    """Return the processes that a process has forked and that live."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def watch(postmaster: int, seconds: float, file: Path) -> None:
    """Write, at both ends of a time, pid, CLOCK_MONOTONIC, and time on CPU and in the run queue."""
    rows = []
    for pause in (seconds, 0.0):
        for pid in children(postmaster):
            counted = Path(f"/proc/{pid}/schedstat").read_text().split()
            rows.append(f"{pid} {time.monotonic_ns()} {counted[0]} {counted[1]}\n")
        time.sleep(pause)
    file.write_text("".join(rows))


def spent(joined: Joined, pid: int, start: int, end: int, run: int) -> int:
    """Return how long, in ns, a process was in one state of the scheduler between two times."""
    segments = joined.segments
    own = (segments.pid == pid) & (segments.run == run)
    begun, ended = segments.start_ns[own], segments.end_ns[own]
    return int(np.maximum(np.minimum(ended, end) - np.maximum(begun, start), 0).sum())


def check(name: str, what: str, capture: Path, file: Path) -> bool:
    """Print a line; return whether it is as it should be."""
    joined = join(open_capture(capture, Naming()))
    segments = joined.segments
    lived = joined.end_ns - joined.start_ns
    unknown = (segments.run == UNKNOWN) | (segments.value == UNSEEN)
    residual, shares = [], []
    for pid in np.unique(segments.pid).tolist():
        own = segments.pid == pid
        length = segments.dur_ns[own]
        if joined.backends[pid].type != CLIENT or length.sum() < lived:
            continue
        residual.append(float(length[unknown[own]].sum()) / lived)
        shares.append(float(length[segments.value[own] == LOCK_RELATION].sum()) / lived)
    counted: dict[int, list[list[int]]] = {}
    for line in file.read_text().splitlines():
        pid, *values = map(int, line.split())
        counted.setdefault(pid, []).append(values)
    off: dict[int, list[float]] = {ON_CPU: [], RUN_QUEUE: []}
    share: dict[int, list[float]] = {ON_CPU: [], RUN_QUEUE: []}
    for pid, both in counted.items():
        if joined.backends[pid].type != CLIENT:
            continue
        (start, *before), (end, *after) = both
        for run, then, now in zip(off, before, after, strict=True):
            seen = spent(joined, pid, start, end, run)
            share[run].append(seen / (end - start))
            off[run].append((now - then - seen) / (end - start))
    locked = float(np.mean(shares))
    print(
        f"{name:12} {what:19} {len(residual):>2} {lived / 1e9:5.1f}"
        f" {100 * max(residual):5.2f} {100 * np.mean(residual):5.2f}"
        + "".join(
            f"   {100 * np.mean(share[r]):6.2f} {100 * max(off[r], key=abs):+8.2f}" for r in off
        )
        + (f" {100 * locked:7.2f} %" if name == "lock" else "")
    )
    for warning in joined.warnings:
        print(f"    {warning}")
    if joined.lost:
        print(f"    {joined.lost} samples lost")
    return max(residual) <= MOST_RESIDUAL and (name != "lock" or abs(locked - SHARE) <= POINTS)


def main() -> int:
    """Do what the command line says."""
    match sys.argv[1:]:
        case ["watch", postmaster, seconds, file]:
            watch(int(postmaster), float(seconds), Path(file))
        case ["head"]:
            print(HEAD)
        case ["check", name, what, capture, file]:
            return 0 if check(name, what, Path(capture), Path(file)) else 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
