"""Which query each backend was in at every moment: its text, its id, or idle in a transaction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .backends import CLIENT, PARALLEL, backend_of, whole_lines
from .bundled import Bundled
from .capture import Capture
from .events import CUT, FORK, STORE, Codes, Column, PairRule, Transitions, Use, transitions
from .pair import Places, merged
from .probeset import OWN_GROUP
from .probeset import UNKNOWN as UNKNOWN_TEXT
from .waitevents import Version

NONE, IDLE_IN_TRANSACTION, UNKNOWN = 0, 1, -1
"""Codes of a backend in no query, and of one that is not known to be in any."""

SET = "query"
"""The probe set that queries are read from."""

# What a row says, in its upper four bits; the rest is the code of a text or of an id: a report of
# activity, what the recorder read from memory, an id, a loss, a birth.
_IDLE, _IN_TRANSACTION, _FASTPATH, _RUNNING, _SEEN, _ID, _FORCED_ID, _LOST, _BORN = range(9)
_KIND = 28
_CODE = (1 << _KIND) - 1

# BackendState (src/include/pgstat.h to 13, utils/backend_status.h since), as of 10 to 17; 18 has a
# new one, STATE_STARTING, before all of these. Any other means that nothing runs.
_STATES = {2: _RUNNING, 3: _IN_TRANSACTION, 4: _FASTPATH, 5: _IN_TRANSACTION}

_FASTPATH_CALL = "(fastpath function call)"
_OTHERS = "(others)"

_TEXT_MAX = 1023  # bytes of a text in backends.tsv
_BLANKS = bytes(0x20 if byte < 0x20 or byte == 0x7F else byte for byte in range(256))
_EVER = (1 << 63) - 1


@dataclass(frozen=True)
class Query:
    """A query; `query_id` as pg_stat_activity shows it, 0 where the server gave none."""

    text: str
    query_id: int


@dataclass(frozen=True)
class Queries:
    """Which query each backend was in: from `time_ns` on, `pid` was in the query `code`.

    Sorted by (pid, time_ns), no two rows of a pid with one time. A code is a row of `table`, or
    UNKNOWN; NONE and IDLE_IN_TRANSACTION stand in `table` too. A query that has an id is one row,
    however its texts differ, with the shortest of them. A process is in none from its birth on,
    so those of others that were born on the host have a row as well.
    """

    pid: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    code: NDArray[np.int32]
    table: list[Query]

    def at(self, pid: NDArray[np.int32], time_ns: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the codes in effect, UNKNOWN before a process's first."""
        row = self._places.latest(pid, time_ns)
        codes = np.full(len(pid), UNKNOWN, np.int32)
        codes[row >= 0] = self.code[row[row >= 0]]
        return codes

    @cached_property
    def _places(self) -> Places:
        return Places(self.pid, self.time_ns)


def _table() -> list[Query]:
    return [Query("(none)", 0), Query("(idle in transaction)", 0)]


def stand_ins() -> list[str]:
    """Return the texts that stand for queries without one."""
    return [*(query.text for query in _table()), _FASTPATH_CALL, _OTHERS, UNKNOWN_TEXT]


def _no_queries() -> Queries:
    empty = np.empty(0, np.int64)
    return Queries(empty.astype(np.int32), empty, empty.astype(np.int32), _table())


