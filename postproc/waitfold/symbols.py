"""Name addresses: by the symbols of ELF files, and by the kernel's own.

Which symbols count, how far each goes and which of several at one address is taken are perf's
rules (tools/perf/util/symbol-elf.c and symbol.c), so that a profile reads the same by either.
Symbols of a file are by their place in it, as memory maps have it, position-independent or not.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import WaitfoldError

KERNEL = "[kernel.kallsyms]"
"""What perf calls the kernel's own image."""

_DEBUG = Path("/usr/lib/debug")
_KALLSYMS = Path("/proc/kallsyms")
_KERNEL_NOTES = Path("/sys/kernel/notes")
_PAGE = 4096

# elf.h
_PT_LOAD = 1
_SYMTAB, _NOTE, _NOBITS, _DYNSYM = 2, 7, 8, 11  # SHT_
_ALLOC = 2  # SHF_
_RESERVED = 0xFF00  # SHN_LORESERVE
_NOTYPE, _OBJECT, _FUNC, _IFUNC = 0, 1, 2, 10  # STT_
_LOCAL, _GLOBAL, _WEAK = 0, 1, 2  # STB_
_HIDDEN = (1, 2)  # STV_INTERNAL, STV_HIDDEN
_GNU_BUILD_ID = 3  # NT_

_SYMBOL = np.dtype(
    {
        "names": ["name", "info", "other", "section", "value", "size"],
        "formats": ["<u4", "u1", "u1", "<u2", "<u8", "<u8"],
    }
)
_RELOCATION = np.dtype({"names": ["offset", "info", "addend"], "formats": ["<u8", "<u8", "<i8"]})
_MASK = (1 << 64) - 1

_NO_COLUMNS = (
    np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint8),
    np.empty(0, np.uint8),
)  # fmt: skip

# Kind and binding by the letter in kallsyms: of text and data, no others.
_KERNEL_KINDS = np.zeros((2, 256), np.uint8)
for _letter, _kind in (("T", _FUNC), ("W", _FUNC), ("D", _OBJECT), ("B", _OBJECT)):
    _KERNEL_KINDS[:, ord(_letter)] = _kind, _WEAK if _letter == "W" else _GLOBAL
    _KERNEL_KINDS[:, ord(_letter.lower())] = _kind, _WEAK if _letter == "W" else _LOCAL

_DIGITS = np.full(256, 0xFF, np.uint64)  # what each character is worth as one of hex
_DIGITS[list(b"0123456789abcdef")] = range(16)


class Rows(NamedTuple):
    """Columns of symbols; kinds and bindings as ELF has them.

    One that has no size ends where it starts. `names` are places in `text`, where each goes on to
    a zero: most are never read.
    """

    starts: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    names: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    bindings: NDArray[np.uint8]
    text: bytes


class Symbols:
    """Symbols in the order of their starts, one for each start."""

    def __init__(self, parts: Sequence[Rows] = ()) -> None:
        self._text = b"\0".join(part.text for part in parts)
        before = np.cumsum([0, *(len(part.text) + 1 for part in parts)])
        empty = Rows(*_NO_COLUMNS, b"")
        starts, ends, kinds, bindings = (
            np.concatenate([empty[i], *(part[i] for part in parts)]) for i in (0, 1, 3, 4)
        )
        names = np.concatenate(
            [empty.names, *(p.names + at for p, at in zip(parts, before.tolist(), strict=False))]
        )
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        # One without a size goes on to the next.
        last = (starts[-1:] + np.uint64(2 * _PAGE - 1)) & ~np.uint64(_PAGE - 1)
        self._ends = np.where(ends == starts, np.append(starts[1:], last), ends)
        self._names, kinds, bindings = names[order], kinds[order], bindings[order]
        self._worth = np.stack(
            [self._ends > starts, kinds != _NOTYPE, bindings != _WEAK, bindings == _GLOBAL], axis=1
        )
        # Those that start at one place stand together; there are `_count` of them from `_first` on.
        self._first = np.flatnonzero(np.append(starts[:1] >= 0, starts[1:] != starts[:-1]))
        self._count = np.diff(np.append(self._first, len(starts)))
        self._starts = starts[self._first]

    def __len__(self) -> int:
        """Return the number of symbols."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        """Yield start, end and name of each."""
        best = self._best(np.arange(len(self)))
        columns = (self._starts, self._ends[best], self._names[best])
        for start, end, name in zip(*(c.tolist() for c in columns), strict=True):
            yield start, end, _text(self._text, name)

    def names(self, addresses: NDArray[np.uint64]) -> list[str | None]:
        """Return the name for each address, None where there is none."""
        if not len(self):
            return [None] * len(addresses)
        at = np.maximum(np.searchsorted(self._starts, addresses, "right") - 1, 0)
        places, row = np.unique(at, return_inverse=True)
        best = self._best(places)
        known = (self._starts[at] <= addresses) & (addresses < self._ends[best][row])
        names = [_text(self._text, name) for name in self._names[best].tolist()]
        return [
            names[i] if found else None
            for i, found in zip(row.tolist(), known.tolist(), strict=True)
        ]

    def _best(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which symbol of those that start at each place is taken: choose_best_symbol."""

        def worth(i: int) -> tuple[list[bool], int, int]:
            name = _text(self._text, int(self._names[i]))
            return self._worth[i].tolist(), len(name.lstrip("_")) - len(name), len(name)

        best = self._first[places]
        for i in np.flatnonzero(self._count[places] > 1).tolist():
            first = int(best[i])
            best[i] = max(range(first, first + int(self._count[places[i]])), key=worth)
        return best


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    entry_size: int


