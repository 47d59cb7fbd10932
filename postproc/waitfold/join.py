"""Waits, scheduling and queries of each process joined: what it did at every moment it lived."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from waitfold.analysis import Progress
from waitfold.backends import CLIENT, PARALLEL, POSTMASTER, Backend
from waitfold.backends import UNKNOWN as UNKNOWN_TYPE
from waitfold.bundled import Bundled
from waitfold.capture import Capture
from waitfold.events import ATTACH, CUT, EXIT, FORK, STORE, TransitionStream, transitions
from waitfold.pair import Places, merged
from waitfold.perfdata import PerfData
from waitfold.queries import IDLE_IN_TRANSACTION, Queries, read_queries
from waitfold.queries import UNKNOWN as NO_QUERY
from waitfold.sched import (
    NO_SLEEPS,
    NO_UNKNOWN,
    Lives,
    Sleeps,
    Unknown,
    has_switches,
    off_cpu,
    read_switches,
)
from waitfold.waitevents import CLIENT_READ

ON_CPU, RUN_QUEUE, BLOCKED, UNKNOWN = 0, 1, 2, 3
"""What the scheduler did with a process: it ran, was ready to run, slept; not known."""

UNSEEN = 0xFFFF_FFFF
"""Stands for a wait event that is not known, as it was lost or is older than what was seen."""


_NEVER = (1 << 63) - 1


@dataclass(frozen=True)
class Segments:
    """What processes did, a row each, sorted by (pid, start_ns).

    Those of a pid cover its life in the window, without gap or overlap; nothing changes within
    one. `value` is wait_event_info: 0 where it was in no wait, UNSEEN where that is not known.
    `run` is ON_CPU, RUN_QUEUE, BLOCKED, or UNKNOWN, as it is throughout where context switches
    were not recorded. `query` is a code of queries.Queries, -1 where it is not known. `sleep` is
    the row in Sleeps that one off CPU is part of, else -1.
    """

    pid: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    value: NDArray[np.uint32]
    run: NDArray[np.uint8]
    query: NDArray[np.int32]
    sleep: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.pid)

    @property
    def dur_ns(self) -> NDArray[np.int64]:
        """Length of each row."""
        return self.end_ns - self.start_ns

    @cached_property
    def places(self) -> Places:
        """Where the rows of a process and a time are."""
        return Places(self.pid, self.start_ns)

    def take(self, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Segments:
        """Return some of the rows."""
        return Segments(*(getattr(self, column.name)[which] for column in fields(self)))


@dataclass(frozen=True)
class Joined:
    """A capture joined: its window from `start_ns` to `end_ns`, and who the processes were.

    `scheduled` and `asked` say whether context switches and queries were recorded; `lost` counts
    the samples that the kernel had no room for.
    """

    capture: Capture
    segments: Segments
    sleeps: Sleeps
    queries: Queries
    backends: dict[int, Backend]
    warnings: list[str]
    start_ns: int
    end_ns: int
    scheduled: bool
    asked: bool
    lost: int

    @property
    def postmasters(self) -> list[int]:
        """Return the processes that report no waits: they block for nothing but something to do."""
        return [pid for pid, who in self.backends.items() if who.type == POSTMASTER]


def switched(capture: Capture) -> PerfData | Bundled | None:
    """Return the file of a capture that has its context switches, None without."""
    files = (file for file in capture.files if isinstance(file, PerfData | Bundled))
    return next(filter(has_switches, files), None)


def join(capture: Capture, progress: Progress | None = None) -> Joined:
    """Read a capture through and join what it holds of each of the server's processes.

    A process is the server's if it stored a wait event or is in backends.tsv. Its wait event is
    UNSEEN until its first store, where it was not read when the window began, and
    from a loss until its next store.

    Raises
    ------
    WaitfoldError
        The capture cannot be read.

    """
    data = switched(capture)
    switches = read_switches(data, progress) if data else None
    queries = read_queries(capture, progress)
    stream = transitions(capture.files, capture.rule, progress)
    stores = _Stores(stream, capture)
    gaps = merged(stream.gaps)
    start = (stream.first_ns or 0) if capture.start_ns is None else capture.start_ns
    end = max((stream.last_ns or 0) if capture.end_ns is None else capture.end_ns, start)
    warnings = [*capture.warnings, *stream.warnings]

    pids = _pids(stores, capture)
    lives = stores.lives(pids, start, end)
    sleeps, unknown = NO_SLEEPS, NO_UNKNOWN
    if switches:
        waits = capture.seen.waits
        waiting = np.array([pid for pid, value in waits.items() if value], np.int32)
        sleeps, unknown = off_cpu(switches, lives, gaps, waiting, stores.after)
        others = sum(pid in pids for pid in switches.others.values())
        if others:
            warnings.append(f"{others} threads that are not the first of their process left out")
    scheduled = switches is not None
    del switches
    merger = _Merger(stores, sleeps if scheduled else None, unknown, queries, gaps)
    segments = merger.segments(lives)
    return Joined(
        capture, segments, sleeps, queries, _backends(pids, stores, segments, queries, capture),
        warnings, start, end, scheduled, len(queries.pid) > 0, stream.lost,
    )  # fmt: skip


def _backends(
    pids: set[int], stores: _Stores, segments: Segments, queries: Queries, capture: Capture
) -> dict[int, Backend]:
    """Return who the processes were, those of which no title was read by what they did.

    One that read from a client is a client backend. One that was in the query which a client
    backend was in is its parallel worker, and has its user, database and application.
    """
    backends = dict(capture.seen.backends)
    untitled = [
        pid for pid in pids if backends.get(pid, Backend(UNKNOWN_TYPE)).type == UNKNOWN_TYPE
    ]
    for pid in untitled:
        backends[pid] = Backend(CLIENT if stores.reads(pid) else UNKNOWN_TYPE)
    clients = [pid for pid, who in backends.items() if who.type == CLIENT]
    for pid in untitled:
        head, end = np.searchsorted(segments.pid, [pid, pid + 1]).tolist()
        asked = np.flatnonzero(segments.query[head:end] > IDLE_IN_TRANSACTION)
        if backends[pid].type == CLIENT or not len(asked):
            continue
        code, time = segments.query[head + asked[0]], segments.start_ns[head + asked[0]]
        same = queries.at(np.array(clients, np.int32), np.full(len(clients), time)) == code
        if same.any():
            leader = clients[int(same.argmax())] if same.sum() == 1 else 0
            backends[pid] = Backend(PARALLEL, leader=leader)
    for pid, who in backends.items():
        if who.type == PARALLEL and who.leader in backends:
            leads = backends[who.leader]
            backends[pid] = replace(
                who, user=leads.user, database=leads.database, application=leads.application
            )
    return backends


def _pids(stores: _Stores, capture: Capture) -> set[int]:
    """Return the server's processes that were recorded."""
    # Of a flight recorder some may have gone before its window began, and of mode mem some were
    # never attached to.
    partly = "ring" in capture.manifest or capture.mode == "mem"
    seen = {} if partly else capture.seen.backends
    # With -p the postmaster is known, but not recorded.
    read = capture.seen.waits
    return stores.stored | {p for p, b in seen.items() if p in read or b.type != POSTMASTER}


