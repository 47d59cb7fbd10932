"""Waits, scheduling and queries of a process merged, from columns made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from waitfold.events import ATTACH, CUT, EXIT, FORK, STORE, Transitions
from waitfold.join import BLOCKED, ON_CPU, RUN_QUEUE, UNKNOWN, UNSEEN, Segments, _Merger, _Stores
from waitfold.queries import Queries
from waitfold.sched import NO_UNKNOWN, Sleeps, Unknown

START, STOP = 100, 1000
A = 7919
READ, SYNC = 0x0A00000F, 0x0A000043

Row = tuple[int, ...]


def merge(
    stores: Sequence[tuple[int, int, int]],
    sleeps: Sequence[tuple[int, int, int]] | None = (),
    unknown: Sequence[tuple[int, int]] = (),
    queries: Sequence[tuple[int, int]] = (),
    gaps: Sequence[tuple[int, int]] = (),
    initial: int | None = 0,
) -> list[Row]:
    """Segments of process A as (start, end, value, run, query, sleep), its life as marks say.

    `stores` are (time, value, mark), `sleeps` (out, wake, in), `queries` (time, code).
    """
    time, value, mark = zip(*stores, strict=True) if stores else ((),) * 3
    n = len(time)
    batch = Transitions(
        np.array(time, np.int64),
        np.full(n, A << 32 | A, np.uint64),
        np.array(value, np.uint32),
        np.array(mark, np.uint8),
    )
    capture: Any = SimpleNamespace(
        seen=SimpleNamespace(waits={} if initial is None else {A: initial}),
        events=SimpleNamespace(merged=lambda values: values),
    )
    stream: Any = [batch]
    stored = _Stores(stream, capture)
    off = None
    if sleeps is not None:
        out, wake, came = (np.array([s[i] for s in sleeps], np.int64) for i in range(3))
        none = np.zeros(len(sleeps), np.uint8)
        off = Sleeps(np.full(len(sleeps), A, np.int32), out, wake, came, none > 0, none)
    vague = NO_UNKNOWN
    if unknown:
        since, until = (np.array(column, np.int64) for column in zip(*unknown, strict=True))
        vague = Unknown(np.full(len(unknown), A, np.int32), since, until, since > 0)
    asked = Queries(
        np.full(len(queries), A, np.int32),
        np.array([time for time, _ in queries], np.int64),
        np.array([code for _, code in queries], np.int32),
        [],
    )
    lost = np.array(gaps, np.int64).reshape(-1, 2)
    merger = _Merger(stored, off, vague, asked, lost)
    rows = merger.segments(stored.lives({A}, START, STOP))
    check(rows)
    columns = (rows.start_ns, rows.end_ns, rows.value, rows.run, rows.query, rows.sleep)
    return [tuple(row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def check(rows: Segments) -> None:
    """No segment is empty, none overlaps the next."""
    assert (rows.dur_ns > 0).all()
    assert (rows.start_ns[1:] >= rows.end_ns[:-1]).all()


def test_all_three() -> None:
    """Each change of the wait, of the scheduling, or of the query begins a segment."""
    assert merge(
        [(211, READ, STORE), (401, 0, STORE)],
        [(223, 307, 331), (503, 503, 509)],
        queries=[(199, 2), (601, 1)],
    ) == [
        (100, 199, 0, ON_CPU, -1, -1),
        (199, 211, 0, ON_CPU, 2, -1),
        (211, 223, READ, ON_CPU, 2, -1),
        (223, 307, READ, BLOCKED, 2, 0),
        (307, 331, READ, RUN_QUEUE, 2, 0),
        (331, 401, READ, ON_CPU, 2, -1),
        (401, 503, 0, ON_CPU, 2, -1),
        (503, 509, 0, RUN_QUEUE, 2, 1),
        (509, 601, 0, ON_CPU, 2, -1),
        (601, 1000, 0, ON_CPU, 1, -1),
    ]


def test_not_scheduled() -> None:
    """Without context switches it is not known whether it ran."""
    assert merge([(211, READ, STORE)], None) == [
        (100, 211, 0, UNKNOWN, -1, -1),
        (211, 1000, READ, UNKNOWN, -1, -1),
    ]


@pytest.mark.parametrize(("initial", "first"), [(None, UNSEEN), (0, 0), (SYNC, SYNC)])
def test_before_the_first_store(initial: int | None, first: int) -> None:
    """Before its first store it is in the wait that was read from its memory, or nobody knows."""
    assert merge([(211, READ, STORE)], None, initial=initial)[0] == (
        100,
        211,
        first,
        UNKNOWN,
        -1,
        -1,
    )


def test_stores_before_the_window() -> None:
    """The last store before the window's start counts, not what was read before that."""
    rows = merge([(53, READ, STORE), (97, SYNC, STORE), (211, 0, STORE)], None, initial=READ)
    assert [row[:3] for row in rows] == [(100, 211, SYNC), (211, 1000, 0)]


def test_life() -> None:
    """A process is in no wait when it is born, and what a pid does later is another's."""
    rows = merge(
        [(199, 0, FORK), (211, READ, STORE), (401, 0, EXIT), (503, 0, FORK), (601, SYNC, STORE)],
        None,
        initial=None,
    )
    assert [row[:3] for row in rows] == [
        (199, 211, 0),
        (211, 401, READ),
        (503, 601, 0),
        (601, 1000, SYNC),
    ]


def test_attached_late() -> None:
    """Mode mem: from when it was attached on, what it was in; before, nothing is counted."""
    rows = merge([(211, READ, ATTACH), (307, 0, STORE)], None, initial=None)
    assert [row[:3] for row in rows] == [
        (211, 307, READ),
        (307, 1000, 0),
    ]


def test_loss() -> None:
    """From a loss until its next store its wait is not known, nor where its value was not."""
    rows = merge(
        [(211, READ, STORE), (307, 0, STORE), (401, SYNC, STORE), (503, 0, CUT), (601, 0, STORE)],
        [],
        unknown=[(223, 311)],
        gaps=[(223, 311)],
    )
    assert [row[:4] for row in rows] == [
        (100, 211, 0, ON_CPU),
        (211, 223, READ, ON_CPU),
        (223, 307, UNSEEN, UNKNOWN),
        (307, 311, UNSEEN, UNKNOWN),
        (311, 401, UNSEEN, ON_CPU),
        (401, 503, SYNC, ON_CPU),
        (503, 601, UNSEEN, ON_CPU),
        (601, 1000, 0, ON_CPU),
    ]