class Elf:
    """What names come from in a 64-bit little-endian ELF file.

    Raises OSError where the file cannot be read, ValueError where it is none or is damaged.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = file.seek(0, os.SEEK_END)
        head = self._part(0, 64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        headers_at, sections_at = struct.unpack_from("<2Q", head, 32)
        _, header_count, section_size, section_count, names = struct.unpack_from("<5H", head, 54)
        self._loads: list[tuple[int, int, int]] = []  # address, size in memory, offset in the file
        for i in range(header_count):
            kind, _, offset, address, _, _, size, _ = struct.unpack(
                "<2I6Q", self._part(headers_at + 56 * i, 56)
            )
            if kind == _PT_LOAD:
                self._loads.append((address, size, offset))
        raw = [
            struct.unpack("<2I4Q2I2Q", self._part(sections_at + section_size * i, 64))
            for i in range(section_count)
        ]
        text = self._part(*raw[names][4:6]) if names < len(raw) else b""
        self._sections = [
            _Section(_text(text, name), kind, flags, address, offset, size, link, each)
            for name, kind, flags, address, offset, size, link, _, _, each in raw
        ]

    def _part(self, offset: int, size: int) -> bytes:
        if offset + size > self._size:
            raise ValueError(f"{size} bytes at {offset} of {self._size}")
        self._file.seek(offset)
        return self._file.read(size)

    def _content(self, section: _Section) -> bytes:
        return b"" if section.type == _NOBITS else self._part(section.offset, section.size)

    def _named(self, name: str) -> _Section | None:
        return next((s for s in self._sections if s.name == name), None)

    def _of_kind(self, kind: int) -> _Section | None:
        return next((s for s in self._sections if s.type == kind), None)

    @property
    def has_symtab(self) -> bool:
        """Return whether it has all symbols, and not only those that it exports."""
        return self._of_kind(_SYMTAB) is not None

    @property
    def build_id(self) -> str:
        """Return the build-id in hex, empty if it has none."""
        for section in self._sections:
            if section.type == _NOTE and (found := _build_id(self._content(section))):
                return found
        return ""

    @property
    def debug_link(self) -> str:
        """Return the name of the separate debug file, empty if it names none."""
        section = self._named(".gnu_debuglink")
        return _text(self._content(section), 0) if section else ""

    def symbols(self, mapped: Elf | None = None) -> list[Rows]:
        """Return .symtab's symbols and .dynsym's, by their places in the file that is mapped.

        That is the file itself, or another one of which this holds what was stripped.
        """
        tables = (self._of_kind(kind) for kind in (_SYMTAB, _DYNSYM))
        return [self._symbols(table, mapped or self) for table in tables if table is not None]

    def _table(self, section: _Section) -> tuple[NDArray[np.void], bytes]:
        if section.link >= len(self._sections):
            raise ValueError("symbols without a string table")
        content = self._content(section)
        rows = np.frombuffer(content, _SYMBOL, len(content) // _SYMBOL.itemsize)
        return rows, self._content(self._sections[section.link])

    def _symbols(self, section: _Section, mapped: Elf) -> Rows:
        rows, text = self._table(section)
        home = rows["section"]
        kind, binding = (
            column.astype(np.uint8) for column in (rows["info"] & 0xF, rows["info"] >> 4)
        )
        # What a section's number says of its symbols; the numbers from _RESERVED on are none.
        allocated = np.zeros(1 << 16, np.bool_)
        labelled = np.zeros(1 << 16, np.bool_)
        for i, own in enumerate(self._sections[:_RESERVED]):
            allocated[i] = own.flags & _ALLOC
            labelled[i] = "text" in own.name or "data" in own.name
        label = (kind == _NOTYPE) & labelled[home] & ~np.isin(rows["other"] & 3, _HIDDEN)
        wanted = np.isin(kind, (_FUNC, _IFUNC, _OBJECT)) | label
        rows_at = np.flatnonzero(wanted & (rows["name"] != 0) & allocated[home])
        rows, home, kind = rows[rows_at], home[rows_at], kind[rows_at]
        # Numbers of sections are the same in both files, their offsets are not.
        delta = np.zeros(1 << 16, np.uint64)
        for i, own in enumerate(mapped._sections[:_RESERVED]):
            delta[i] = own.offset - own.address & _MASK
        moved = delta[home]
        for address, size, offset in reversed(mapped._loads):
            inside = (rows["value"] >= address) & (rows["value"] - np.uint64(address) < size)
            moved[inside] = offset - address & _MASK
        starts = rows["value"] + moved
        names = rows["name"].astype(np.int64)
        return Rows(starts, starts + rows["size"], names, kind, binding[rows_at], text)

    def stubs(self) -> list[Rows]:
        """Return the entries of .plt, by which functions of other files are called: name@plt."""
        plt, relocations = self._named(".plt"), self._named(".rela.plt")
        exported = self._of_kind(_DYNSYM)
        if plt is None or relocations is None or exported is None:
            return []
        table, text = self._table(exported)
        content = self._content(relocations)
        entries = np.frombuffer(content, _RELOCATION, len(content) // _RELOCATION.itemsize)
        which = (entries["info"] >> np.uint64(32)).astype(np.int64)
        if len(which) and which.max() >= len(table):
            raise ValueError("a relocation of a symbol that is not there")
        # The first entry is the resolver's.
        starts = plt.offset + plt.entry_size * np.arange(1, len(which) + 1, dtype=np.uint64)
        stubs = [_bytes(text, at) + b"@plt\0" for at in table["name"][which].tolist()]
        names = np.cumsum([0, *map(len, stubs)])[:-1]
        kinds = np.full(len(which), _FUNC, np.uint8)
        bindings = np.full(len(which), _GLOBAL, np.uint8)
        ends = starts + np.uint64(plt.entry_size)
        return [Rows(starts, ends, names, kinds, bindings, b"".join(stubs))]


def _bytes(text: bytes, at: int) -> bytes:
    end = text.find(b"\0", at)
    return text[at : end if end >= 0 else len(text)]


def _text(text: bytes, at: int) -> str:
    return _bytes(text, at).decode(errors="backslashreplace")


def _build_id(notes: bytes) -> str:
    """Return the build-id among ELF notes in hex, empty if it is not there."""
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<3I", notes, at)
        name_at = at + 12
        at = name_at + (name_size + 3 & ~3)
        if kind == _GNU_BUILD_ID and notes[name_at : name_at + name_size] == b"GNU\0":
            return notes[at : at + size].hex()
        at += size + 3 & ~3
    return ""


def file_symbols(path: str, build_id: str) -> Symbols:
    """Return the symbols of an ELF file by their places in it, none where it has none.

    They are those of its separate debug file where there is one. A file that has another build-id
    than the recorded one, where that is known, was replaced since and is not read.
    """
    try:
        with _open(Path(path)) as file:
            elf = Elf(file)
            if build_id and elf.build_id != build_id:
                return Symbols()
            found = _debug_symbols(Path(path), elf) or elf.symbols()
            return Symbols([*found, *elf.stubs()])
    except (OSError, ValueError):
        return Symbols()


def _open(path: Path) -> IO[bytes]:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    return path.open("rb")


def _debug_symbols(path: Path, elf: Elf) -> list[Rows]:
    """Return the symbols of the separate debug file, by their places in the file itself."""
    build_id = elf.build_id
    candidates = []
    if link := elf.debug_link:
        folder = path.parent
        candidates += [folder / link, folder / ".debug" / link]
        candidates.append(_DEBUG / folder.relative_to(folder.anchor) / link)
    if build_id:
        candidates.append(_DEBUG / ".build-id" / build_id[:2] / f"{build_id[2:]}.debug")
    for candidate in candidates:
        try:
            with _open(candidate) as file:
                debug = Elf(file)
                if debug.build_id == build_id and debug.has_symtab:
                    return debug.symbols(elf)
        except (OSError, ValueError):
            continue
    return []


class CapturedSymbols:
    """The symbols that a capture holds: its folder `symbols` (docs/capture.md).

    Raises WaitfoldError where what is read of it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / "index.tsv"
        lines = _read(path).decode(errors="backslashreplace").split("\n")
        if lines[0] != "file\tinode\tpath" or lines[-1]:
            raise _damaged(path, len(lines) if lines[-1] else 1)
        self._mapped: list[tuple[str, int, str]] = []  # file, inode, path
        for i, line in enumerate(lines[1:-1], 2):
            match = re.fullmatch(r"([0-9a-z][0-9a-z.-]*)\t([0-9]{1,20})\t(.+)", line)
            if match is None:
                raise _damaged(path, i)
            self._mapped.append((match[1], int(match[2]), _without_deleted(match[3])))

    def symbols(self, path: str, inode: int, build_id: str) -> Symbols:
        """Return the symbols of a file by their places in it, none where they are not held.

        What is not known of the file is 0 or empty; of several that may be it none is taken.
        """
        path = _without_deleted(path)
        name = path.rpartition("/")[2]
        # The same file may have been mapped by other paths: in a container, after an upgrade.
        same = [m for m in self._mapped if m[1] == inode > 0 and m[2].rpartition("/")[2] == name]
        if build_id:
            found = [m for m in self._mapped if m[0] == build_id]
        else:
            found = same or [m for m in self._mapped if m[2] == path]
        files = {m[0] for m in found}
        if len(files) > 1:
            files = {m[0] for m in found if m[2] == path}
        return _captured_file(self._folder / files.pop()) if len(files) == 1 else Symbols()


