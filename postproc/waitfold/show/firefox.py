"""A capture as a profile of the Firefox Profiler."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from waitfold import __version__
from waitfold.api import Recording, Samples, samples
from waitfold.join import Joined
from waitfold.show.parts import Json, as_name, by_time, process_name, query_name, runs_of

# The "processed profile" of version 55, the shape that samply's crate
# fxprof-processed-profile 0.8 writes; the profiler upgrades older versions.

_PROFILE_VERSION = 55
_HZ = 99  # of the samples
_COLOURS = {
    "Lock": "red", "LWLock": "yellow", "IO": "blue", "IPC": "magenta", "Client": "lightblue",
    "Timeout": "purple", "Activity": "grey", "BufferPin": "brown", "Extension": "orange",
}  # fmt: skip
_OTHER, _QUERY_CATEGORY = 0, 1
_MARKER_FIELDS = {
    "cut": ("Cut by", "string"),
    "query": ("Query", "unique-string"),
    "blocked": ("Blocked", "duration"),
    "run_queue": ("Run queue", "duration"),
    "on_cpu": ("On CPU", "duration"),
}
_SPLIT = {"blocked": "blocked_ns", "run_queue": "run_queue_ns", "on_cpu": "on_cpu_ns"}


def write_firefox(recording: Recording, file: IO[bytes]) -> None:
    """Write a processed profile of the Firefox Profiler (JSON).

    A process is a thread there; its waits and its queries are markers, its samples on a CPU are
    samples, weighted by the ms that they stand for. Times are ms since the recording began.
    """
    joined, text = recording.joined, Json(file)
    waits, taken = recording.intervals, samples(joined, recording.traces)
    classes = sorted(waits["class"].dropna().unique())
    category = {name: i for i, name in enumerate(classes, _QUERY_CATEGORY + 1)}
    pids = by_time(joined)
    text.begin({"meta": _firefox_meta(joined, [*category], len(pids)), "libs": []}, "threads")
    by_pid = dict(iter(waits.groupby("pid")))
    for pid in pids:
        text.item(_firefox_thread(joined, pid, by_pid.get(pid, waits.iloc[:0]), category, taken))
    text.end({"pages": [], "profilerOverhead": [], "counters": []})


def _firefox_meta(joined: Joined, classes: list[str], threads: int) -> dict[str, Any]:
    manifest = joined.capture.manifest
    started = manifest.get("started")
    categories = [("Other", "grey"), ("Query", "green")]
    categories += [(name, _COLOURS.get(name, "darkgrey")) for name in classes]
    places = ["marker-chart", "marker-table", "timeline-overview"]
    return {
        "categories": [
            {"name": name, "color": colour, "subcategories": ["Other"]}
            for name, colour in categories
        ],
        "debug": False,
        "extensions": {"baseURL": [], "id": [], "length": 0, "name": []},
        "interval": 1000 / _HZ,
        "preprocessedProfileVersion": _PROFILE_VERSION,
        "processType": 0,
        "product": f"PostgreSQL {joined.capture.pg_version}",
        "sampleUnits": {"time": "ms", "eventDelay": "ms", "threadCPUDelta": "µs"},
        "startTime": datetime.fromisoformat(started).timestamp() * 1000 if started else 0,
        "symbolicated": True,
        "pausedRanges": [],
        "version": 24,  # must be there, means nothing
        "usesOnlyOneStackType": True,
        "sourceCodeIsNotOnSearchfox": True,
        "importedFrom": f"waitfold {__version__}",
        "markerSchema": [
            {
                "name": "wait",
                "display": places,
                "fields": [
                    {"key": key, "label": label, "format": format_}
                    for key, (label, format_) in _MARKER_FIELDS.items()
                ],
            },
            {"name": "query", "display": places, "fields": []},
        ],
        "initialVisibleThreads": [*range(threads)],
        "initialSelectedThreads": [*range(min(threads, 1))],
    }


def _firefox_thread(
    joined: Joined, pid: int, waits: pd.DataFrame, category: dict[str, int], taken: Samples
) -> dict[str, Any]:
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings))

    def ms(ns: NDArray[np.int64]) -> list[float]:
        return [one / 1e6 for one in ns.tolist()]

    frames: dict[str, int] = {}
    nodes: dict[tuple[int | None, int], int] = {}
    rows = np.flatnonzero(taken.on_cpu & (taken.pid == pid))
    leaves = []
    for i in taken.stack[rows].tolist():
        node: int | None = None
        for name in taken.path(i):
            key = node, frames.setdefault(name, len(frames))
            node = nodes.setdefault(key, len(nodes))
        leaves.append(node)
    n = len(frames)
    time = taken.time_ns[rows] - joined.start_ns
    return {
        "name": process_name(joined, pid),
        "processName": process_name(joined, pid),
        "processType": "default",
        "isMainThread": True,
        "pid": str(pid),
        "tid": str(pid),
        "registerTime": 0,
        "unregisterTime": None,
        "processStartupTime": 0,
        "processShutdownTime": None,
        "pausedRanges": [],
        "showMarkersInTimeline": True,
        "markers": _markers(joined, pid, waits, category, string),
        "samples": {
            "length": len(rows),
            "weightType": "tracing-ms",
            "stack": leaves,
            "timeDeltas": ms(np.diff(time, prepend=0)),
            "weight": ms(taken.dur_ns[rows]),
        },
        "stackTable": {
            "length": len(nodes),
            "prefix": [prefix for prefix, _ in nodes],
            "frame": [frame for _, frame in nodes],
        },
        "frameTable": {
            "length": n,
            "address": [-1] * n,
            "inlineDepth": [0] * n,
            "category": [_OTHER] * n,
            "subcategory": [0] * n,
            "func": [*range(n)],
            "nativeSymbol": [None] * n,
            "innerWindowID": [0] * n,
            "line": [None] * n,
            "column": [None] * n,
        },
        "funcTable": {
            "length": n,
            "name": [string(name) for name in frames],
            "isJS": [False] * n,
            "relevantForJS": [False] * n,
            "resource": [-1] * n,
            "fileName": [None] * n,
            "lineNumber": [None] * n,
            "columnNumber": [None] * n,
        },
        "resourceTable": {"length": 0, "lib": [], "name": [], "host": [], "type": []},
        "nativeSymbols": {
            "length": 0, "address": [], "functionSize": [], "libIndex": [], "name": [],
        },
        "stringArray": [*strings],
    }  # fmt: skip


def _markers(
    joined: Joined,
    pid: int,
    waits: pd.DataFrame,
    category: dict[str, int],
    string: Callable[[str], int],
) -> dict[str, Any]:
    """Return the marker table of a process: its waits, then its queries."""
    found: list[tuple[int, int, int, int, dict[str, Any]]] = []
    queries = {text: string(as_name(text)) for text in waits["query"].dropna().unique()}
    columns = ["start_ns", "dur_ns", "class", "name", "flags", "query", *_SPLIT.values()]
    rows = (waits[c].astype(object).where(waits[c].notna(), None).tolist() for c in columns)
    for start, length, class_, name, flags, query, *split in zip(*rows, strict=True):
        data: dict[str, Any] = {"type": "wait"}
        if flags:
            data["cut"] = flags
        if query is not None:
            data["query"] = queries[query]
        parts = zip(_SPLIT, split, strict=True)
        data |= {key: ns / 1e6 for key, ns in parts if ns is not None}
        times = start - joined.start_ns, start - joined.start_ns + length
        found.append((*times, string(f"{class_}:{name}"), category[class_], data))
    head, end = np.searchsorted(joined.segments.pid, [pid, pid + 1]).tolist()
    segments = joined.segments.take(slice(head, end))
    runs = runs_of(segments, segments.query)
    for start, stop, row in zip(*(c.tolist() for c in runs[1:]), strict=True):
        text = query_name(joined, int(segments.query[row]))
        if text is not None:
            times = start - joined.start_ns, stop - joined.start_ns
            found.append((*times, string(text), _QUERY_CATEGORY, {"type": "query"}))
    return {
        "length": len(found),
        "category": [one[3] for one in found],
        "data": [one[4] for one in found],
        "startTime": [one[0] / 1e6 for one in found],
        "endTime": [one[1] / 1e6 for one in found],
        "name": [one[2] for one in found],
        "phase": [1] * len(found),  # an interval
    }
