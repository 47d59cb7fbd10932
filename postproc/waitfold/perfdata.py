"""Read perf.data without perf, on any system.

The format is that of tools/perf/Documentation/perf.data-file-format.txt; records and samples are
laid out as include/uapi/linux/perf_event.h says. Files are read in pieces, and a size that a
file states is checked against the file before anything is allocated by it.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import PerfDataError
from .inputs import RATIO_FREE, RATIO_MAX, SLICE

MAGICS = (b"PERFILE2", b"2ELIFREP")
"""What a perf.data begins with, of a little-endian machine and of a big-endian one."""

# Record types, perf_event.h and, from 64, tools/lib/perf/include/perf/event.h.
MMAP, LOST, COMM, EXIT, FORK, SAMPLE, MMAP2, LOST_SAMPLES = 1, 2, 3, 4, 7, 9, 10, 13
FINISHED_ROUND, AUXTRACE, COMPRESSED, COMPRESSED2 = 68, 71, 81, 83
# Those that say to a pipe what the header says in a file.
_HEADER_ATTR, _HEADER_TRACING_DATA, _HEADER_BUILD_ID, _EVENT_UPDATE, _HEADER_FEATURE = (
    64, 66, 67, 78, 80
)  # fmt: skip
_USER_TYPES = 64
_UPDATE_NAME = 2  # of an EVENT_UPDATE

# sample_type bits
_IP, _TID, _TIME, _ADDR, _READ, _CALLCHAIN, _ID, _CPU, _PERIOD, _STREAM, _RAW = (
    1 << bit for bit in range(11)
)
_REGS_USER, _STACK_USER, _IDENTIFIER = 1 << 12, 1 << 13, 1 << 16
_BEFORE_REGS = _READ | _CALLCHAIN | _RAW | 1 << 11  # the last is BRANCH_STACK

# enum perf_event_x86_regs, arch/x86/include/uapi/asm/perf_regs.h
_REGISTERS = "ax bx cx dx si di bp sp ip flags cs ss ds es fs gs r8 r9 r10 r11 r12 r13 r14 r15"

# Feature sections, tools/perf/util/header.h; only those used.
_TRACING_DATA, _BUILD_ID, _NRCPUS, _CMDLINE, _EVENT_DESC = 1, 2, 7, 11, 12
_STRINGS = {3: "hostname", 4: "osrelease", 5: "version", 6: "arch"}
_FEATURE_BITS = 256

_CLOCKS = {0: "CLOCK_REALTIME", 1: "CLOCK_MONOTONIC", 4: "CLOCK_MONOTONIC_RAW", 7: "CLOCK_BOOTTIME"}
_SOFTWARE = {0: "cpu-clock", 1: "task-clock", 2: "page-faults", 3: "context-switches"}
_TYPE_SOFTWARE, _TYPE_TRACEPOINT, _TYPE_BREAKPOINT = 1, 2, 5

_RECORD = struct.Struct("<IHH")  # type, misc and size: what each record begins with
_HEADER = 104  # bytes of struct perf_file_header
_PIPE_HEADER = 16  # bytes of struct perf_pipe_file_header
_ATTR_MIN = 64  # PERF_ATTR_SIZE_VER0
_SECTION_MAX = 64 << 20  # no header section comes near this
_HEAD = 64 << 10  # a record's size is 16 bits wide: what is left over of a piece is less
_PIECE = 1 << 22  # what is looked at several times stays in the cache
_WHOLE, _BROKEN, _PACKED = range(3)  # what follows the records of a piece
_KIND = 7 << 48 | 0xFFFF_FFFF  # of a record's first word: its kind, and bits that are 0
_NOT_HEAD = 7 << 48 | 0xFF8 << 32 | 0xFFFF_FF80  # bits that are 0 there, whatever its kind
_STRETCH = 1 << 12  # words that are walked at least before it is looked for more at once
_FEW = 8  # samples alike that make it worth while to look for more at once


@dataclass(frozen=True)
class Field:
    """A field of a tracepoint's raw data: place and size in bytes.

    Of a string the 4 bytes say where in the raw data it is: offset, and size in the upper half.
    One that is not of the raw data has its offset from the record's first byte.
    """

    name: str
    offset: int
    size: int
    signed: bool
    string: bool = False
    raw: bool = True


@dataclass(frozen=True)
class Event:
    """An event that a perf.data holds.

    `fields` are a tracepoint's. Those of a breakpoint are ip, the instruction behind the one that
    wrote, and the registers that were recorded. `period` is what each sample stands for, where it
    does not say it itself.
    """

    index: int
    name: str
    ids: tuple[int, ...]
    sample_type: int
    read_format: int
    fields: Mapping[str, Field]
    period: int = 1

    @property
    def has_callchain(self) -> bool:
        """Return whether its samples have a stack."""
        return bool(self.sample_type & _CALLCHAIN)

    @property
    def has_stack_copy(self) -> bool:
        """Return whether its samples have a copy of the user's stack in place of its callchain."""
        return bool(self.sample_type & _STACK_USER)