def captured_symbols(capture: Path) -> CapturedSymbols | None:
    """Return the symbols of a capture, None where it was recorded without."""
    folder = capture / "symbols"
    return CapturedSymbols(folder) if folder.is_dir() else None


def _without_deleted(path: str) -> str:
    return path.removesuffix(" (deleted)")


def _read(path: Path) -> bytes:
    try:
        with _open(path) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise WaitfoldError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _damaged(path: Path, line: int) -> WaitfoldError:
    return WaitfoldError(f"{path}: line {line} is damaged or cut short. Copy the capture anew.")


def _captured_file(path: Path) -> Symbols:
    """Return the symbols of a file in a capture, by their places in the file that was mapped."""
    whole = _read(path)
    match = re.match(rb"(?:#.*\n)*", whole)
    head = match[0] if match else b""
    loads: list[tuple[int, int, int]] = []  # offset in the file, address, size in memory
    for i, line in enumerate(head.splitlines(), 1):
        if line.startswith(b"# load"):
            if not re.fullmatch(rb"# load\t0x[0-9a-f]{1,16}( 0x[0-9a-f]{1,16}){2}", line):
                raise _damaged(path, i)
            offset, address, size = (int(word, 16) for word in line.split()[2:])
            loads.append((offset, address, size))
    text = whole[len(head) :]
    above = head.count(b"\n") + 1
    content = np.frombuffer(text, np.uint8)
    feeds = np.flatnonzero(content == ord("\n"))
    if text and not text.endswith(b"\n"):
        raise _damaged(path, above + len(feeds))
    heads = np.append(0, feeds[:-1] + 1)[: len(feeds)]
    # Three tabs in each line: address, size, st_info, name.
    tabs = np.flatnonzero(content == ord("\t"))
    bad = np.bincount(np.searchsorted(feeds, tabs), minlength=len(feeds)) != 3
    if bad.any():
        raise _damaged(path, above + int(np.argmax(bad)))
    first, second, third = tabs.reshape(-1, 3).T
    addresses, bad = _hex(content, heads, first)
    sizes, bad_too = _hex(content, first + 1, second)
    info, bad_as_well = _hex(content, second + 1, third)
    bad = bad | bad_too | bad_as_well
    if bad.any():
        raise _damaged(path, above + int(np.argmax(bad)))
    starts = addresses.copy()
    inside = np.full(len(starts), not loads)
    for offset, address, size in reversed(loads):
        here = (addresses >= address) & (addresses - np.uint64(address) < size)
        starts[here] = addresses[here] + np.uint64(offset - address & _MASK)
        inside |= here
    rows = np.flatnonzero(inside)
    starts, info = starts[rows], info[rows]
    kinds, bindings = (info & np.uint64(0xF)).astype(np.uint8), (info >> 4).astype(np.uint8)
    ends = starts + sizes[rows]
    text = text.replace(b"\n", b"\0")
    return Symbols([Rows(starts, ends, third[rows] + 1, kinds, bindings, text)])