def read_queries(capture: Capture, progress: Callable[[int, int], None] | None = None) -> Queries:
    """Return the queries of a capture; none where it does not hold the probe set `query`.

    Nor where it holds one of the first, which had no ids.

    A backend is in a query from where it reports to be running (pgstat_report_activity) to its
    next report. The id is what pgstat_report_query_id keeps: the first one other than 0 since the
    text was reported or since it was told to forget (`force`, once for each statement of a string),
    so that what a function runs does not count. Here it holds from the report on. In
    pg_stat_activity it appears when the statement has been analysed, which may take a lock.

    What was lost makes a backend's query UNKNOWN until its next report. A query that it was in
    when the recording began has no id.
    """
    for file in capture.files:
        if isinstance(file, Bundled):
            return file.queries or _no_queries()
    held = capture.sets.get(SET)
    if held is None or "query_id" not in held.only:
        return _no_queries()
    major = Version.parse(capture.pg_version).major
    first, last = held.only["query_id"]
    group = capture.manifest.get("group", OWN_GROUP)
    rule = _Reports(
        f"{group}:query_activity",
        "state",
        f"{group}:query_id" if first <= major <= last else "",
        None,
        {state + (major >= 18): kind for state, kind in _STATES.items()},
    )
    stream = transitions(capture.files, rule, progress)
    parts = [_Rows.none(), *map(_fewer, stream)]
    rows = _Rows.joined(*_begun(capture, major, rule.texts), *parts)
    rows = rows.take(np.lexsort((rows.time_ns, rows.pid)))
    return _queries(_with_losses(rows, stream.gaps), rule)


@dataclass(frozen=True)
class _Reports(PairRule):
    """Which events are read, and how; they pair to nothing."""

    states: dict[int, int]
    texts: Codes = field(default_factory=Codes, compare=False)
    ids: Codes = field(default_factory=Codes, compare=False)

    @property
    def uses(self) -> list[Use]:
        """Return what each event means."""
        activity = Use(self.start_event, ("state", "pointer", "text"), self._activity)
        if not self.end_event:
            return [activity]
        return [activity, Use(self.end_event, ("id", "force"), self._ids)]

    def _activity(self, columns: list[Column], rows: int) -> NDArray[np.uint32]:
        state, pointer, text = (np.asarray(columns[0]), np.asarray(columns[1]), columns[2])
        kind = np.full(rows, _IDLE, np.uint32)
        for number, means in self.states.items():
            kind[state == number] = means
        # The process of a subscription runs without a text.
        with_text = np.flatnonzero((kind == _RUNNING) & (pointer != 0))
        code = np.zeros(rows, np.uint32)
        code[with_text] = self.texts.of([[text[i] for i in with_text.tolist()]], len(with_text))
        return kind << np.uint32(_KIND) | code

    def _ids(self, columns: list[Column], rows: int) -> NDArray[np.uint32]:
        ids, force = np.asarray(columns[0]), np.asarray(columns[1])
        kind = np.where(force != 0, np.uint32(_FORCED_ID), np.uint32(_ID))
        code = np.zeros(rows, np.uint32)
        some = np.flatnonzero(ids)
        code[some] = self.ids.of([ids[some]], len(some))
        return kind << np.uint32(_KIND) | code


@dataclass(frozen=True)
class _Rows:
    """What was reported, or happened to a process; `kind` is one of the above."""

    pid: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    value: NDArray[np.uint32]

    @property
    def kind(self) -> NDArray[np.uint32]:
        return self.value >> np.uint32(_KIND)

    @property
    def code(self) -> NDArray[np.uint32]:
        return self.value & np.uint32(_CODE)

    def __len__(self) -> int:
        return len(self.pid)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> _Rows:
        return _Rows(self.pid[which], self.time_ns[which], self.value[which])

    @property
    def same(self) -> NDArray[np.bool_]:
        """Whether the row before is of the same process."""
        return np.append(False, self.pid[1:] == self.pid[:-1])[: len(self)]

    @staticmethod
    def joined(*parts: _Rows) -> _Rows:
        return _Rows(
            np.concatenate([part.pid for part in parts]),
            np.concatenate([part.time_ns for part in parts]),
            np.concatenate([part.value for part in parts]),
        )

    @staticmethod
    def none() -> _Rows:
        return _Rows(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.uint32))


