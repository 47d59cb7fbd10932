"""The container of a bundle: a tar in xz, whose reader trusts nothing that it says.

Nothing is written to a disk: members are parts of one block of memory, and are had by the names
that the caller knows. The tar is of the oldest form that all have in common (ustar), without
extensions, which a plain `tar xf` unpacks.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from waitfold.errors import WaitfoldError

MAX = 256 << 20
"""Bytes that an archive may unpack to, whatever its size."""

FIRST = "manifest"
"""The first member, by which a bundle is told from another file in xz."""

MAGIC = b"\xfd7zXZ\0"

_MEMBERS = 512
_MEMORY = 80 << 20  # what xz -9 wants
_BLOCK = 512
_CHUNK = 1 << 20
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder",
    b"6": "a pipe",
}


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return an archive of some members, that of FIRST before all others.

    Raises
    ------
    WaitfoldError
        They are more than a reader would take.

    """
    if sum(len(content) + 2 * _BLOCK for content in members.values()) > MAX - (1 << 20):
        raise WaitfoldError(
            f"a bundle holds at most {MAX >> 20} MiB before it is compressed, and this is more. "
            "Record for a shorter time, or less."
        )
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(members, key=lambda name: name != FIRST):
            about = tarfile.TarInfo(name)
            about.size = len(members[name])
            tar.addfile(about, io.BytesIO(members[name]))
    return lzma.compress(raw.getbuffer(), preset=6)


def is_bundle(path: Path) -> bool:
    """Return whether a file is in xz and begins as pack() does."""
    with path.open("rb") as file:
        begin = file.read(1 << 16)
    if not begin.startswith(MAGIC):
        return False
    try:
        head = lzma.LZMADecompressor(memlimit=_MEMORY).decompress(begin, _BLOCK)
    except (lzma.LZMAError, MemoryError):
        return False
    return head.startswith(FIRST.encode() + b"\0") and head[257:262] == b"ustar"


def unpack(path: Path, known: re.Pattern[str]) -> dict[str, memoryview]:
    """Return the members of an archive by name; all names are such as `known` matches.

    Raises
    ------
    WaitfoldError
        It is cut short or damaged, has another member, two of one name, one that is no file, or
        unpacks to more than MAX bytes.

    """
    content = memoryview(_decompressed(path))
    members: dict[str, memoryview] = {}
    at = 0
    while True:
        head = bytes(content[at : at + _BLOCK])
        if len(head) < _BLOCK:
            raise _damaged(path, "its list of members has no end")
        if not any(head):
            break
        name, size = _member(path, head, known)
        if name in members:
            raise _damaged(path, f"it has two members '{name}'")
        if len(members) == _MEMBERS:
            raise _damaged(path, f"it has more than {_MEMBERS} members")
        at += _BLOCK
        if size > len(content) - at:
            raise _damaged(path, f"'{name}' should have {size} bytes")
        members[name] = content[at : at + size]
        at += -(-size // _BLOCK) * _BLOCK
    return members


def _decompressed(path: Path) -> bytes:
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
    content = bytearray()
    try:
        with path.open("rb") as file:
            while not unpacker.eof:
                packed = file.read(_CHUNK) if unpacker.needs_input else b""
                if unpacker.needs_input and not packed:
                    raise _damaged(path, "it was cut short")
                content += unpacker.decompress(packed, _CHUNK)
                if len(content) > MAX:
                    raise WaitfoldError(
                        f"{path} unpacks to more than {MAX >> 20} MiB, which no bundle does: it is "
                        "not read."
                    )
            if unpacker.unused_data or file.read(1):
                raise _damaged(path, "something follows its end")
    except (lzma.LZMAError, MemoryError) as error:
        raise _damaged(path, f"xz says: {error}") from None
    return bytes(content)


def _member(path: Path, head: bytes, known: re.Pattern[str]) -> tuple[str, int]:
    """Return name and size of a member by its header (POSIX.1-1988, ustar)."""
    name = head[:100].split(b"\0")[0].decode(errors="backslashreplace")
    shown = repr(name)
    if head[257:263] != b"ustar\0":
        raise _damaged(path, f"the header of {shown} is none of a tar")
    try:
        size, stated = (int(part.rstrip(b" \0"), 8) for part in (head[124:136], head[148:156]))
    except ValueError:
        raise _damaged(path, f"the header of {shown} holds no numbers") from None
    if stated != sum(head[:148]) + sum(head[156:]) + 8 * 0x20 or size < 0:
        raise _damaged(path, f"the header of {shown} does not fit its checksum")
    if name.startswith("/") or head[345:346] != b"\0":
        raise _refused(path, f"{shown} is no name within a folder of its own")
    if ".." in name.split("/"):
        raise _refused(path, f"{shown} leads out of its folder")
    if head[156:157] not in (b"0", b"\0"):
        what = _KINDS.get(head[156:157], "an extension of tar")
        raise _refused(path, f"{shown} is {what}, and bundles hold plain files alone")
    if not known.fullmatch(name):
        raise _refused(path, f"no bundle has a member {shown}")
    return name, size


def _damaged(path: Path, why: str) -> WaitfoldError:
    return WaitfoldError(f"{path}: {why}. The bundle is damaged: copy it anew.")


def _refused(path: Path, why: str) -> WaitfoldError:
    return WaitfoldError(f"{path} is not read: {why}.")
