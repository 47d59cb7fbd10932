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
from .errors import PerfDataError, WaitfoldError
from .perfdata import Event, Field, Layout, PerfData, Piece

STORE, FORK, EXIT = 0, 1, 2
"""Marks of a transition: a store, the thread begins (not waiting), the thread ends."""

PID_MAX = 1 << 22
"""No process id of Linux is greater (PID_MAX_LIMIT, include/linux/threads.h)."""

_AHEAD = 4  # batches
_BATCH = 1 << 19  # transitions that are put in order and handed on together
_HELD_MAX = 1 << 23  # transitions held back where a file does not say what is complete
_DELAY = 1 << 20  # transitions by which the stream runs behind, so that gaps are known in time
_EVER = (1 << 63) - 1


@dataclass(frozen=True)
class PairRule:
    """Which events begin and end an interval; event names are glob patterns (`waitfold_*:w`).

    `start_field` of the start event says of what. Where one event carries both, `end_value` is
    the value that means the end; it is None where the end is an event of its own.
    """

    start_event: str
    start_field: str
    end_event: str
    end_value: int | None


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


def transitions(
    files: Sequence[PerfData],
    rule: PairRule,
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
    sources = [_Source(data, rule, stream) for data in files]
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
        batch = _sorted(_joined(held))
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


def _joined(parts: Sequence[Transitions]) -> Transitions:
    if len(parts) == 1:
        return parts[0]
    return Transitions(
        *(np.concatenate([getattr(p, c.name) for p in parts]) for c in fields(Transitions))
    )


def _sorted(batch: Transitions) -> Transitions:
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
    """An event of the rule in one file; `field` is None for one that only ends."""

    event: Event
    layout: Layout
    field: Field | None


class _Source:
    """One file's transitions, as they stand in the file."""

    def __init__(self, data: PerfData, rule: PairRule, stream: TransitionStream) -> None:
        self.data = data
        self.data_size = data.data_size
        self.complete = -1
        self.done = 0
        self._stream = stream
        self._wanted = _wanted(data, rule)
        self._end_value = rule.end_value
        self._pieces = data.pieces()
        self._newest = -1  # time of the newest sample so far
        self._rounds = deque([-1] * 4, maxlen=4)  # the same when each of the last rounds ended
        self._last_by_cpu = np.zeros(1 << 16, np.int64)
        self._lost = self._lost_samples = 0
        ids = [(id_, event.index) for event in data.events for id_ in event.ids]
        ids.sort()
        self._ids = np.array([id_ for id_, _ in ids], np.uint64)
        self._event_of_id = np.array([index for _, index in ids], np.int64)

    def read(self) -> Transitions | None:
        """Return the transitions of the file's next piece, None at its end."""
        piece = next(self._pieces, None)
        if piece is None:
            return None
        self.done = piece.end - self.data.data_offset
        at, batch, cpu = self._samples(piece)
        self._others(piece, at, batch, cpu)
        marks = self._tasks(piece)
        return _joined([batch, marks]) if len(marks) else batch

    def close(self) -> None:
        """Add up what was lost, once all is read.

        LOST counts what had no room until the buffer was next written to; LOST_SAMPLES, which
        perf reads from the kernel's counters at the end, counts the same records and also those
        that were lost after a buffer's last record (__perf_output_begin in
        kernel/events/ring_buffer.c raises both). That buffer was full when the events were
        stopped, so it was written in one of the two rounds that can follow.
        """
        self._stream.lost += max(self._lost, self._lost_samples)
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
            event = self._event_of(piece, at)
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
        return at[order], _joined(decoded).take(order), cpu

    def _event_of(self, piece: Piece, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each sample's event."""
        id_at = self.data.layouts[0].id_at  # the same for all events, as PerfData sees to
        self._long_enough(piece, at, id_at + 1)
        ids = piece.words[at + id_at]
        place = np.searchsorted(self._ids, ids)
        place[place == len(self._ids)] = 0
        unknown = self._ids[place] != ids if len(self._ids) else np.ones(len(ids), np.bool_)
        if unknown.any():
            raise self._damaged(piece, at, unknown, "belongs to no event of the file's")
        return self._event_of_id[place]

    def _decode(self, piece: Piece, at: NDArray[np.int64], wanted: _Wanted) -> Transitions:
        words, layout = piece.words, wanted.layout
        self._long_enough(piece, at, layout.fixed)
        time = words[layout.time_at :].take(at).view(np.int64)
        thread = words[layout.tid_at :].take(at)
        if wanted.field is None:
            value = np.zeros(len(at), np.uint32)
        else:
            value = self._values(piece, at, layout, wanted.field)
            if self._end_value:
                value[value == self._end_value] = 0
        if len(at) and (int(thread.max()) >> 32 > PID_MAX or int(time.min()) < 0):
            # -1 stands for a thread that is already gone (perf_event_tid in kernel/events/core.c)
            bad = (thread.view(np.int32)[1::2] > PID_MAX) | (time < 0)
            if bad.any():
                raise self._damaged(piece, at, bad, "has a thread or a time that cannot be")
        stream = self._stream
        stream.samples += len(at)
        if len(at):
            first, last = int(time.min()), int(time.max())
            stream.first_ns = first if stream.first_ns is None else min(first, stream.first_ns)
            stream.last_ns = last if stream.last_ns is None else max(last, stream.last_ns)
        return Transitions(time, thread, value, np.zeros(len(at), np.uint8))

    def _values(
        self, piece: Piece, at: NDArray[np.int64], layout: Layout, field: Field
    ) -> NDArray[np.uint32]:
        """Return a field of the samples' raw data: behind their size, a 32-bit word."""
        need = field.offset + field.size
        self._long_enough(piece, at, layout.fixed + (4 + need + 7) // 8)
        raw, end = layout.raw_at(piece.words, at)
        halves = piece.words.view(np.uint32)
        raw *= 2
        bad = halves.take(raw) < need
        if end is not None:
            bad |= 4 * raw + 4 + need > 8 * end
        if bad.any():
            raise self._damaged(piece, at, bad, f"is too short for its field {field.name}")
        if field.size == 4 and field.offset % 4 == 0:
            narrow: NDArray[np.uint32] = halves[1 + field.offset // 4 :].take(raw)
            return narrow
        bytes_ = piece.words.view(np.uint8)
        first = 4 * raw + 4 + field.offset
        places = first[:, None] + np.arange(field.size)
        wide: NDArray[np.unsignedinteger] = bytes_[places].view(f"<u{field.size}")[:, 0]
        if len(wide) and int(wide.max()) > 0xFFFF_FFFF:
            raise WaitfoldError(
                f"{self.data.path}: the field {field.name} holds {int(wide.max()):#x}, but a wait "
                "event has 32 bits. Name the field that holds it."
            )
        return wide.astype(np.uint32)

    def _long_enough(self, piece: Piece, at: NDArray[np.int64], words: int) -> None:
        if piece.shortest >= words:
            return
        short = piece.words[at] >> np.uint64(51) < words
        if short.any():
            raise self._damaged(piece, at, short, "is too short for what its event records")

    def _damaged(
        self, piece: Piece, at: NDArray[np.int64], bad: NDArray[np.bool_], why: str
    ) -> PerfDataError:
        offset = piece.offset + 8 * int(at[bad.argmax()])
        return PerfDataError(
            f"{self.data.path}: the sample at byte {offset} {why}. The file is damaged."
        )

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
        """Return FORK and EXIT records as transitions: pid, parent; tid, parent's; time."""
        words = piece.words
        at = np.array(piece.tasks, np.int64)
        at = at[words[at] >> np.uint64(51) >= 4]
        time = words[at + 3].view(np.int64)
        pid = words[at + 1] & np.uint64(0xFFFF_FFFF)
        tid = words[at + 2] & np.uint64(0xFFFF_FFFF)
        # perf makes up a FORK at time 0 for each process that exists already.
        real = np.flatnonzero((time > 0) & (pid <= PID_MAX) & (tid <= PID_MAX))
        is_exit = words[at] & np.uint64(0xFFFF_FFFF) == perfdata.EXIT
        every = Transitions(
            time,
            tid << np.uint64(32) | pid,
            np.zeros(len(at), np.uint32),
            np.where(is_exit, np.uint8(EXIT), np.uint8(FORK)),
        )
        return every.take(real)


def _wanted(data: PerfData, rule: PairRule) -> list[_Wanted]:
    """Return the events of a file that the rule names."""
    starts = [e for e in data.events if fnmatchcase(e.name, rule.start_event)]
    ends = [e for e in data.events if fnmatchcase(e.name, rule.end_event)]
    for pattern, found in ((rule.start_event, starts), (rule.end_event, ends)):
        if not found:
            names = ", ".join(event.name for event in data.events)
            hint = " perf had not yet written their names." if data.cut else ""
            raise WaitfoldError(
                f"{data.path} has no event {pattern}. It has: {names}.{hint} Name the one that "
                "wait events begin with as --start and that which ends them as --end."
            )
    wanted = []
    for event in (e for e in data.events if e in starts or e in ends):
        layout = data.layouts[event.index]
        if not layout.tid_at or not layout.time_at:
            raise WaitfoldError(
                f"{data.path}: samples of {event.name} lack the thread or the time. Record them "
                "with 'perf record -k CLOCK_MONOTONIC -e ...' without --no-timestamp."
            )
        field = None
        if event in starts:
            field = event.fields.get(rule.start_field)
            if field is None or not layout.has_raw:
                names = ", ".join(n for n in event.fields if not n.startswith("common_"))
                raise WaitfoldError(
                    f"{data.path}: {event.name} has no field {rule.start_field}. It has: "
                    f"{names or 'none'}. Name the one that holds the wait event as --value."
                )
            if field.size not in (1, 2, 4, 8):
                raise WaitfoldError(
                    f"{data.path}: the field {field.name} of {event.name} has {field.size} bytes "
                    "and is no number. Name the one that holds the wait event as --value."
                )
        wanted.append(_Wanted(event, layout, field))
    return wanted
