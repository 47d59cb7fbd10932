"""From samples to transitions: which thread stored which value when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from . import perfdata
from .errors import WaitfoldError
from .perfdata import Event, Field, Layout, PerfData, Piece

STORE, FORK, EXIT, RESET, ATTACH, CUT = 0, 1, 2, 3, 4, 5
"""Marks of a transition: a store, the thread begins (not waiting), the thread ends, a reset.

ATTACH: recording of the thread begins, and `value` is what it waits for. CUT: what it stored is
not known, or what it stores from then on until its next transition.
"""

ENDED = 1 << 31
"""Added to the value of a transition that ends an interval and says how: its lower bits tell."""

Column = NDArray[np.integer] | list[bytes | None]
"""A field of many samples: numbers, or strings, None for one that the kernel could not read."""

PID_MAX = 1 << 22
"""No process id of Linux is greater (PID_MAX_LIMIT, include/linux/threads.h)."""

_AHEAD = 4  # batches
_BATCH = 1 << 19  # transitions that are put in order and handed on together
_HELD_MAX = 1 << 23  # transitions held back where a file does not say what is complete
_DELAY = 1 << 20  # transitions by which the stream runs behind, so that gaps are known in time
_EVER = (1 << 63) - 1


@dataclass(frozen=True)
class Use:
    """What an event means: `values` makes its samples' transitions of the columns of `fields`.

    The event's name is a glob pattern (`waitfold_*:w`).
    """

    event: str
    fields: tuple[str, ...]
    values: Callable[[list[Column], int], NDArray[np.uint32]]
    """Of the columns and the number of rows."""
    mark: int = STORE


@dataclass(frozen=True)
class PairRule:
    """Which events begin and end a wait; event names are glob patterns (`waitfold_*:w`).

    `start_field` of the start event is the wait_event_info. Where one event carries both,
    `end_value` is the value that means the end; it is None where the end is an event of its own.
    """

    start_event: str
    start_field: str
    end_event: str
    end_value: int | None

    @property
    def uses(self) -> list[Use]:
        """Return what each event means."""
        start = Use(self.start_event, (self.start_field,), self._values)
        return [start] if self.end_value is not None else [start, Use(self.end_event, (), nothing)]

    def _values(self, columns: list[Column], rows: int) -> NDArray[np.uint32]:
        column = columns[0]
        if isinstance(column, list):
            raise WaitfoldError(
                f"the field {self.start_field} is a text and no number. Name the one that holds "
                "the wait event as --value."
            )
        if column.dtype != np.uint32:
            if len(column) and not 0 <= int(column.max()) <= 0xFFFF_FFFF:
                raise WaitfoldError(
                    f"the field {self.start_field} holds {int(column.max()):#x}, but a wait event "
                    "has 32 bits. Name the field that holds it as --value."
                )
            column = column.astype(np.uint32)
        if self.end_value:
            column = np.where(column == self.end_value, np.uint32(0), column)
        return column.astype(np.uint32, copy=False)


def nothing(columns: list[Column], rows: int) -> NDArray[np.uint32]:
    """Return the values of samples that only end an interval."""
    return np.zeros(rows, np.uint32)


class Codes:
    """Numbers distinct rows of columns in the order in which they come, from 2 on.

    Memory is bounded: once there are 65,535 rows, or 64 MiB of strings, each further one is 1.
    """

    OTHERS = 1
    _ROWS = (1 << 16) + 1
    _BYTES = 64 << 20

    def __init__(self) -> None:
        self.rows: list[tuple[int | bytes | None, ...]] = [(), ()]
        """By code; the first two stand for nothing and for all others."""
        self._codes: dict[tuple[int | bytes | None, ...], int] = {}
        self._bytes = 0

    def of(self, columns: Sequence[Column], rows: int) -> NDArray[np.uint32]:
        """Return the codes of rows."""
        place = np.zeros(rows, np.int64)
        for column in columns:
            if isinstance(column, list):
                number: dict[bytes | None, int] = {}
                column = np.array([number.setdefault(s, len(number)) for s in column], np.int64)
            _, inverse = np.unique(column, return_inverse=True)
            # Below 2**62: there are fewer rows than 2**31 in a batch.
            _, place = np.unique(
                place * (inverse.max(initial=0) + 1) + inverse, return_inverse=True
            )
        _, first, place = np.unique(place, return_index=True, return_inverse=True)
        # In the order in which they come, so that the first are not called "others".
        codes = np.zeros(len(first), np.uint32)
        for i in np.argsort(first).tolist():
            at = int(first[i])
            codes[i] = self._code(
                tuple(c[at] if isinstance(c, list) else int(c[at]) for c in columns)
            )
        return codes[place]

    def _code(self, row: tuple[int | bytes | None, ...]) -> int:
        code = self._codes.get(row)
        if code is None:
            if len(self.rows) >= self._ROWS or self._bytes > self._BYTES:
                return self.OTHERS
            code = self._codes[row] = len(self.rows)
            self.rows.append(row)
            self._bytes += sum(len(v) for v in row if isinstance(v, bytes))
        return code


@dataclass(frozen=True)
class SetRule:
    """Which events begin and end the intervals of a probe set, and what these are called by.

    A transition's value is a code: of `start_fields`, or ENDED and a code of `end_fields`, 0 where
    there are none. `end_value`, a field of `start` and a number, is what means the end where the
    same event does both. Event names are glob patterns.
    """

    start: str
    start_fields: tuple[str, ...]
    ends: tuple[str, ...]
    end_fields: tuple[str, ...] = ()
    end_value: tuple[str, int] | None = None
    reset: tuple[str, ...] = ()
    nested: bool = False
    continued: bool = False
    started: Codes = field(default_factory=Codes, compare=False)
    ended: Codes = field(default_factory=Codes, compare=False)
    both: Codes = field(default_factory=Codes, compare=False)

    @property
    def uses(self) -> list[Use]:
        """Return what each event means."""
        ending = () if self.end_value is None else (self.end_value[0],)
        return [
            Use(self.start, (*self.start_fields, *ending), self._starts),
            *(Use(event, self.end_fields, self._ends) for event in self.ends),
            *(Use(event, (), nothing, RESET) for event in self.reset),
        ]

    def _starts(self, columns: list[Column], rows: int) -> NDArray[np.uint32]:
        codes = self.started.of(columns[: len(self.start_fields)], rows)
        if self.end_value is not None:
            codes[columns[-1] == self.end_value[1]] = 0
        return codes

    def _ends(self, columns: list[Column], rows: int) -> NDArray[np.uint32]:
        if not columns:
            return nothing(columns, rows)
        return self.ended.of(columns, rows) | np.uint32(ENDED)

    def joined(self, values: NDArray[np.uint32], ends: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the codes, in `both`, of intervals by what started and what ended them."""
        how = np.where(ends & np.uint32(ENDED), ends & np.uint32(ENDED - 1), 0)
        codes = self.both.of([values, how], len(values))
        codes[values == 0] = 0
        return codes

    def known(self, code: int) -> dict[str, int | bytes | None] | None:
        """Return the fields, where known, of an interval's code; None for one of the others."""
        row = self.both.rows[code]
        start, end = (int(part or 0) for part in row) if row else (Codes.OTHERS, 0)
        if Codes.OTHERS in (start, end):
            return None
        known = dict(zip(self.start_fields, self.started.rows[start], strict=False))
        return known | dict(zip(self.end_fields, self.ended.rows[end], strict=False))


