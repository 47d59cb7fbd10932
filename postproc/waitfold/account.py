"""Where the time of each process went, to the nanosecond: sums of segments that add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from waitfold.analysis import Analysis, Progress, SetAnalysis, analyse, analyse_set
from waitfold.backends import SeenBackends
from waitfold.capture import Capture
from waitfold.join import BLOCKED, UNKNOWN, UNSEEN, Joined, Segments, join, switched
from waitfold.pair import distinct
from waitfold.queries import IDLE_IN_TRANSACTION
from waitfold.queries import SET as QUERY_SET
from waitfold.queries import UNKNOWN as NO_QUERY
from waitfold.redact import without_literals
from waitfold.sched import GUESSED
from waitfold.waitevents import CLIENT_READ, is_idle_wait

DIMENSIONS = ("backend", "query", "event", "database", "user", "application")
"""What time can be told apart by."""

BUSY, IDLE, IN_TRANSACTION = 0, 1, 2
"""Kinds of time: idle is outside of DB time, and so is idle in a transaction."""

_CHUNK = 1 << 20  # segments


class Times(NamedTuple):
    """Time in ns by what the scheduler did; their sum is the time that passed."""

    on_cpu: int
    run_queue: int
    blocked: int
    unknown: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return sum(self)


@dataclass(frozen=True)
class Cells:
    """Sums of all segments, a row for each that differ in process, wait event, query or kind.

    `ns` has a column for each of ON_CPU, RUN_QUEUE, BLOCKED, UNKNOWN. All rows of a process add up
    to how long it lived in the window.
    """

    pid: NDArray[np.int32]
    value: NDArray[np.uint32]
    query: NDArray[np.int32]
    kind: NDArray[np.uint8]  # BUSY, IDLE or IN_TRANSACTION
    ns: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.pid)

    def take(self, which: NDArray[np.bool_]) -> Cells:
        """Return some of the rows."""
        return Cells(
            self.pid[which], self.value[which], self.query[which], self.kind[which], self.ns[which]
        )

    def times(self) -> Times:
        """Return the sums over all rows."""
        return Times(*self.ns.sum(axis=0).tolist())


@dataclass(frozen=True)
class Row:
    """Time by some dimensions: a name for each, and by state what was not idle, and the idle."""

    names: tuple[str, ...]
    busy: Times
    idle_ns: int
    in_transaction_ns: int


@dataclass(frozen=True)
class Account:
    """A capture's time accounted for.

    `wall` and `residual` are by process: how long it lived in the window, and how much of that is
    not accounted for: its wait event is UNSEEN, or it is UNKNOWN whether it ran. The latter counts
    only where context switches were recorded.
    """

    joined: Joined
    cells: Cells
    wall: dict[int, int]
    residual: dict[int, int]

    @property
    def unseen_ns(self) -> int:
        """How long the wait event of any process was not known."""
        return int(self.cells.ns[self.cells.value == UNSEEN].sum())

    @property
    def unknown_ns(self) -> int:
        """How long it was not known of any process whether it ran, though its wait event was."""
        if not self.joined.scheduled:
            return 0
        return int(self.cells.ns[self.cells.value != UNSEEN, UNKNOWN].sum())

    @property
    def guessed(self) -> int:
        """How many times a process came onto a CPU without a sample of that."""
        return int(((self.joined.sleeps.flags & GUESSED) > 0).sum())

    def of(self, *kinds: str) -> Cells:
        """Return the rows of the processes of these kinds (backends.KINDS)."""
        backends = self.joined.backends
        pids = [pid for pid in self.wall if backends[pid].kind in kinds]
        return self.cells.take(np.isin(self.cells.pid, pids))

    def db_time_ns(self) -> int:
        """Return the time of client backends and parallel workers that was not idle."""
        cells = self.of("foreground")
        return cells.take(cells.kind == BUSY).times().total

    def no_wait_ns(self) -> int:
        """Return the part of DB time in which they were in no wait event."""
        cells = self.of("foreground")
        return cells.take((cells.kind == BUSY) & (cells.value == 0)).times().total

    def event(self, value: int) -> str:
        """Return a wait event as `Class:Name`."""
        return ":".join(self.joined.capture.events.label(value))

    def by(self, dimensions: Sequence[str], cells: Cells) -> list[Row]:
        """Return rows of `cells` by some of DIMENSIONS, the most time first."""
        codes: list[NDArray[np.int64]] = []
        names: list[list[str]] = []
        for dimension in dimensions:
            code, called = self._dimension(dimension, cells)
            codes.append(code)
            names.append(called)
        first, place = distinct(codes)
        sums = np.zeros((len(first), 3, 4), np.int64)
        np.add.at(sums, (place, cells.kind), cells.ns)
        rows = [
            Row(
                tuple(called[code[at]] for code, called in zip(codes, names, strict=True)),
                Times(*kinds[BUSY]),
                sum(kinds[IDLE]),
                sum(kinds[IN_TRANSACTION]),
            )
            for at, kinds in zip(first.tolist(), sums.tolist(), strict=True)
        ]
        return sorted(rows, key=lambda row: (-row.busy.total, -row.idle_ns, row.names))

    def _dimension(self, dimension: str, cells: Cells) -> tuple[NDArray[np.int64], list[str]]:
        """Return a code for each row, and what the codes are called."""
        if dimension == "event":
            codes, row = np.unique(cells.value, return_inverse=True)
            special = {0: "(no wait event)", UNSEEN: "(not known)"}
            names = [special.get(value) or self.event(value) for value in codes.tolist()]
        elif dimension == "query":
            codes, row = np.unique(cells.query, return_inverse=True)
            names = [self.query(code) for code in codes.tolist()]
        else:
            codes, row = np.unique(cells.pid, return_inverse=True)
            names = [self.process(pid, dimension) for pid in codes.tolist()]
        codes_of: dict[str, int] = {}
        code = np.array([codes_of.setdefault(name, len(codes_of)) for name in names], np.int64)
        return code[row], list(codes_of)

    def process(self, pid: int, dimension: str) -> str:
        """Return what a process is called by one of the other dimensions."""
        who = self.joined.backends[pid]
        if dimension == "backend":
            return f"{pid:>7} {who.type.removesuffix(' backend')} {who.who}".rstrip()
        return getattr(who, dimension) or "-"

    def query(self, code: int) -> str:
        """Return what a query is called: the shape of its text."""
        if code == NO_QUERY:
            return "(not known)"
        query = self.joined.queries.table[code]
        return shape(query.text) if code > IDLE_IN_TRANSACTION else query.text


def shape(text: str) -> str:
    """Return a query in one line with `?` for its literals: what those that differ share."""
    return " ".join(without_literals(text)[0].split())


def report_of(
    capture: Capture, by: Sequence[str] = (), progress: Progress | None = None
) -> tuple[Analysis, list[SetAnalysis], Account | None]:
    """Return what a report is of: the wait events, the other probe sets, and the accounting.

    There is no accounting where neither context switches nor queries were recorded, unless `by`
    names another dimension than backend.
    """
    accounted = None
    if switched(capture) or QUERY_SET in capture.sets or list(by) not in ([], ["backend"]):
        accounted = account(join(capture, progress))
        # It knows of more processes what they were.
        seen = SeenBackends(accounted.joined.backends, capture.seen.waits)
        capture = replace(capture, seen=seen)
    analysis = analyse(capture, progress)
    sets = [analyse_set(capture, name, progress, analysis.backends) for name in capture.sets]
    return analysis, sets, accounted


def account(joined: Joined) -> Account:
    """Sum up a capture's segments.

    Idle is what is_idle_wait() says, and the postmaster while it is blocked, which reports no
    waits. Where queries were recorded, Client:ClientRead is idle only in no query: in a
    transaction it is idle in transaction, and in a query the wait for more of its data.
    """
    sums: dict[tuple[int, int, int, int], NDArray[np.int64]] = {}
    for chunk in _chunks(joined.segments):
        kind = _kinds(chunk, joined.postmasters)
        for key, ns in _sums(chunk, kind):
            if key in sums:
                sums[key] += ns
            else:
                sums[key] = ns
    keys = list(zip(*sums, strict=True)) or [()] * 4
    cells = Cells(
        np.array(keys[0], np.int32),
        np.array(keys[1], np.uint32),
        np.array(keys[2], np.int32),
        np.array(keys[3], np.uint8),
        np.array(list(sums.values()), np.int64).reshape(-1, 4),
    )
    not_known = cells.value == UNSEEN
    lost = np.where(not_known, cells.ns.sum(axis=1), cells.ns[:, UNKNOWN] * joined.scheduled)
    wall: dict[int, int] = {}
    residual: dict[int, int] = {}
    for pid, ns, vague in zip(
        cells.pid.tolist(), cells.ns.sum(axis=1).tolist(), lost.tolist(), strict=True
    ):
        wall[pid] = wall.get(pid, 0) + ns
        residual[pid] = residual.get(pid, 0) + vague
    return Account(joined, cells, wall, residual)


def _chunks(segments: Segments) -> Iterator[Segments]:
    for head in range(0, len(segments), _CHUNK):
        yield segments.take(slice(head, head + _CHUNK))


def _kinds(rows: Segments, postmasters: list[int]) -> NDArray[np.uint8]:
    """Return whether each row is BUSY, IDLE or IN_TRANSACTION."""
    reads = rows.value == CLIENT_READ
    kind = np.where(is_idle_wait(rows.value), np.uint8(IDLE), np.uint8(BUSY))
    kind[reads & (rows.query == IDLE_IN_TRANSACTION)] = IN_TRANSACTION
    kind[reads & (rows.query > IDLE_IN_TRANSACTION)] = BUSY
    waits = (rows.run == BLOCKED) | (rows.run == UNKNOWN)
    kind[np.isin(rows.pid, postmasters) & (rows.value == 0) & waits] = IDLE
    return kind


def _sums(
    rows: Segments, kind: NDArray[np.uint8]
) -> Iterator[tuple[tuple[int, int, int, int], NDArray[np.int64]]]:
    """Yield process, wait event, query and kind of rows that agree in them, and their time."""
    columns = (rows.pid, rows.value, rows.query, kind)
    first, place = distinct(columns)
    # Whole ns below 2**53, over a hundred days, and so exact.
    sums = np.bincount(place * 4 + rows.run, rows.dur_ns, 4 * len(first)).astype(np.int64)
    keys = zip(*(column[first].tolist() for column in columns), strict=True)
    yield from zip(keys, sums.reshape(-1, 4), strict=True)
