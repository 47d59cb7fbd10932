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
from waitfold.inputs import Input

MAX = 256 << 20
"""Bytes that an archive may unpack to, whatever its size."""

FIRST = "manifest"
"""The first member, by which a bundle is told from any other file."""

_MEMBERS = 512
_BLOCK = 512
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder",
    b"6": "a pipe",
}


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return an archive of some members, of which the one called FIRST is first.

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
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return lzma.compress(raw.getbuffer(), preset=6)


def is_bundle(head: bytes) -> bool:
    """Return whether what begins so, unpacked, is what pack() has packed."""
    return head.startswith(FIRST.encode() + b"\0") and head[257:263] == b"ustar\0"


def unpack(input_: Input, known: re.Pattern[str]) -> dict[str, memoryview]:
    """Return the members of an archive by name; all names are such as `known` matches.

    Raises
    ------
    WaitfoldError
        It is cut short or damaged, has another member, two of one name, one that is no file, or
        unpacks to more than MAX bytes.

    """
    path = input_.path
    content = memoryview(_unpacked(input_)).toreadonly()
    members: dict[str, memoryview] = {}
    at = 0
    while any(head := bytes(content[at : at + _BLOCK])):
        if len(head) < _BLOCK:
            raise _damaged(path, "it was cut short")
        name, size = _member(path, head, known)
        if name in members:
            raise _refused(path, f"it has two members '{name}'")
        if len(members) == _MEMBERS:
            raise _refused(path, f"it has more than {_MEMBERS} members")
        at += _BLOCK
        if size > len(content) - at:
            raise _damaged(path, f"it was cut short: '{name}' should have {size} bytes")
        members[name] = content[at : at + size]
        at += -(-size // _BLOCK) * _BLOCK
    # Two empty blocks are the end, and tar adds some to fill its own.
    if len(content) - at < 2 * _BLOCK:
        raise _damaged(path, "it was cut short: its list of members has no end")
    if any(content[at:]):
        raise _refused(path, "something stands behind its end")
    return members


def _unpacked(input_: Input) -> bytearray:
    content = bytearray()
    for block in input_.blocks():
        content += block
        if len(content) > MAX:
            raise _refused(input_.path, f"it unpacks to more than {MAX >> 20} MiB")
    if input_.cut:
        raise _damaged(input_.path, "it was cut short")
    return content


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
        raise _refused(path, f"{shown} is {what}, and no plain file")
    if not known.fullmatch(name):
        raise _refused(path, f"it has a member {shown}")
    return name, size


def _damaged(path: Path, why: str) -> WaitfoldError:
    return WaitfoldError(f"{path}: {why}. Copy it anew.")


def _refused(path: Path, why: str) -> WaitfoldError:
    return WaitfoldError(f"{path} is refused: {why}, as in no bundle of waitfold's.")
