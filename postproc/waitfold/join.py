"""Waits, scheduling and queries of each process joined: what it did at every moment it lived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waitfold.backends import CLIENT, Backend
from waitfold.backends import UNKNOWN as UNKNOWN_TYPE
from waitfold.capture import Capture
from waitfold.events import ATTACH, CUT, EXIT, FORK, STORE, Transitions, transitions
from waitfold.sched import NO_SLEEPS, Sleeps
from waitfold.waitevents import CLIENT_READ

ON_CPU, RUN_QUEUE, BLOCKED, UNKNOWN = 0, 1, 2, 3
"""What the scheduler did with a process: it ran, was ready to run, slept; not known."""

UNSEEN = 0xFFFF_FFFF
"""Stands for a wait event that is not known, as it was lost or is older than what was seen."""

NO_QUERY = -1
"""Stands for a query that is not known."""


@dataclass(frozen=True)
class Segments:
    """What processes did, sorted by (pid, start_ns).

    Those of a pid cover its life in the window, without gap or overlap; nothing changes within
    one. `value` is wait_event_info: 0 where it was in no wait, UNSEEN where that is not known.
    `run` is ON_CPU, RUN_QUEUE, BLOCKED or UNKNOWN; `query` a code of queries.Queries or -1;
    `sleep` the row of the off-CPU interval that it is part of, else -1.
    """

    pid: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    value: NDArray[np.uint32]
    run: NDArray[np.uint8]
    query: NDArray[np.int32]
    sleep: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.pid)

    @property
    def dur_ns(self) -> NDArray[np.int64]:
        """Length of each row."""
        return self.end_ns - self.start_ns

    def take(self, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Segments:
        """Return some of the rows."""
        return Segments(*(getattr(self, column.name)[which] for column in fields(self)))


@dataclass(frozen=True)
class Joined:
    """A capture joined: its window from `start_ns` to `end_ns`, and who the processes were."""

    capture: Capture
    segments: Segments
    sleeps: Sleeps
    queries: Any
    backends: dict[int, Backend]
    warnings: list[str]
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class _Steps:
    """A step function: from `time_ns`, rising, on it has `value`."""

    time_ns: NDArray[np.int64]
    value: NDArray[np.integer]

    def at(self, time_ns: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return its values; none of the times is before its first."""
        return self.value[np.searchsorted(self.time_ns, time_ns, "right") - 1]


def join(capture: Capture, progress: Callable[[int, int], None] | None = None) -> Joined:
    """Read a capture through and join what it holds of each of the server's processes."""
    stream = transitions(capture.files, capture.rule, progress)
    rows = _collected(stream.batches)
    warnings = [*capture.warnings, *stream.warnings]
    start = stream.first_ns or 0 if capture.start_ns is None else capture.start_ns
    end = stream.last_ns or 0 if capture.end_ns is None else capture.end_ns
    end = max(end, start)

    rows = rows.take(np.lexsort((rows.time_ns, rows.pid)))
    pids, heads = np.unique(rows.pid, return_index=True)
    ends = np.append(heads[1:], len(rows))
    of = {
        pid: slice(head, tail)
        for pid, head, tail in zip(pids.tolist(), heads.tolist(), ends.tolist(), strict=True)
    }
    backends = dict(capture.seen.backends)
    wanted = set(np.unique(rows.pid[(rows.mark == STORE) | (rows.mark == ATTACH)]).tolist())
    parts: list[Segments] = []
    for pid in sorted(wanted | backends.keys() | capture.seen.waits.keys()):
        own = rows.take(of.get(pid, slice(0, 0)))
        if backends.get(pid, Backend(UNKNOWN_TYPE)).type == UNKNOWN_TYPE:
            is_client = bool((own.value[own.mark == STORE] == CLIENT_READ).any())
            backends[pid] = Backend(CLIENT if is_client else UNKNOWN_TYPE)
        for born, died, part in _lives(own, start, end):
            waits = _waits(part, born, capture.seen.waits.get(pid), stream.gaps, capture)
            times = _breaks([waits], born, died)
            n = len(times) - 1
            parts.append(
                Segments(
                    np.full(n, pid, np.int32),
                    times[:-1],
                    times[1:],
                    waits.at(times[:-1]).astype(np.uint32),
                    np.full(n, UNKNOWN, np.uint8),
                    np.full(n, NO_QUERY, np.int32),
                    np.full(n, -1, np.int64),
                )
            )
    return Joined(capture, _together(parts), NO_SLEEPS, None, backends, warnings, start, end)


def _collected(batches: Iterator[Transitions]) -> Transitions:
    """Return all transitions of main threads."""
    none = Transitions(
        np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.uint8)
    )
    kept = [none]
    kept += [batch.take(np.flatnonzero(batch.pid == batch.tid)) for batch in batches]
    return Transitions(
        *(np.concatenate([getattr(p, c.name) for p in kept]) for c in fields(Transitions))
    )


def _lives(rows: Transitions, start: int, end: int) -> Iterator[tuple[int, int, Transitions]]:
    """Yield from when until when in the window a process of this pid lived, and its rows then."""
    born, first = start, 0
    alive = True
    for row in np.flatnonzero((rows.mark == FORK) | (rows.mark == EXIT)).tolist():
        time = int(rows.time_ns[row])
        if rows.mark[row] == FORK:
            born, first, alive = max(time, start), row, True
        elif alive:
            if born < min(time, end):
                yield born, min(time, end), rows.take(slice(first, row))
            alive = False
    if alive and born < end:
        yield born, end, rows.take(slice(first, None))


def _waits(
    rows: Transitions,
    born: int,
    initial: int | None,
    gaps: list[tuple[int, int]],
    capture: Capture,
) -> _Steps:
    """Return the wait event of a process at each time of its life."""
    merged = capture.events.merged
    time = rows.time_ns
    value = merged(rows.value).copy()
    value[rows.mark == CUT] = UNSEEN
    first = UNSEEN if initial is None else int(merged(np.array([initial], np.uint32))[0])
    time = np.append(np.int64(min(born, int(time[0]) if len(time) else born)), time)
    value = np.append(np.uint32(first), value)
    for gap_start, gap_end in gaps:
        # Nothing is known until the next that is seen.
        inside = (time >= gap_start) & (time < gap_end)
        value[inside] = UNSEEN
        place = int(np.searchsorted(time, gap_start, "left"))
        if place:
            time = np.insert(time, place, gap_start)
            value = np.insert(value, place, UNSEEN)
    return _Steps(time, value)


def _breaks(functions: list[_Steps], born: int, died: int) -> NDArray[np.int64]:
    """Return all times of a life at which one of the functions changes, and its start and end."""
    inside = [f.time_ns[(f.time_ns > born) & (f.time_ns < died)] for f in functions]
    return np.unique(np.concatenate([np.array([born, died], np.int64), *inside]))


def _together(parts: list[Segments]) -> Segments:
    none = Segments(*(np.empty(0, dtype) for dtype in ("i4", "i8", "i8", "u4", "u1", "i4", "i8")))
    return Segments(
        *(np.concatenate([getattr(p, c.name) for p in (none, *parts)]) for c in fields(Segments))
    )
