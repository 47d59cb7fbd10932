"""Pairing and sums: against rules written out one transition at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from waitfold import summary
from waitfold.events import EXIT, FORK, STORE, Transitions, TransitionStream
from waitfold.pair import END, LOST, START, Intervals, pair
from waitfold.summary import Summary

Store = tuple[int, int, int, int]  # time_ns, tid, value, mark
Row = tuple[int, int, int, int, int]  # start_ns, dur_ns, tid, value, flags


def stream(
    stores: Sequence[Store], gaps: Sequence[tuple[int, int]] = (), batch: int = 1000
) -> TransitionStream:
    """Make a stream of (time, tid, value, mark)."""

    def batches() -> Iterator[Transitions]:
        for at in range(0, len(stores), batch):
            columns = np.array(stores[at : at + batch], np.int64).reshape(-1, 4)
            time, tid, value, mark = columns.T
            threads = (tid << 32 | tid & 0xFFFF_FFFF).astype(np.uint64)
            yield Transitions(time.copy(), threads, value.astype(np.uint32), mark.astype(np.uint8))

    times = [time for time, _, _, mark in stores if mark == STORE]
    first, last = (min(times), max(times)) if times else (None, None)
    return TransitionStream(batches(), gaps=list(gaps), first_ns=first, last_ns=last)


def rows(batches: Iterator[Intervals]) -> list[Row]:
    """Return all intervals, sorted."""
    found: list[Row] = []
    for batch in batches:
        columns = (batch.start_ns, batch.dur_ns, batch.tid, batch.value, batch.flags)
        found += zip(*(column.tolist() for column in columns), strict=True)
        assert batch.pid.tolist() == batch.tid.tolist()
    return sorted(found)


def by_hand(
    stores: Sequence[Store],
    gaps: Sequence[tuple[int, int]],
    start: int,
    end: int,
    initial: dict[int, int],
) -> list[Row]:
    """Pair one transition at a time."""
    found: list[Row] = []
    state: dict[int, tuple[int | None, int]] = {t: (None, v) for t, v in initial.items()}

    def close(tid: int, now: int, flag: int) -> None:
        since, value = state[tid]
        early = since is None or since < start
        begun = start if since is None else since
        until = now
        if begun >= until and early:
            return
        for gap_start, gap_end in sorted(gaps):
            if gap_end > begun and gap_start < until:
                if value == 0:
                    return
                until, flag = max(begun, gap_start), LOST
                break
        if (early and until < start) or (early and until == start and since is not None):
            return
        flag |= START * early
        begun = max(begun, start)
        found.append((begun, until - begun, tid, value, flag))

    for time, tid, value, mark in stores:
        if time > end:
            break
        if tid in state:
            if state[tid][1]:
                close(tid, time, END if mark == EXIT else 0)
        elif value == 0 and mark == STORE:
            state[tid] = (None, 0)
            close(tid, time, 0)
        state[tid] = (time, value)
    for tid, (_, value) in state.items():
        if value:
            close(tid, end, END)
    return sorted(found)


def test_an_interval_runs_to_the_next_store() -> None:
    """Whatever that is: a new wait replaces the old one, threads do not mix."""
    stores = [(10, 1, 5, 0), (11, 2, 6, 0), (15, 1, 7, 0), (18, 1, 0, 0), (20, 2, 0, 0)]
    want = [(10, 5, 1, 5, 0), (11, 9, 2, 6, 0), (15, 3, 1, 7, 0)]
    assert rows(pair(stream(stores))) == want
    assert rows(pair(stream(stores, batch=1))) == want


def test_records_that_perf_wrote_twice() -> None:
    """The same thread, time and value again is the same store, in one batch or in the next."""
    stores = [(10, 1, 5, 0), (10, 1, 5, 0), (15, 1, 0, 0), (15, 1, 0, 0), (15, 2, 0, 0)]
    for batch in (1, 2, 100):
        twice = stream(stores, batch=batch)
        twice.samples = len(stores)
        assert rows(pair(twice, 0, 20)) == [(0, 15, 2, 0, START), (10, 5, 1, 5, 0)]
        assert twice.transitions == 3


def test_start() -> None:
    """What was open when the window began is cut there, known or not."""
    stores = [(10, 1, 0, 0), (12, 2, 0, 0), (13, 3, 4, 0), (14, 3, 0, 0), (15, 4, 0, 0)]
    found = rows(pair(stream(stores), 5, 20, {1: 9, 4: 0}))
    assert found == [(5, 5, 1, 9, START), (5, 7, 2, 0, START), (13, 1, 3, 4, 0)]


def test_stores_before_the_window() -> None:
    """They tell what was open when it began; what ended before is not in it."""
    stores = [(1, 1, 5, 0), (2, 1, 0, 0), (3, 1, 6, 0), (10, 1, 0, 0), (4, 2, 7, 0)]
    found = rows(pair(stream(sorted(stores)), 5, 20, {1: 8, 2: 8}))
    assert found == [(5, 5, 1, 6, START), (5, 15, 2, 7, START | END)]


def test_end() -> None:
    """What is open at the end, or when its thread ends, is cut there; later stores are not read."""
    stores = [(10, 1, 5, 0), (11, 2, 6, 0), (13, 2, 0, EXIT), (30, 1, 0, 0), (31, 1, 8, 0)]
    found = rows(pair(stream(stores), 5, 20, {}))
    assert found == [(10, 10, 1, 5, END), (11, 2, 2, 6, END)]


def test_no_store_in_the_window() -> None:
    """A process that waited throughout has one interval; one that was not waiting has none."""
    assert rows(pair(stream([]), 5, 20, {1: 9, 2: 0})) == [(5, 15, 1, 9, START | END)]
    assert rows(pair(stream([]))) == []


def test_forked_threads_have_no_past() -> None:
    """Nor has one whose number was used before."""
    stores = [(10, 1, 0, FORK), (12, 1, 0, 0), (13, 1, 5, 0), (15, 1, 0, EXIT)]
    stores += [(20, 1, 0, FORK), (22, 1, 0, 0)]
    assert rows(pair(stream(stores), 5, 30)) == [(13, 2, 1, 5, END)]


def test_gaps() -> None:
    """What overlaps a gap ends where it begins; what only touches it is whole."""
    stores = [(10, 1, 5, 0), (20, 1, 0, 0), (30, 1, 6, 0), (50, 1, 0, 0), (50, 1, 7, 0)]
    stores += [(60, 1, 0, 0), (32, 2, 8, 0), (35, 2, 0, 0), (35, 3, 0, 0)]
    found = rows(pair(stream(sorted(stores), [(20, 25), (31, 40), (38, 50)]), 5, 70))
    assert found == [
        (10, 10, 1, 5, 0),
        (30, 1, 1, 6, LOST),
        (32, 0, 2, 8, LOST),
        (50, 10, 1, 7, 0),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_the_same_as_by_hand(seed: int) -> None:
    """Random stores, births, deaths, gaps and windows, in batches of random size."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 400))
    times = np.sort(rng.choice(5000, count, replace=False)) + 1000
    stores: list[Store] = []
    alive: set[int] = set(range(1, 6))
    for time in times.tolist():
        tid = int(rng.integers(1, 12))
        mark = STORE
        if tid not in alive:
            mark = FORK
            alive.add(tid)
        elif rng.random() < 0.05:
            mark = EXIT
            alive.remove(tid)
        value = int(rng.integers(0, 4)) if mark == STORE else 0
        stores.append((time, tid, value, mark))
    begins = rng.integers(900, 6100, int(rng.integers(0, 4))).tolist()
    gaps = [(begin, begin + int(rng.integers(1, 300))) for begin in begins]
    start, end = sorted(rng.integers(900, 6200, 2).tolist())
    initial = {tid: int(rng.integers(0, 4)) for tid in range(1, 4)}
    # Gaps that overlap are one.
    merged: list[tuple[int, int]] = []
    for begin, until in sorted(gaps):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
        else:
            merged.append((begin, until))
    want = by_hand(stores, merged, start, end, initial)
    for batch in (1, int(rng.integers(1, 50)), 1000):
        assert rows(pair(stream(stores, gaps, batch), start, end, initial)) == want


