"""A capture as a Perfetto trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import IO

import numpy as np
from numpy.typing import NDArray

from waitfold.analysis import intervals
from waitfold.api import Recording, Samples, samples
from waitfold.pair import FLAGS, Intervals
from waitfold.show.parts import STATES, Runs, process_name, query_name, runs_of

# The messages are those of its protos/perfetto/trace; the numbers of their fields stand
# beside their names below.

_MONOTONIC = 3  # BuiltinClock
_CLEARED, _NEEDED = 1, 2  # SequenceFlags: interned data begin anew; are used
_BEGIN, _END = 1, 2  # TrackEvent.Type
_EXPLICIT = 3  # ChildTracksOrdering: by sibling_order_rank
_TASK_CLOCK_HZ = 99

# Kinds of interned data: fields of InternedData
_CATEGORIES, _NAMES, _FUNCTIONS, _PATHS = 1, 2, 5, 17

# Tracks of a thread; uuid is 8 times its id, and one of these
_PROCESS, _QUERY, _WAITS, _RUN = 1, 2, 3, 4

_Part = bytes | tuple[NDArray[np.integer], int]
"""Of a row of bytes: the same in each, or a column of varints and how many bytes wide they are."""


def write_perfetto(recording: Recording, file: IO[bytes]) -> None:
    """Write a Perfetto trace (protobuf).

    A process has a track, and below it tracks with slices: its queries, its waits, and what the
    scheduler did with it, as far as that was recorded. A slice is named by its wait event,
    its category is the class; one that was cut has an annotation `cut`, as Recording.intervals'
    flags. Samples on a CPU are PerfSamples. Times are CLOCK_MONOTONIC, in ns.
    """
    joined = recording.joined
    label = joined.capture.events.label
    trace = _Perfetto(file, joined.start_ns)
    for pid in np.unique(joined.segments.pid).tolist():
        trace.process(pid, process_name(joined, pid))
    threads: set[int] = set()
    for batch in intervals(joined.capture, recording.progress)[1]:
        tids, rows = np.unique(batch.tid, return_index=True)
        for tid, pid in zip(tids.tolist(), batch.pid[rows].tolist(), strict=True):
            if tid not in threads:
                threads.add(tid)
                trace.process(pid, process_name(joined, pid))
                own = "waits" if tid == pid else f"waits of thread {tid}"
                trace.track(8 * tid + _WAITS, 8 * pid + _PROCESS, own, _WAITS)
        # Apart by flags, and yet in order: those of one track may touch.
        heads = [0, *(np.flatnonzero(np.diff(batch.flags)) + 1).tolist(), len(batch)]
        for head, end in pairwise(heads):
            if head < end:
                _write_waits(trace, batch.take(slice(head, end)), label)
    if joined.asked:
        runs = runs_of(joined.segments, joined.segments.query)
        codes = joined.segments.query[runs.row]
        names = {code: query_name(joined, code) for code in np.unique(codes).tolist()}
        trace.runs("query", _QUERY, runs, codes, names)
    if joined.scheduled:
        runs = runs_of(joined.segments, joined.segments.run)
        trace.runs("run state", _RUN, runs, joined.segments.run[runs.row], STATES)
    _write_samples(trace, samples(joined, recording.traces))


def _write_waits(
    trace: _Perfetto, batch: Intervals, label: Callable[[int], tuple[str, str]]
) -> None:
    """Write intervals that all have the same flags."""
    flags = int(batch.flags[0])
    values, place = np.unique(batch.value, return_inverse=True)
    labels = [label(value) for value in values.tolist()]
    category = np.array([trace.iid(_CATEGORIES, class_) for class_, _ in labels])[place]
    name = np.array([trace.iid(_NAMES, ":".join(pair)) for pair in labels])[place]
    annotation = b""
    if flags:  # TrackEvent.debug_annotations: DebugAnnotation.name, string_value
        annotation = _field(4, _field(10, "cut") + _field(6, FLAGS[flags]))
    end = batch.start_ns + batch.dur_ns
    trace.slices(8 * batch.tid.astype(np.int64) + _WAITS, batch.start_ns, end, category, name,
                 annotation)  # fmt: skip


def _write_samples(trace: _Perfetto, taken: Samples) -> None:
    rows = np.flatnonzero(taken.on_cpu)
    stacks, place = np.unique(taken.stack[rows], return_inverse=True)
    # A frame must be in a mapping, and be told from others by its address there.
    path = _field(7, trace.iid(_PATHS, "symbols of the capture"))  # Mapping.path_string_ids
    trace.write(_field(12, _field(19, _field(1, 1) + path)))
    frames: set[int] = set()
    for i in stacks.tolist():
        ids = [trace.iid(_FUNCTIONS, name) for name in taken.path(i)]
        new = set(ids) - frames
        frames |= new
        interned = b""
        for one in sorted(new):  # Frame: iid, function_name_id, mapping_id, rel_pc
            interned += _field(6, _field(1, one) + _field(2, one) + _field(3, 1) + _field(4, one))
        ids_ = b"".join(_field(2, one) for one in ids)  # Callstack: iid, frame_ids
        trace.write(_field(12, interned + _field(7, _field(1, i + 2) + ids_)))
    # PerfSample: pid, tid, callstack_iid
    sample: list[_Part] = [
        _key(2, 0), (taken.pid[rows], 5), _key(3, 0), (taken.tid[rows], 5),
        _key(4, 0), (stacks[place] + 2, 5),
    ]  # fmt: skip
    trace.packets([trace.timed(taken.time_ns[rows], _nested(66, sample))])


class _Perfetto:
    """Writes the packets of a trace; all are of one sequence."""

    def __init__(self, file: IO[bytes], start_ns: int) -> None:
        self._file = file
        self._iids: dict[tuple[int, str], int] = {}
        self._processes: set[int] = set()
        clock = _field(1, _field(1, _MONOTONIC) + _field(2, start_ns)) + _field(2, _MONOTONIC)
        self.write(_field(6, clock), flags=0)  # ClockSnapshot.clocks, primary_trace_clock
        # PerfSampleDefaults.timebase: frequency, name
        timebase = _field(12, _field(1, _field(2, _TASK_CLOCK_HZ) + _field(10, "task-clock")))
        self.write(_field(59, _field(58, _MONOTONIC) + timebase), flags=_CLEARED)

    def write(self, fields: bytes, flags: int = _NEEDED) -> None:
        """Write one packet without a time."""
        packet = _field(10, 1) + (_field(13, flags) if flags else b"") + fields
        self._file.write(_field(1, packet))

    def process(self, pid: int, name: str) -> None:
        """Write the track of a process, once."""
        if pid in self._processes:
            return
        self._processes.add(pid)
        # ProcessDescriptor: pid, process_name
        about = _field(3, _field(1, pid) + _field(6, name)) + _field(11, _EXPLICIT)
        self.write(_field(60, _field(1, 8 * pid + _PROCESS) + about))

    def track(self, uuid: int, parent: int, name: str, rank: int) -> None:
        """Write a track below another one."""
        about = _field(5, parent) + _field(2, name) + _field(12, rank)
        self.write(_field(60, _field(1, uuid) + about))

    def iid(self, kind: int, text: str) -> int:
        """Return the number of an interned text, from 1 on."""
        key = kind, text
        if key not in self._iids:
            self._iids[key] = len(self._iids) + 1
            self.write(_field(12, _field(kind, _field(1, self._iids[key]) + _field(2, text))))
        return self._iids[key]

    def runs(
        self,
        track: str,
        kind: int,
        runs: Runs,
        codes: NDArray[np.integer],
        names: Mapping[int, str | None],
    ) -> None:
        """Write a track of each process, with slices of those runs whose code has a name."""
        for pid in np.unique(runs.pid).tolist():
            self.track(8 * pid + kind, 8 * pid + _PROCESS, track, kind)
        distinct, place = np.unique(codes, return_inverse=True)
        texts = [names.get(code) for code in distinct.tolist()]
        iids = np.array([0 if one is None else self.iid(_NAMES, one) for one in texts])[place]
        rows = np.flatnonzero(iids > 0)
        category = np.full(len(rows), self.iid(_CATEGORIES, track))
        uuid = 8 * runs.pid[rows].astype(np.int64) + kind
        self.slices(uuid, runs.start_ns[rows], runs.end_ns[rows], category, iids[rows])

    def slices(
        self,
        track: NDArray[np.int64],
        start_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        category: NDArray[np.integer],
        name: NDArray[np.integer],
        annotation: bytes = b"",
    ) -> None:
        """Write slices; those of one track must be in the order of time."""
        # TrackEvent: type, track_uuid, category_iids, name_iid
        uuid: list[_Part] = [_key(11, 0), (track, 5)]
        begin = [_field(9, _BEGIN), *uuid, _key(3, 0), (category, 5), _key(10, 0), (name, 5)]
        end = [_field(9, _END), *uuid]
        self.packets(
            [
                self.timed(start_ns, _nested(11, [*begin, annotation])),
                self.timed(end_ns, _nested(11, end)),
            ]
        )

    def timed(self, time_ns: NDArray[np.int64], fields: list[_Part]) -> list[_Part]:
        """Return a packet with a time."""
        return [_key(8, 0), (time_ns, 9), _field(10, 1), _field(13, _NEEDED), *fields]

    def packets(self, packets: Sequence[list[_Part]]) -> None:
        """Write packets, one of each in each row."""
        parts = [part for packet in packets for part in _nested(1, packet)]
        rows = next(len(part[0]) for part in parts if isinstance(part, tuple))
        for first in range(0, rows, 1 << 16):
            last = min(first + (1 << 16), rows)
            columns = [
                np.broadcast_to(np.frombuffer(part, np.uint8), (last - first, len(part)))
                if isinstance(part, bytes)
                else _varints(part[0][first:last], part[1])
                for part in parts
            ]
            self._file.write(np.concatenate(columns, axis=1).tobytes())


def _varint(number: int) -> bytes:
    digits = b""
    while number > 0x7F:
        digits += bytes([number & 0x7F | 0x80])
        number >>= 7
    return digits + bytes([number])


def _varints(numbers: NDArray[np.integer], width: int) -> NDArray[np.uint8]:
    """Return varints of so many bytes each: padding is allowed, and makes rows equally long."""
    shifts = 7 * np.arange(width, dtype=np.int64)
    digits = (numbers.astype(np.int64)[:, None] >> shifts & 0x7F).astype(np.uint8)
    digits[:, :-1] |= 0x80
    return digits


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _field(number: int, value: int | str | bytes) -> bytes:
    """Return a field of a message: a number, a text, or a message in it."""
    if isinstance(value, int):
        return _key(number, 0) + _varint(value)
    content = value.encode(errors="replace") if isinstance(value, str) else value
    return _key(number, 2) + _varint(len(content)) + content


def _nested(number: int, message: list[_Part]) -> list[_Part]:
    """Return a field that is a message of which some parts are columns."""
    size = sum(part[1] if isinstance(part, tuple) else len(part) for part in message)
    return [_key(number, 2) + _varint(size), *message]
