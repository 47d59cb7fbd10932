"""Read trace.dat without trace-cmd, on any system.

The file is laid out as trace-cmd.dat.v6(5) and trace-cmd.dat.v7(5) say, its pages as
include/linux/ring_buffer.h and kernel/trace/ring_buffer.c: behind a time and a size, records whose
first word has a type in its lower 5 bits and above them the ns since the record before. Where one
record ends the next begins, so the records of a page must be found one after the other; but no
page depends on another, and all pages of a piece are walked at the same time.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from io import RawIOBase
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from .errors import PerfDataError, WaitfoldError
from .events import EXIT, FORK, PID_MAX, Column, Rule, Source, Transitions, TransitionStream, Use
from .inputs import RATIO_FREE, RATIO_MAX, SPOOL_MAX, Reread
from .perfdata import Field, format_fields

MAGIC = b"\x17\x08\x44tracing"

# Option ids, trace-cmd-private.h; only those used.
_DONE, _CPUSTAT, _BUFFER, _TRACECLOCK, _HEADER_INFO, _EVENT_FORMATS = 0, 2, 3, 4, 16, 18
_CLOCKS = {"mono": "CLOCK_MONOTONIC", "mono_raw": "CLOCK_MONOTONIC_RAW", "boot": "CLOCK_BOOTTIME"}

_PADDING, _TIME_EXTEND, _TIME_STAMP = 29, 30, 31  # types of records that are no events
_MISSED, _MISSED_STORED = 1 << 31, 1 << 30  # flags in a page's size
_SIZE = (1 << 27) - 1  # what is left of it for the size
_TIME_MAX = 1 << 62

_FORK_EVENT, _EXIT_EVENT = "sched:sched_process_fork", "sched:sched_process_exit"
_PART_MAX = 64 << 20  # no part of a header comes near this
_PAGE_MAX = 1 << 20
_CPUS_MAX = 1 << 16
_PIECE = 1 << 22  # bytes of pages that are walked together


@dataclass(frozen=True)
class TraceEvent:
    """An event that a trace.dat may hold."""

    name: str
    id: int
    fields: dict[str, Field]


@dataclass(frozen=True)
class Pages:
    """Where the pages of one CPU are: bytes `offset` to `offset + size` of a file.

    `lost` is how many events the kernel had no room for, as far as it said so.
    """

    cpu: int
    path: Path
    offset: int
    size: int
    lost: int


class TraceDat:
    """A trace.dat: what its header says when it is opened, its CPUs by `sources()`.

    `path` is the file, or a capture folder. In that of a recorder that was killed there is, in
    its place, trace.head and for each CPU trace.cpuN; these are read as they are. `cut` is a
    warning where the file was not written to its end. Of a flight recorder, `ring`, what was
    overwritten before a CPU's first page is no loss; from `since_ns` on all CPUs are known.
    `opener` opens what `path` names, where that is not the file itself.

    Raises PerfDataError where the file is none, damaged, or of a kind that is refused.
    """

    def __init__(
        self,
        path: str | Path,
        ring: bool = False,
        opener: Callable[[], RawIOBase] | None = None,
    ) -> None:
        self.path = Path(path)
        self._opener = opener
        self.ring = ring
        self.events: list[TraceEvent] = []
        self.cpus: list[Pages] = []
        self.info: dict[str, str] = {}
        self.cut: str | None = None
        parts: dict[int, Path] = {}
        if self.path.is_dir():
            folder = self.path
            for part in folder.glob("trace.cpu*"):
                if re.fullmatch(r"[0-9]{1,5}", part.name[9:]):
                    parts[int(part.name[9:])] = part
            self.path = folder / "trace.dat"
            if not self.path.exists() and (folder / "trace.head").exists():
                self.path = folder / "trace.head"
        try:
            with self.open(self.path) as file:
                self._open(_Head(self.path, file.fileno()), parts)
            self.since_ns = self._since() if ring else 0
        except OSError as error:
            raise PerfDataError(f"{self.path} cannot be read: {error.strerror}.") from error

    def unpacked(self, opener: Callable[[], RawIOBase]) -> None:
        """Take where the pages are, if they are not in the file itself."""
        self._opener = opener

    def open(self, path: Path) -> RawIOBase:
        """Open the file, or one of those beside it."""
        if self._opener and path == self.path:
            return self._opener()
        return path.open("rb", buffering=0)

    def _open(self, head: _Head, parts: dict[int, Path]) -> None:
        if self._first(head) == 7:
            self.cpus = _Version7(self, head).cpus()
            return
        self.describe_pages(head)
        self.read_formats(head)
        head.skip(head.number(4))  # kallsyms
        head.skip(head.number(4))  # formats of trace_printk
        unfinished = bool(parts) or self.path.name == "trace.head"
        if unfinished:
            self.cut = (
                f"{self.path} was not finished: its recorder was killed, or the disk was full. "
                "All that was recorded till then is read."
            )
        table = self._table(head) if head.left or not unfinished else []
        for pages in table:
            if pages.cpu not in parts:
                self._add(self.there(pages, head.size))
        for cpu, path in sorted(parts.items()):
            self._add(Pages(cpu, path, 0, path.stat().st_size, 0))

    def there(self, pages: Pages, size: int) -> Pages:
        """Return the part of a CPU's pages that a file of `size` bytes has."""
        if pages.offset + pages.size > size:
            self.cut = (
                f"{self.path} was cut short: CPU {pages.cpu} should have {pages.size} bytes at "
                f"byte {pages.offset}, but the file has {size}. What is there is read."
            )
        begin = min(pages.offset, size)
        return replace(pages, offset=begin, size=min(pages.size, size - begin))

    def _add(self, pages: Pages) -> None:
        """Take the pages that are whole: the last one of a recorder that was killed may not be."""
        self.cpus.append(replace(pages, size=pages.size // self.page_size * self.page_size))

    def _since(self) -> int:
        """Return from when on all CPUs are known, as far as they have lost what was before.

        That begins with a CPU's first page, or with its second one: the first may be the rest of
        one that an earlier dump has taken a part of.
        """
        since = 0
        for pages in self.cpus:
            with self.open(pages.path) as file:
                for page in range(min(2, pages.size // self.page_size)):
                    file.seek(pages.offset + page * self.page_size)
                    time, state = struct.unpack("<QI", (file.read(12) or b"").ljust(12, b"\0"))
                    if state & _MISSED:
                        since = max(since, time)
        return min(since, _TIME_MAX)

    def _first(self, head: _Head) -> int:
        """Read magic number, version and sizes; return the version."""
        if head.size == 0:
            raise PerfDataError(f"{self.path} is empty: nothing was written to it.")
        if head.bytes(min(len(MAGIC), head.size)) != MAGIC:
            raise PerfDataError(f"{self.path} is not a trace.dat file: it does not begin as one.")
        version = head.string()
        if version not in ("6", "7"):
            raise PerfDataError(
                f"{self.path} is a trace.dat of version {version[:20]}, and 6 and 7 are read here. "
                f"To make one: trace-cmd convert --file-version 7 -i {self.path} -o NEW.dat"
            )
        if head.number(1):
            raise PerfDataError(
                f"{self.path} was recorded on a big-endian machine, which is not read here. Record "
                "on a little-endian one, as x86-64 is."
            )
        self._long_size = head.number(1)
        self.page_size = head.number(4)
        self.info["page_size"] = str(self.page_size)
        if self.page_size & (self.page_size - 1) or not 512 <= self.page_size <= _PAGE_MAX:
            raise head.damaged(f"the size of a page is {self.page_size}")
        return int(version)

    def describe_pages(self, head: _Head) -> None:
        """Read how pages and records look."""
        long_size = self._long_size
        page = self._described(head, "header_page")
        fields = format_fields(page)
        data = fields.get("data")
        if (
            (fields.get("timestamp"), fields.get("commit"))
            != (Field("timestamp", 0, 8, False), Field("commit", 8, long_size, True))
            or data is None
            or data.offset != 8 + long_size
            or long_size not in (4, 8)
            or "type_len    :    5 bits" not in self._described(head, "header_event")
        ):
            raise PerfDataError(
                f"{self.path} describes its pages in a way that is not known here. It is damaged, "
                "or of a kernel that is newer than this waitfold: use a newer one."
            )
        self.data_at = data.offset

    def _described(self, head: _Head, name: str) -> str:
        if head.string() != name:
            raise head.damaged(f"{name} should stand")
        return head.text(head.number(8))

    def read_formats(self, head: _Head, own: bool = True) -> None:
        """Read the events' formats, behind those of ftrace's `own`."""
        for _ in range(head.count(8) if own else 0):
            head.skip(head.number(8))
        for _ in range(head.count(5)):
            system = head.string()
            for _ in range(head.count(8)):
                text = head.text(head.number(8))
                name = re.search(r"^name: (\S+)$", text, re.MULTILINE)
                number = re.search(r"^ID: (\d{1,5})$", text, re.MULTILINE)
                if name and number:
                    event = TraceEvent(f"{system}:{name[1]}", int(number[1]), format_fields(text))
                    self.events.append(event)

    def _table(self, head: _Head) -> list[Pages]:
        """Return where the pages of all CPUs are, and what they lost."""
        lost: dict[tuple[str, int], int] = {}
        buffers = [("", 0)]  # name and place of the tables; the first one follows the options
        head.skip(head.number(8))  # names of processes
        cpus = head.number(4)
        if cpus > _CPUS_MAX:
            raise head.damaged(f"a number of {cpus} CPUs")
        of = ""
        kind = head.bytes(10)
        if kind == b"options  \0":
            while option := head.number(2):
                size = head.number(4)
                if option == _CPUSTAT:
                    of = _lost(head.text(size), of, lost)
                elif option == _BUFFER and size >= 8:
                    place = head.number(8)
                    buffers.append((head.text(size - 8).rstrip("\0"), place))
                elif option == _TRACECLOCK:
                    self.name_clock(head.text(size))
                else:
                    head.skip(size)
            kind = head.bytes(10)
        found = []
        for name, place in buffers:
            if place:
                head.go(place)
                kind = head.bytes(10)
            if kind != b"flyrecord\0":
                raise head.damaged("the table of the CPUs should stand")
            for cpu in range(cpus):
                at, size = head.number(8), head.number(8)
                found.append(Pages(cpu, self.path, at, size, lost.get((name, cpu), 0)))
        return found

    def name_clock(self, text: str) -> None:
        """Take the clock from what trace_clock holds, which marks it so: [mono]."""
        match = re.search(r"\[(\w+)\]", text)
        clock = match[1] if match else "local"
        self.info["clockid"] = _CLOCKS.get(clock, f"clock {clock}")

    def sources(self, rule: Rule, stream: TransitionStream) -> Sequence[Source]:
        """Return a source for each CPU.

        Raises WaitfoldError where the file does not have what the rule names.
        """
        wanted = _wanted(self, rule)
        # Of many CPUs smaller pieces, as something of each is held until it can be put in order.
        piece = min(_PIECE, max(8 * _PIECE // max(len(self.cpus), 1), 1 << 16))
        pages = piece // self.page_size or 1
        buffer = np.empty(pages * self.page_size // 4, np.uint32)
        return [_CpuSource(self, cpu, wanted, stream, buffer) for cpu in self.cpus]


def _lost(text: str, of: str, lost: dict[tuple[str, int], int]) -> str:
    """Take from a CPU's stats what it lost, of buffer `of`; return the buffer that they are of."""
    if match := re.search(r"^Buffer: (.*)$", text, re.MULTILINE):
        return match[1]
    if match := re.search(r"^CPU: (\d{1,5})$", text, re.MULTILINE):
        numbers = re.findall(r"overrun: (\d{1,18})$", text, re.MULTILINE)
        lost[of, int(match[1])] = sum(map(int, numbers))
    return of


class _Version7:
    """The sections of a trace.dat of version 7, trace-cmd.dat.v7(5), which may be compressed."""

    def __init__(self, data: TraceDat, head: _Head) -> None:
        self._data = data
        self._head = head
        self._packing = head.string()
        head.string()  # its version
        if self._packing not in ("none", "zstd", "zlib"):
            raise PerfDataError(
                f"{data.path} is compressed by {self._packing[:20]!r}, and zstd and zlib are read "
                f"here. trace-cmd convert --compression none -i {data.path} -o NEW.dat unpacks it"
            )

    def cpus(self) -> list[Pages]:
        """Read all sections; return where the pages of all CPUs are."""
        data, head = self._data, self._head
        lost: dict[tuple[str, int], int] = {}
        buffers: list[bytes] = []
        places: dict[int, int] = {}
        of = ""
        place = head.number(8)
        seen: set[int] = set()
        while place and place not in seen:
            seen.add(place)
            options = self._section(place)
            place = 0
            while options.left >= 6:
                option, size = options.number(2), options.number(4)
                content = options.bytes(size)
                if option == _DONE:
                    place = int.from_bytes(content[:8], "little")
                    break
                if option == _CPUSTAT:
                    of = _lost(content.decode(errors="replace"), of, lost)
                elif option == _BUFFER:
                    buffers.append(content)
                elif option == _TRACECLOCK:
                    data.name_clock(content.decode(errors="replace"))
                elif option in (_HEADER_INFO, _EVENT_FORMATS):
                    places[option] = int.from_bytes(content[:8], "little")
        for option in (_HEADER_INFO, _EVENT_FORMATS):
            if option not in places:
                raise head.damaged(f"no section {option} is named")
        data.describe_pages(self._section(places[_HEADER_INFO]))
        data.read_formats(self._section(places[_EVENT_FORMATS]), own=False)
        spool = tempfile.TemporaryFile(prefix="waitfold-")  # noqa: SIM115
        found = []
        for content in buffers:
            for pages, packed in self._buffer(content, lost):
                whole = data.there(pages, head.size)
                if packed:
                    whole = self._unpacked(whole, spool)
                found.append(replace(whole, size=whole.size // data.page_size * data.page_size))
        if spool.tell():
            spool.flush()
            data.unpacked(lambda: Reread(spool.fileno()))
        return found

    def _section(self, place: int) -> _Head:
        head = self._head
        head.go(place)
        _, flags = head.number(2), head.number(2)
        head.skip(4)
        size = head.number(8)
        if not flags & 1:
            return _Head(self._data.path, head.bytes(size))
        size, full = head.number(4), head.number(4)
        return _Head(self._data.path, self._unpack(head.bytes(size), full))

    def _buffer(
        self, content: bytes, lost: dict[tuple[str, int], int]
    ) -> Iterator[tuple[Pages, bool]]:
        """Yield the pages of an option BUFFER, as they are in the file, and whether packed."""
        data, option = self._data, _Head(self._data.path, content)
        place = option.number(8)
        name = option.string()
        option.string()  # its clock
        if option.number(4) != data.page_size:
            raise option.damaged("the size of a page is another than the file's")
        self._head.go(place)
        packed = bool(self._head.number(4) >> 16 & 1)
        for _ in range(option.count(20)):
            cpu, offset, size = option.number(4), option.number(8), option.number(8)
            yield Pages(cpu, data.path, offset, size, lost.get((name, cpu), 0)), packed

    def _unpacked(self, pages: Pages, spool: IO[bytes]) -> Pages:
        """Unpack a CPU's pages into a file; return where they are there."""
        begin = spool.tell()
        if pages.size >= 4:
            head = self._head
            head.go(pages.offset)
            for _ in range(head.number(4)):
                size, full = head.number(4), head.number(4)
                spool.write(self._unpack(head.bytes(size), full))
                if spool.tell() > SPOOL_MAX:
                    raise WaitfoldError(
                        f"{pages.path} unpacks to more than {SPOOL_MAX >> 30} GiB, which is "
                        "refused: it is damaged, or was recorded for too long"
                    )
        return replace(pages, offset=begin, size=spool.tell() - begin)

    def _unpack(self, content: bytes, size: int) -> bytes:
        """Return `size` bytes that were packed."""
        # It takes longer to import than a small file to read.
        from zstandard import ZstdDecompressor, ZstdError, frame_content_size

        if size > min(_PART_MAX, RATIO_FREE + RATIO_MAX * len(content)):
            raise self._head.damaged(f"ends what unpacks to {size} bytes")
        try:
            if self._packing == "zlib":
                full = zlib.decompressobj().decompress(content, size)
            elif frame_content_size(content) > size:
                full = b""
            else:
                full = ZstdDecompressor().decompress(content, max_output_size=size)
        except (ZstdError, zlib.error) as error:
            raise self._head.damaged(f"ends what is packed wrongly ({error})") from None
        if len(full) != size:
            raise self._head.damaged(f"ends what does not unpack to {size} bytes")
        return full


class _Head:
    """Read numbers and texts from the start of a file, or of bytes, on, never behind the end."""

    def __init__(self, path: Path, content: int | bytes) -> None:
        if isinstance(content, bytes):
            self.size = len(content)
            self._read: Callable[[int, int], bytes] = lambda size, at: content[at : at + size]
        else:
            state = os.fstat(content)
            if not stat.S_ISREG(state.st_mode):
                raise PerfDataError(f"{path} is not a regular file; write it to one first.")
            self.size = state.st_size
            self._read = lambda size, at: os.pread(content, size, at)
        self._path, self._at = path, 0

    @property
    def left(self) -> int:
        return self.size - self._at

    def damaged(self, what: str) -> PerfDataError:
        return PerfDataError(f"{self._path}: at byte {self._at} {what}. The file is damaged.")

    def skip(self, size: int) -> None:
        if size > self.left:
            raise PerfDataError(
                f"{self._path}: {size} bytes should stand at byte {self._at}, but the file has "
                f"{self.size}. It is damaged or was cut short."
            )
        self._at += size

    def go(self, place: int) -> None:
        self._at = 0
        self.skip(place)

    def bytes(self, size: int) -> bytes:
        self.skip(size)
        if size > _PART_MAX:
            raise self.damaged(f"ends a part of {size} bytes")
        return self._read(size, self._at - size)

    def number(self, size: int) -> int:
        return int.from_bytes(self.bytes(size), "little")

    def count(self, each: int) -> int:
        """Return a 32-bit count of things that have at least `each` bytes."""
        count = self.number(4)
        if count * each > self.left:
            self.skip(count * each)
        return count

    def text(self, size: int) -> str:
        return self.bytes(size).decode(errors="replace")

    def string(self) -> str:
        """Return a string that a NUL ends."""
        found, end, _ = self._read(256, self._at).partition(b"\0")
        if not end:
            raise self.damaged("a name should end")
        self._at += len(found) + 1
        return found.decode(errors="replace")


@dataclass(frozen=True)
class _Wanted:
    """An event of the rule, or one that makes a mark."""

    event: TraceEvent
    fields: list[Field]
    use: Use | None
    mark: int
    thread: Field


def _wanted(data: TraceDat, rule: Rule) -> list[_Wanted]:
    """Return the events of a file that the rule names, and those of processes."""
    wanted = []
    for use in rule.uses:
        found = [event for event in data.events if fnmatchcase(event.name, use.event)]
        if not found:
            raise WaitfoldError(
                f"{data.path} has no event {use.event}. It has: "
                f"{listed([e.name for e in data.events])}. Name the one that wait events begin "
                "with as --start and that which ends them as --end."
            )
        for event in found:
            fields = [_field(data, event, name, string=True) for name in use.fields]
            thread = _field(data, event, "common_pid")
            wanted.append(_Wanted(event, fields, use, use.mark, thread))
    for event in data.events:
        if event.name == _FORK_EVENT:
            wanted.append(_Wanted(event, [], None, FORK, _field(data, event, "child_pid")))
        elif event.name == _EXIT_EVENT:
            wanted.append(_Wanted(event, [], None, EXIT, _field(data, event, "common_pid")))
    return wanted


def _field(data: TraceDat, event: TraceEvent, name: str, string: bool = False) -> Field:
    field = event.fields.get(name)
    if field is None:
        known = ", ".join(n for n in event.fields if not n.startswith("common_"))
        raise WaitfoldError(
            f"{data.path}: {event.name} has no field {name}. It has: {known or 'none'}. Name the "
            "one that holds the wait event as --value."
        )
    if field.size not in (1, 2, 4, 8) or (field.string and not string):
        raise WaitfoldError(
            f"{data.path}: the field {name} of {event.name} has {field.size} bytes and is no "
            "number. Name the one that holds the wait event as --value."
        )
    return field


def listed(names: Sequence[str]) -> str:
    """Return names of events for people; a trace.dat may describe hundreds that it has none of."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return (", ".join(names[:20]) or "no events") + more


class _CpuSource:
    """The transitions of one CPU."""

    def __init__(
        self,
        data: TraceDat,
        pages: Pages,
        wanted: list[_Wanted],
        stream: TransitionStream,
        buffer: NDArray[np.uint32],
    ) -> None:
        self.data_size = pages.size
        self.done = 0
        self.complete = -1
        self._data = data
        self._pages = pages
        self._wanted = wanted
        self._stream = stream
        self._buffer = buffer
        self._lost = 0
        self._begin = pages.offset  # of the pages that were read last
        self._table = np.zeros(1 << 16, np.uint8)
        for number, each in enumerate(wanted, 1):
            self._table[each.event.id] = number

    def read(self) -> Transitions | None:
        """Return the transitions of the next pages, None at the end."""
        words = self._fill()
        if not len(words):
            return None
        at, time = self._walk(words)
        # A record whose length does not fit into 5 bits has it in a word of its own.
        long = (words[at] & 31) == 0
        data = at + 1 + long
        event = self._table[words.take(data, mode="clip") & 0xFFFF]
        parts = []
        for number, wanted in enumerate(self._wanted, 1):
            rows = np.flatnonzero(event == number)
            if len(rows):
                parts.append((rows, self._decode(words, wanted, at[rows], data[rows], time[rows])))
        if len(parts) == 1:
            return parts[0][1]
        if not parts:
            return Transitions(*(np.empty(0, kind) for kind in ("i8", "u8", "u4", "u1")))
        order = np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable")
        return Transitions(
            *(
                np.concatenate([getattr(batch, column) for _, batch in parts])[order]
                for column in ("time_ns", "thread", "value", "mark")
            )
        )

    def close(self) -> None:
        """Add up what was lost, once all is read: pages do not always have room for the count."""
        lost = self._lost if self._data.ring else max(self._lost, self._pages.lost)
        self._stream.lost += lost

    def _fill(self) -> NDArray[np.uint32]:
        """Read whole pages; none at the end."""
        size = min(self._buffer.nbytes, self.data_size - self.done)
        content = self._buffer.data.cast("B")[:size]
        got = 0
        with self._data.open(self._pages.path) as file:
            file.seek(self._pages.offset + self.done)
            while got < size and (more := file.readinto(content[got:])):
                got += more
        self._begin = self._pages.offset + self.done
        self.done += got
        return self._buffer[: got // self._data.page_size * self._data.page_size // 4]

    def _walk(self, words: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the events begin, and their times.

        Most pages hold events of one length. Where that ends, all pages take one step at a time,
        from each its next record.
        """
        each, first = self._data.page_size // 4, self._data.data_at // 4
        page = np.arange(0, len(words), each)
        state = words[page + 2]
        size = (state & _SIZE).astype(np.int64)
        begun = words[page].astype(np.int64) | words[page + 1].astype(np.int64) << 32
        bad = (size > self._data.page_size - self._data.data_at) | (size % 4 != 0)
        bad |= (size > 0) & ((begun < 0) | (begun > _TIME_MAX))
        if bad.any():
            raise self._damaged(int(page[bad.argmax()]), "is no page of a ring buffer")

        is_event = np.zeros(len(words), np.bool_)
        time_at = np.empty(len(words), np.int64)
        at, ended = self._alike(words, size, begun, is_event, time_at)
        end = page + first + size // 4
        row = np.flatnonzero(at < end)
        at, end, time = at[row], end[row], ended[row]
        while len(row):
            head = words[at]
            kind = (head & 31).astype(np.int64)
            time += head >> 5
            is_event[at] = True
            time_at[at] = time
            step = kind + 1
            rare = np.flatnonzero((kind == 0) | (kind >= _PADDING))
            if len(rare):
                step[rare], time[rare] = self._rare(words, at[rare], end[rare], time[rare])
                is_event[at[rare[kind[rare] != 0]]] = False
            at += step
            if (at >= end).any():
                if (at > end).any():
                    raise self._damaged(
                        int((at - step)[(at > end).argmax()]), "ends behind its page"
                    )
                ended[row] = time
                going = at < end
                row, at, end, time = row[going], at[going], end[going], time[going]
        self._gaps(words, page, begun, ended, size)
        events = np.flatnonzero(is_event)
        return events, time_at[events]

    def _alike(
        self,
        words: NDArray[np.uint32],
        size: NDArray[np.int64],
        begun: NDArray[np.int64],
        is_event: NDArray[np.bool_],
        time_at: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take down the events at the start of each page that are as long as most.

        Return where in each page the walk goes on, and the time of the event before that.
        """
        each, first = self._data.page_size // 4, self._data.data_at // 4
        at = np.arange(0, len(words), each) + first
        kind = int(np.bincount(words[at[size > 0]] & 31, minlength=1).argmax())
        if not 0 < kind < _PADDING:
            return at, begun.copy()
        step = kind + 1
        heads = words.reshape(-1, each)[:, first::step]
        number = np.arange(heads.shape[1])
        # Each that is alike proves where the next one begins.
        alike = (heads & 31 == kind) & (number < (size // (4 * step))[:, None])
        run = np.where(alike.all(axis=1), len(number), alike.argmin(axis=1))
        time = begun[:, None] + np.cumsum(heads >> 5, axis=1, dtype=np.int64)
        time_at.reshape(-1, each)[:, first::step] = time
        is_event.reshape(-1, each)[:, first::step] = number < run[:, None]
        last = time[np.arange(len(at)), np.maximum(run, 1) - 1]
        return at + run * step, np.where(run > 0, last, begun)

    def _rare(
        self,
        words: NDArray[np.uint32],
        at: NDArray[np.int64],
        end: NDArray[np.int64],
        time: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return words and time of records that have a word of their own for a length or a time."""
        kind = words[at] & 31
        delta = (words[at] >> 5).astype(np.int64)
        rest = (kind == _PADDING) & (delta == 0)  # nothing more in this page
        if (~rest & (at + 2 > end)).any():
            raise self._damaged(int(at[(~rest & (at + 2 > end)).argmax()]), "ends behind its page")
        word = words.take(at + 1, mode="clip").astype(np.int64)
        step = np.where(kind >= _TIME_EXTEND, 2, 1 + (word + 3) // 4)
        step[rest] = (end - at)[rest]
        long = word << 27
        time = np.where(kind == _TIME_EXTEND, time + long, time)
        # An absolute time has 59 bits; those above are of the time before.
        high = time - delta & ~((1 << 59) - 1)
        time = np.where(kind == _TIME_STAMP, high | long | delta, time)
        if (time > _TIME_MAX).any():
            raise self._damaged(int(at[(time > _TIME_MAX).argmax()]), "has a time that cannot be")
        return step, time

    def _gaps(
        self,
        words: NDArray[np.uint32],
        page: NDArray[np.int64],
        begun: NDArray[np.int64],
        ended: NDArray[np.int64],
        size: NDArray[np.int64],
    ) -> None:
        """Take down what is missing before a page, and the newest time."""
        used = np.flatnonzero(size)
        if not len(used):
            return
        before = np.append(self.complete, ended[used[:-1]])
        state = words[page[used] + 2]
        for i in np.flatnonzero(state & np.uint32(_MISSED)).tolist():
            since, until = int(before[i]), int(begun[used[i]])
            if until > self._data.since_ns or not self._data.ring:
                # The count is behind the last record, where there is room for it.
                behind = int(page[used[i]]) + (self._data.data_at + int(size[used[i]])) // 4
                stored = int(state[i]) & _MISSED_STORED and behind % (self._data.page_size // 4)
                self._lost += int(words[behind]) if stored else 1
            self._stream.gaps.append((max(since, 0), until))
        self.complete = max(self.complete, int(ended[used].max()))

    def _decode(
        self,
        words: NDArray[np.uint32],
        wanted: _Wanted,
        at: NDArray[np.int64],
        data: NDArray[np.int64],
        time: NDArray[np.int64],
    ) -> Transitions:
        """Return the transitions of one event's records; `data` is where these carry what."""
        length = words[at] & 31
        size = 4 * length.astype(np.int64)
        long = length == 0
        size[long] = words[at[long] + 1].astype(np.int64) - 4
        need = max(f.offset + f.size for f in (wanted.thread, *wanted.fields))
        if (size < need).any():
            name = wanted.event.name
            raise self._damaged(int(at[(size < need).argmax()]), f"is too short for its {name}")
        thread = self._number(words, data, wanted.thread)
        if len(thread) and not 0 <= int(thread.min()) <= int(thread.max()) <= PID_MAX:
            bad = (thread < 0) | (thread > PID_MAX)
            raise self._damaged(int(at[bad.argmax()]), "has a thread that cannot be")
        if wanted.use is None:
            value = np.zeros(len(at), np.uint32)
        else:
            columns = [self._column(words, at, data, size, field) for field in wanted.fields]
            value = wanted.use.values(columns, len(at))
            stream = self._stream
            stream.samples += len(at)
            first, last = int(time.min()), int(time.max())
            stream.first_ns = first if stream.first_ns is None else min(first, stream.first_ns)
            stream.last_ns = last if stream.last_ns is None else max(last, stream.last_ns)
        # The kernel names the thread only. A backend's is the one of its process.
        both = thread.astype(np.uint64)
        both |= both << np.uint64(32)
        return Transitions(time, both, value, np.full(len(at), wanted.mark, np.uint8))

    def _column(
        self,
        words: NDArray[np.uint32],
        at: NDArray[np.int64],
        data: NDArray[np.int64],
        size: NDArray[np.int64],
        field: Field,
    ) -> Column:
        numbers = self._number(words, data, field)
        if not field.string:
            return numbers
        where = numbers.astype(np.int64)
        start, length = where & 0xFFFF, where >> 16
        if (start + length > size).any():
            bad = int(at[(start + length > size).argmax()])
            raise self._damaged(bad, f"is too short for its field {field.name}")
        content = words.data.cast("B")
        return [
            bytes(content[begin : begin + count - 1]) if count else None
            for begin, count in zip((4 * data + start).tolist(), length.tolist(), strict=True)
        ]

    def _number(
        self, words: NDArray[np.uint32], data: NDArray[np.int64], field: Field
    ) -> NDArray[np.integer]:
        if field.size == 4 and field.offset % 4 == 0:
            narrow = words.take(data + field.offset // 4)
            return narrow.view(np.int32) if field.signed else narrow
        places = (4 * data + field.offset)[:, None] + np.arange(field.size)
        kind = "i" if field.signed else "u"
        wide: NDArray[np.integer] = words.view(np.uint8)[places].view(f"<{kind}{field.size}")[:, 0]
        return wide

    def _damaged(self, word: int, what: str) -> PerfDataError:
        return PerfDataError(
            f"{self._pages.path}: what stands at byte {self._begin + 4 * word} {what}. The file is "
            "damaged."
        )
