"""A capture as DataFrames: waitfold.load(), and the same rows for the exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from waitfold.analysis import Progress, intervals
from waitfold.audit import left, profile_events, sampled_in
from waitfold.capture import Capture, Naming, open_capture
from waitfold.errors import Misuse
from waitfold.events import ATTACH, CUT, EXIT, FORK, STORE, Transitions, transitions
from waitfold.join import BLOCKED, ON_CPU, RUN_QUEUE, UNSEEN, Joined, Segments, join
from waitfold.pair import FLAGS, Intervals
from waitfold.profile import UNKNOWN, Frames, Traces, read_traces
from waitfold.queries import IDLE_IN_TRANSACTION
from waitfold.queries import UNKNOWN as NO_QUERY
from waitfold.sched import SWITCH
from waitfold.symbols import captured_symbols
from waitfold.waitevents import is_idle

INTERVALS = pa.schema(
    {
        "start_ns": pa.int64(),
        "dur_ns": pa.int64(),
        "pid": pa.int32(),
        "tid": pa.int32(),
        "type": pa.string(),
        "user": pa.string(),
        "database": pa.string(),
        "application": pa.string(),
        "class": pa.string(),
        "name": pa.string(),
        "idle": pa.bool_(),
        "flags": pa.string(),
        "query_id": pa.int64(),
        "query": pa.string(),
        "blocked_ns": pa.int64(),
        "run_queue_ns": pa.int64(),
        "on_cpu_ns": pa.int64(),
    }
)
"""Columns of `Recording.intervals`, which documents them, and of the exports to CSV and Parquet."""

_MARKS = {STORE: "store", FORK: "fork", EXIT: "exit", ATTACH: "attach", CUT: "cut"}
_MAYBE_MISSING = ("query_id", "blocked_ns", "run_queue_ns", "on_cpu_ns")


class Recording:
    """A capture; each table is read when it is first asked for, and kept.

    All times are int64 nanoseconds of CLOCK_MONOTONIC. Texts are categorical. What a capture does
    not hold or nobody knows is missing: <NA> in Int64, NaN elsewhere.
    """

    def __init__(self, capture: Capture, progress: Progress | None = None) -> None:
        self.capture = capture
        self.progress = progress

    @cached_property
    def joined(self) -> Joined:
        """What each process did at every moment: waits, scheduling and queries joined."""
        return join(self.capture, self.progress)

    @cached_property
    def traces(self) -> Traces | None:
        """Samples on a CPU and those of who left one, of the whole host; None without."""
        return read_profile(self.capture)

    @property
    def start_ns(self) -> int:
        """When the recording began."""
        return self.joined.start_ns

    @property
    def end_ns(self) -> int:
        """When the recording ended."""
        return self.joined.end_ns

    @property
    def warnings(self) -> list[str]:
        """What to know before the numbers are trusted."""
        return self.joined.warnings

    @cached_property
    def events(self) -> pd.DataFrame:
        """What was recorded of the server's processes, a row an event, in the order of time.

        ========  ========  =======================================================
        time_ns   int64     when
        pid       int32     process
        tid       int32     thread; that of a process's main thread is its pid
        mark      category  ``store`` to wait_event_info; ``fork`` and ``exit`` of a
                            thread; ``attach``: recording of it began, in a wait or in
                            none; ``cut``: what it stored then is not known
        value     uint32    wait_event_info, 0: not waiting
        class     category  of the wait event, missing where value is 0
        name      category  of the wait event, missing where value is 0
        ========  ========  =======================================================
        """
        capture = self.capture
        parts = [Transitions(*(np.empty(0, kind) for kind in ("i8", "u8", "u4", "u1")))]
        pids = np.array([*self.joined.backends], np.int32)
        for batch in transitions(capture.files, capture.rule, self.progress):
            parts.append(batch.take(np.flatnonzero(np.isin(batch.pid, pids))))
        columns = ("time_ns", "thread", "value", "mark")
        all_ = Transitions(*(np.concatenate([getattr(p, c) for p in parts]) for c in columns))
        value = capture.events.merged(all_.value)
        class_, name = _labels(value, capture.events.label)
        return pd.DataFrame(
            {
                "time_ns": all_.time_ns,
                "pid": all_.pid,
                "tid": all_.tid,
                "mark": _category(all_.mark, _MARKS.get),
                "value": value,
                "class": class_,
                "name": name,
            }
        )

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """The waits, a row each, sorted by start_ns.

        ============  ========  ===================================================
        start_ns      int64     when the wait began, or the window, if that was later
        dur_ns        int64     how long it was; of a cut one the part that was seen
        pid           int32     process
        tid           int32     thread
        type          category  of the process, as pg_stat_activity.backend_type
        user          category  of a client backend or its parallel worker
        database      category  the same
        application   category  the same, its application_name
        class         category  of the wait event; ``?``: only its end was seen
        name          category  of the wait event
        idle          bool      Client:ClientRead and the class Activity: no work to do
        flags         category  empty: complete; else ``start``, ``end``: the window or
                                its thread began or ended in it, ``lost``: samples were;
                                joined by ``|``
        query_id      Int64     of the query that it began in, where the server gave one
        query         category  its text, or ``(idle in transaction)``
        blocked_ns    Int64     the part in which the process slept
        run_queue_ns  Int64     the part in which it was ready, and waited for a CPU
        on_cpu_ns     Int64     the part in which it ran
        ============  ========  ===================================================

        query needs a recording ``--with query``, the last three need ``--with offcpu``, and are
        missing for threads that are not the first of their process. They add up to dur_ns
        but where samples were lost.
        """
        tables = [INTERVALS.empty_table(), *interval_tables(self.joined, self.progress)]
        # To pandas, the texts of all rows take 8 bytes a row and column as dictionaries.
        frame = pa.concat_tables(tables).to_pandas(strings_to_categorical=True, self_destruct=True)
        assert isinstance(frame, pd.DataFrame)
        for column in _MAYBE_MISSING:
            frame[column] = frame[column].astype("Int64")
        frame["idle"] = frame["idle"].astype(bool)
        return frame.sort_values("start_ns", kind="stable", ignore_index=True)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """Stacks of the server's processes, a row each, sorted by time_ns.

        ============  ========  ===================================================
        time_ns       int64     when
        pid           int32     process
        tid           int32     thread
        kind          category  ``on-CPU``: a sample of one that ran; ``off-CPU``: it
                                left the CPU
        dur_ns        int64     the time that it stands for: of on-CPU the period, of
                                off-CPU the time until it ran again
        run_queue_ns  int64     the part in which it was ready; 0 of on-CPU
        class, name   category  its wait event then, missing where it was in none
        query         category  its query then
        stack         category  functions, root first, joined by ``;``; missing: not seen
        ============  ========  ===================================================

        Empty for a recording without ``--with oncpu`` and ``--with offcpu``.
        """
        rows = samples(self.joined, self.traces)
        joined = self.joined
        class_, name = _labels(rows.value, joined.capture.events.label)
        return pd.DataFrame(
            {
                "time_ns": rows.time_ns,
                "pid": rows.pid,
                "tid": rows.tid,
                "kind": _category(rows.on_cpu, {False: "off-CPU", True: "on-CPU"}.get),
                "dur_ns": rows.dur_ns,
                "run_queue_ns": rows.run_queue_ns,
                "class": class_,
                "name": name,
                "query": _category(rows.query, lambda code: query_text(joined, code)),
                "stack": _category(rows.stack, rows.folded),
            }
        )

    @cached_property
    def backends(self) -> pd.DataFrame:
        """The server's processes, a row each, indexed by pid.

        ===========  ========  =====================================================
        type         category  as pg_stat_activity.backend_type; ``unknown``
        kind         category  ``foreground``: client backends and parallel workers;
                               ``background``; ``unknown``
        user         category  of a client backend or its parallel worker
        database     category  the same
        application  category  the same, its application_name
        leader       Int64     pid of the client backend that a parallel worker works for
        first_ns     Int64     from when on it lived in the window
        last_ns      Int64     until when
        ===========  ========  =====================================================
        """
        segments, known = self.joined.segments, sorted(self.joined.backends.items())
        firsts, lasts = {}, {}
        pids, heads = np.unique(segments.pid, return_index=True)
        for pid, (head, end) in zip(
            pids.tolist(), pairwise([*heads.tolist(), len(segments)]), strict=True
        ):
            firsts[pid], lasts[pid] = segments.start_ns[head], segments.end_ns[end - 1]
        return pd.DataFrame(
            {
                "type": pd.Categorical([who.type for _, who in known]),
                "kind": pd.Categorical([who.kind for _, who in known]),
                "user": pd.Categorical([who.user or None for _, who in known]),
                "database": pd.Categorical([who.database or None for _, who in known]),
                "application": pd.Categorical([who.application or None for _, who in known]),
                "leader": pd.array([who.leader or None for _, who in known], "Int64"),
                "first_ns": pd.array([firsts.get(pid) for pid, _ in known], "Int64"),
                "last_ns": pd.array([lasts.get(pid) for pid, _ in known], "Int64"),
            },
            index=pd.Index([pid for pid, _ in known], dtype=np.int32, name="pid"),
        )


def load(
    path: str | Path,
    *,
    start: str | None = None,
    value: str | None = None,
    end: str | None = None,
    pg_version: str | None = None,
) -> Recording:
    """Open a capture, or a perf.data or trace.dat, for tables of what it holds.

    The last four are for a file recorded by hand, as in `waitfold report`.

    Raises
    ------
    WaitfoldError
        It cannot be read; the message says why. Also when a table is first asked for.

    Examples
    --------
    >>> recording = waitfold.load("waits-db1")
    >>> waits = recording.intervals
    >>> waits[~waits.idle].groupby(["class", "name"], observed=True).dur_ns.sum()

    """
    return Recording(open_capture(Path(path), Naming(start, end, value, pg_version)))


def interval_tables(joined: Joined, progress: Progress | None = None) -> Iterator[pa.Table]:
    """Read a capture through and yield its intervals, as INTERVALS says, piece by piece."""
    parts = _Parts(joined.segments) if joined.scheduled else None
    table = joined.queries.table
    for batch in intervals(joined.capture, progress)[1]:
        if not len(batch):
            continue
        batch = batch.take(np.argsort(batch.start_ns, kind="stable"))
        pids, pid = np.unique(batch.pid, return_inverse=True)
        who = [joined.backends.get(one) for one in pids.tolist()]
        values, value = np.unique(batch.value, return_inverse=True)
        labels = [joined.capture.events.label(one) for one in values.tolist()]
        at = joined.segments.places.latest(batch.tid, batch.start_ns)
        code = _at(joined.segments.query, at, NO_QUERY)
        codes, query = np.unique(code, return_inverse=True)
        ids = [table[one].query_id or None if one >= 0 else None for one in codes.tolist()]
        texts = [query_text(joined, one) for one in codes.tolist()]
        columns: list[Any] = [
            pa.array(batch.start_ns),
            pa.array(batch.dur_ns),
            pa.array(batch.pid),
            pa.array(batch.tid),
            _taken([one.type if one else None for one in who], pid),
            _taken([one.user or None if one else None for one in who], pid),
            _taken([one.database or None if one else None for one in who], pid),
            _taken([one.application or None if one else None for one in who], pid),
            _taken([class_ for class_, _ in labels], value),
            _taken([name for _, name in labels], value),
            pa.array(is_idle(batch.value)),
            _taken(FLAGS, batch.flags),
            pa.array(ids, pa.int64()).take(pa.array(query)),
            _taken(texts, query),
        ]
        columns += _split(parts, batch, at)
        yield pa.table(columns, schema=INTERVALS)


def _split(parts: _Parts | None, batch: Intervals, at: NDArray[np.int64]) -> list[Any]:
    if parts is None:
        return [pa.nulls(len(batch), pa.int64())] * 3
    known = np.flatnonzero(at >= 0)
    start, tid = batch.start_ns[known], batch.tid[known]
    end = start + batch.dur_ns[known]
    columns = []
    for state in (BLOCKED, RUN_QUEUE, ON_CPU):
        time = np.zeros(len(batch), np.int64)
        time[known] = parts.inside(state, tid, start, end)
        columns.append(pa.array(time, mask=at < 0))
    return columns


def _at(column: NDArray[Any], rows: NDArray[np.int64], missing: int) -> NDArray[Any]:
    """Return what a column has in some rows, `missing` for row -1."""
    found = np.full(len(rows), missing, column.dtype)
    known = rows >= 0
    found[known] = column[rows[known]]
    return found


def query_text(joined: Joined, code: int) -> str | None:
    """Return the text of a query, None where a process was in none, or it is not known."""
    return joined.queries.table[code].text if code >= IDLE_IN_TRANSACTION else None


def read_profile(capture: Capture) -> Traces | None:
    """Return a capture's samples on a CPU and those of who left one; None where it has neither."""
    try:
        data, events = profile_events(capture)
    except Misuse:
        return None
    return read_traces(data, events, captured_symbols(capture.path))


