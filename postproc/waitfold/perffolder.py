"""Folders that perf record itself makes: --switch-output's pieces, and those of --threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import WaitfoldError
from .events import PerfSource, Rule, Transitions, TransitionStream
from .perfdata import Event, PerfData

Opener = Callable[[Path, "PerfData | None"], PerfData]
"""Opens a piece; of one that was not finished, the events are those of the one before."""

# perf appends year to seconds, and two digits of its fraction.
_PIECE = re.compile(r".*\.(\d{14,17})(?:\.(?:gz|xz|zst))?")
_PART = re.compile(r"data\.(\d{1,5})")


def pieces_in(folder: Path) -> list[Path]:
    """Return the files that perf record --switch-output wrote into a folder, by their times."""
    found = ((_PIECE.fullmatch(path.name), path) for path in folder.iterdir())
    return [path for _, path in sorted((match[1], path) for match, path in found if match)]


class Pieces:
    """The files of perf record --switch-output, one after the other as if they were one.

    What a flight recorder (--overwrite) lost between two dumps counts as a loss. `events` are those
    of the first.
    """

    def __init__(self, path: Path, files: Sequence[Path], opener: Opener) -> None:
        self.path = path
        self.files = files
        self._opener = opener
        first = self.open(0, None)
        self.events: list[Event] = first.events
        self.has_stacks = first.has_stacks
        self.cut: str | None = None

    def open(self, number: int, before: PerfData | None) -> PerfData:
        """Open one of the files."""
        return self._opener(self.files[number], before)

    def sources(self, rule: Rule, stream: TransitionStream) -> list[_Chain]:
        """Return what reads all of them."""
        return [_Chain(self, rule, stream)]


class _Chain:
    """The transitions of the files in their order; only one is open at a time."""

    def __init__(self, pieces: Pieces, rule: Rule, stream: TransitionStream) -> None:
        self._sizes = [path.stat().st_size for path in pieces.files]
        self.data_size = sum(self._sizes)
        self._pieces, self._rule, self._stream = pieces, rule, stream
        self.complete = -1
        self.done = 0
        self._number = 0
        self._source = self._open(None)

    def _open(self, before: PerfData | None) -> PerfSource:
        data = self._pieces.open(self._number, before)
        if data.cut:
            self._stream.warnings.append(data.cut)
        return PerfSource(data, self._rule, self._stream)

    def read(self) -> Transitions | None:
        """Return the transitions of the next piece, None at the end of the last file."""
        while (batch := self._source.read()) is None:
            if self._number + 1 == len(self._sizes):
                return None
            before = self._source
            before.close()
            self._number += 1
            self._source = self._open(before.data)
            self._source.goes_on(before)
        self.complete = self._source.complete
        self.done = sum(self._sizes[: self._number]) + self._source.done
        return batch

    def close(self) -> None:
        """Add up what was lost, once all is read."""
        self._source.close()


class Parts:
    """The files of perf record --threads: a header, and one of records for each thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._header = PerfData(folder / "data")
        self._parts = sorted(path for path in folder.iterdir() if _PART.fullmatch(path.name))
        if not self._parts:
            raise WaitfoldError(f"{folder} has a header, and no data.0 beside it: it is not whole")
        self.events: list[Event] = self._header.events
        self.has_stacks = self._header.has_stacks
        self.cut = self._header.cut

    def sources(self, rule: Rule, stream: TransitionStream) -> list[PerfSource]:
        """Return what reads each of them."""
        files = [self._header, *(self._header.part(path) for path in self._parts)]
        return [PerfSource(data, rule, stream) for data in files]
