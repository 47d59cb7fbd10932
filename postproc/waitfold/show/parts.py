"""What the exports for other tools have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from waitfold.api import query_text
from waitfold.backends import UNKNOWN as UNKNOWN_TYPE
from waitfold.backends import Backend
from waitfold.join import BLOCKED, ON_CPU, RUN_QUEUE, UNSEEN, Joined, Segments
from waitfold.show.text import one_line
from waitfold.waitevents import is_idle_wait

STATES = {ON_CPU: "on-CPU", RUN_QUEUE: "run queue", BLOCKED: "blocked"}
"""What the scheduler does with a process, as the exports call it."""

_NAME_WIDTH = 500


class Runs(NamedTuple):
    """Stretches of time of processes in which something was the same."""

    pid: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    row: NDArray[np.int64]
    """a segment in each"""


def runs_of(segments: Segments, *columns: NDArray[np.integer]) -> Runs:
    """Return the stretches of time in which none of the columns changes."""
    new = np.ones(len(segments), np.bool_)
    new[1:] = segments.pid[1:] != segments.pid[:-1]
    new[1:] |= segments.start_ns[1:] != segments.end_ns[:-1]
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    heads = np.flatnonzero(new)
    tails = np.append(heads[1:], len(new))[: len(heads)] - 1
    return Runs(segments.pid[heads], segments.start_ns[heads], segments.end_ns[tails], heads)


def process_name(joined: Joined, pid: int) -> str:
    """Return a process's type, user and database, as far as they are known."""
    who = joined.backends.get(pid, Backend(UNKNOWN_TYPE))
    return as_name(" ".join(filter(None, (who.type, who.who))))


def as_name(text: str) -> str:
    """Return a text of any length and shape, as that of a query, as one to show in one line."""
    return one_line(text, _NAME_WIDTH)


def query_name(joined: Joined, code: int) -> str | None:
    """Return a query as one line, None where a process was in none, or it is not known."""
    text = query_text(joined, code)
    return None if text is None else as_name(text)


def by_time(joined: Joined) -> list[int]:
    """Return the processes, that first which was known to be not idle for most."""
    segments = joined.segments
    idle = is_idle_wait(segments.value) | np.isin(segments.pid, joined.postmasters)
    busy = np.where(idle | (segments.value == UNSEEN), 0, segments.dur_ns)
    pids, place = np.unique(segments.pid, return_inverse=True)
    time = np.bincount(place, busy, len(pids))
    return [int(pid) for pid in pids[np.argsort(-time, kind="stable")]]


class Json:
    """Writes an object with one long array in it, item by item."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._separator = b"\n"

    def begin(self, members: dict[str, Any], array: str) -> None:
        """Write the object's first members, and begin the array."""
        head = b"".join(self._member(item) + b",\n" for item in members.items())
        self._file.write(b"{" + head + json.dumps(array).encode() + b":[")

    def item(self, members: dict[str, Any], array: str = "", values: Iterable[str] = ()) -> None:
        """Write an item of the array: an object, whose last member may be long itself.

        That is another array, of values that are JSON already.
        """
        content = json.dumps(members, separators=(",", ":")).encode()
        self._file.write(self._separator + content[:-1])
        self._separator = b",\n"
        if array:
            self._file.write(f",{json.dumps(array)}:[".encode())
            separator, rest = "", iter(values)
            while some := list(islice(rest, 10_000)):
                self._file.write((separator + ",".join(some)).encode())
                separator = ","
            self._file.write(b"]")
        self._file.write(b"}")

    def end(self, members: dict[str, Any]) -> None:
        """End the array, and write the object's last members."""
        tail = b"".join(b",\n" + self._member(item) for item in members.items())
        self._file.write(b"]" + tail + b"}\n")

    def _member(self, item: tuple[str, Any]) -> bytes:
        return json.dumps(dict([item]), separators=(",", ":")).encode()[1:-1]
