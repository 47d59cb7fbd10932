#!/usr/bin/env python3
"""Compare a capture's transitions of one backend with those that bpftrace read from memory.

Then compare the reader with perf script, on all transitions of the capture. Exit status 1 where
anything differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from waitfold.capture import Naming, open_capture
from waitfold.events import STORE, transitions

SAME = 8  # so many equal values in a row, and the sequences are in step again
REACH = 2000  # as far as that is looked for

Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]  # time_ns, tid, value


def read_bpftrace(path: Path) -> tuple[NDArray[np.int64], NDArray[np.uint32], list[str]]:
    """Return times, values, and the lines that are something else: what it says of lost events."""
    lines = path.read_text().splitlines()
    rows = [line.split() for line in lines if re.fullmatch(r"\d+ \d+", line)]
    others = [line for line in lines if line and not re.fullmatch(r"\d+ \d+", line)]
    table = np.array(rows, np.int64).reshape(-1, 2)
    # bpftrace empties the CPUs' buffers one after the other; a thread that moved is in several.
    table = table[np.argsort(table[:, 0], kind="stable")]
    return table[:, 0], table[:, 1].astype(np.uint32), others


def read_capture(path: Path) -> tuple[Columns, int]:
    """Return the capture's transitions, and how many records it says were lost."""
    capture = open_capture(path, Naming())
    stream = transitions(capture.files, capture.rule)
    parts = [batch.take(np.flatnonzero(batch.mark == STORE)) for batch in stream]
    return (
        np.concatenate([part.time_ns for part in parts]),
        np.concatenate([part.tid for part in parts]).astype(np.int64),
        np.concatenate([part.value for part in parts]),
    ), stream.lost


def read_script(path: Path) -> Columns:
    """Return what perf script printed: `12  1055.776645746: waitfold_1:w: (562e1db96a20) v=0x1`."""
    rows = []
    with path.open() as file:
        for line in file:
            tid, at, *_, value = line.split()
            whole, part = at[:-1].split(".")
            rows.append((int(whole) * 10**9 + int(part), int(tid), int(value[2:], 16)))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].astype(np.uint32)


def in_step(ours: NDArray[np.uint32], theirs: NDArray[np.uint32]) -> int:
    """Return how many values at the start are equal."""
    size = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:size] != theirs[:size])
    return int(differ[0]) if len(differ) else size


def resume(ours: NDArray[np.uint32], theirs: NDArray[np.uint32]) -> tuple[int, int] | None:
    """Return how many values of each to skip so that both go on alike; as few as possible."""
    for skipped in range(1, REACH):
        for of_ours in range(skipped + 1):
            a, b = ours[of_ours:][:SAME], theirs[skipped - of_ours :][:SAME]
            if len(a) == len(b) and len(a) and (a == b).all():
                return of_ours, skipped - of_ours
    return None


def some(values: NDArray[np.uint32]) -> str:
    """Return how many values there are, and the first of them."""
    return " ".join([str(len(values)), *(f"{value:#x}" for value in values[:9])])


def compare(ours: Columns, watched: tuple[NDArray[np.int64], NDArray[np.uint32]]) -> bool:
    """Print how a backend's transitions differ from the watchpoint's; return whether none does."""
    time, _, value = ours
    their_time, their_value = watched
    # A probe fires some us after the store, or, where it is on the store itself, just before: the
    # watchpoint's first counterpart is the one near in time with which most is in step.
    near = int(np.searchsorted(their_time, time[0]))
    starts = range(max(near - 3, 0), near + 3)
    start = max(starts, key=lambda place: in_step(value, their_value[place:]))
    at, other = 0, start
    missing = extra = equal = 0
    delays: list[NDArray[np.int64]] = []
    while at < len(value):
        size = in_step(value[at:], their_value[other:])
        delays.append(time[at : at + size] - their_time[other : other + size])
        equal += size
        at += size
        other += size
        if at == len(value):
            break
        skip = resume(value[at:], their_value[other:])
        if skip is None:
            print(f"  out of step for good at {time[at]} ns")
            return False
        print(
            f"  at {time[at]} ns: only recorded: {some(value[at:][: skip[0]])}; "
            f"only by bpftrace: {some(their_value[other:][: skip[1]])}"
        )
        extra += skip[0]
        missing += skip[1]
        at += skip[0]
        other += skip[1]
    delay = np.concatenate(delays) / 1000
    kinds = len(np.unique(value))
    print(
        f"  transitions compared {len(value)}, of {kinds} values: equal {equal}, "
        f"missing {missing}, extra {extra}"
    )
    print(
        "  the recording's time less bpftrace's, us: "
        + ", ".join(
            f"{name} {np.percentile(delay, share):.1f}"
            for name, share in (("min", 0), ("p1", 1), ("p50", 50), ("p99", 99), ("max", 100))
        )
    )
    return missing == extra == 0


def main() -> int:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capture", type=Path)
    parser.add_argument("pid", type=int, help="the backend that was watched")
    parser.add_argument("bpftrace", type=Path, help="lines of nsecs and value")
    parser.add_argument("script", type=Path, help="what perf script prints of the capture")
    options = parser.parse_args()

    everything, lost = read_capture(options.capture)
    watched_time, watched_value, others = read_bpftrace(options.bpftrace)
    mine = everything[1] == options.pid
    time, tid, value = (column[mine] for column in everything)
    print(f"  lost by the recording: {lost}; bpftrace's own words: {'; '.join(others)}")
    same = compare((time, tid, value), (watched_time, watched_value))

    # In the order of time; perf script keeps the file's order where times are equal.
    theirs = read_script(options.script)
    sort = [np.lexsort((columns[1], columns[0])) for columns in (everything, theirs)]
    read_alike = len(sort[0]) == len(sort[1]) and all(
        bool((a[sort[0]] == b[sort[1]]).all()) for a, b in zip(everything, theirs, strict=True)
    )
    print(
        f"  reader {len(everything[0])} events, perf script {len(theirs[0])}: "
        f"{'all equal' if read_alike else 'NOT equal'}"
    )
    return 0 if same and read_alike and lost == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