class Samples(NamedTuple):
    """Samples of the server's processes in the window, in the order of time.

    Columns as those of Recording.samples. `value` is wait_event_info, UNSEEN where not known,
    `query` a code of queries.Queries, `stack` an index of the stacks of `frames`, -1 where none
    was seen.
    """

    time_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    on_cpu: NDArray[np.bool_]
    dur_ns: NDArray[np.int64]
    run_queue_ns: NDArray[np.int64]
    value: NDArray[np.uint32]
    query: NDArray[np.int32]
    stack: NDArray[np.int64]
    frames: Frames

    def folded(self, stack: int) -> str | None:
        """Return a stack as text, root first, a semicolon between two functions."""
        names = (name.replace(";", ":") for name in self.path(stack))
        return ";".join(names) if stack >= 0 else None

    def path(self, stack: int) -> list[str]:
        """Return the functions of a stack, root first."""
        if stack < 0:
            return [UNKNOWN]
        starts = self.frames.starts
        entries = self.frames.entries[starts[stack] : starts[stack + 1]]
        return [self.frames.names[i] for i in reversed(entries.tolist())] or [UNKNOWN]


def samples(joined: Joined, traces: Traces | None) -> Samples:
    """Return the samples of a capture with what its processes were in when they were taken."""
    segments, sleeps = joined.segments, joined.sleeps
    names = [event.name for event in traces.events] if traces else []
    frames = traces.frames if traces else Frames([], np.empty(0, "i8"), np.zeros(1, "i8"))
    places = segments.places
    columns: list[list[NDArray[Any]]] = [[np.empty(0, k)] for k in ("i8", "i4", "i4", "?", "i8")]
    columns += [[np.empty(0, "i8")], [np.empty(0, "i8")]]

    def add(*new: NDArray[Any]) -> None:
        for column, more in zip(columns, new, strict=True):
            column.append(more)

    if traces:
        rows, at = sampled_in(segments, traces)
        rows = rows[at >= 0]
        zero = np.zeros(len(rows), np.int64)
        weight = traces.weight[rows].astype(np.int64)
        who = (traces.pid[rows], traces.tid[rows])
        add(traces.time_ns[rows], *who, zero == 0, weight, zero, traces.trace[rows])
    if traces and SWITCH in names:
        off = np.zeros(len(sleeps), np.bool_)
        lengths = (sleeps.in_ns - sleeps.out_ns, sleeps.in_ns - sleeps.wake_ns)
        add(sleeps.out_ns, sleeps.tid, sleeps.tid, off, *lengths, left(sleeps, traces))
    joint = [np.concatenate(column) for column in columns]
    order = np.argsort(joint[0], kind="stable")
    time, pid, tid, on_cpu, dur, ready, stack = (column[order] for column in joint)
    # A process's wait event is that of its first thread.
    at = places.latest(tid, time)
    value = _at(segments.value, at, UNSEEN)
    query = _at(segments.query, at, NO_QUERY)
    return Samples(time, pid, tid, on_cpu, dur, ready, value, query, stack, frames)