def test_many_threads() -> None:
    """More threads than 16 bits can number."""
    tids = range(1, 70_001)
    stores = [(tid, tid, 5, 0) for tid in tids] + [(100_000 + tid, tid, 0, 0) for tid in tids]
    found = rows(pair(stream(stores, batch=30_000)))
    assert found == [(tid, 100_000, tid, 5, 0) for tid in tids]


def test_threads_that_are_gone() -> None:
    """A sample of a thread that has no number any more belongs to none."""
    stores = [(10, -1, 5, 0), (12, -1, 0, 0)]
    assert rows(pair(stream(stores), 5, 20)) == []
    assert rows(pair(stream([*stores, (15, 1, 5, 0)]), 5, 20)) == [(15, 5, 1, 5, END)]


def intervals(seed: int, count: int) -> Intervals:
    """Make random intervals of a few processes and values."""
    rng = np.random.default_rng(seed)
    pid = np.sort(rng.integers(1, 5, count)).astype(np.int32)
    return Intervals(
        rng.integers(0, 10**9, count),
        (10 ** rng.uniform(0, 12, count)).astype(np.int64) - 1,
        pid,
        pid,
        rng.choice(np.array([1, 0x0900_0001, 0xFFFF_FFFF], np.uint32), count),
        rng.choice(np.array([0] * 20 + [START, END, LOST, 3, 5, 6, 7], np.uint8), count),
    )


