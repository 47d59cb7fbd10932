"""Read perf.data without perf.  (Signatures first; the body follows.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Field:
    """A field of a tracepoint's raw data: place and size in bytes."""

    name: str
    offset: int
    size: int
    signed: bool


@dataclass(frozen=True)
class Event:
    """An event that a perf.data holds; `fields` is empty unless it is a tracepoint."""

    index: int
    name: str
    ids: tuple[int, ...]
    sample_type: int
    fields: Mapping[str, Field]


def probe_fields(args: Sequence[tuple[str, str]]) -> dict[str, Field]:
    """Return where the kernel puts a uprobe's arguments, given as (name, type), e.g. ("v", "u32")."""
    raise NotImplementedError


class PerfData:
    """A perf.data file.

    `fallback` names the file's tracepoints and their fields, in the file's order, for a file
    whose writer was killed: perf writes names and formats only at its end.
    """

    path: Path
    events: list[Event]
    info: dict[str, str]  # hostname, osrelease, version, arch, nrcpus, cmdline, clockid
    cut: str | None  # a warning for the report: the file was cut short

    def __init__(
        self, path: str | Path, fallback: Mapping[str, Mapping[str, Field]] | None = None
    ) -> None:
        raise NotImplementedError
