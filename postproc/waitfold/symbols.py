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

# Kind and binding by the letter in kallsyms.
_KERNEL_KINDS = {
    "T": (_FUNC, _GLOBAL), "W": (_FUNC, _WEAK), "D": (_OBJECT, _GLOBAL), "B": (_OBJECT, _GLOBAL),
    "t": (_FUNC, _LOCAL), "w": (_FUNC, _WEAK), "d": (_OBJECT, _LOCAL), "b": (_OBJECT, _LOCAL),
}  # fmt: skip


class Rows(NamedTuple):
    """Columns of symbols: where each starts, where it ends, its name; kind and binding as ELF's.

    One that has no size ends where it starts.
    """

    starts: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    names: list[str]
    kinds: NDArray[np.uint8]
    bindings: NDArray[np.uint8]


class Symbols:
    """Symbols in the order of their starts, one for each start."""

    def __init__(self, parts: Sequence[Rows] = ()) -> None:
        names = [name for part in parts for name in part.names]
        if not names:
            self._starts = self._ends = np.empty(0, np.uint64)
            self._names = names
            return
        starts, ends, kinds, bindings = (
            np.concatenate([part[column] for part in parts]) for column in (0, 1, 3, 4)
        )
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        # One without a size goes on to the next.
        last = (starts[-1:] + np.uint64(2 * _PAGE - 1)) & ~np.uint64(_PAGE - 1)
        ends = np.where(ends == starts, np.append(starts[1:], last), ends)
        heads = np.flatnonzero(np.append(True, starts[1:] != starts[:-1]))
        best = heads.copy()
        counts = np.diff(np.append(heads, len(starts)))

        def rank(i: int) -> tuple[bool, bool, bool, bool, int, int]:
            """Return what makes one of several symbols at a place the best: choose_best_symbol."""
            which = order[i]
            name = names[which]
            return (
                bool(ends[i] > starts[i]),
                kinds[which] != _NOTYPE,
                bindings[which] != _WEAK,
                bindings[which] == _GLOBAL,
                len(name.lstrip("_")) - len(name),
                len(name),
            )

        for group in np.flatnonzero(counts > 1).tolist():
            head = int(heads[group])
            best[group] = max(range(head, head + int(counts[group])), key=rank)
        self._starts, self._ends = starts[best], ends[best]
        self._names = [names[i] for i in order[best].tolist()]

    def __len__(self) -> int:
        """Return the number of symbols."""
        return len(self._names)

    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        """Return start, end and name of each."""
        return iter(zip(self._starts.tolist(), self._ends.tolist(), self._names, strict=True))

    def names(self, addresses: NDArray[np.uint64]) -> list[str | None]:
        """Return the name for each address, None where there is none."""
        if not self._names:
            return [None] * len(addresses)
        at = np.maximum(np.searchsorted(self._starts, addresses, "right") - 1, 0)
        known = (self._starts[at] <= addresses) & (addresses < self._ends[at])
        return [
            self._names[i] if found else None
            for i, found in zip(at.tolist(), known.tolist(), strict=True)
        ]


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
        self.loads: list[tuple[int, int, int]] = []
        """address, size in memory, offset in the file"""
        for i in range(header_count):
            kind, _, offset, address, _, _, size, _ = struct.unpack(
                "<2I6Q", self._part(headers_at + 56 * i, 56)
            )
            if kind == _PT_LOAD:
                self.loads.append((address, size, offset))
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

    def symbols(self, loads: list[tuple[int, int, int]]) -> list[Rows]:
        """Return .symtab's symbols and .dynsym's, by their places in the file of `loads`."""
        tables = (self._of_kind(kind) for kind in (_SYMTAB, _DYNSYM))
        return [self._symbols(table, loads) for table in tables if table is not None]

    def _table(self, section: _Section) -> tuple[NDArray[np.void], bytes]:
        if section.link >= len(self._sections):
            raise ValueError("symbols without a string table")
        content = self._content(section)
        rows = np.frombuffer(content, _SYMBOL, len(content) // _SYMBOL.itemsize)
        return rows, self._content(self._sections[section.link])

    def _symbols(self, section: _Section, loads: list[tuple[int, int, int]]) -> Rows:
        rows, text = self._table(section)
        kind, binding, home = rows["info"] & 0xF, rows["info"] >> 4, rows["section"]
        # What a section's number says of its symbols; the numbers from _RESERVED on are none.
        allocated = np.zeros(1 << 16, np.bool_)
        labelled = np.zeros(1 << 16, np.bool_)
        delta = np.zeros(1 << 16, np.uint64)
        for i, own in enumerate(self._sections[:_RESERVED]):
            allocated[i] = own.flags & _ALLOC
            labelled[i] = "text" in own.name or "data" in own.name
            delta[i] = own.offset - own.address & _MASK
        label = (kind == _NOTYPE) & labelled[home] & ~np.isin(rows["other"] & 3, _HIDDEN)
        wanted = np.isin(kind, (_FUNC, _IFUNC, _OBJECT)) | label
        rows_at = np.flatnonzero(wanted & (rows["name"] != 0) & allocated[home])
        rows, home = rows[rows_at], home[rows_at]
        moved = delta[home]
        for address, size, offset in reversed(loads):
            inside = (rows["value"] >= address) & (rows["value"] - np.uint64(address) < size)
            moved[inside] = offset - address & _MASK
        starts = rows["value"] + moved
        names = [_text(text, at) for at in rows["name"].tolist()]
        return Rows(starts, starts + rows["size"], names, kind[rows_at], binding[rows_at])

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
        names = [f"{_text(text, at)}@plt" for at in table["name"][which].tolist()]
        kinds = np.full(len(which), _FUNC, np.uint8)
        bindings = np.full(len(which), _GLOBAL, np.uint8)
        return [Rows(starts, starts + np.uint64(plt.entry_size), names, kinds, bindings)]


def _text(text: bytes, at: int) -> str:
    end = text.find(b"\0", at)
    return text[at : end if end >= 0 else len(text)].decode(errors="backslashreplace")


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
            found = _debug_symbols(Path(path), elf) or elf.symbols(elf.loads)
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
                    return debug.symbols(elf.loads)
        except (OSError, ValueError):
            continue
    return []


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
        return Symbols(elf.symbols(elf.loads))
    except (OSError, ValueError):
        return Symbols()


def kernel_symbols(build_id: str, text_at: int) -> Symbols:
    """Return the symbols of the running kernel, none if it is not that which was recorded.

    `text_at` is where the recorded one's _text was, which differs from boot to boot.
    """
    try:
        if build_id and _build_id(_KERNEL_NOTES.read_bytes()) != build_id:
            return Symbols()
        lines = _KALLSYMS.read_text().split("\n")
    except OSError:
        return Symbols()
    # Only those of text and data; those of modules have the module behind a tab.
    rows = [line for line in lines if line[17:18] in _KERNEL_KINDS]
    names = [row[19:].partition("\t")[0] for row in rows]
    starts = np.array([int(row[:16], 16) for row in rows], np.uint64)
    here = int(starts[names.index("_text")]) if "_text" in names else 0
    if not here:  # hidden from all but root (kptr_restrict)
        return Symbols()
    if text_at:
        starts += np.uint64(text_at - here & _MASK)
    kinds, bindings = (
        np.array([_KERNEL_KINDS[row[17]][i] for row in rows], np.uint8) for i in (0, 1)
    )
    return Symbols([Rows(starts, starts, names, kinds, bindings)])
