"""Profiles: samples with stacks, as columns, and the names of their frames."""

from __future__ import annotations

import re
import secrets
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from . import perfdata, perfscript
from .errors import PerfDataError, WaitfoldError
from .events import PID_MAX
from .pair import numbered
from .perfdata import Event, PerfData, Piece
from .perfscript import Script
from .symbols import (
    KERNEL,
    CapturedSymbols,
    Symbols,
    file_symbols,
    kernel_symbols,
    perf_map_symbols,
    vdso_symbols,
)
from .tracetext import TraceText

UNKNOWN = perfscript.UNKNOWN
"""A frame of which not even the file is known."""

# Marks in a callchain: whose the addresses are that follow. perf_event.h
_CONTEXT_MAX = -4095 & (1 << 64) - 1
_HYPERVISOR, _KERNEL, _USER = (-n & (1 << 64) - 1 for n in (32, 128, 512))

# Bits of a record's misc
_CPUMODE, _MODE_KERNEL = 7, 1
_WITHOUT_MAPS = 1 << 13  # of a FORK that perf made up (FORK_EXEC)
_WITH_BUILD_ID = 1 << 14  # of an MMAP2

_PROT_EXEC = 4

# Parts of a record: its head, a word, a pid and a tid, and what is mapped where.
_HEAD, _WORD, _THREAD, _MAP = (struct.Struct(f"<{part}") for part in ("IHH", "Q", "II", "3Q"))


class Map(NamedTuple):
    """Memory from `start` to before `end` that shows a file from `offset` on."""

    start: int
    end: int
    offset: int
    path: str
    build_id: str
    inode: int = 0  # 0: not recorded


Space = tuple[Map, ...]
"""What a process had mapped, in order of address, none over another."""


@dataclass(frozen=True)
class Profile:
    """Samples with stacks, one a row in the order of the file.

    Columns: `time_ns` int64; `pid`, `tid` int32; `cpu` int32, -1 where it was not recorded;
    `event`, an index of `events`; `weight`, the event's units that the sample stands for (ns, of a
    clock); `stack`, `comm` and `space` int32, indices of `stacks`, `comms` and `spaces`.
    """

    events: list[Event]
    time_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    cpu: NDArray[np.int32]
    event: NDArray[np.uint8]
    weight: NDArray[np.uint64]
    stack: NDArray[np.int32]
    comm: NDArray[np.int32]
    space: NDArray[np.int32]
    stacks: Stacks
    comms: list[str]
    spaces: list[Space]
    kernel: Kernel
    warnings: list[str]


@dataclass(frozen=True)
class Stacks:
    """Distinct callchains as recorded, leaf first, marks of contexts among the addresses.

    That of stack i are `entries[starts[i]:starts[i + 1]]`.
    """

    entries: NDArray[np.uint64]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class Frames:
    """Stacks of names, leaf first.

    That of stack i are `names[j]` for the j in `entries[starts[i]:starts[i + 1]]`.
    """

    names: list[str]
    entries: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class Kernel:
    """Where the kernel and its modules were; `text_at` is the address of _text, 0 if unknown."""

    maps: Space
    build_id: str
    text_at: int


@dataclass(frozen=True)
class Traces:
    """Samples with stacks of names, one a row; columns as those of Profile.

    `trace` is an index of the stacks of `frames`.
    """

    events: list[Event]
    time_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    event: NDArray[np.uint8]
    weight: NDArray[np.uint64]
    comm: NDArray[np.int32]
    trace: NDArray[np.int64]
    frames: Frames
    comms: list[str]
    warnings: list[str]

    @property
    def sampled(self) -> list[int]:
        """Return the indices of the events that have samples, that of the earliest first."""
        firsts = {int(i): int(self.time_ns[self.event == i].min()) for i in np.unique(self.event)}
        return sorted(firsts, key=lambda i: firsts[i])


class Traced(Protocol):
    """A file whose stacks have names already."""

    def traces_of(self, events: Sequence[Event]) -> Traces:
        """Return the samples of some of its events."""