Rule = PairRule | SetRule


@dataclass(frozen=True)
class Transitions:
    """A batch of transitions in the order of time; a row each. `value` 0 is "not waiting"."""

    time_ns: NDArray[np.int64]
    thread: NDArray[np.uint64]  # pid in the lower, tid in the upper half
    value: NDArray[np.uint32]
    mark: NDArray[np.uint8]

    @property
    def pid(self) -> NDArray[np.int32]:
        """Process of each row."""
        return self.thread.view(np.int32)[0::2]

    @property
    def tid(self) -> NDArray[np.int32]:
        """Thread of each row."""
        return self.thread.view(np.int32)[1::2]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.time_ns)

    def take(self, which: slice | NDArray[np.int64]) -> Transitions:
        """Return some of the rows."""
        return Transitions(*(getattr(self, column.name)[which] for column in fields(self)))


@dataclass
class TransitionStream:
    """Iterate once over the batches; all else is complete when that has ended.

    A thread's transitions are in the order of time, within and over all batches. `gaps` are
    (start_ns, end_ns) in which records were lost, by any thread; a gap that ends before a batch
    is known before that batch. `lost` counts records that the kernel had no room for.
    """

    batches: Iterator[Transitions] = field(default_factory=lambda: iter(()))
    samples: int = 0
    twice: int = 0
    """samples that were only a repetition of the one before; counted by pair()"""
    lost: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    cuts: int = 0
    """gaps that concern one thread alone; there it has a transition marked CUT"""
    first_ns: int | None = None
    last_ns: int | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def transitions(self) -> int:
        """Number of stores that were seen."""
        return self.samples - self.twice

    def __iter__(self) -> Iterator[Transitions]:
        """Return the batches."""
        return self.batches


