"""A capture as a speedscope file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from waitfold import __version__
from waitfold.api import Recording, samples
from waitfold.join import UNSEEN, Joined
from waitfold.show.parts import STATES, Json, by_time, process_name, query_name, runs_of

# Its file-format-schema.json, of the npm package, says what the file looks like.


def write_speedscope(recording: Recording, file: IO[bytes]) -> None:
    """Write a speedscope file (JSON).

    A process is a profile of what it did, from outside in: its query, its wait event, what the
    scheduler did with it; the one that waited most, idle waits aside, comes first. Where samples on
    a CPU were recorded, another one has their stacks, weighted by the time that they stand for.
    Times are ns since the recording began.
    """
    joined, text = recording.joined, Json(file)
    frames: dict[str, int] = {}
    taken = samples(joined, recording.traces)
    text.begin(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "exporter": f"waitfold {__version__}",
            "name": joined.capture.path.resolve().name,
        },
        "profiles",
    )
    window = {"unit": "nanoseconds", "startValue": 0, "endValue": joined.end_ns - joined.start_ns}
    for pid in by_time(joined):
        name = f"{process_name(joined, pid)} {pid}"
        about = {"type": "evented", "name": name, **window}
        text.item(about, "events", _events(joined, pid, frames))
        rows = np.flatnonzero(taken.on_cpu & (taken.pid == pid))
        if len(rows):
            stacks = [
                [frames.setdefault(one, len(frames)) for one in taken.path(stack)]
                for stack in taken.stack[rows].tolist()
            ]
            weights = taken.dur_ns[rows].tolist()
            whole = {"unit": "nanoseconds", "startValue": 0, "endValue": sum(weights)}
            about = {"type": "sampled", "name": f"{name}, on-CPU samples", **whole}
            text.item({**about, "samples": stacks, "weights": weights})
    text.end({"shared": {"frames": [{"name": name} for name in frames]}})


def _events(joined: Joined, pid: int, frames: dict[str, int]) -> Iterator[str]:
    """Yield when a process entered and left its queries, wait events and states, as JSON."""
    head, end = np.searchsorted(joined.segments.pid, [pid, pid + 1]).tolist()
    segments = joined.segments.take(slice(head, end))
    runs = runs_of(segments, segments.query, segments.value, segments.run)
    label = joined.capture.events.label

    def frame(name: str | None) -> int:
        return -1 if name is None else frames.setdefault(name, len(frames))

    def event(value: int) -> str | None:
        if value == UNSEEN:
            return "(not seen)"
        if value == 0:
            return None if joined.scheduled else "(not waiting)"
        return ":".join(label(value))

    def closed(one: int, at: int) -> str:
        return f'{{"type":"C","frame":{one},"at":{at}}}'

    def levels(column: NDArray[Any], name: Callable[[int], str | None]) -> list[int]:
        codes, place = np.unique(column[runs.row], return_inverse=True)
        numbers = [frame(name(code)) for code in codes.tolist()]
        return [numbers[i] for i in place.tolist()]

    open_: list[int] = []
    until = 0
    for start, stop, *stack in zip(
        (runs.start_ns - joined.start_ns).tolist(),
        (runs.end_ns - joined.start_ns).tolist(),
        levels(segments.query, lambda code: query_name(joined, code)),
        levels(segments.value, event),
        levels(segments.run, STATES.get),
        strict=True,
    ):
        stack = [one for one in stack if one >= 0]
        same = 0
        while start == until and open_[same : same + 1] == stack[same : same + 1] != []:
            same += 1
        yield from (closed(one, until) for one in reversed(open_[same:]))
        yield from (f'{{"type":"O","frame":{one},"at":{start}}}' for one in stack[same:])
        open_, until = stack, stop
    yield from (closed(one, until) for one in reversed(open_))