class _Stores:
    """All transitions of main threads, sorted by (pid, time)."""

    def __init__(self, stream: TransitionStream, capture: Capture) -> None:
        self._initial = capture.seen.waits
        self._merged = capture.events.merged
        parts = [(np.empty(0, "i8"), np.empty(0, "i4"), np.empty(0, "u4"), np.empty(0, "u1"))]
        for batch in stream:
            own = batch.take(np.flatnonzero(batch.pid == batch.tid))
            value = self._merged(own.value)
            value = np.where(own.mark == CUT, np.uint32(UNSEEN), value).astype(np.uint32)
            parts.append((own.time_ns, own.pid.copy(), value, own.mark))
        time, pid, value, mark = (np.concatenate(c) for c in zip(*parts, strict=True))
        del parts
        # In the order of time already.
        order = np.argsort(pid, kind="stable")
        self.time_ns, self.value, self.mark = time[order], value[order], mark[order]
        pid = pid[order]
        pids, heads = np.unique(pid, return_index=True)
        ends = np.append(heads, len(pid))[1:].tolist()
        self._rows = {
            p: slice(head, end)
            for p, head, end in zip(pids.tolist(), heads.tolist(), ends, strict=True)
        }
        self.stored = set(np.unique(pid[(self.mark == STORE) | (self.mark == ATTACH)]).tolist())

    def __len__(self) -> int:
        return len(self.time_ns)

    def reads(self, pid: int) -> bool:
        """Return whether a process was ever in Client:ClientRead."""
        rows = self._rows.get(pid, slice(0, 0))
        return bool((self.value[rows] == CLIENT_READ).any())

    def lives(self, pids: set[int], start: int, end: int) -> Lives:
        """Return when processes lived in the window."""
        found: list[tuple[int, int, int, bool, bool]] = []
        for pid in sorted(pids):
            rows = self._rows.get(pid, slice(0, 0))
            marks = self.mark[rows]
            at = np.flatnonzero((marks == FORK) | (marks == EXIT) | (marks == ATTACH))
            since, born, alive = start, False, True
            times = self.time_ns[rows][at].tolist()
            for mark, time in zip(marks[at].tolist(), times, strict=True):
                if mark in (FORK, ATTACH):
                    # Before it was attached to nothing is known of it.
                    since, alive = max(time, start), True
                    born = mark == FORK and time >= start
                    continue
                if alive and since < min(time, end):
                    found.append((pid, since, min(time, end), born, time <= end))
                alive = False
            if alive and since < end:
                found.append((pid, since, end, born, False))
        columns = [[row[i] for row in found] for i in range(5)]
        kinds = ("i4", "i8", "i8", "?", "?")
        return Lives(*(np.array(c, kind) for c, kind in zip(columns, kinds, strict=True)))

    def after(self, pid: int, time: int) -> int:
        """Return when a process stored something next, a time that never comes if it did not."""
        rows = self._rows.get(pid, slice(0, 0))
        place = rows.start + int(np.searchsorted(self.time_ns[rows], time, "right"))
        return int(self.time_ns[place]) if place < rows.stop else _NEVER

    def waits(
        self, pid: int, since: int, until: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return from when on a process stored which wait event, first the one at `since`."""
        rows = self._rows.get(pid, slice(0, 0))
        time, value, mark = self.time_ns[rows], self.value[rows], self.mark[rows]
        end = int(np.searchsorted(time, until, "right"))
        forks = np.flatnonzero((mark[:end] == FORK) & (time[:end] <= since))
        head = int(forks[-1]) if len(forks) else 0
        kept = slice(head, end)
        time, value = time[kept][mark[kept] != EXIT], value[kept][mark[kept] != EXIT]
        if not len(forks):
            first = UNSEEN
            if pid in self._initial:
                first = int(self._merged(np.array([self._initial[pid]], np.uint32))[0])
            time = np.append(np.int64(0), time)
            value = np.append(np.uint32(first), value)
        place = max(int(np.searchsorted(time, since, "right")) - 1, 0)
        return np.maximum(time[place:], since), value[place:]


class _Merger:
    """Merges the step functions of each life."""

    def __init__(
        self,
        stores: _Stores,
        sleeps: Sleeps | None,
        unknown: Unknown,
        queries: Queries,
        gaps: NDArray[np.int64],
    ) -> None:
        self._stores = stores
        self._sleeps = sleeps
        self._unknown = unknown
        self._queries = queries
        self._gaps = gaps

    def segments(self, lives: Lives) -> Segments:
        """Return the segments of all lives."""
        rows = 3 * len(lives.tid) * (1 + 2 * len(self._gaps)) + len(self._stores)
        rows += len(self._queries.pid)
        if self._sleeps is not None:
            rows += 3 * len(self._sleeps) + 2 * len(self._unknown.tid)
        # Memory that is not written to is not used.
        kinds = ("i4", "i8", "i8", "u4", "u1", "i4", "i4")
        all_ = Segments(*(np.empty(rows, kind) for kind in kinds))
        n = 0
        columns = (lives.tid.tolist(), lives.since_ns.tolist(), lives.until_ns.tolist())
        for pid, since, until in zip(*columns, strict=True):
            n += self._life(all_, n, pid, since, until)
        return all_.take(slice(0, n))

    def _life(self, all_: Segments, n: int, pid: int, since: int, until: int) -> int:
        """Write the segments of a life from row `n` on; return how many they are."""
        wait_at, wait = self._seen(*self._stores.waits(pid, since, until))
        run_at, run, sleep = self._run(pid, since, until)
        asked_at, query = self._query(pid, since, until)
        times = np.concatenate([wait_at, run_at, asked_at])
        times = times[(times > since) & (times < until)]
        times.sort(kind="stable")
        times = np.append(np.int64(since), times)
        times = times[np.append(True, times[1:] != times[:-1])]
        rows = slice(n, n + len(times))
        all_.pid[rows] = pid
        all_.start_ns[rows] = times
        all_.end_ns[rows][:-1] = times[1:]
        all_.end_ns[rows.stop - 1] = until
        all_.value[rows] = wait[np.searchsorted(wait_at, times, "right") - 1]
        at = np.searchsorted(run_at, times, "right") - 1
        all_.run[rows] = run[at]
        all_.sleep[rows] = sleep[at]
        all_.query[rows] = query[np.searchsorted(asked_at, times, "right") - 1]
        return len(times)

    def _seen(
        self, time: NDArray[np.int64], value: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the same, UNSEEN from each loss until what was stored next."""
        if not len(self._gaps):
            return time, value
        starts, ends = self._gaps[:, 0], self._gaps[:, 1]
        gap = np.searchsorted(starts, time, "right") - 1
        lost = (gap >= 0) & (time < ends[gap])
        # What it had at the window's start was read from its memory.
        value = np.where(lost, np.uint32(UNSEEN), value).astype(np.uint32)
        starts = starts[starts > time[0]]
        place = np.searchsorted(time, starts, "left")
        return np.insert(time, place, starts), np.insert(value, place, np.uint32(UNSEEN))

    def _query(
        self, pid: int, since: int, until: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return from when on a process was in which query, first the one at `since`."""
        own = _slice(self._queries.pid, self._queries.time_ns, pid, since + 1, until)
        before = own.start - 1
        first = NO_QUERY
        if before >= 0 and self._queries.pid[before] == pid:
            first = int(self._queries.code[before])
        time = np.append(np.int64(since), self._queries.time_ns[own])
        return time, np.append(np.int32(first), self._queries.code[own])

    def _run(
        self, pid: int, since: int, until: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int32]]:
        """Return from when on a process did what on a CPU or off it, and in which row of sleeps."""
        if self._sleeps is None:
            one = np.array([since], np.int64)
            return one, np.array([UNKNOWN], np.uint8), np.array([-1], np.int32)
        sleeps, unknown = self._sleeps, self._unknown
        own = _slice(sleeps.tid, sleeps.out_ns, pid, since, until)
        vague = _slice(unknown.tid, unknown.start_ns, pid, since, until)
        off = (sleeps.out_ns[own], sleeps.wake_ns[own], sleeps.in_ns[own])
        n = len(off[0])
        row = np.arange(own.start, own.stop, dtype=np.int32)
        ends, starts = unknown.end_ns[vague], unknown.start_ns[vague]
        # Of those with one time the last holds.
        time = np.concatenate([[since], ends, np.stack(off, axis=1).ravel(), starts])
        run = np.concatenate(
            [
                np.full(1 + len(ends), ON_CPU, np.uint8),
                np.tile(np.array([BLOCKED, RUN_QUEUE, ON_CPU], np.uint8), n),
                np.full(len(starts), UNKNOWN, np.uint8),
            ]
        )
        sleep = np.full(len(time), -1, np.int32)
        sleep[1 + len(ends) :][: 3 * n].reshape(n, 3)[:, :2] = row[:, None]
        if len(starts):
            order = np.argsort(time, kind="stable")
            time, run, sleep = time[order], run[order], sleep[order]
        return time, run, sleep


def _slice(
    tid: NDArray[np.int32], time: NDArray[np.int64], pid: int, since: int, until: int
) -> slice:
    """Return the rows of a process from `since` to before `until`."""
    head, end = np.searchsorted(tid, [pid, pid + 1]).tolist()
    first, last = (head + np.searchsorted(time[head:end], [since, until], "left")).tolist()
    return slice(first, last)