def read_traces(
    data: PerfData | Traced, events: list[Event], captured: CapturedSymbols | None = None
) -> Traces:
    """Return the samples of some events of a perf.data, their stacks as names.

    `captured` is what a capture has of them: then this host's files are not looked at.

    Raises
    ------
    WaitfoldError
        Only perf could unwind their stacks (--call-graph dwarf), and it is missing or failed.
    PerfDataError
        The file is damaged.

    """
    if not isinstance(data, PerfData):
        return data.traces_of(events)
    if any(event.has_stack_copy for event in events):
        return _read_script(data, events)
    profile = read_profile(data, events)
    stacks = len(profile.stacks.starts) - 1
    pairs, trace = numbered(profile.space.astype(np.int64) * stacks + profile.stack)
    frames = name_frames(profile, pairs % stacks, pairs // stacks, captured)
    return Traces(
        events, profile.time_ns, profile.pid, profile.tid, profile.event, profile.weight,
        profile.comm, trace, frames, profile.comms, profile.warnings,
    )  # fmt: skip


def text_traces(text: TraceText) -> Traces:
    """Return the samples with stacks of a text of perf script.

    Raises
    ------
    WaitfoldError
        It cannot be read to its end.

    """
    script, names, strange = perfscript.read_any(text.lines())
    events = [Event(i, name, (), 0, 0, {}) for i, name in enumerate(names)]
    warnings = [text.input.cut] if text.input.cut else []
    if strange:
        warnings.append(f"{strange} lines of {text.path} are of no sample, and were left out")
    return _script_traces(script, events, warnings)


def _read_script(data: PerfData, events: list[Event]) -> Traces:
    """Return the same by way of perf script; lost samples are not counted."""
    script = perfscript.run(data, [event.name for event in events])
    return _script_traces(script, events, [data.cut] if data.cut else [])


def _script_traces(script: Script, events: list[Event], warnings: list[str]) -> Traces:
    names = [
        name if name != UNKNOWN or file == UNKNOWN else file_frame(file)
        for name, file in script.frames
    ]
    lengths = np.array([len(stack) for stack in script.stacks], np.int64)
    entries = np.fromiter(chain.from_iterable(script.stacks), np.int64, int(lengths.sum()))
    frames = Frames(names, entries, np.append(0, np.cumsum(lengths)))
    time, pid, tid, event, weight, comm, stack = (
        np.array(column, column.typecode)
        for column in (
            script.time_ns, script.pid, script.tid, script.event, script.weight, script.comm,
            script.stack,
        )
    )  # fmt: skip
    return Traces(
        events, time, pid, tid, event, weight, comm, stack, frames, list(script.comms), warnings
    )


def read_profile(data: PerfData, events: list[Event]) -> Profile:
    """Return the samples of some events of a perf.data, those without a stack with an empty one.

    Raises
    ------
    WaitfoldError
        They lack the thread or the time.
    PerfDataError
        The file is damaged.

    """
    return _Reader(data, events).profile()


def name_frames(
    profile: Profile,
    stack: NDArray[np.int64],
    space: NDArray[np.int64],
    captured: CapturedSymbols | None = None,
) -> Frames:
    """Return the names of the frames of stacks, each in a process that had `space` mapped.

    Each distinct address of each space is named once. What has no name is [FILE], as in other
    tools, but of a capture with symbols of its own [FILE+OFFSET].
    """
    entries, mode, lengths = _addresses(profile.stacks)
    place, _ = _ranges((np.cumsum(lengths) - lengths)[stack], lengths[stack])
    addresses, which = np.unique(entries, return_inverse=True)
    # A user's address means what the process had mapped there, the kernel's the same for all.
    owner = np.repeat(space, lengths[stack])
    modes = mode[place]
    owner = np.where(modes == _IN_USER, owner + _OWNERS, modes)
    keys, row = np.unique(owner * len(addresses) + which[place], return_inverse=True)
    namer = _Namer(profile.kernel, captured)
    heads = np.searchsorted(keys, np.arange(_OWNERS + len(profile.spaces) + 1) * len(addresses))
    for i, (head, end) in enumerate(zip(heads[:-1].tolist(), heads[1:].tolist(), strict=True)):
        if head < end:
            own = addresses[keys[head:end] - i * len(addresses)]
            if i >= _OWNERS:
                namer.add(profile.spaces[i - _OWNERS], own)
            else:
                namer.add(profile.kernel.maps if i == _IN_KERNEL else (), own)
    ends = np.cumsum(lengths[stack])
    return Frames(namer.names(), row, np.append(0, ends))


def file_frame(path: str) -> str:
    """Return the frame of an address without a name in a file: the name of the file alone."""
    return f"[{path.removesuffix(' (deleted)').rpartition('/')[2]}]"


# Whose an address is; from _OWNERS on, a space's.
_IN_KERNEL, _IN_HYPERVISOR, _IN_USER = 0, 1, 2
_OWNERS = 2


def _addresses(
    stacks: Stacks,
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the addresses of all stacks without the marks, whose they are, and stacks' lengths.

    A stack with a mark that is none of the three is empty, as perf has it (add_callchain_ip).
    """
    entries = stacks.entries
    lengths = np.diff(stacks.starts)
    stack = np.repeat(np.arange(len(lengths)), lengths)
    marks = entries >= np.uint64(_CONTEXT_MAX)
    modes = np.full(len(entries), -1)
    for mark, mode in ((_USER, _IN_USER), (_KERNEL, _IN_KERNEL), (_HYPERVISOR, _IN_HYPERVISOR)):
        modes[entries == np.uint64(mark)] = mode
    broken = np.zeros(len(lengths), np.bool_)
    broken[stack[marks & (modes < 0)]] = True
    # The latest mark before each address, if it is of the same stack.
    at = np.maximum.accumulate(np.where(marks, np.arange(len(entries)), -1))
    modes = np.where(at >= stacks.starts[stack], modes[at], _IN_USER)
    kept = np.flatnonzero(~marks & ~broken[stack])
    return entries[kept], modes[kept], np.bincount(stack[kept], minlength=len(lengths))


class _Namer:
    """Names addresses, all those in one file at once."""

    def __init__(self, kernel: Kernel, captured: CapturedSymbols | None) -> None:
        self._kernel = kernel
        self._captured = captured
        self._count = 0
        # By path, inode and build-id.
        self._files: dict[tuple[str, int, str], list[tuple[NDArray[np.int64], NDArray[np.uint64]]]]
        self._files = defaultdict(list)

    def add(self, space: Space, addresses: NDArray[np.uint64]) -> None:
        """Take addresses, in rising order, in what is mapped."""
        starts = np.array([m.start for m in space], np.uint64)
        heads = np.searchsorted(addresses, starts, "left")
        ends = np.searchsorted(addresses, np.array([m.end for m in space], np.uint64), "left")
        for mapped, head, end in zip(space, heads.tolist(), ends.tolist(), strict=True):
            if head < end:
                moved = mapped.offset - mapped.start & (1 << 64) - 1
                places = addresses[head:end] + np.uint64(moved)
                rows = np.arange(self._count + head, self._count + end)
                file = mapped.path, mapped.inode, mapped.build_id
                self._files[file].append((rows, places))
        self._count += len(addresses)

    def names(self) -> list[str]:
        """Return the names of all, in the order in which they were taken."""
        found = [UNKNOWN] * self._count
        for (path, inode, build_id), parts in self._files.items():
            symbols = self._symbols(path, inode, build_id)
            rows = np.concatenate([rows for rows, _ in parts]).tolist()
            places = np.concatenate([places for _, places in parts])
            unnamed = file_frame(path)
            for row, place, name in zip(rows, places.tolist(), symbols.names(places), strict=True):
                if name is None:
                    name = f"+{place:#x}" if self._captured else unnamed
                # A function that has no name, or a place in none, by its offset in the file.
                if name.startswith("+0x"):
                    name = f"[{unnamed.strip('[]')}{name}]"
                found[row] = name
        return found

    def _symbols(self, path: str, inode: int, build_id: str) -> Symbols:
        of_kernel = any(path == mapped.path for mapped in self._kernel.maps)
        if self._captured:
            return self._captured.symbols(KERNEL if of_kernel else path, inode, build_id)
        if path == "[vdso]":
            return vdso_symbols()
        if re.fullmatch(r"/tmp/perf-[0-9]+\.map", path):
            return perf_map_symbols(path)
        if of_kernel:
            return kernel_symbols(self._kernel.build_id, self._kernel.text_at)
        return file_symbols(path, build_id)


class _Stacker:
    """Numbers distinct stacks.

    They are told apart by 64 bits of a hash, the polynomial of their mixed words: a difference of
    running sums over all words of a piece gives each stack's. Its two secrets are drawn anew each
    time.
    """

    def __init__(self) -> None:
        self._mixer, self._base = (2 * secrets.randbits(63) + 1 for _ in range(2))
        self._powers = self._inverse = np.empty(0, np.uint64)
        self._known = np.empty(0, np.uint64)  # hashes, sorted, and what each is numbered
        self._numbers = np.empty(0, np.int32)
        self._entries: list[NDArray[np.uint64]] = []
        self._lengths: list[NDArray[np.int64]] = []

    def hashed(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the running sums from before the first word to behind the last."""
        if len(words) >= len(self._powers):
            size = 1 << len(words).bit_length()
            inverse = pow(self._base, -1, 1 << 64)
            self._powers = np.cumprod(np.full(size, self._base, np.uint64), dtype=np.uint64)
            self._inverse = np.cumprod(np.full(size, inverse, np.uint64), dtype=np.uint64)
        mixed: NDArray[np.uint64] = words ^ words >> np.uint64(29)
        mixed *= np.uint64(self._mixer)
        mixed ^= mixed >> np.uint64(32)
        mixed *= self._powers[: len(words)]
        sums = np.zeros(len(words) + 1, np.uint64)
        np.cumsum(mixed, out=sums[1:])
        return sums

    def number(
        self,
        words: NDArray[np.uint64],
        sums: NDArray[np.uint64],
        at: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Return the numbers of stacks, which begin `at` and have `lengths` words."""
        hashed = (sums.take(at + lengths) - sums.take(at)) * self._inverse.take(at)
        hashed += lengths.view(np.uint64)
        place, known = self._place(hashed)
        if not known.all():
            new, first = np.unique(hashed[~known], return_index=True)
            first = np.flatnonzero(~known)[first]
            self._entries.append(words.take(_ranges(at[first], lengths[first])[0]))
            self._lengths.append(lengths[first])
            numbers = np.arange(len(self._known), len(self._known) + len(new), dtype=np.int32)
            before = np.searchsorted(self._known, new)
            self._known = np.insert(self._known, before, new)
            self._numbers = np.insert(self._numbers, before, numbers)
            place, _ = self._place(hashed)
        return self._numbers.take(place)

    def _place(self, hashed: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where hashes stand among the known ones, and which do."""
        if not len(self._known):
            return np.zeros(len(hashed), np.int64), np.zeros(len(hashed), np.bool_)
        place = np.minimum(np.searchsorted(self._known, hashed), len(self._known) - 1)
        return place, self._known.take(place) == hashed

    def stacks(self) -> Stacks:
        """Return the distinct stacks."""
        lengths = np.concatenate([np.zeros(1, np.int64), *self._lengths])
        return Stacks(np.concatenate([np.empty(0, np.uint64), *self._entries]), np.cumsum(lengths))


def _ranges(
    at: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all places of ranges that begin `at`, and how far each is from its range's first."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    depth = np.arange(total) - np.repeat(ends - lengths, lengths)
    return np.repeat(at, lengths) + depth, depth


class _Record(NamedTuple):
    """A record other than a sample: what a process was called, or had mapped."""

    time_ns: int
    offset: int  # in the file
    kind: int
    pid: int
    tid: int
    parent: tuple[int, int] = (0, 0)
    inherits: bool = True
    comm: str = ""
    map: Map | None = None


class _Reader:
    """Reads one file."""

    def __init__(self, data: PerfData, events: list[Event]) -> None:
        self._data = data
        self._wanted = events
        for event in self._wanted:
            layout = data.layouts[event.index]
            if not layout.tid_at or not layout.time_at:
                raise WaitfoldError(
                    f"{data.path}: samples of {event.name} lack the thread or the time. Record "
                    "them without --no-timestamp."
                )
        self._stacker = _Stacker()
        self._records: list[_Record] = []
        self._kernel: list[_Record] = []
        self._columns: list[list[NDArray[Any]]] = []
        self._lost = self._lost_samples = 0

    def profile(self) -> Profile:
        """Read all."""
        for piece in self._data.pieces():
            self._records += self._names(piece)
            self._records += self._tasks(piece)
            self._losses(piece)
            sums = self._stacker.hashed(piece.words)
            of = self._data.event_of(piece, piece.samples)
            for wanted in self._wanted:
                at = piece.samples[of == wanted.index]
                self._columns.append(self._decode(piece, sums, at, wanted))
        none = [np.empty(0, dtype) for dtype in ("i8", "u8", "i4", "u1", "u8", "i4")]
        columns: list[NDArray[Any]] = [
            np.concatenate(column) for column in zip(none, *self._columns, strict=True)
        ]
        time, thread, cpu, event, weight, stack = columns
        # In the order of time, those that perf made up at its start first, as they stand.
        self._records.sort(key=lambda record: (record.time_ns, record.offset))
        pid, tid = thread.view(np.int32)[0::2], thread.view(np.int32)[1::2]
        times = np.array([record.time_ns for record in self._records], np.uint64)
        until = np.searchsorted(times, time.view(np.uint64), "right")
        comm, comms = self._comms(tid, until)
        space, spaces = self._spaces(pid, until)
        return Profile(
            self._wanted, time, pid, tid, cpu, event, weight, stack, comm, space,
            self._stacker.stacks(), comms, spaces, self._kernel_of(), self._warnings(),
        )  # fmt: skip

    def _decode(
        self, piece: Piece, sums: NDArray[np.uint64], at: NDArray[np.int64], event: Event
    ) -> list[NDArray[Any]]:
        """Return the columns of an event's samples in a piece."""
        data, words = self._data, piece.words
        layout = data.layouts[event.index]
        if event.has_callchain:
            data.long_enough(piece, at, layout.fixed + 1)
            first, end = layout.chain_at(words, at)
            lengths = words.take(first)
            bad = lengths >= (end - first).astype(np.uint64)
            if bad.any():
                raise data.damaged(piece, at, bad, "is too short for its callchain")
        else:
            data.long_enough(piece, at, layout.fixed)
            first, lengths = at, np.zeros(len(at), np.uint64)
        time = words[layout.time_at :].take(at).view(np.int64)
        thread = words[layout.tid_at :].take(at)
        # -1 stands for a thread that is already gone (perf_event_tid in kernel/events/core.c)
        bad = (thread.view(np.int32).reshape(-1, 2) > PID_MAX).any(axis=1) | (time < 0)
        if bad.any():
            raise data.damaged(piece, at, bad, "has a thread or a time that cannot be")
        cpu = np.full(len(at), -1, np.int32)
        if layout.cpu_at:
            cpu = words[layout.cpu_at :].take(at).astype(np.uint32).view(np.int32)
        weight = np.full(len(at), event.period, np.uint64)
        if layout.period_at:
            weight = words[layout.period_at :].take(at)
        which = np.full(len(at), self._wanted.index(event), np.uint8)
        stack = self._stacker.number(words, sums, first + 1, lengths.view(np.int64))
        return [time, thread, cpu, which, weight, stack]

    def _names(self, piece: Piece) -> Iterator[_Record]:
        """Yield the COMM and MMAP records of a piece, the kernel's apart."""
        content = piece.words.data.cast("B")
        time_at = self._data.layouts[0].trailer_time if self._data.sample_id_all else 0
        for at in piece.names:
            kind, misc, size = _HEAD.unpack_from(content, 8 * at)
            place = piece.offset + 8 * at
            fixed = {perfdata.COMM: 16, perfdata.MMAP: 40, perfdata.MMAP2: 72}[kind]
            if size <= fixed:
                raise PerfDataError(
                    f"{self._data.path}: the record at byte {place} is too short "
                    "for what it should hold. The file is damaged."
                )
            end = 8 * at + size
            timed = 0 < 8 * time_at < size
            time = _WORD.unpack_from(content, end - 8 * time_at)[0] if timed else 0
            pid, tid = _THREAD.unpack_from(content, 8 * at + 8)
            text = bytes(content[8 * at + fixed : end]).split(b"\0", 1)[0]
            name = text.decode(errors="backslashreplace")
            if kind == perfdata.COMM:
                yield _Record(time, place, kind, pid, tid, comm=name)
                continue
            start, length, offset = _MAP.unpack_from(content, 8 * at + 16)
            inode, build_id, executable = 0, "", True
            if kind == perfdata.MMAP2:
                executable = bool(_THREAD.unpack_from(content, 8 * at + 64)[0] & _PROT_EXEC)
                if misc & _WITH_BUILD_ID:
                    raw = bytes(content[8 * at + 40 : 8 * at + 64])
                    build_id = raw[4 : 4 + min(raw[0], 20)].hex()
                else:
                    inode = _WORD.unpack_from(content, 8 * at + 48)[0]
            end = min(start + length, (1 << 64) - 1)
            if _has_no_file(name) and executable:
                # Where perf looks for the names of what is compiled, by address.
                name, offset, inode = f"/tmp/perf-{pid}.map", start, 0
            own = Map(start, end, offset, name, build_id, inode)
            found = _Record(time, place, kind, pid, tid, map=own)
            if misc & _CPUMODE == _MODE_KERNEL:
                self._kernel.append(found)
            else:
                yield found

    def _tasks(self, piece: Piece) -> Iterator[_Record]:
        """Yield the FORK records of a piece."""
        tasks = self._data.tasks(piece)
        time_ns = tasks.time_ns.view(np.uint64)  # as that of the other records
        columns = (tasks.at, tasks.pid, tasks.tid, tasks.parent, tasks.parent_tid, time_ns)
        rows = zip(*(column[~tasks.is_exit].tolist() for column in columns), strict=True)
        for at, pid, tid, parent, parent_tid, time in rows:
            inherits = not int(piece.words[at]) >> 32 & _WITHOUT_MAPS
            place = piece.offset + 8 * at
            parents = (parent, parent_tid)
            yield _Record(time, place, perfdata.FORK, pid, tid, parents, inherits)

    def _losses(self, piece: Piece) -> None:
        """Count what the kernel had no room for; LOST_SAMPLES counts it once more, in the end."""
        for at in piece.others:
            head = int(piece.words[at])
            if head & 0xFFFF_FFFF == perfdata.LOST and head >> 51 >= 3:
                self._lost += int(piece.words[at + 2])
            elif head & 0xFFFF_FFFF == perfdata.LOST_SAMPLES and head >> 51 >= 2:
                self._lost_samples += int(piece.words[at + 1])

    def _warnings(self) -> list[str]:
        warnings = [self._data.cut] if self._data.cut else []
        if lost := max(self._lost, self._lost_samples):
            warnings.append(f"{lost} samples were lost")
        return warnings

    def _comms(
        self, tid: NDArray[np.int32], until: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], list[str]]:
        """Return for samples what their threads were called after the first `until` records."""
        codes = {"swapper": 0}
        current = {0: 0}
        changes: list[tuple[int, int]] = []
        for i, record in enumerate(self._records):
            if record.kind == perfdata.COMM:
                current[record.tid] = codes.setdefault(record.comm, len(codes))
            elif record.kind == perfdata.FORK:
                code = current.get(record.parent[1])
                if code is None:
                    code = codes.setdefault(f":{record.tid}", len(codes))
                current[record.tid] = code
            else:
                continue
            changes.append((record.tid << 32 | i, current[record.tid]))
        changes.sort()
        place = _latest([key for key, _ in changes], tid, until)
        comm = np.array([0, *(code for _, code in changes)], np.int32)[place + 1]
        for unnamed in np.unique(tid[(place < 0) & (tid != 0)]).tolist():
            comm[(place < 0) & (tid == unnamed)] = codes.setdefault(f":{unnamed}", len(codes))
        return comm, list(codes)

    def _spaces(
        self, pid: NDArray[np.int32], until: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], list[Space]]:
        """Return for samples what their processes had mapped after the first `until` records."""
        changes = [
            (record.pid << 32 | i, record)
            for i, record in enumerate(self._records)
            if record.map is not None
            or (record.kind == perfdata.FORK and record.pid != record.parent[0])
        ]
        place = _latest([key for key, _ in changes], pid, until)
        wanted, row = np.unique(place, return_inverse=True)
        needed = set(wanted.tolist())
        mapped: dict[int, list[Map]] = defaultdict(list)
        codes: dict[Space, int] = {(): 0}
        code = {-1: 0}
        place_of = {key: i for i, key in enumerate(sorted(key for key, _ in changes))}
        for key, record in changes:
            if record.map is None:
                own = mapped[record.parent[0]] if record.inherits else []
                mapped[record.pid] = list(own)
            else:
                _insert(mapped[record.pid], record.map)
            if place_of[key] in needed:
                space = tuple(mapped[record.pid])
                code[place_of[key]] = codes.setdefault(space, len(codes))
        return np.array([code[i] for i in wanted.tolist()], np.int32)[row], list(codes)

    def _kernel_of(self) -> Kernel:
        mapped: list[Map] = []
        text_at = 0
        for record in self._kernel:
            assert record.map is not None
            own = record.map
            if own.path.startswith(KERNEL):
                # The record tells where .text ends, but .init.text and the like are behind it.
                own, text_at = own._replace(path=KERNEL, end=(1 << 64) - 1), own.offset
            # Its symbols are by address, those of its modules as well.
            _insert(mapped, own._replace(offset=own.start))
        return Kernel(tuple(mapped), self._data.build_ids.get(KERNEL, ""), text_at)


def _has_no_file(path: str) -> bool:
    return path in ("//anon", "[heap]", "/anon_hugepage") or path.startswith(
        ("/dev/zero", "[stack", "/SYSV", "[anon:")
    )


def _latest(
    keys: list[int], task: NDArray[np.int32], until: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the place among the keys, sorted, of each task's last before `until`; -1: none.

    A key is a task's number in its upper half, and the number of a record.
    """
    ordered = np.sort(np.array(keys, np.uint64))
    wanted = task.view(np.uint32).astype(np.uint64) << np.uint64(32) | until.view(np.uint64)
    # Samples of one task mostly follow one another.
    heads = np.flatnonzero(np.append(wanted[:1] >= 0, wanted[1:] != wanted[:-1]))
    some = wanted[heads]
    place = np.searchsorted(ordered, some, "left") - 1
    found = place >= 0
    found[found] = ordered[place[found]] >> np.uint64(32) == some[found] >> np.uint64(32)
    return np.repeat(np.where(found, place, -1), np.diff(np.append(heads, len(wanted))))


def _insert(mapped: list[Map], new: Map) -> None:
    """Put a map among others in order of address; it takes the place of what was there."""
    if new.start >= new.end:
        return
    first = bisect_left(mapped, (new.start + 1,))
    if first and mapped[first - 1].end > new.start:
        first -= 1
    last = first
    around = [new]
    while last < len(mapped) and mapped[last].start < new.end:
        old = mapped[last]
        if old.start < new.start:
            around.insert(0, old._replace(end=new.start))
        if old.end > new.end:
            around.append(old._replace(start=new.end, offset=old.offset + new.end - old.start))
        last += 1
    mapped[first:last] = around
