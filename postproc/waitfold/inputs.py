"""Bytes from anywhere: a file, a pipe or standard input, plain or packed by gzip, xz or zstd."""

from __future__ import annotations

import io
import lzma
import os
import shutil
import stat
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from .errors import Misuse, WaitfoldError

STDIN = Path("-")
"""What stands for standard input on the command line."""

HEAD = 1 << 20
"""So many bytes tell what an input is."""

SPOOL_MAX = 16 << 30
"""A packed or piped perf.data or trace.dat is unpacked into a temporary file no larger."""

RATIO_MAX = 200
"""What unpacks to so many times its size is refused, beyond RATIO_FREE bytes."""
RATIO_FREE = 64 << 20

SLICE = 1 << 10
"""So many bytes are unpacked at once; zstd makes 32 MiB of them at the most, the others less."""

LINE_MAX = 8 << 20
"""A longer line of a text is refused."""

_BLOCK = 1 << 18
_TEXT = 1 << 22
_XZ_MEMORY = 256 << 20  # xz -9 takes 65 MiB
_FREE = 256 << 20  # bytes that a temporary file leaves free on its disk

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"


class Reread(io.RawIOBase):
    """A file by a descriptor of somebody else's, with a place of its own to read at."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, counted from the start."""
        self._at = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as there is something; return how far."""
        with memoryview(buffer).cast("B") as view:
            content = os.pread(self._descriptor, len(view), self._at)
            view[: len(content)] = content
        self._at += len(content)
        return len(content)


class Input:
    """An opened input; `path` is its name for people, `head` its first bytes, unpacked.

    `packing` is what it was packed by, or "". `size` is that of the file, packed; 0 where it is
    not known; `taken` the bytes of it that the latest pass has read. `cut` is a warning where
    what packed it ends too soon, complete once a pass is through.

    Raises WaitfoldError, also later, where it cannot be read or unpacked.
    """

    def __init__(self, path: Path) -> None:
        is_stdin = path == STDIN
        self.path = Path("standard input") if is_stdin else path
        self.cut: str | None = None
        self.taken = 0
        self._file = io.FileIO(0, closefd=False) if is_stdin else path.open("rb", buffering=0)
        state = os.fstat(self._file.fileno())
        if is_stdin and self._file.isatty():
            raise Misuse("standard input is a terminal: name a file, or send it one by < or |")
        self._is_stdin = is_stdin
        self.is_file = stat.S_ISREG(state.st_mode)
        self.size = state.st_size if self.is_file else 0
        self._begun: bytes | None = None  # of a pipe, what has been read to know what it is
        self._spool: IO[bytes] | None = None  # of a pipe, a copy of all of it
        first = self._raw_head()
        names = {_GZIP: "gzip", _XZ: "xz", _ZSTD: "zstd"}
        self.packing = next((name for magic, name in names.items() if first.startswith(magic)), "")
        self.head = self._unpacked_head(first)

    def _raw_head(self) -> bytes:
        if self.is_file:
            return os.pread(self._file.fileno(), HEAD, 0)
        parts = []
        size = 0
        while size < HEAD and (part := self._file.read(HEAD - size)):
            parts.append(part)
            size += len(part)
        self._begun = b"".join(parts)
        return self._begun

    def _unpacked_head(self, first: bytes) -> bytes:
        if not self.packing:
            return first
        parts = []
        size = 0
        for part in self._unpack(iter([first]), partial=True):
            parts.append(part)
            size += len(part)
            if size >= HEAD:
                break
        self.taken = 0
        return b"".join(parts)[:HEAD]

    @property
    def plain_file(self) -> bool:
        """Return whether `path` can be opened and read at any place."""
        return self.is_file and not self.packing and not self._is_stdin

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes, unpacked, from the first one on, some at a time.

        A pipe gives them once; of what is not larger than SPOOL_MAX a copy is kept, unlinked, for
        those who ask again.
        """
        raw = self._raw() if self.is_file else self._once()
        return self._unpack(raw) if self.packing else raw

    def text(self) -> Iterator[bytes]:
        """Yield whole lines, some MiB at a time.

        Raises WaitfoldError where one is longer than LINE_MAX.
        """
        parts: list[bytes] = []
        size = lines = 0
        for block in self.blocks():
            parts.append(block)
            size += len(block)
            if size < _TEXT:
                continue
            end = block.rfind(b"\n") + 1
            if end:
                parts[-1] = block[:end]
                whole = b"".join(parts)
                lines += whole.count(b"\n")
                yield whole
                parts, size = [block[end:]], len(block) - end
            elif size > _TEXT + LINE_MAX:
                raise WaitfoldError(
                    f"{self.path}: line {lines + 1} or one that follows is longer than "
                    f"{LINE_MAX >> 20} MiB: this is no text of events, or damaged"
                )
        if size:
            yield b"".join(parts)

    def opener(self) -> Callable[[], io.RawIOBase]:
        """Return what opens the unpacked bytes to be read at any place, as often as one likes.

        A file as it is, or else an unlinked temporary one of SPOOL_MAX bytes at the most.
        """
        file = self._file if self.is_file and not self.packing else self._spooled()
        return lambda: Reread(file.fileno())

    def _raw(self) -> Iterator[bytes]:
        at = 0
        while part := os.pread(self._file.fileno(), _BLOCK, at):
            at += len(part)
            self.taken = at
            yield part

    def _once(self) -> Iterator[bytes]:
        """Yield what comes out of a pipe, and keep a copy."""
        if self._spool is not None:
            spool = Reread(self._spool.fileno())
            yield from iter(lambda: spool.read(_BLOCK) or b"", b"")
            return
        if self._begun is None:
            raise WaitfoldError(
                f"{self.path} is longer than the {SPOOL_MAX >> 30} GiB that are kept of a pipe, or "
                f"than there is room for in {tempfile.gettempdir()}, and this needs to read it "
                "more than once: write it to a file, and name that"
            )
        begun, self._begun = self._begun, None
        self.taken = 0
        spool_: IO[bytes] | None = tempfile.TemporaryFile(prefix="waitfold-")  # noqa: SIM115
        for part in chain((begun,), iter(lambda: self._file.read(_BLOCK) or b"", b"")):
            self.taken += len(part)
            if spool_ is not None and not _keep(spool_, part, self.taken):
                spool_.close()
                spool_ = None
            yield part
        if spool_ is not None:
            spool_.flush()
        self._spool = spool_

    def _spooled(self) -> IO[bytes]:
        """Return a temporary file of all that there is, unpacked."""
        if not self.packing:
            if self._spool is None:
                deque(self._once(), 0)
            if self._spool is None:
                raise self._too_large()
            return self._spool
        spool = tempfile.TemporaryFile(prefix="waitfold-")  # noqa: SIM115
        size = 0
        for block in self.blocks():
            size += len(block)
            if not _keep(spool, block, size):
                raise self._too_large()
        spool.flush()
        return spool

    def _too_large(self) -> WaitfoldError:
        return WaitfoldError(
            f"{self.path}: unpacked it is larger than {SPOOL_MAX >> 30} GiB, or than there is room "
            f"for in {tempfile.gettempdir()}. Unpack it where there is room, and name that file, "
            "or name a folder with room by TMPDIR"
        )

    def _unpack(self, raw: Iterator[bytes], partial: bool = False) -> Iterator[bytes]:
        """Yield what packed bytes hold; `partial`: they may end anywhere."""
        taken = given = 0
        decoder: Any = None
        try:
            for block in raw:
                view = memoryview(block)
                at = 0
                while at < len(view):
                    if decoder is None:
                        if not any(view[at : at + SLICE]):
                            break  # padding
                        decoder = _decoder(self.packing)
                    content = decoder.decompress(view[at : at + SLICE])
                    at = min(at + SLICE, len(view))
                    taken += min(SLICE, len(view))
                    given += len(content)
                    if given > RATIO_FREE + RATIO_MAX * taken:
                        raise WaitfoldError(
                            f"{self.path} unpacks to more than {RATIO_MAX} times its size, as no "
                            "capture does: it is refused"
                        )
                    if content:
                        yield content
                    if decoder.eof:
                        at -= len(decoder.unused_data)
                        decoder = None
        except (zlib.error, lzma.LZMAError, _zstd_error()) as error:
            raise WaitfoldError(
                f"{self.path}: its {self.packing} is damaged ({error}): copy it again"
            ) from None
        if decoder is not None and not partial:
            self.cut = (
                f"{self.path} was cut short: its {self.packing} does not end. All that is there of "
                "it is read."
            )


def _keep(spool: IO[bytes], block: bytes, size: int) -> bool:
    """Write to a spool; False where that is more than there may be."""
    if size > SPOOL_MAX or shutil.disk_usage(tempfile.gettempdir()).free < _FREE:
        return False
    spool.write(block)
    return True


def _decoder(packing: str) -> Any:
    if packing == "gzip":
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    if packing == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    # It takes longer to import than a small capture to read.
    from zstandard import ZstdDecompressor

    return ZstdDecompressor().decompressobj()


def _zstd_error() -> type[Exception]:
    from zstandard import ZstdError

    return ZstdError