class Source(Protocol):
    """What gives transitions piece by piece: a perf.data, or one CPU of a trace.dat."""

    data_size: int
    """bytes in all"""
    done: int
    """bytes read"""
    complete: int
    """No transition that is still to be read is this old or older."""

    def read(self) -> Transitions | None:
        """Return the transitions of the next piece, maybe none; None at the end."""

    def close(self) -> None:
        """Add up what was lost, once all is read."""


class SourceFile(Protocol):
    """A file that has several sources; `cut` is a warning where it was not written to its end."""

    cut: str | None

    def sources(self, rule: Rule, stream: TransitionStream) -> Sequence[Source]:
        """Return them; raise WaitfoldError where the file does not have what the rule names."""


def transitions(
    files: Sequence[PerfData | SourceFile],
    rule: Rule,
    progress: Callable[[int, int], None] | None = None,
) -> TransitionStream:
    """Return the transitions of `files`.

    `progress` is called, by whoever iterates, with (bytes read, bytes in all).

    perf writes the buffers of the CPUs one after the other, and FINISHED_ROUND when it has
    been through all: what is older than the newest of the round before is complete then
    (tools/perf/util/ordered-events.c). A file without these marks is held back whole as far as 8
    million transitions, and is put in order over that distance.

    Raises WaitfoldError where the files do not have what the rule names, PerfDataError, also
    later, where one is damaged.
    """
    stream = TransitionStream()
    sources: list[Source] = []
    for data in files:
        if isinstance(data, PerfData):
            sources.append(PerfSource(data, rule, stream))
        else:
            sources += data.sources(rule, stream)
    stream.warnings += [data.cut for data in files if data.cut]
    stream.batches = _ahead(_delayed(stream, _ordered(stream, sources, progress)))
    return stream


def _ahead(batches: Iterator[Transitions]) -> Iterator[Transitions]:
    """Make the next batches ready in another thread: NumPy lets both run at once."""
    with ThreadPoolExecutor(1) as thread:
        try:
            coming = deque(thread.submit(next, batches, None) for _ in range(_AHEAD))
            while (batch := coming.popleft().result()) is not None:
                coming.append(thread.submit(next, batches, None))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


def _ordered(
    stream: TransitionStream,
    sources: Sequence[Source],
    progress: Callable[[int, int], None] | None,
) -> Iterator[Transitions]:
    """Read all sources side by side and yield what is complete, in the order of time."""
    held: list[Transitions] = []
    rows = 0
    floor = -1  # all up to this time has been yielded
    late = 0
    size = sum(source.data_size for source in sources)
    going = list(sources)
    while going:
        source = min(going, key=lambda s: s.complete)
        batch = source.read()
        if batch is None:
            going.remove(source)
        else:
            held.append(batch)
            rows += len(batch)
            if progress:
                progress(sum(s.done for s in sources), size)
        complete = min((s.complete for s in going), default=_EVER)
        full = rows >= _HELD_MAX
        if not rows or (going and not full and (rows < _BATCH or complete <= floor)):
            continue
        batch = in_order(joined(held))
        early = int(np.searchsorted(batch.time_ns, floor, "left"))
        if early:
            # Stored before something that has been handed on; the order cannot be mended.
            late += int((batch.mark[:early] == STORE).sum())
            stream.gaps.append((int(batch.time_ns[0]), floor))
        ready = int(np.searchsorted(batch.time_ns, complete, "right"))
        if full and ready < rows // 2:
            ready = rows // 2
        if ready > early:
            floor = int(batch.time_ns[ready - 1])
            yield batch.take(slice(early, ready))
        held = [batch.take(slice(max(early, ready), None))]
        rows = len(held[0])
    for source in sources:
        source.close()
    if late:
        stream.warnings.append(
            f"{late} of {stream.samples} samples came too late to be put in order and are left "
            "out; waits around them count as cut by a loss."
        )


