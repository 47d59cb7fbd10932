#!/usr/bin/env python3
"""Compare captures of the same backends at the same time, pair by pair, transition by transition.

Exit status 1 where two differ.
"""

from __future__ import annotations

import argparse
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from truth import Stores, once

from waitfold.capture import Naming, open_capture
from waitfold.events import CUT, STORE, transitions

AROUND_NS = 200_000
UNKNOWN = 0xFFFF_FFFF  # a store was seen, but not its value
MOST = 100  # differences of two sequences, after which they count as out of step


def of_backends(path: Path, pids: list[int]) -> tuple[dict[int, Stores], int, int]:
    """Return what each backend stored, how much was lost, and how much perf wrote twice."""
    capture = open_capture(path, Naming())
    stream = transitions(capture.files, capture.rule)
    parts = []
    for batch in stream:
        batch.value[batch.mark == CUT] = UNKNOWN
        parts.append(batch.take(np.flatnonzero((batch.mark == STORE) | (batch.mark == CUT))))
    columns = (
        np.concatenate([part.time_ns for part in parts]),
        np.concatenate([part.tid for part in parts]).astype(np.int64),
        np.concatenate([part.value for part in parts]),
    )
    (time, tid, value), twice = once(columns)
    return {pid: Stores(time[tid == pid], value[tid == pid]) for pid in pids}, stream.lost, twice


def equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where values are equal; an unknown one is equal to any."""
    return (a == b) | (a == UNKNOWN) | (b == UNKNOWN)


def in_step(a: Stores, at: int, b: Stores, other: int) -> int:
    """Return how many values from these places on are equal."""
    size = min(len(a.value) - at, len(b.value) - other)
    differ = np.flatnonzero(~equal(a.value[at : at + size], b.value[other : other + size]))
    return int(differ[0]) if len(differ) else size


def resume(a: Stores, at: int, b: Stores, other: int) -> tuple[int, int]:
    """Return how many of each to skip so that both go on alike; all there are, if they never do."""
    left = len(a.value) - at, len(b.value) - other
    for skipped in range(1, 200):
        for more in range(skipped + 1):
            size = min(left[0] - more, left[1] - skipped + more, 16)
            if size > 0 and in_step(a, at + more, b, other + skipped - more) >= size:
                return more, skipped - more
    return left


def differences(a: Stores, b: Stores) -> tuple[list[tuple[int, int, int, int]], list[np.ndarray]]:
    """Return where they differ: place and length in each; and the times of the equal, a less b."""
    found: list[tuple[int, int, int, int]] = []
    apart: list[np.ndarray] = []
    at = other = 0
    while True:
        size = in_step(a, at, b, other)
        apart.append(a.time[at : at + size] - b.time[other : other + size])
        at, other = at + size, other + size
        rest = len(a.value) - at, len(b.value) - other
        if rest == (0, 0):
            return found, apart
        skip = resume(a, at, b, other) if len(found) < MOST else rest
        found.append((at, skip[0], other, skip[1]))
        at, other = at + skip[0], other + skip[1]


def shown(stores: Stores, since: int, until: int) -> str:
    """Return the stores from one time to another."""
    some = np.flatnonzero((stores.time >= since) & (stores.time <= until))
    return " ".join(f"{stores.time[i] - since}:{stores.value[i]:#x}" for i in some.tolist()[:24])


def main() -> int:
    """Print a line for each pair, and each difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the workload")
    parser.add_argument("--pids", type=int, nargs="+", required=True, help="backends to compare")
    parser.add_argument("--captures", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    recorded = {}
    for path in options.captures:
        recorded[path.name], lost, twice = of_backends(path, options.pids)
        total = sum(len(stores.value) for stores in recorded[path.name].values())
        unknown = sum(int((s.value == UNKNOWN).sum()) for s in recorded[path.name].values())
        print(
            f"{options.name}, {path.name}: {total} stores, lost {lost}, written twice {twice}, "
            f"value not known {unknown}"
        )
    same = True
    for one, other in combinations(recorded, 2):
        alike = only_one = only_other = 0
        apart: list[np.ndarray] = []
        values: set[int] = set()
        shows: list[str] = []
        for pid in options.pids:
            a, b = recorded[one][pid], recorded[other][pid]
            found, times = differences(a, b)
            apart += times
            values |= set(np.unique(a.value).tolist()) - {UNKNOWN}
            alike += sum(len(part) for part in times)
            for at, more, beside, less in found:
                only_one, only_other = only_one + more, only_other + less
                near = a.time[min(at, len(a.time) - 1)]
                since, until = int(near) - AROUND_NS, int(near) + AROUND_NS
                shows.append(
                    f"    backend {pid}, place {at} of {len(a.value)} and {beside} of "
                    f"{len(b.value)}: {more} only in {one}, {less} only in {other}; all, in ns "
                    f"from {since}:"
                )
                shows += [
                    f"        {way}: {shown(stores[pid], since, until)}"
                    for way, stores in recorded.items()
                ]
        times_us = np.concatenate(apart) / 1000
        low, middle, high = np.percentile(times_us, (1, 50, 99))
        print(
            f"{options.name}, {one} and {other}: equal {alike} of {len(values)} values, "
            f"only {one} {only_one}, only {other} {only_other}; time less the other's, "
            f"us: p1 {low:.1f}, median {middle:.1f}, p99 {high:.1f}"
        )
        print("\n".join(shows[:60]), end="\n" if shows else "")
        same &= not shows
    return not same


if __name__ == "__main__":
    sys.exit(main())