def _fewer(batch: Transitions) -> _Rows:
    """Return a batch's rows but for what does not matter.

    In a function that runs a statement a million times those are nearly all.
    """
    value = batch.value.copy()
    value[batch.mark == FORK] = _BORN << _KIND
    value[batch.mark == CUT] = _LOST << _KIND
    matters = (batch.mark == STORE) | (batch.mark == FORK) | (batch.mark == CUT)
    matters &= (batch.pid == batch.tid) & (batch.pid > 0)
    rows = _Rows(batch.pid, batch.time_ns, value).take(np.flatnonzero(matters))
    rows = rows.take(np.argsort(rows.pid, kind="stable"))
    is_id = rows.kind == _ID
    again = rows.same & is_id & np.append(False, is_id[:-1])[: len(rows)]
    # One that comes after one that was taken, and no id after no id.
    before = np.append(np.uint32(0), rows.code[:-1])[: len(rows)]
    again &= (before != 0) | (rows.code == 0)
    return rows.take(~again)


def _begun(capture: Capture, major: int, texts: Codes) -> Iterator[_Rows]:
    """Yield what processes did when they were first looked at, by backends.tsv."""
    file = capture.path / "backends.tsv"
    # What a flight recorder began with is older than what it holds.
    if capture.start_ns is None or "ring" in capture.manifest or not file.exists():
        return
    header, *lines = [line.split("\t") for line in whole_lines(file)] or [[]]
    known = {_shown(row[0]): code for code, row in enumerate(texts.rows) if row}
    seen: set[str] = set()
    for line in lines:
        row = dict(zip(header, line, strict=False))
        pid, since = row["pid"], int(row["seen_ns"])
        if pid in seen or since > capture.start_ns:
            continue
        seen.add(pid)
        text = row.get("query", "-")
        if text == "-":
            value = _by_title(row["title"], major)
        else:
            if text not in known:
                known[text] = int(texts.of([[text.encode()]], 1)[0])
            value = _SEEN << _KIND | known[text]
        if value is not None:
            yield _Rows(np.array([pid], np.int32), np.array([since]), np.array([value], np.uint32))


def _shown(text: int | bytes | None) -> str:
    """Return a text as backends.tsv has it."""
    if not isinstance(text, bytes):
        return ""
    return text[:_TEXT_MAX].translate(_BLANKS).decode(errors="replace")


_TITLE = re.compile(
    r".* (?:\[local\]|\S+\(\d+\)) idle(?P<within> in transaction(?: \(aborted\))?)?"
)


def _by_title(title: str, major: int) -> int | None:
    """Return what a process does by its title, None if that is not known."""
    backend = backend_of(title, major)
    if match := _TITLE.fullmatch(title):
        return (_IN_TRANSACTION if match["within"] else _IDLE) << _KIND
    # These have texts; all other processes never report one.
    if backend.type in (CLIENT, PARALLEL, "walsender", "autovacuum worker"):
        return None
    return _IDLE << _KIND


def _with_losses(rows: _Rows, gaps: list[tuple[int, int]]) -> _Rows:
    """Return the rows, those of a process in the order of time, and where each is cut by a gap."""
    if not gaps or not len(rows):
        return rows
    apart = merged(gaps)
    starts, ends = np.append(apart[:, 0], _EVER), apart[:, 1]
    until = np.where(np.append(rows.same[1:], False), np.append(rows.time_ns[1:], _EVER), _EVER)
    # The first that ends after the row.
    gap = starts[np.searchsorted(ends, rows.time_ns, "right")]
    cut = np.flatnonzero(gap < until)
    lost = _Rows(
        rows.pid[cut],
        np.maximum(rows.time_ns[cut], gap[cut]),
        np.full(len(cut), _LOST << _KIND, np.uint32),
    )
    # In the order of time within a process, and behind the row that it cuts.
    order = np.argsort(np.append(np.arange(len(rows)), cut), kind="stable")
    return _Rows.joined(rows, lost).take(order)


