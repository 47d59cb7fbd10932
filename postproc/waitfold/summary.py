"""From intervals to numbers: counts, totals, percentiles and histograms."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pair import END, LOST, START, Intervals

EXACT_MAX = 32 << 20
"""Intervals of which all durations are kept; beyond it they are counted in buckets."""

_BITS = 7  # a bucket is 1/128 of a power of two wide: its middle is off by less than 0.4 %
_BUCKETS = 64 << _BITS


@dataclass(frozen=True)
class ValueStats:
    """The complete intervals of one value of wait_event_info; times in nanoseconds.

    Percentiles are by the nearest rank: p95 is the smallest duration that at least 95 % of all
    do not exceed. histogram[i], of 64, counts durations from 2**i to below 2**(i+1); [0] also
    those of 0.
    """

    value: int
    count: int
    total_ns: int
    mean_ns: float
    p50_ns: int
    p95_ns: int
    p99_ns: int
    max_ns: int
    histogram: list[int]


@dataclass(frozen=True)
class PidValue:
    """One process's time in one value: complete intervals, and what was seen of cut ones."""

    count: int
    total_ns: int
    censored: int
    censored_ns: int


class Summary:
    """Sums of intervals; add batch by batch, then ask.

    `intervals` counts the complete ones, `censored` the others by the first that holds of
    start, lost and end. Memory is bounded at any number of intervals: up to EXACT_MAX all
    durations are kept and percentiles are exact; beyond that `exact_percentiles` is False and
    they are off by less than 0.4 %. Counts, totals and greatest are always exact.
    """

    def __init__(self) -> None:
        self.intervals = 0
        self.censored = {"start": 0, "end": 0, "lost": 0}
        self.exact_percentiles = True
        self._values = np.empty(0, np.uint32)  # all that were seen, ascending
        self._sums: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._durations: dict[int, list[NDArray[np.integer]]] = defaultdict(list)
        self._buckets: dict[int, NDArray[np.int64]] = {}
        self._max: dict[int, int] = {}

    def add(self, batch: Intervals) -> None:
        """Add a batch."""
        if batch.flags.any():
            cut = batch.take(np.flatnonzero(batch.flags))
            batch = batch.take(np.flatnonzero(batch.flags == 0))
            start = cut.flags & START > 0
            lost = ~start & (cut.flags & LOST > 0)
            self.censored["start"] += int(start.sum())
            self.censored["lost"] += int(lost.sum())
            self.censored["end"] += int((~start & ~lost & (cut.flags & END > 0)).sum())
            self._add_sums(cut, self._codes(cut.value), 2)
        if not len(batch):
            return
        codes = self._codes(batch.value)
        self._add_sums(batch, codes, 0)
        # NumPy sorts 16-bit integers by radix, which is several times faster.
        by_value = codes.astype(np.uint16) if len(self._values) < 1 << 16 else codes
        order = np.argsort(by_value, kind="stable")
        durations = batch.dur_ns[order]
        ends = np.cumsum(np.bincount(codes, minlength=len(self._values)))
        for value, part in zip(self._values.tolist(), np.split(durations, ends), strict=False):
            if len(part):
                self._keep(value, part)
        self._count(len(batch))

    def merge(self, other: Summary) -> None:
        """Add all that another summary was given."""
        for name, count in other.censored.items():
            self.censored[name] += count
        self._values = np.union1d(self._values, other._values)
        for key, sums in other._sums.items():
            mine = self._sums[key]
            mine[:] = [a + b for a, b in zip(mine, sums, strict=True)]
        if not other.exact_percentiles:
            self._fold()
        for value, parts in other._durations.items():
            for part in parts:
                self._keep(value, part)
        for value, counts in other._buckets.items():
            self._buckets[value] = self._buckets.get(value, 0) + counts
            self._max[value] = max(self._max.get(value, 0), other._max[value])
        self._count(other.intervals)

    def values(self) -> list[ValueStats]:
        """Return one entry for each value that has complete intervals, the greatest total first."""
        totals: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for (_, value), (count, total, _, _) in self._sums.items():
            totals[value][0] += count
            totals[value][1] += total
        stats = [
            ValueStats(value, count, total, total / count, *self._spread(value, count))
            for value, (count, total) in totals.items()
            if count
        ]
        return sorted(stats, key=lambda s: (-s.total_ns, s.value))

    def pid_values(self) -> dict[tuple[int, int], PidValue]:
        """Return time by (pid, value)."""
        return {key: PidValue(*sums) for key, sums in self._sums.items()}

    def pids(self) -> dict[int, tuple[int, int]]:
        """Return (count, total_ns) of complete intervals by pid."""
        pids: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for (pid, _), (count, total, _, _) in self._sums.items():
            pids[pid] = (pids[pid][0] + count, pids[pid][1] + total)
        return dict(pids)

    def _codes(self, values: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the places of `values` in self._values, where new ones are put first."""
        known = self._values
        if len(known):
            codes = np.searchsorted(known, values)
            codes[codes == len(known)] = 0
            new = values[known[codes] != values]
            if not len(new):
                return codes
        else:
            new = values
        self._values = np.union1d(known, new)
        codes = np.searchsorted(self._values, values)
        return codes

    def _add_sums(self, batch: Intervals, codes: NDArray[np.int64], column: int) -> None:
        """Add count and time by process and value; rows of one process mostly stand together."""
        heads = np.flatnonzero(np.append(True, batch.pid[1:] != batch.pid[:-1]))
        pids, places = np.unique(batch.pid[heads], return_inverse=True)
        width = len(self._values)
        keys = np.repeat(places * width, np.diff(np.append(heads, len(batch)))) + codes
        counts = np.bincount(keys)
        # Doubles hold a batch's sums exactly: 2**53 ns are 104 days.
        totals = np.bincount(keys, batch.dur_ns)
        for key in np.flatnonzero(counts).tolist():
            sums = self._sums[int(pids[key // width]), int(self._values[key % width])]
            sums[column] += int(counts[key])
            sums[column + 1] += int(totals[key])

    def _keep(self, value: int, durations: NDArray[np.integer]) -> None:
        longest = int(durations.max())
        if not self.exact_percentiles:
            counts = np.bincount(_bucket(durations), minlength=_BUCKETS)
            self._buckets[value] = self._buckets.get(value, 0) + counts
            self._max[value] = max(self._max.get(value, 0), longest)
        else:
            narrow = longest < 1 << 32
            self._durations[value].append(durations.astype(np.uint32 if narrow else np.int64))

    def _count(self, intervals: int) -> None:
        self.intervals += intervals
        if self.intervals > EXACT_MAX:
            self._fold()

    def _fold(self) -> None:
        """Count from now on in buckets."""
        if self.exact_percentiles:
            self.exact_percentiles = False
            kept, self._durations = self._durations, defaultdict(list)
            for value, parts in kept.items():
                for part in parts:
                    self._keep(value, part)

    def _spread(self, value: int, count: int) -> tuple[int, int, int, int, list[int]]:
        """Return p50, p95, p99, the greatest and the histogram of one value."""
        ranks = [(count * percent + 99) // 100 - 1 for percent in (50, 95, 99)]
        if self.exact_percentiles:
            durations = np.concatenate(self._durations[value])
            durations.partition([*ranks, count - 1])
            p50, p95, p99, longest = durations[[*ranks, count - 1]].tolist()
            powers = np.bincount(_bucket(durations) >> _BITS, minlength=64)
        else:
            counts = self._buckets[value]
            longest = self._max[value]
            places = np.searchsorted(np.cumsum(counts), ranks, "right")
            p50, p95, p99 = (min(_middle(int(place)), longest) for place in places)
            powers = counts.reshape(64, -1).sum(axis=1)
        return p50, p95, p99, longest, powers.tolist()


def _bucket(durations: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return each duration's bucket: exponent and first bits of the fraction of a double."""
    bits: NDArray[np.int64] = np.maximum(durations, 1).astype(np.float64).view(np.int64)
    return (bits >> (52 - _BITS)) - (1023 << _BITS)


def _middle(bucket: int) -> int:
    power, part = bucket >> _BITS, bucket & (1 << _BITS) - 1
    return int((1 << power) * (1 + (part + 0.5) / (1 << _BITS)))
