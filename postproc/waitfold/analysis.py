"""From a capture to what the views show: sums by process and wait event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from waitfold.backends import CLIENT, KINDS, UNKNOWN, Backend
from waitfold.capture import Capture
from waitfold.events import (
    CUT,
    EXIT,
    STORE,
    Codes,
    SetRule,
    Transitions,
    TransitionStream,
    transitions,
)
from waitfold.pair import Intervals, pair
from waitfold.probeset import ProbeSet
from waitfold.summary import Summary, ValueStats
from waitfold.waitevents import CLIENT_READ, WaitEvents, is_idle

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]

_UNDECIDED_MAX = 4 << 20
"""Intervals, and with them memory, for processes of which it is not yet known what they are."""


@dataclass(frozen=True, slots=True)
class ProcessWait:
    """A process and a wait event that it was in.

    `who` is user/database, empty if not known; `count` and `total_ns` are of the complete
    intervals, `cut_ns` is what was seen of those that were cut, `time_ns` the sum of both.
    """

    pid: int
    type: str
    who: str
    kind: str
    value: int
    class_: str
    name: str
    idle: bool
    count: int
    total_ns: int
    cut_ns: int
    time_ns: int


@dataclass
class Process:
    """A process that waited.

    `count` and `total_ns` are of complete intervals; of all that were not idle are `busy_count`,
    `busy_ns` and `top`, the wait event with the most time.
    """

    pid: int
    type: str
    who: str
    count: int = 0
    total_ns: int = 0
    busy_count: int = 0
    busy_ns: int = 0
    top: str = "-"


@dataclass(frozen=True)
class Wait:
    """One wait event in a group of processes, or one name of another probe set.

    `stats` is of the complete intervals, None where there are none; `time_ns` is their total
    and what was seen of those that the window or a loss cut.
    """

    value: int
    class_: str
    name: str
    stats: ValueStats | None
    time_ns: int


@dataclass(frozen=True)
class Analysis:
    """A capture summed up.

    `parts` sums up each interval once: `idle`, what is_idle() says, of all processes; the rest
    by kind of process, `foreground` of client backends and parallel workers, `background` of all
    others whose type is known, `unknown` of those that no title tells about. A process without a
    title is a client backend if it ever was in Client:ClientRead.

    `rows` has one for each process and wait event that it was in.
    """

    capture: Capture
    stream: TransitionStream
    lives: Lives
    parts: dict[str, Summary]
    backends: dict[int, Backend]
    rows: list[ProcessWait]

    @property
    def start_ns(self) -> int:
        """When the window begins."""
        start = self.capture.start_ns
        return (self.stream.first_ns or 0) if start is None else start

    @property
    def end_ns(self) -> int:
        """When the window ends."""
        end = self.capture.end_ns
        return max((self.stream.last_ns or 0) if end is None else end, self.start_ns)

    @property
    def window_ns(self) -> int:
        """Length of the window."""
        return self.end_ns - self.start_ns

    @property
    def warnings(self) -> list[str]:
        """What the user should know before trusting the numbers."""
        return [*self.capture.warnings, *self.stream.warnings]

    @property
    def intervals(self) -> int:
        """Number of complete intervals."""
        return sum(part.intervals for part in self.parts.values())

    @property
    def censored(self) -> dict[str, int]:
        """Number of intervals cut by `start` and `end` of the window, and by `lost` samples."""
        parts = self.parts.values()
        return {why: sum(p.censored[why] for p in parts) for why in ("start", "end", "lost")}

    def everything(self) -> Summary:
        """Return the parts as one."""
        everything = Summary()
        for part in self.parts.values():
            everything.merge(part)
        return everything

    def waits(self, summary: Summary) -> list[Wait]:
        """Return a summary's wait events, the greatest time first."""
        return _waits(summary, self.capture.events.label)

    def times(self) -> pd.DataFrame:
        """Return `rows` as a table; the column of `class_` is `class`, those of times are in ns."""
        # Not needed for a report, and takes longer to import than a small capture to read.
        import pandas as pd

        columns = [column.name for column in fields(ProcessWait)]
        times = pd.DataFrame(self.rows, columns=columns).rename(columns={"class_": "class"})
        return times.astype({"idle": bool})  # also where there is no row to tell

    def processes(self) -> list[Process]:
        """Return the processes that waited, the longest waiting first."""
        found: dict[int, Process] = {}
        most: dict[int, int] = {}
        for row in self.rows:
            process = found.setdefault(row.pid, Process(row.pid, row.type, row.who))
            process.count += row.count
            process.total_ns += row.total_ns
            if row.idle:
                continue
            process.busy_count += row.count
            process.busy_ns += row.time_ns
            if row.time_ns > most.get(row.pid, -1):
                most[row.pid] = row.time_ns
                process.top = f"{row.class_}:{row.name}"
        return sorted(found.values(), key=lambda p: (-p.busy_ns, -p.total_ns, p.pid))

    def db_time_ns(self) -> int:
        """Return the time that client backends and parallel workers lived and were not idle.

        A process lives from its fork, or the window's start, to its exit, or the window's end.
        Where a bare perf.data does not tell what a process did before its first wait, it counts
        from there.
        """
        idle: dict[int, int] = {}
        for row in self.rows:
            if row.kind == "foreground":
                idle[row.pid] = idle.get(row.pid, 0) + row.time_ns * row.idle
        # One that neither waited nor stored in the whole window worked throughout, if it was
        # read that it was not waiting when the window began.
        waits = self.capture.seen.waits
        foreground = [pid for pid, b in self.backends.items() if b.kind == "foreground"]
        lived = [pid for pid in foreground if pid in idle or waits.get(pid) == 0]
        start, end = self.start_ns, self.end_ns
        total = 0
        for pid in lived:
            since = start if pid in waits else self.lives.first_ns.get(pid, start)
            total += self.lives.length_ns(pid, since, start, end) - idle.get(pid, 0)
        return total