@dataclass(frozen=True)
class Piece:
    """Whole records of a file, in file order. `words` is overwritten by the next piece."""

    offset: int  # of words[0] in the file
    words: NDArray[np.uint64]
    samples: NDArray[np.int64]  # where in words the SAMPLE records begin
    shortest: int  # words of the shortest sample
    tasks: list[int]  # where the FORK and EXIT records begin
    names: list[int]  # where the MMAP, MMAP2 and COMM records begin
    others: list[int]  # where the LOST, LOST_SAMPLES and FINISHED_ROUND records begin
    end: int  # offset in the file behind the last record


@dataclass(frozen=True)
class Tasks:
    """FORK and EXIT records, of the threads that begin and end.

    `at` is where each begins in the piece's words; the others are what it says, with 64 bits each.
    """

    at: NDArray[np.int64]
    is_exit: NDArray[np.bool_]
    pid: NDArray[np.int64]
    parent: NDArray[np.int64]
    tid: NDArray[np.int64]
    parent_tid: NDArray[np.int64]
    time_ns: NDArray[np.int64]


def probe_fields(args: Sequence[tuple[str, str]]) -> dict[str, Field]:
    """Return where a uprobe's arguments are, given as (name, type), e.g. ("v", "u32").

    The kernel packs them behind the 8 bytes that all tracepoints begin with and the 8 of
    __probe_ip (kernel/trace/trace_probe.c).
    """
    fields = {}
    offset = 16
    for name, kind in args:
        match = re.fullmatch(r"([usx])(8|16|32|64)|string", kind)
        if match is None:
            raise PerfDataError(
                f"{kind} is not a type of a probe's argument (u32, x32, s64 ... or string)."
            )
        size = int(match[2] or 32) // 8
        fields[name] = Field(name, offset, size, match[1] == "s", kind == "string")
        offset += size
    return fields