def _hex(
    content: NDArray[np.uint8], heads: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the numbers that stand from `heads` to before `ends`, and which are none."""
    value = np.zeros(len(heads), np.uint64)
    bad = (heads >= ends) | (ends - heads > 16)
    for i in range(16):
        here = np.flatnonzero(heads + i < ends)
        digits = _DIGITS[content[heads[here] + i]]
        bad[here] |= digits > 15
        value[here] = value[here] << np.uint64(4) | digits
    return value, bad


def perf_map_symbols(path: str) -> Symbols:
    """Return the functions, by address, that a compiler wrote into a /tmp/perf-PID.map."""
    try:
        with _open(Path(path)) as file:
            text = file.read()
    except (OSError, ValueError):
        return Symbols()
    line = rb"^(?:0x)?([0-9a-f]{1,16}) (?:0x)?([0-9a-f]{1,16}) ([^\t\n]+)$"
    matches = list(re.finditer(line, text, re.MULTILINE))
    starts, sizes = (np.array([int(m[i], 16) for m in matches], np.uint64) for i in (1, 2))
    names = np.array([m.start(3) for m in matches], np.int64)
    kinds, bindings = (np.full(len(matches), n, np.uint8) for n in (_FUNC, _GLOBAL))
    text = text.replace(b"\n", b"\0")
    return Symbols([Rows(starts, starts + sizes, names, kinds, bindings, text)])


def vdso_symbols() -> Symbols:
    """Return the symbols of the running kernel's vdso."""
    try:
        maps = Path("/proc/self/maps").read_text()
        match = re.search(r"^([0-9a-f]+)-([0-9a-f]+) .*\[vdso\]$", maps, re.MULTILINE)
        if match is None:
            return Symbols()
        start, end = int(match[1], 16), int(match[2], 16)
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            memory.seek(start)
            elf = Elf(io.BytesIO(memory.read(end - start)))
        return Symbols(elf.symbols())
    except (OSError, ValueError):
        return Symbols()


def kernel_symbols(build_id: str, text_at: int) -> Symbols:
    """Return the symbols of the running kernel, none if it is not that which was recorded.

    `text_at` is where the recorded one's _text was, which differs from boot to boot.
    """
    try:
        if build_id and _build_id(_KERNEL_NOTES.read_bytes()) != build_id:
            return Symbols()
        text = _KALLSYMS.read_bytes()
    except OSError:
        return Symbols()
    # Lines are an address of 16 digits, a letter, a name and, of a module, a tab and its name.
    content = np.frombuffer(text, np.uint8)
    lines = np.append(0, np.flatnonzero(content == ord("\n"))[:-1] + 1)
    lines = lines[lines + 19 < len(content)]
    kinds, bindings = _KERNEL_KINDS[:, content[lines + 17]]
    lines, kinds, bindings = (c[kinds != _NOTYPE] for c in (lines, kinds, bindings))
    digits = content[lines[:, None] + np.arange(16)].astype(np.uint64)
    digits -= np.where(digits < ord("a"), np.uint64(ord("0")), np.uint64(ord("a") - 10))
    starts = (digits << np.arange(60, -1, -4, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
    at = text.find(b" _text\n") - 18  # where its line begins
    here = int(text[at : at + 16], 16) if at >= 0 else 0
    if not here:  # hidden from all but root (kptr_restrict)
        return Symbols()
    if text_at:
        starts += np.uint64(text_at - here & _MASK)
    text = text.translate(bytes.maketrans(b"\t\n", b"\0\0"))
    return Symbols([Rows(starts, starts, lines + 19, kinds, bindings, text)])