def _waits(summary: Summary, label: Callable[[int], tuple[str, str]]) -> list[Wait]:
    stats = {s.value: s for s in summary.values()}
    time: dict[int, int] = {}
    for (_, value), seen in summary.pid_values().items():
        time[value] = time.get(value, 0) + seen.total_ns + seen.censored_ns
    waits = [Wait(value, *label(value), stats.get(value), ns) for value, ns in time.items()]
    return sorted(waits, key=lambda wait: (-wait.time_ns, wait.value))


class SetNames:
    """What the codes of a probe set's intervals are called."""

    def __init__(self, probe_set: ProbeSet, rule: SetRule, events: WaitEvents) -> None:
        self._set = probe_set
        self._rule = rule
        self._events = events

    def texts(self, code: int) -> tuple[str, ...]:
        """Return the texts of the fields of the set's label, or one where there is but that."""
        if code == 0:
            return ("began unseen",)
        known = self._rule.known(code)
        if known is None:
            return ("(others)",)
        return self._set.texts(known, lambda value: self._events.label(value)[1])

    def fields(self, code: int) -> dict[str, str]:
        """Return the fields of the set's label and their texts, as far as there are any."""
        if code <= Codes.OTHERS or self._rule.known(code) is None:
            return {}
        return dict(zip(self._set.label, self.texts(code), strict=True))

    def label(self, code: int) -> tuple[str, str]:
        """Return the set's name, for the class of a wait event, and the name."""
        return self._set.name, " ".join(self.texts(code))


@dataclass(frozen=True)
class SetAnalysis:
    """The intervals of a probe set other than wait events summed up.

    In `summary` the places in `types`, the types of backends, stand for processes, so that its
    size does not grow with their number.
    """

    probe_set: ProbeSet
    names: SetNames
    stream: TransitionStream
    summary: Summary
    types: list[str]

    def waits(self) -> list[Wait]:
        """Return what the intervals were of, the greatest time first."""
        return _waits(self.summary, self.names.label)

    def times(self) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Yield type of backend, texts of the label, and time in ns."""
        for (type_, code), seen in self.summary.pid_values().items():
            yield self.types[type_], self.names.texts(code), seen.total_ns + seen.censored_ns


class Lives:
    """When processes were born and died, as often as their pids were given out.

    `first_ns` is when a process was first in a wait.
    """

    def __init__(self) -> None:
        self.first_ns: dict[int, int] = {}
        self._marks: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def watch(self, batches: Iterator[Transitions]) -> Iterator[Transitions]:
        """Hand the batches on, and take down the births and deaths in them."""
        for batch in batches:
            marked = batch.take(np.flatnonzero((batch.mark != STORE) & (batch.mark != CUT)))
            columns = (marked.pid, marked.tid, marked.time_ns, marked.mark)
            for pid, tid, time_ns, mark in zip(*(c.tolist() for c in columns), strict=True):
                if pid == tid:
                    self._marks[pid].append((time_ns, mark))
            yield batch

    def length_ns(self, pid: int, since_ns: int, start_ns: int, end_ns: int) -> int:
        """Return how long a process lived in the window.

        `since_ns` is from when on one lived that was not seen to be born.
        """
        marks = self._marks.get(pid, [])
        born = since_ns if not marks or marks[0][1] == EXIT else None
        length = 0
        for time_ns, mark in [*marks, (end_ns, EXIT)]:
            if mark == EXIT and born is not None:
                length += max(0, min(time_ns, end_ns) - max(born, start_ns))
            born = None if mark == EXIT else time_ns
        return length


def intervals(
    capture: Capture, progress: Progress | None = None, lives: Lives | None = None
) -> tuple[TransitionStream, Iterator[Intervals]]:
    """Return the transitions of a capture and, lazily, the intervals that they make."""
    stream = transitions(capture.files, capture.rule, progress)
    if lives is not None:
        stream.batches = lives.watch(stream.batches)
    merged = capture.events.merged
    paired = pair(stream, capture.start_ns, capture.end_ns, capture.seen.waits)
    return stream, (replace(batch, value=merged(batch.value)) for batch in paired)


def set_intervals(
    capture: Capture, name: str, progress: Progress | None = None
) -> tuple[TransitionStream, Iterator[Intervals], SetNames]:
    """Return the same of one of the capture's other probe sets, and what its values are called."""
    rule = capture.set_rule(name)
    stream = transitions(capture.files, rule, progress)
    paired = pair(stream, capture.start_ns, capture.end_ns, None, rule)
    return stream, paired, SetNames(capture.sets[name], rule, capture.events)