class PerfData:
    """A perf.data file: what its header says when it is opened, its records on `pieces()`.

    `events` are in the file's order. `info` has, where the file says them, hostname, osrelease,
    version (perf's), arch, nrcpus, cmdline and clockid; `build_ids` those of the files that samples
    were in, by path, in hex. `cut` is a warning where the file was not
    written to its end; what is there of it is read all the same.

    perf writes names and formats of tracepoints last, so a file whose writer was killed has none.
    `fallback`, event name -> fields, then names the file's tracepoints, in the file's order.

    It may be one that perf record wrote to a pipe (-o -), and compressed by its -z. `opener` opens
    what `path` names, where that is not the file itself.

    Raises PerfDataError where the file is none, damaged, or of a kind that is refused.
    """

    def __init__(
        self,
        path: str | Path,
        fallback: Mapping[str, Mapping[str, Field]] | None = None,
        opener: Callable[[], RawIOBase] | None = None,
    ) -> None:
        self.path = Path(path)
        self.open = opener or (lambda: self.path.open("rb", buffering=0))
        self.is_file = opener is None
        self.events: list[Event] = []
        self.info: dict[str, str] = {}
        self.build_ids: dict[str, str] = {}
        self.cut: str | None = None
        try:
            with self.open() as file:
                self._open(_Sections(self.path, file.fileno()), fallback or {})
        except OSError as error:
            raise PerfDataError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _open(self, sections: _Sections, fallback: Mapping[str, Mapping[str, Field]]) -> None:
        header = sections.header()
        self.is_pipe = len(header) == _PIPE_HEADER
        attrs, found, updates = (self._piped if self.is_pipe else self._headed)(sections, header)
        for feature, key in _STRINGS.items():
            if feature in found:
                self.info[key] = found[feature].string()
        if _NRCPUS in found:
            self.info["nrcpus"] = str(found[_NRCPUS].u32())
        if _CMDLINE in found:
            cursor = found[_CMDLINE]
            words = [cursor.string() for _ in range(cursor.count(4))]
            self.info["cmdline"] = " ".join(words)
        if _BUILD_ID in found:
            self.build_ids = _build_ids(found[_BUILD_ID])
        names = _event_names(found[_EVENT_DESC]) if _EVENT_DESC in found else []
        if updates and not names:
            names = [updates.get(attr.ids[0] if attr.ids else -1, "") for attr in attrs]
        formats = _tracing_formats(found[_TRACING_DATA]) if _TRACING_DATA in found else {}
        self.info["clockid"] = attrs[0].clock
        self.events = _events(attrs, names, formats, fallback)
        self.sample_id_all = attrs[0].sample_id_all
        self.is_ring = any(attr.backward for attr in attrs)
        self.layouts = [Layout(e.sample_type, e.read_format) for e in self.events]
        self._check_layouts()
        ids = sorted((id_, event.index) for event in self.events for id_ in event.ids)
        self._ids = np.array([id_ for id_, _ in ids], np.uint64)
        self._event_of_id = np.array([index for _, index in ids], np.int64)

    def _headed(
        self, sections: _Sections, header: bytes
    ) -> tuple[list[_Attr], dict[int, _Cursor], dict[int, str]]:
        """Return what stands in a file's header, and the sections behind its data."""
        _, attr_size, attrs_at, attrs_size, data_at, data_size = struct.unpack_from(
            "<6Q", header, 8
        )
        # bytes 56 to 72 are the event types of old files
        features = int.from_bytes(header[72:_HEADER], "little")
        size = sections.size

        attrs = self._attrs(sections, attr_size, attrs_at, attrs_size)
        if data_at % 8 or not _HEADER <= data_at <= size:
            raise PerfDataError(
                f"{self.path}: its data should begin at byte {data_at}, but the file has {size} "
                "bytes. It is damaged or was cut short before anything was recorded."
            )
        self.data_offset = data_at
        self.data_size = min(data_size, size - data_at)
        found: dict[int, _Cursor] = {}
        if data_size == 0:
            self.data_size = size - data_at
            self.cut = (
                f"{self.path} was not finished: perf was killed while it recorded, or its disk "
                f"was full. All {self.data_size} bytes recorded till then are read."
            )
        elif data_size > size - data_at:
            self.cut = (
                f"{self.path} was cut short: of {data_size} bytes of data {self.data_size} are "
                "there, and these are read."
            )
        else:
            found, missing = sections.features(features, data_at + data_size)
            if missing:
                self.cut = (
                    f"{self.path} was cut short: {missing} sections at its end are missing, but "
                    "all its data are there."
                )
        return attrs, found, {}

    def _piped(
        self, sections: _Sections, header: bytes
    ) -> tuple[list[_Attr], dict[int, _Cursor], dict[int, str]]:
        """Return the same of a stream, whose first records say it; and events' names by id."""
        attrs: list[_Attr] = []
        found: dict[int, _Cursor] = {}
        updates: dict[int, str] = {}
        at = self.data_offset = len(header)
        while at + 8 <= sections.size:
            kind, _, size = _RECORD.unpack(_pread(sections.file, at, 8))
            packed = kind in (COMPRESSED, COMPRESSED2)
            if size < 8 or kind < _USER_TYPES or kind == FINISHED_ROUND or packed:
                break
            record = sections.read(at, size, "a record")
            at += size
            record.bytes(8)
            if kind == _HEADER_ATTR:
                length = int.from_bytes(record.data[12:16], "little")
                data = record.bytes(max(length, _ATTR_MIN))
                attrs.append(_attr(data, tuple(record.u64() for _ in range(record.left // 8))))
            elif kind == _HEADER_TRACING_DATA:
                length = record.u32()
                found[_TRACING_DATA] = sections.read(at, length, "the events' formats")
                at += length
            elif kind == _HEADER_FEATURE:
                feature = record.u64()
                rest = record.bytes(record.left)
                found[feature] = _Cursor(self.path, at - size, f"header section {feature}", rest)
            elif kind == _EVENT_UPDATE and record.u64() == _UPDATE_NAME:
                updates[record.u64()] = record.cstring()
            elif kind == _HEADER_BUILD_ID:
                self.build_ids |= _build_ids(_Cursor(self.path, at - size, "", record.data))
            else:
                continue
            self.data_offset = at
        if not attrs:
            raise PerfDataError(
                f"{self.path} was written by perf to a pipe, and no event is described at its "
                "start: it was cut short before anything was recorded."
            )
        self.data_size = sections.size - self.data_offset
        return attrs, found, updates

    @property
    def has_stacks(self) -> bool:
        """Return whether samples of some event have a stack."""
        return any(event.has_callchain for event in self.events)

    def _attrs(
        self, sections: _Sections, attr_size: int, attrs_at: int, attrs_size: int
    ) -> list[_Attr]:
        if attr_size < _ATTR_MIN + 16 or attrs_size == 0 or attrs_size % attr_size:
            raise PerfDataError(
                f"{self.path}: {attrs_size} bytes of event attributes at byte {attrs_at} are not "
                f"made of {attr_size} bytes each. The file is damaged."
            )
        table = sections.read(attrs_at, attrs_size, "the event attributes")
        attrs = []
        for at in range(0, attrs_size, attr_size):
            ids_at, ids_size = struct.unpack_from("<2Q", table.data, at + attr_size - 16)
            ids = sections.read(ids_at, ids_size, "an event's ids").data
            count = len(ids) // 8
            attrs.append(
                _attr(table.data[at : at + attr_size - 16], struct.unpack_from(f"<{count}Q", ids))
            )
        return attrs

    def _check_layouts(self) -> None:
        """Where events differ, refuse a file whose samples do not say of which they are."""
        if len({layout.id_at for layout in self.layouts}) > 1 or (
            len(self.events) > 1 and not self.layouts[0].id_at
        ):
            raise PerfDataError(
                f"{self.path}: its {len(self.events)} events cannot be told apart, because their "
                "samples do not carry an id at the same place. The file is damaged."
            )

    def part(self, path: Path) -> PerfData:
        """Return what reads a file of records that this header is of, as --threads writes them."""
        part = copy(self)
        part.path, part.is_pipe, part.cut = path, True, None
        part.open = lambda: path.open("rb", buffering=0)
        part.data_offset, part.data_size = 0, path.stat().st_size
        return part

    def pieces(self) -> Iterator[Piece]:
        """Yield all records, some MiB at a time; offsets behind compressed ones count unpacked.

        Raises PerfDataError at a record that cannot be one. In a file that is cut the records
        end there.
        """
        buffer = np.empty((_HEAD + _PIECE) // 8, np.uint64)
        with self.open() as file:
            file.seek(self.data_offset)
            plain = _Plain(file, self.data_size)
            packed = yield from self._pieces(plain, self.data_offset, buffer)
            if packed is not None:
                size = self.data_offset + self.data_size - packed
                yield from self._pieces(_Packed(self.path, file, packed, size), packed, buffer)

    def _pieces(
        self, stream: _Plain | _Packed, offset: int, buffer: NDArray[np.uint64]
    ) -> Generator[Piece, None, int | None]:
        """Yield the records of a stream; return where compressed ones begin, if any do."""
        content = buffer.data.cast("B")
        rest = 0  # bytes of the next record that are already there, before _HEAD
        state = _WHOLE
        while got := _fill(stream, content[_HEAD:]):
            words = buffer[(_HEAD - rest) // 8 : (_HEAD + got) // 8]
            piece, state = _walk(self.path, offset, words)
            rest += got - (piece.end - offset)
            offset = piece.end
            yield piece
            if state == _PACKED and isinstance(stream, _Plain):
                return offset
            if state != _WHOLE:
                break
            content[_HEAD - rest : _HEAD] = bytes(content[_HEAD + got - rest : _HEAD + got])
        if (rest or stream.left) and self.cut is None:
            if self.is_pipe and state == _WHOLE:
                self.cut = f"{self.path} was cut short. All its records that are whole are read."
                return None
            raise PerfDataError(
                f"{self.path}: what stands at byte {offset} is not a whole record, and "
                f"{rest + stream.left} bytes of data should follow. The file is damaged."
            )
        return None

    def event_of(self, piece: Piece, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the event of each sample of a piece."""
        if len(self.events) == 1:
            return np.zeros(len(at), np.int64)
        id_at = self.layouts[0].id_at  # the same for all events, as _check_layouts sees to
        self.long_enough(piece, at, id_at + 1)
        ids = piece.words[at + id_at]
        place = np.searchsorted(self._ids, ids)
        place[place == len(self._ids)] = 0
        unknown = self._ids[place] != ids if len(self._ids) else np.ones(len(ids), np.bool_)
        if unknown.any():
            raise self.damaged(piece, at, unknown, "belongs to no event of the file's")
        return self._event_of_id[place]

    def long_enough(self, piece: Piece, at: NDArray[np.int64], words: int) -> None:
        """Raise PerfDataError where a sample is shorter than so many words."""
        if piece.shortest >= words:
            return
        short = piece.words[at] >> np.uint64(51) < words
        if short.any():
            raise self.damaged(piece, at, short, "is too short for what its event records")

    def tasks(self, piece: Piece) -> Tasks:
        """Return a piece's FORK and EXIT records, but for those that are too short."""
        at = np.array(piece.tasks, np.int64)
        at = at[piece.words[at] >> np.uint64(51) >= 4]
        # pid, parent; tid, parent's; time: perf_event_task_output in kernel/events/core.c
        heads, pids, tids, times = (piece.words[at + i] for i in range(4))
        low, half = np.uint64(0xFFFF_FFFF), np.uint64(32)
        pid, parent, tid, parent_tid, time = (
            part.view(np.int64)
            for part in (pids & low, pids >> half, tids & low, tids >> half, times)
        )
        return Tasks(at, heads & low == EXIT, pid, parent, tid, parent_tid, time)

    def damaged(
        self, piece: Piece, at: NDArray[np.int64], bad: NDArray[np.bool_], why: str
    ) -> PerfDataError:
        """Return the error for the first of the samples that are bad."""
        offset = piece.offset + 8 * int(at[bad.argmax()])
        return PerfDataError(
            f"{self.path}: the sample at byte {offset} {why}. The file is damaged."
        )

    def known_since_ns(self, buffer: int) -> int:
        """Return from when on no CPU's samples are missing, of a file of perf record --overwrite.

        `buffer` is the size of each CPU's buffer. Where the file is smaller, no CPU's oldest
        records can have been overwritten, and 0 is returned; else the latest of the CPUs' firsts.
        """
        time, cpu = self.layouts[0].time_at, self.layouts[0].cpu_at
        if self.data_size < buffer or not time or not cpu:
            return 0
        first = np.full(1 << 16, np.iinfo(np.int64).max)
        for piece in self.pieces():
            on = piece.words.take(piece.samples + cpu).astype(np.uint16)
            np.minimum.at(first, on, piece.words.take(piece.samples + time).view(np.int64))
        return int(first[first < np.iinfo(np.int64).max].max(initial=0))

    def trailer(self, piece: Piece, at: int) -> tuple[int | None, int | None]:
        """Return time and CPU that end a record other than a sample, None where it has none."""
        words = piece.words
        end = at + (int(words[at]) >> 51)
        layout = self.layouts[0]
        if not self.sample_id_all:
            return None, None
        time, cpu = layout.trailer_time, layout.trailer_cpu
        return (
            int(words[end - time]) if time and end - time > at else None,
            int(words[end - cpu]) & 0xFFFF_FFFF if cpu and end - cpu > at else None,
        )


class Layout:
    """Where the fields of an event's samples are, in words of 8 bytes from the record's first.

    0 stands for a field that the samples do not have. `fixed` is where the fields of a
    constant size end; `raw` follows there, or behind fields that vary.
    """

    def __init__(self, sample_type: int, read_format: int) -> None:
        at = 1
        places: dict[int, int] = {}
        for bit in (_IDENTIFIER, _IP, _TID, _TIME, _ADDR, _ID, _STREAM, _CPU, _PERIOD):
            if sample_type & bit:
                places[bit] = at
                at += 1
        self.id_at = places.get(_IDENTIFIER, places.get(_ID, 0))
        self.ip_at = places.get(_IP, 0)
        self.tid_at = places.get(_TID, 0)
        self.time_at = places.get(_TIME, 0)
        self.cpu_at = places.get(_CPU, 0)
        self.period_at = places.get(_PERIOD, 0)
        self.fixed = at
        self.has_raw = bool(sample_type & _RAW)
        self._varying = _varying(sample_type, read_format)
        # The trailer of other records has some of the same fields, counted from its end.
        behind = 1
        self.trailer_time = self.trailer_cpu = 0
        for bit in (_IDENTIFIER, _CPU, _STREAM, _ID, _TIME):
            if sample_type & bit:
                if bit == _CPU:
                    self.trailer_cpu = behind
                if bit == _TIME:
                    self.trailer_time = behind
                behind += 1

    def raw_at(
        self, words: NDArray[np.uint64], samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return where in `words` the raw data of samples begin, and where the samples end.

        None for the latter where nothing before varies, so that the caller can check one size.
        Else the caller must see that the raw data end within the sample; each of the places
        returned is within it.
        """
        if not self._varying:
            return samples + self.fixed, None
        return self._behind(words, samples, self._varying)

    def chain_at(
        self, words: NDArray[np.uint64], samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where in `words` the callchains of samples begin, and where the samples end.

        A callchain is its length and as many words; the caller must see that they end within the
        sample. Each of the places returned is within it.
        """
        return self._behind(words, samples, self._varying[:-1])

    def _behind(
        self,
        words: NDArray[np.uint64],
        samples: NDArray[np.int64],
        fields: list[tuple[int, int]],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where in `words` what follows the fields begins, and where the samples end."""
        end = samples + (words[samples] >> np.uint64(51)).astype(np.int64)
        at = np.minimum(samples + self.fixed, end - 1)
        for before, each in fields:
            count = np.minimum(words[at], 0xFFFF).astype(np.int64) if each else 0
            at = np.minimum(at + before + each * count, end - 1)
        return at, end


def _varying(sample_type: int, read_format: int) -> list[tuple[int, int]]:
    """Return for each field between the fixed ones and raw its words and those of each entry."""
    sizes = []
    if sample_type & _READ:
        enabled, running, with_id, group, lost = (read_format >> bit & 1 for bit in range(5))
        each = 1 + with_id + lost
        sizes.append((1 + enabled + running, each) if group else (each + enabled + running, 0))
    if sample_type & _CALLCHAIN:
        sizes.append((1, 1))
    return sizes


class _Plain:
    """Records as they stand in a file, from where it is."""

    def __init__(self, file: RawIOBase, size: int) -> None:
        self._file = file
        self.left = size

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` as far as there is something; return how far."""
        got = self._file.readinto(buffer[: self.left]) or 0
        self.left -= got
        return got


class _Packed:
    """Records that perf record -z compressed, from where a file is, and what stands between them.

    All are one zstd stream, and each begins where the one before ended. `left` counts what is
    packed.
    """

    def __init__(self, path: Path, file: RawIOBase, offset: int, size: int) -> None:
        # It takes longer to import than a small file to read.
        from zstandard import ZstdDecompressor, ZstdError

        file.seek(offset)
        self.left = size
        self._path, self._file, self._offset = path, file, offset
        self._decoder = ZstdDecompressor().decompressobj()
        self._error = ZstdError
        self._input = b""
        self._at = 0
        self._ready: list[bytes] = []
        self._taken = self._given = 0

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` as far as there is something; return how far."""
        while not self._ready:
            record = self._record()
            if record is None:
                return 0
            self._ready = list(self._unpacked(record))[::-1]
        content = self._ready.pop()
        got = min(len(content), len(buffer))
        buffer[:got] = content[:got]
        if got < len(content):
            self._ready.append(content[got:])
        return got

    def _record(self) -> bytes | None:
        """Return the next whole record, None where there is none."""
        if not self._has(8):
            return None
        size = _RECORD.unpack_from(self._input, self._at)[2]
        if size < 8 or not self._has(size):
            return None
        record = self._input[self._at : self._at + size]
        self._at += size
        self.left -= size
        self._offset += size
        return record

    def _has(self, size: int) -> bool:
        """Read until so many bytes are there; return whether they are."""
        while len(self._input) - self._at < size <= self.left:
            more = self._file.read(_PIECE)
            if not more:
                return False
            self._input = self._input[self._at :] + more
            self._at = 0
        return size <= self.left

    def _unpacked(self, record: bytes) -> Iterator[bytes]:
        kind = _RECORD.unpack_from(record)[0]
        if kind not in (COMPRESSED, COMPRESSED2):
            yield record
            return
        begin, end = 8, len(record)
        if kind == COMPRESSED2 and len(record) >= 16:
            begin, end = 16, 16 + int.from_bytes(record[8:16], "little")
        try:
            for at in range(begin, min(end, len(record)), SLICE):
                content = self._decoder.decompress(record[at : min(at + SLICE, end)])
                self._taken += SLICE
                self._given += len(content)
                if self._given > RATIO_FREE + RATIO_MAX * self._taken:
                    raise PerfDataError(
                        f"{self._path}: its records unpack to more than {RATIO_MAX} times their "
                        "size, as perf's never do. It is refused."
                    )
                if content:
                    yield content
        except self._error as error:
            raise PerfDataError(
                f"{self._path}: what is compressed before byte {self._offset} is damaged: {error}."
            ) from None


def _fill(stream: _Plain | _Packed, buffer: memoryview) -> int:
    """Read until `buffer` is full or the stream ends; return how much."""
    got = 0
    while got < len(buffer):
        more = stream.readinto(buffer[got:])
        if not more:
            break
        got += more
    return got


def _walk(path: Path, offset: int, words: NDArray[np.uint64]) -> tuple[Piece, int]:
    """Find the records in `words`, up to the last whole one, and say what follows.

    That is _WHOLE, the next of them; _BROKEN, what can be none; or _PACKED, a compressed one.

    Samples of wait events have the size of the one before. So after a few that are alike, the first
    words of all that would follow at the same distance are compared at once: each that is alike
    proves where the next one begins. Otherwise records are walked by their sizes alone.
    """
    limit = len(words)
    walked: list[NDArray[np.int64]] = []
    runs: list[NDArray[np.int64]] = []  # of samples that are alike, one behind each of `walked`
    at = 0
    stretch = _STRETCH
    whole = True
    while at < limit and whole:
        places, at = _chain(words, at, min(at + stretch, limit))
        if at > limit:
            at = int(places[-1])
            places = places[:-1]
            whole = False
        walked.append(places)
        alike = words[places[-_FEW:]].tolist()
        run = step = 0
        if whole and alike.count(alike[0]) == _FEW and alike[0] & _KIND == SAMPLE:
            step = alike[0] >> 51
            if at < limit and words[at] == alike[0]:
                run = _run(words, at, step)
        runs.append(np.arange(at, at + run * step, step or 1))
        at += run * step
        stretch = _STRETCH if run else 2 * stretch
    state = _WHOLE if at == limit or words[at] >> np.uint64(51) else _BROKEN

    first = np.concatenate([np.empty(0, np.int64), *walked])
    heads = words.take(first)
    kind = heads & np.uint64(0xFFFF_FFFF)
    bad = heads & np.uint64(_KIND) != kind
    bad |= (kind == SAMPLE) & (heads >> np.uint64(51) < 2)
    cut = int(bad.argmax()) if bad.any() else len(first)
    # Sizes of compressed ones are odd.
    packed = np.isin(kind[: cut + 1], (COMPRESSED, COMPRESSED2))
    if packed.any():
        cut = int(packed.argmax())
    if cut < len(first):
        state = _PACKED if packed.any() else _BROKEN
        at = int(first[cut])
        del runs[np.searchsorted(np.cumsum([len(part) for part in walked]), cut, "right") :]
        first, heads, kind = first[:cut], heads[:cut], kind[:cut]

    samples = np.concatenate([first[kind == SAMPLE], *runs])
    if any(len(run) for run in runs):
        samples.sort(kind="stable")
    sizes = words[[int(run[0]) for run in runs if len(run)]] >> np.uint64(51)
    sizes = np.append(sizes, heads[kind == SAMPLE] >> np.uint64(51))
    shortest = int(sizes.min(initial=_HEAD // 8))
    first, kind = first[kind != SAMPLE], kind[kind != SAMPLE]
    tasks, names, others, traces = (
        first[np.isin(kind, kinds)].tolist()
        for kinds in (
            (FORK, EXIT), (MMAP, MMAP2, COMM), (LOST, LOST_SAMPLES, FINISHED_ROUND), (AUXTRACE,)
        )
    )  # fmt: skip
    if traces:
        raise PerfDataError(
            f"{path} holds a hardware trace (AUXTRACE at byte {offset + 8 * traces[0]}), which is "
            "not read here. Record the wait events without it."
        )
    return Piece(offset, words, samples, shortest, tasks, names, others, offset + 8 * at), state


def _chain(words: NDArray[np.uint64], at: int, until: int) -> tuple[NDArray[np.int64], int]:
    """Return where records begin, from `at` to before `until`, and where the last one ends.

    That is behind all words where its size is 0. Whatever looks like a record's first word is
    taken for one, as few others do; then all from which one leads to the next are right at once.
    """
    part = words[at:until]
    looks = (part & np.uint64(_NOT_HEAD) == 0) & (part >= np.uint64(1 << 51))
    heads = np.flatnonzero(looks)
    ends = heads + (part[heads] >> np.uint64(51)).astype(np.int64)
    right = (ends >= len(part)) | looks.take(ends, mode="clip")
    heads, ends = at + heads[right], at + ends[right]
    strays = np.append(np.flatnonzero(heads[1:] != ends[:-1]), len(heads) - 1).tolist()
    places = [heads[:0]]
    while at < until:
        first = int(np.searchsorted(heads, at))
        if first < len(heads) and heads[first] == at:
            last = strays[bisect_left(strays, first)]
            places.append(heads[first : last + 1])
            at = int(ends[last])
        else:
            places.append(np.array([at]))
            at += int(words[at]) >> 51 or len(words) + 1
    return np.concatenate(places), at


def _run(words: NDArray[np.uint64], at: int, step: int) -> int:
    """Return how many whole records, one each `step` words from `at` on, begin like the first."""
    firsts = words[at : len(words) - step + 1 : step]
    done, block = 0, 512
    while done < len(firsts):
        differ = firsts[done : done + block] != firsts[0]
        first = int(differ.argmax())
        if differ[first]:
            return done + first
        done += len(differ)
        block *= 4
    return done


class _Cursor:
    """Read numbers and strings out of a header section, never behind its end."""

    def __init__(self, path: Path, offset: int, what: str, data: bytes) -> None:
        self.data = data
        self._where = path, offset, what
        self._at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self._at

    def bytes(self, size: int) -> bytes:
        if size > len(self.data) - self._at:
            path, offset, what = self._where
            raise PerfDataError(
                f"{path}: {what} at byte {offset} wants {size} bytes at {self._at} but has "
                f"{len(self.data)} in all. The file is damaged."
            )
        self._at += size
        return self.data[self._at - size : self._at]

    def u32(self) -> int:
        return int.from_bytes(self.bytes(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.bytes(8), "little")

    def count(self, each: int) -> int:
        """Return a 32-bit count of things that have at least `each` bytes."""
        count = self.u32()
        if count * each > len(self.data) - self._at:
            self.bytes(count * each)
        return count

    def string(self) -> str:
        """Return a string that its length stands before."""
        return self.bytes(self.u32()).split(b"\0")[0].decode(errors="replace")

    def cstring(self) -> str:
        end = self.data.find(b"\0", self._at)
        if end < 0:
            end = len(self.data)
        return self.bytes(end + 1 - self._at)[:-1].decode(errors="replace")


class _Sections:
    """The parts of an open file that are found through its header."""

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self.file = file
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            raise PerfDataError(f"{path} is not a regular file; write it to one first.")
        self.size = state.st_size

    def header(self) -> bytes:
        path, size = self.path, self.size
        if size == 0:
            raise PerfDataError(f"{path} is empty: perf was killed before it wrote anything.")
        header = _pread(self.file, 0, _HEADER)
        if header[:8] == MAGICS[1]:
            raise PerfDataError(
                f"{path} was recorded on a big-endian machine, which is not read here. Record on "
                "a little-endian one, as x86-64 is."
            )
        if header[:8] != MAGICS[0]:
            raise PerfDataError(f"{path} is not a perf.data file: it does not begin with PERFILE2.")
        if header[8:16] == struct.pack("<Q", _PIPE_HEADER):
            return header[:_PIPE_HEADER]
        if len(header) < _HEADER or header[8:16] != struct.pack("<Q", _HEADER):
            raise PerfDataError(
                f"{path}: the header of a perf.data file has {_HEADER} bytes; this file has {size} "
                f"and its header says {int.from_bytes(header[8:16], 'little')}. It is damaged or "
                "was cut short before anything was recorded."
            )
        return header

    def read(self, offset: int, size: int, what: str) -> _Cursor:
        if offset + size > self.size or size > _SECTION_MAX:
            raise PerfDataError(
                f"{self.path}: {what} should be {size} bytes at byte {offset}, but the file has "
                f"{self.size} bytes. It is damaged or was cut short."
            )
        return _Cursor(self.path, offset, what, _pread(self.file, offset, size))

    def features(self, bits: int, table_at: int) -> tuple[dict[int, _Cursor], int]:
        """Return the sections that are used, and how many of all the file was cut before.

        The table behind the data has offset and size of each section whose bit is set.
        """
        found: dict[int, _Cursor] = {}
        missing = 0
        used = {_TRACING_DATA, _BUILD_ID, _NRCPUS, _CMDLINE, _EVENT_DESC, *_STRINGS}
        present = [bit for bit in range(_FEATURE_BITS) if bits >> bit & 1]
        for number, bit in enumerate(present):
            entry = _pread(self.file, table_at + 16 * number, 16)
            if len(entry) < 16:
                return found, missing + len(present) - number
            offset, size = struct.unpack("<2Q", entry)
            if offset + size > self.size:
                missing += 1
            elif bit in used:
                found[bit] = self.read(offset, size, f"header section {bit}")
        return found, missing


def _pread(file: int, offset: int, size: int) -> bytes:
    parts = []
    while size and (part := os.pread(file, size, offset)):
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return b"".join(parts)


@dataclass(frozen=True)
class _Attr:
    """What is used of a struct perf_event_attr, and the event's ids."""

    type: int
    config: int
    period: int
    sample_type: int
    read_format: int
    registers: int
    sample_id_all: bool
    backward: bool
    clock: str
    ids: tuple[int, ...]


def _attr(data: bytes, ids: tuple[int, ...]) -> _Attr:
    kind, _, config, period, sample_type, read_format, flags = struct.unpack_from("<2I5Q", data)
    clock = "perf"
    if flags >> 25 & 1 and len(data) >= 96:
        number = int.from_bytes(data[92:96], "little", signed=True)
        clock = _CLOCKS.get(number, f"clock {number}")
    registers = int.from_bytes(data[80:88], "little")
    sample_id_all, backward = bool(flags >> 18 & 1), bool(flags >> 27 & 1)
    return _Attr(
        kind,
        config,
        period,
        sample_type,
        read_format,
        registers,
        sample_id_all,
        backward,
        clock,
        ids,
    )


def _event_names(cursor: _Cursor) -> list[str]:
    count, attr_size = cursor.u32(), cursor.u32()
    names = []
    for _ in range(count):
        cursor.bytes(attr_size)
        ids = cursor.u32()
        names.append(cursor.string())
        cursor.bytes(8 * ids)
    return names


def _build_ids(cursor: _Cursor) -> dict[str, str]:
    """Return build-ids by path, of struct perf_record_header_build_id one after the other."""
    found = {}
    while cursor.left >= 36:
        head = cursor.bytes(8)
        misc, size = struct.unpack_from("<2H", head, 4)
        body = cursor.bytes(max(size - 8, 28))
        # Byte 20 of the id is its size if that flag is set (MISC_BUILD_ID_SIZE).
        length = min(body[24], 20) if misc & 1 << 15 else 20
        path = body[28:].split(b"\0")[0].decode(errors="backslashreplace")
        found[path] = body[4 : 4 + length].hex()
    return found


def _tracing_formats(cursor: _Cursor) -> dict[int, tuple[str, dict[str, Field]]]:
    """Return name and fields of the tracepoints by id, from the layout of trace.dat version 0.6."""
    cursor.bytes(10)  # \x17\x08\x44 "tracing"
    cursor.cstring()  # version
    cursor.bytes(1 + 1 + 4)  # endianness, size of a long, size of a page
    for _ in ("header_page", "header_event"):
        cursor.cstring()
        cursor.bytes(cursor.u64())
    for _ in range(cursor.count(8)):
        cursor.bytes(cursor.u64())  # ftrace's own events
    formats = {}
    for _ in range(cursor.count(5)):
        system = cursor.cstring()
        for _ in range(cursor.count(8)):
            text = cursor.bytes(cursor.u64()).decode(errors="replace")
            name = re.search(r"^name: (\S+)$", text, re.MULTILINE)
            number = re.search(r"^ID: (\d{1,19})$", text, re.MULTILINE)
            if name and number:
                formats[int(number[1])] = (f"{system}:{name[1]}", format_fields(text))
    return formats


def format_fields(text: str) -> dict[str, Field]:
    """Return the fields of a tracepoint's format file, but not those that are arrays."""
    lines = re.finditer(
        r"^\tfield:(__data_loc char\[\])?[^;\n]*?(?<!\w)(\w++);"
        r"\toffset:(\d{1,5});\tsize:(\d{1,5});\tsigned:([01]);$",
        text,
        re.MULTILINE,
    )
    return {
        m[2]: Field(m[2], int(m[3]), int(m[4]), m[5] == "1", bool(m[1]) and m[4] == "4")
        for m in lines
    }


def _events(
    attrs: Sequence[_Attr],
    names: Sequence[str],
    formats: Mapping[int, tuple[str, dict[str, Field]]],
    fallback: Mapping[str, Mapping[str, Field]],
) -> list[Event]:
    """Name the events: tracepoints by their format, others as perf was asked for them."""
    spare = iter(fallback.items())
    events = []
    for index, attr in enumerate(attrs):
        fields: Mapping[str, Field] = {}
        if index < len(names):
            name = names[index]
        else:
            name = _SOFTWARE.get(attr.config, "") if attr.type == _TYPE_SOFTWARE else ""
        if attr.type == _TYPE_TRACEPOINT:
            name, fields = formats.get(attr.config) or next(spare, (name, fields))
        elif attr.type == _TYPE_BREAKPOINT:
            name, fields = name or "mem:", _breakpoint_fields(attr)
        name = name or f"event {index}"
        events.append(
            Event(index, name, attr.ids, attr.sample_type, attr.read_format, fields, attr.period)
        )
    return events


def _breakpoint_fields(attr: _Attr) -> dict[str, Field]:
    """Return where ip and registers are; the word before these says of how many bits they are."""
    layout = Layout(attr.sample_type, attr.read_format)
    at = {}
    if layout.ip_at:
        at["ip"] = layout.ip_at
    if attr.sample_type & _REGS_USER and not attr.sample_type & _BEFORE_REGS:
        names = [n for bit, n in enumerate(_REGISTERS.split()) if attr.registers >> bit & 1]
        at |= {name: layout.fixed + 1 + i for i, name in enumerate(names)}
    return {name: Field(name, 8 * word, 8, False, raw=False) for name, word in at.items()}