def joined(parts: Sequence[Transitions]) -> Transitions:
    """Return the rows of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    return Transitions(
        *(np.concatenate([getattr(p, c.name) for p in parts]) for c in fields(Transitions))
    )


def in_order(batch: Transitions) -> Transitions:
    """Return the rows in the order of time."""
    time = batch.time_ns
    if (time[1:] >= time[:-1]).all():
        return batch
    return batch.take(np.argsort(time, kind="stable"))


def _delayed(stream: TransitionStream, batches: Iterator[Transitions]) -> Iterator[Transitions]:
    """Hand on the batches so late that a LOST record is read before what it puts in doubt.

    The kernel writes LOST when the buffer is next written to, which can be a while after.
    """
    line: deque[Transitions] = deque()
    rows = gaps = unforeseen = 0
    given = -1

    def look() -> None:
        nonlocal gaps, unforeseen
        unforeseen += sum(start < given for start, _ in stream.gaps[gaps:])
        gaps = len(stream.gaps)

    for batch in batches:
        line.append(batch)
        rows += len(batch)
        look()
        while rows - len(line[0]) >= _DELAY:
            rows -= len(line[0])
            given = int(line[0].time_ns[-1])
            yield line.popleft()
    look()
    yield from line
    if unforeseen:
        stream.warnings.append(
            f"{unforeseen} losses became known only when later waits had been counted; waits "
            "that they cut may be shown as whole."
        )


@dataclass(frozen=True)
class _Wanted:
    """An event of the rule in one file."""

    event: Event
    layout: Layout
    use: Use
    fields: list[Field]


class PerfSource:
    """One file's transitions, as they stand in the file."""

    def __init__(self, data: PerfData, rule: Rule, stream: TransitionStream) -> None:
        self.data = data
        self.data_size = data.data_size
        self.complete = -1
        self.done = 0
        self._stream = stream
        self._wanted = _wanted(data, rule)
        self._pieces = data.pieces()
        self._newest = -1  # time of the newest sample so far
        self._rounds = deque([-1] * 4, maxlen=4)  # the same when each of the last rounds ended
        self._last_by_cpu = np.zeros(1 << 16, np.int64)
        self._lost = self._lost_samples = 0
        self._cut = data.cut

    def goes_on(self, before: PerfSource) -> None:
        """Take over what the source of the file before knew."""
        self.complete = before.complete
        self._newest = before._newest
        self._rounds = before._rounds
        self._last_by_cpu = before._last_by_cpu
        if self.data.is_ring:
            # What was between the two may have been overwritten.
            self._stream.gaps.append((max(before._newest, 0), self.data.known_since_ns(0)))

    def read(self) -> Transitions | None:
        """Return the transitions of the file's next piece, None at its end."""
        piece = next(self._pieces, None)
        if piece is None:
            return None
        self.done = piece.end - self.data.data_offset
        at, batch, cpu = self._samples(piece)
        self._others(piece, at, batch, cpu)
        marks = self._tasks(piece)
        return joined([batch, marks]) if len(marks) else batch

    def close(self) -> None:
        """Add up what was lost, once all is read.

        LOST counts what had no room until the buffer was next written to; LOST_SAMPLES, which
        perf reads from the kernel's counters at the end, counts the same records and also those
        that were lost after a buffer's last record (__perf_output_begin in
        kernel/events/ring_buffer.c raises both). That buffer was full when the events were
        stopped, so it was written in one of the two rounds that can follow.
        """
        self._stream.lost += max(self._lost, self._lost_samples)
        if self.data.cut and not self._cut:
            self._stream.warnings.append(self.data.cut)  # of a stream, only its end tells
        if self._lost_samples > self._lost:
            last = self._last_by_cpu[self._last_by_cpu > self._rounds[0]]
            self._stream.gaps.append((int(min(last, default=max(self._rounds[0], 0))), _EVER))

    def _samples(
        self, piece: Piece
    ) -> tuple[NDArray[np.int64], Transitions, NDArray[np.uint64] | None]:
        """Return where in the piece the samples of the rule's events begin, them, and their CPUs.

        None for the latter where they do not say it.
        """
        at = piece.samples
        if len(self.data.events) == 1:
            parts = [(self._wanted[0], at)]
        else:
            event = self.data.event_of(piece, at)
            parts = [(w, at[event == w.event.index]) for w in self._wanted]
        decoded = [self._decode(piece, at, wanted) for wanted, at in parts]
        cpus = [
            piece.words[wanted.layout.cpu_at :].take(at)
            for wanted, at in parts
            if wanted.layout.cpu_at
        ]
        if len(parts) == 1:
            return parts[0][1], decoded[0], cpus[0] if cpus else None
        at = np.concatenate([at for _, at in parts])
        order = np.argsort(at, kind="stable")
        cpu = np.concatenate(cpus)[order] if len(cpus) == len(parts) else None
        return at[order], joined(decoded).take(order), cpu

    def _decode(self, piece: Piece, at: NDArray[np.int64], wanted: _Wanted) -> Transitions:
        words, layout = piece.words, wanted.layout
        self.data.long_enough(piece, at, layout.fixed)
        time = words[layout.time_at :].take(at).view(np.int64)
        thread = words[layout.tid_at :].take(at)
        columns = [self._column(piece, at, layout, field) for field in wanted.fields]
        value = wanted.use.values(columns, len(at))
        if len(at) and (int(thread.max()) >> 32 > PID_MAX or int(time.min()) < 0):
            # -1 stands for a thread that is already gone (perf_event_tid in kernel/events/core.c)
            bad = (thread.view(np.int32)[1::2] > PID_MAX) | (time < 0)
            if bad.any():
                raise self.data.damaged(piece, at, bad, "has a thread or a time that cannot be")
        stream = self._stream
        stream.samples += len(at)
        if len(at):
            first, last = int(time.min()), int(time.max())
            stream.first_ns = first if stream.first_ns is None else min(first, stream.first_ns)
            stream.last_ns = last if stream.last_ns is None else max(last, stream.last_ns)
        return Transitions(time, thread, value, np.full(len(at), wanted.use.mark, np.uint8))

    def _column(self, piece: Piece, at: NDArray[np.int64], layout: Layout, field: Field) -> Column:
        """Return a field of the samples, mostly of the raw data: behind their size, 32 bits."""
        if not field.raw:
            self.data.long_enough(piece, at, field.offset // 8 + 1)
            return piece.words[field.offset // 8 :].take(at)
        need = field.offset + field.size
        self.data.long_enough(piece, at, layout.fixed + (4 + need + 7) // 8)
        raw, end = layout.raw_at(piece.words, at)
        halves = piece.words.view(np.uint32)
        raw *= 2
        bad = halves.take(raw) < need
        if end is not None:
            bad |= 4 * raw + 4 + need > 8 * end
        if bad.any():
            raise self.data.damaged(piece, at, bad, f"is too short for its field {field.name}")
        if field.size == 4 and field.offset % 4 == 0 and not field.string:
            return halves[1 + field.offset // 4 :].take(raw)
        bytes_ = piece.words.view(np.uint8)
        first = 4 * raw + 4
        places = (first + field.offset)[:, None] + np.arange(field.size)
        kind = "i" if field.signed else "u"
        column: NDArray[np.integer] = bytes_[places].view(f"<{kind}{field.size}")[:, 0]
        if not field.string:
            return column
        # A __data_loc (include/trace/stages): where the string is and, above, its bytes with the 0.
        size = column.astype(np.int64) >> 16
        first += column.astype(np.int64) & 0xFFFF
        ends = at + (piece.words[at] >> np.uint64(51)).astype(np.int64)
        bad = first + size > np.minimum(4 * raw + 4 + halves.take(raw), 8 * ends)
        if bad.any():
            raise self.data.damaged(piece, at, bad, f"is too short for its field {field.name}")
        content = bytes_.data
        return [
            bytes(content[start : start + length - 1]) if length else None
            for start, length in zip(first.tolist(), size.tolist(), strict=True)
        ]

    def _others(
        self,
        piece: Piece,
        at: NDArray[np.int64],
        batch: Transitions,
        cpu: NDArray[np.uint64] | None,
    ) -> None:
        """Take down losses and ends of rounds, and what stands before them."""
        noted = 0

        def note_cpus(row: int) -> None:
            """Take down when each CPU wrote last before a record."""
            nonlocal noted
            if cpu is not None and row > noted:
                on = cpu[noted:row]  # changes rarely: perf writes the buffers one after the other
                last = np.append(np.flatnonzero(on[1:] != on[:-1]), len(on) - 1)
                self._last_by_cpu[on[last].astype(np.uint16)] = batch.time_ns[noted:row][last]
                noted = row

        seen = 0

        def see(row: int) -> None:
            """Take down the newest time before a record."""
            nonlocal seen
            if row > seen:
                self._newest = max(self._newest, int(batch.time_ns[seen:row].max()))
                seen = row

        before = np.searchsorted(at, piece.others).tolist()
        for place, row in zip(piece.others, before, strict=True):
            head = int(piece.words[place])
            kind, size = head & 0xFFFF_FFFF, head >> 51
            if kind == perfdata.FINISHED_ROUND:
                see(row)
                self._rounds.append(self._newest)
                self.complete = self._rounds[-2]
            elif kind == perfdata.LOST and size >= 3:
                note_cpus(row)
                self._lost += int(piece.words[place + 2])
                time, on = self.data.trailer(piece, place)
                time = _EVER if time is None else min(time, _EVER)
                if cpu is None or on is None:
                    since = max(self.complete, 0)
                else:
                    since = int(self._last_by_cpu[on & 0xFFFF])
                self._stream.gaps.append((since, time))
            elif kind == perfdata.LOST_SAMPLES and size >= 2:
                self._lost_samples += int(piece.words[place + 1])
        note_cpus(len(batch))
        see(len(batch))

    def _tasks(self, piece: Piece) -> Transitions:
        """Return FORK and EXIT records as transitions."""
        tasks = self.data.tasks(piece)
        # perf makes up a FORK at time 0 for each process that exists already.
        real = np.flatnonzero((tasks.time_ns > 0) & (tasks.pid <= PID_MAX) & (tasks.tid <= PID_MAX))
        every = Transitions(
            tasks.time_ns,
            (tasks.tid << 32 | tasks.pid).view(np.uint64),
            np.zeros(len(tasks.at), np.uint32),
            np.where(tasks.is_exit, np.uint8(EXIT), np.uint8(FORK)),
        )
        return every.take(real)


def _wanted(data: PerfData, rule: Rule) -> list[_Wanted]:
    """Return the events of a file that the rule names."""
    wanted = []
    for use in rule.uses:
        found = [event for event in data.events if fnmatchcase(event.name, use.event)]
        if not found:
            names = ", ".join(event.name for event in data.events)
            hint = " perf had not yet written their names." if data.cut else ""
            raise WaitfoldError(
                f"{data.path} has no event {use.event}. It has: {names}.{hint} Name the one that "
                "wait events begin with as --start and that which ends them as --end."
            )
        for event in found:
            layout = data.layouts[event.index]
            if not layout.tid_at or not layout.time_at:
                raise WaitfoldError(
                    f"{data.path}: samples of {event.name} lack the thread or the time. Record "
                    "them with 'perf record -k CLOCK_MONOTONIC -e ...' without --no-timestamp."
                )
            wanted.append(_Wanted(event, layout, use, _fields(data, event, use)))
    return wanted


def _fields(data: PerfData, event: Event, use: Use) -> list[Field]:
    found = []
    for name in use.fields:
        field = event.fields.get(name)
        if field is None or (field.raw and not data.layouts[event.index].has_raw):
            names = ", ".join(n for n in event.fields if not n.startswith("common_"))
            raise WaitfoldError(
                f"{data.path}: {event.name} has no field {name}. It has: {names or 'none'}. "
                "Name the one that holds the wait event as --value."
            )
        if field.size not in (1, 2, 4, 8):
            raise WaitfoldError(
                f"{data.path}: the field {name} of {event.name} has {field.size} bytes and is no "
                "number. Name the one that holds the wait event as --value."
            )
        found.append(field)
    return found