def analyse_set(
    capture: Capture,
    name: str,
    progress: Progress | None = None,
    backends: Mapping[int, Backend] | None = None,
) -> SetAnalysis:
    """Read a capture through and sum up one of its other probe sets.

    `backends` says who the processes were; without it, what was seen of them does.
    """
    backends = capture.seen.backends if backends is None else backends
    stream, batches, names = set_intervals(capture, name, progress)
    summary = Summary()
    places: dict[str, int] = {}
    for batch in batches:
        pids, rows = np.unique(batch.pid, return_inverse=True)
        types = [backends[pid].type if pid in backends else UNKNOWN for pid in pids.tolist()]
        place = np.array([places.setdefault(t, len(places)) for t in types], np.int32)
        summary.add(replace(batch, pid=place[rows]))
    return SetAnalysis(capture.sets[name], names, stream, summary, list(places))


def analyse(capture: Capture, progress: Progress | None = None) -> Analysis:
    """Read a capture through and sum it up."""
    lives = Lives()
    stream, batches = intervals(capture, progress, lives)
    parts = {name: Summary() for name in (*KINDS, "idle")}
    known = {p: b for p, b in capture.seen.backends.items() if b.type != UNKNOWN}
    undecided: dict[int, Summary] = {}
    for batch in batches:
        if not len(batch):
            continue
        idle = is_idle(batch.value)
        # Rows of one process stand together.
        heads = np.flatnonzero(np.append(True, batch.pid[1:] != batch.pid[:-1]))
        lengths = np.diff(np.append(heads, len(batch)))
        kinds = np.full(len(heads), -1, np.int8)
        for i, (head, length) in enumerate(zip(heads.tolist(), lengths.tolist(), strict=True)):
            pid = int(batch.pid[head])
            lives.first_ns.setdefault(pid, int(batch.start_ns[head]))
            rows = slice(head, head + length)
            if pid not in known and (batch.value[rows] == CLIENT_READ).any():
                known[pid] = Backend(CLIENT)
                if pid in undecided:
                    parts["foreground"].merge(undecided.pop(pid))
            if pid in known:
                kinds[i] = KINDS.index(known[pid].kind)
            else:
                busy = head + np.flatnonzero(~idle[rows])
                undecided.setdefault(pid, Summary()).add(batch.take(busy))
        part_of_row = np.where(idle, len(KINDS), np.repeat(kinds, lengths))
        for i, part in enumerate(parts.values()):
            part.add(batch.take(np.flatnonzero(part_of_row == i)))
        if sum(summary.intervals for summary in undecided.values()) > _UNDECIDED_MAX:
            known |= _give_up(undecided, parts["unknown"])
    known |= _give_up(undecided, parts["unknown"])
    return Analysis(capture, stream, lives, parts, known, _rows(parts, known, capture.events))


def _give_up(undecided: dict[int, Summary], unknown: Summary) -> dict[int, Backend]:
    """Move the processes of which it is not decided what they are to those of unknown type."""
    for summary in undecided.values():
        unknown.merge(summary)
    backends = dict.fromkeys(undecided, Backend(UNKNOWN))
    undecided.clear()
    return backends


def _rows(
    parts: dict[str, Summary], backends: dict[int, Backend], events: WaitEvents
) -> list[ProcessWait]:
    return [
        ProcessWait(
            pid,
            backends[pid].type,
            backends[pid].who,
            backends[pid].kind,
            value,
            *events.label(value),
            bool(is_idle(value)),
            seen.count,
            seen.total_ns,
            seen.censored_ns,
            seen.total_ns + seen.censored_ns,
        )
        for part in parts.values()
        for (pid, value), seen in part.pid_values().items()
    ]