@pytest.mark.parametrize("seed", range(5))
def test_sums_and_percentiles(seed: int) -> None:
    """All numbers against sorted lists; in parts, merged or at once."""
    batch = intervals(seed, 3000)
    whole, left, right = Summary(), Summary(), Summary()
    whole.add(batch)
    for at in range(0, 3000, 700):
        (left if at < 1000 else right).add(batch.take(slice(at, at + 700)))
    left.merge(right)
    for sums in (whole, left):
        assert sums.exact_percentiles
        assert sums.intervals == int((batch.flags == 0).sum())
        start = int((batch.flags & START > 0).sum())
        lost = int((batch.flags & (START | LOST) == LOST).sum())
        assert sums.censored == {
            "start": start,
            "lost": lost,
            "end": int((batch.flags == END).sum()),
        }
        totals = []
        for stats in sums.values():
            exact = (batch.value == stats.value) & (batch.flags == 0)
            times = sorted(batch.dur_ns[exact].tolist())
            n = len(times)
            assert (stats.count, stats.total_ns) == (n, sum(times))
            assert stats.mean_ns == pytest.approx(sum(times) / n)
            ranks = [-(-n * p // 100) - 1 for p in (50, 95, 99)]
            assert [stats.p50_ns, stats.p95_ns, stats.p99_ns] == [times[rank] for rank in ranks]
            assert stats.max_ns == times[-1]
            powers = [max(time.bit_length() - 1, 0) for time in times]
            assert stats.histogram == [powers.count(power) for power in range(64)]
            totals.append(stats.total_ns)
        assert totals == sorted(totals, reverse=True) and len(totals) == 3
        for (pid, value), time in sums.pid_values().items():
            those = (batch.pid == pid) & (batch.value == value)
            whole_ns = batch.dur_ns[those & (batch.flags == 0)]
            cut_ns = batch.dur_ns[those & (batch.flags > 0)]
            assert (time.count, time.total_ns) == (len(whole_ns), int(whole_ns.sum()))
            assert (time.censored, time.censored_ns) == (len(cut_ns), int(cut_ns.sum()))
        assert sum(count for count, _ in sums.pids().values()) == sums.intervals


def test_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound percentiles come from buckets, off by less than 0.4 %; sums stay exact."""
    exact, bounded, merged = Summary(), Summary(), Summary()
    parts = [intervals(seed, 1000) for seed in range(5)]
    for part in parts:
        exact.add(part)
    want = exact.values()
    monkeypatch.setattr(summary, "EXACT_MAX", 2000)
    for part in parts:
        bounded.add(part)
        other = Summary()
        other.add(part)
        merged.merge(other)
    merged.merge(bounded)
    assert not bounded.exact_percentiles
    for found, stats in zip(bounded.values(), want, strict=True):
        assert (found.count, found.total_ns, found.max_ns) == (
            stats.count,
            stats.total_ns,
            stats.max_ns,
        )
        assert found.histogram == stats.histogram
        assert found.p50_ns == pytest.approx(stats.p50_ns, rel=0.004)
        assert found.p95_ns == pytest.approx(stats.p95_ns, rel=0.004)
        assert found.p99_ns == pytest.approx(stats.p99_ns, rel=0.004)
    assert [s.count for s in merged.values()] == [2 * s.count for s in want]
    assert [s.p50_ns for s in merged.values()] == [s.p50_ns for s in bounded.values()]