def _queries(rows: _Rows, rule: _Reports) -> Queries:
    """Return the queries by all that was reported, the rows of a process in the order of time."""
    # To forget an id where there is none changes nothing.
    forgets = rows.value == _FORCED_ID << _KIND
    before = np.append(np.uint32(_LOST << _KIND), rows.value[:-1])[: len(rows)]
    nothing = (before >> _KIND == _RUNNING) | (before == _FORCED_ID << _KIND)
    rows = rows.take(~(rows.same & forgets & nothing))

    # A row of the result is a report, or a statement of a string that has several.
    reports = ~np.isin(rows.kind, (_ID, _FORCED_ID))
    first = np.flatnonzero(reports | (rows.kind == _FORCED_ID) | ~rows.same)
    # The report that holds there; with none so far it is as if that was lost.
    kind = np.where(reports, rows.kind, _LOST)
    text = np.where(reports, rows.code, 0)
    report = np.maximum.accumulate(np.where(reports | ~rows.same, np.arange(len(rows)), 0))[first]
    kind, text = kind[report], text[report]
    ids = _ids_of(rows, first, np.isin(rows.kind[first], (_RUNNING, _FORCED_ID)))
    ids[~np.isin(kind, (_RUNNING, _SEEN, _LOST))] = 0

    table, by_id, by_text = _named(rule, ids, text)
    code = np.select(
        [kind == _IN_TRANSACTION, kind == _FASTPATH, ids > 0, kind == _LOST, text > 0],
        [IDLE_IN_TRANSACTION, len(table), by_id[ids], UNKNOWN, by_text[text]],
        NONE,
    )
    if (kind == _FASTPATH).any():
        table.append(Query(_FASTPATH_CALL, 0))
    pid, time_ns = rows.pid[first], rows.time_ns[first]
    last = np.append((pid[1:] != pid[:-1]) | (time_ns[1:] != time_ns[:-1]), True)[: len(pid)]
    pid, time_ns, code = pid[last], time_ns[last], code[last].astype(np.int32)
    new = np.append(True, (pid[1:] != pid[:-1]) | (code[1:] != code[:-1]))[: len(pid)]
    return Queries(pid[new], time_ns[new], code[new], table)


def _ids_of(rows: _Rows, first: NDArray[np.int64], counts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the code of the id of each run of rows, 0 for none; `first` is where they begin."""
    ids = np.zeros(len(first), np.int64)
    given = np.flatnonzero(np.isin(rows.kind, (_ID, _FORCED_ID)) & (rows.code > Codes.OTHERS))
    run, which = np.unique(np.searchsorted(first, given, "right") - 1, return_index=True)
    ids[run] = rows.code[given[which]]
    ids[~counts] = 0
    return ids


def _named(
    rule: _Reports, ids: NDArray[np.int64], texts: NDArray[np.int64]
) -> tuple[list[Query], NDArray[np.int64], NDArray[np.int64]]:
    """Return a table of the queries, and the rows in it by code of an id and by code of a text."""
    table = _table()
    known = [row[0] if row else None for row in rule.texts.rows]
    length = np.array([len(t) if isinstance(t, bytes) else _CODE for t in known])
    by_id = np.zeros(len(rule.ids.rows), np.int64)
    by_text = np.zeros(len(known), np.int64)
    pairs = np.unique(np.stack([ids, texts]), axis=1)
    pairs = pairs[:, np.lexsort((pairs[1], length[pairs[1]], pairs[0]))]
    for id_, text in pairs.T.tolist():
        if id_ and not by_id[id_]:
            by_id[id_] = len(table)
            (number,) = rule.ids.rows[id_]
            assert isinstance(number, int)
            table.append(Query(_text(known[text], text), number))
        elif text and not id_:
            by_text[text] = len(table)
            table.append(Query(_text(known[text], text), 0))
    return table, by_id, by_text


def _text(text: int | bytes | None, code: int) -> str:
    if isinstance(text, bytes):
        return text.decode(errors="backslashreplace")
    return _OTHERS if code == Codes.OTHERS else UNKNOWN_TEXT