class _Parts:
    """How long processes were on a CPU, ready, or blocked, in any stretch of time."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._sums = {
            state: np.append(0, np.cumsum(np.where(segments.run == state, segments.dur_ns, 0)))
            for state in (BLOCKED, RUN_QUEUE, ON_CPU)
        }

    def inside(
        self,
        state: int,
        pid: NDArray[np.int32],
        start_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return the time in a state between two times, of which the first is in a life."""
        return self._until(state, pid, end_ns) - self._until(state, pid, start_ns)

    def _until(
        self, state: int, pid: NDArray[np.int32], time: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the time in a state, of this process and those before it, until a time."""
        segments, at = self._segments, self._segments.places.latest(pid, time)
        within = np.minimum(time, segments.end_ns[at]) - segments.start_ns[at]
        part: NDArray[np.int64] = np.where(segments.run[at] == state, within, 0)
        return self._sums[state][at] + part


def _taken(texts: Sequence[str | None], rows: NDArray[Any]) -> Any:
    return pa.array(texts, pa.string()).take(pa.array(rows))


def _category(codes: NDArray[Any], text: Callable[[Any], str | None]) -> pd.Categorical[str]:
    """Return texts of codes; None is missing."""
    distinct, row = np.unique(codes, return_inverse=True)
    texts = [text(code) for code in distinct.tolist()]
    names = sorted({one for one in texts if one is not None})
    number = {name: i for i, name in enumerate(names)}
    place = np.array([-1 if one is None else number[one] for one in texts], np.int32)
    return pd.Categorical.from_codes(place[row], pd.Index(names, dtype=str))


def _labels(
    values: NDArray[np.uint32], label: Callable[[int], tuple[str, str]]
) -> tuple[pd.Categorical[str], pd.Categorical[str]]:
    """Return class and name of wait events, missing where there is none or it was not seen."""

    def part(i: int) -> pd.Categorical[str]:
        return _category(values, lambda v: label(v)[i] if v not in (0, UNSEEN) else None)

    return part(0), part(1)
