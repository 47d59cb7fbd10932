#!/usr/bin/env python3
"""Compare a capture's transitions of one backend with those that bpftrace read from memory.

Then compare the reader with perf script, on all transitions of the capture. Exit status 1 where
anything differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from waitfold.capture import Naming, open_capture
from waitfold.events import STORE, transitions

SAME = 8  # so many equal values in a row, and the sequences are in step again
REACH = 2000  # as far as that is looked for
AROUND = 64

Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]  # time_ns, tid, value


@dataclass(frozen=True)
class Stores:
    """What one thread stored, in order."""

    time: NDArray[np.int64]
    value: NDArray[np.uint32]

    def after(self, place: int, count: int = SAME) -> Stores:
        """Return `count` of them."""
        return Stores(self.time[place : place + count], self.value[place : place + count])


def read_bpftrace(path: Path) -> tuple[Stores, list[str]]:
    """Return the stores, and the lines that are something else: what it says of lost events."""
    lines = path.read_text().splitlines()
    rows = [line.split() for line in lines if re.fullmatch(r"\d+ \d+", line)]
    others = [line for line in lines if line and not re.fullmatch(r"\d+ \d+", line)]
    table = np.array(rows, np.int64).reshape(-1, 2)
    # bpftrace empties the CPUs' buffers one after the other; a thread that moved is in several.
    table = table[np.argsort(table[:, 0], kind="stable")]
    return Stores(table[:, 0], table[:, 1].astype(np.uint32)), others


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


def nanoseconds(text: str) -> int:
    """Return the time that perf script prints as `1055.776645746:`."""
    seconds, fraction = text.strip().rstrip(":").split(".")
    return int(seconds) * 10**9 + int(fraction)


def read_script(path: Path) -> Columns:
    """Return what perf script printed: `12  1055.776645746: waitfold_1:w: (562e1db96a20) v=0x1`."""
    rows = []
    with path.open() as file:
        for line in file:
            tid, at, *fields = line.split()
            value = next(field for field in fields if field.startswith("v="))
            rows.append((nanoseconds(at), int(tid), int(value[2:], 16)))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].astype(np.uint32)


def once(columns: Columns) -> tuple[Columns, int]:
    """Return the events in order of time and thread, each once, and how many there were twice.

    What comes between perf_mmap__push's two looks at the buffer's head (tools/perf/util/mmap.c),
    perf writes, and writes again with the next push. A thread cannot store twice in a nanosecond.
    """
    time, tid, value = (column[np.lexsort((columns[1], columns[0]))] for column in columns)
    first = np.ones(len(time), np.bool_)
    first[1:] = (np.diff(time) != 0) | (np.diff(tid) != 0) | (value[1:] != value[:-1])
    return (time[first], tid[first], value[first]), int((~first).sum())


def in_step(ours: NDArray[np.uint32], theirs: NDArray[np.uint32]) -> int:
    """Return how many values at the start are equal."""
    size = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:size] != theirs[:size])
    return int(differ[0]) if len(differ) else size


def resume(ours: Stores, theirs: Stores) -> tuple[int, int] | None:
    """Return how many stores of each to skip so that both go on alike.

    As few as possible; of several ways, that in which the times agree best.
    """
    for skipped in range(1, REACH):
        ways = []
        for of_ours in range(skipped + 1):
            a, b = ours.after(of_ours), theirs.after(skipped - of_ours)
            if len(a.value) == len(b.value) and len(a.value) and (a.value == b.value).all():
                ways.append((int(abs(a.time - b.time).sum()), of_ours, skipped - of_ours))
        if ways:
            return min(ways)[1:]
    return None


def some(values: NDArray[np.uint32]) -> str:
    """Return how many values there are, and what the first are."""
    return f"{len(values)} ({' '.join(f'{value:#x}' for value in values[:9])})"


def compare(ours: Stores, theirs: Stores, second: NDArray[np.int64]) -> bool:
    """Print how a backend's transitions differ from the watchpoint's; return whether none does.

    `second` are the times at which another watchpoint fired.
    """
    # A probe fires some us after the store, or, where it is on the store itself, just before: the
    # watchpoint's first counterpart is the one near in time with which most is in step.
    near = int(np.searchsorted(theirs.time, ours.time[0]))
    starts = range(max(near - 3, 0), near + 3)
    other = max(starts, key=lambda place: in_step(ours.value, theirs.value[place:]))
    at = missing = extra = equal = 0
    delays: list[NDArray[np.int64]] = []
    while at < len(ours.value):
        size = in_step(ours.value[at:], theirs.value[other:])
        delays.append(ours.time[at : at + size] - theirs.time[other : other + size])
        equal += size
        at += size
        other += size
        if at == len(ours.value):
            break
        skip = resume(ours.after(at, REACH), theirs.after(other, REACH))
        if skip is None:
            print(f"  out of step for good at {ours.time[at]} ns")
            return False
        # The same time by all three; perf serves the second watchpoint some us after bpftrace's.
        edges = theirs.time[[other - AROUND, other + skip[1] + AROUND]]
        print(
            f"  at {ours.time[at]} ns: only recorded {some(ours.after(at, skip[0]).value)}; "
            f"only by bpftrace {some(theirs.after(other, skip[1]).value)}; recorded from 2 before "
            f"to 2 after: {some(ours.after(max(at - 2, 0), skip[0] + 4).value)}. "
            f"With {AROUND} stores before and after: recorded {2 * AROUND + skip[0]}, "
            f"bpftrace {2 * AROUND + skip[1]}, perf's watchpoint "
            f"{np.diff(np.searchsorted(second, edges))[0]}"
        )
        extra += skip[0]
        missing += skip[1]
        at += skip[0]
        other += skip[1]
    delay = np.concatenate(delays) / 1000
    print(
        f"  transitions compared {len(ours.value)}, of {len(np.unique(ours.value))} values: "
        f"equal {equal}, missing {missing}, extra {extra}"
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
    parser.add_argument("second", type=Path, help="times of another watchpoint's samples")
    options = parser.parse_args()

    everything, lost = read_capture(options.capture)
    everything, _ = once(everything)
    watched, others = read_bpftrace(options.bpftrace)
    mine = everything[1] == options.pid
    ours = Stores(everything[0][mine], everything[2][mine])
    print(f"  lost by the recording: {lost}; bpftrace's own words: {'; '.join(others)}")
    second = np.array([nanoseconds(line) for line in options.second.open()], np.int64)
    same = compare(ours, watched, np.sort(second))

    theirs, twice = once(read_script(options.script))
    read_alike = len(everything[0]) == len(theirs[0]) and all(
        bool((a == b).all()) for a, b in zip(everything, theirs, strict=True)
    )
    print(
        f"  perf script prints {len(theirs[0]) + twice} events, {twice} of them written twice by "
        f"perf; reader {len(everything[0])}: {'all equal' if read_alike else 'NOT equal'}"
    )
    return 0 if same and read_alike and lost == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
