"""A capture as one file to be sent to others: writes bundles and reads them (docs/bundle.md)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waitfold import __version__, archive
from waitfold.account import report_of
from waitfold.analysis import Progress
from waitfold.audit import profile_events
from waitfold.backends import Backend, SeenBackends
from waitfold.bundled import Bundled, Held, Row
from waitfold.capture import WAIT_EVENT, Capture
from waitfold.errors import Misuse, WaitfoldError
from waitfold.events import (
    CUT,
    ENDED,
    EXIT,
    FORK,
    PID_MAX,
    PairRule,
    SetRule,
    Transitions,
    TransitionStream,
    transitions,
)
from waitfold.events import (
    joined as joint,
)
from waitfold.inputs import Input
from waitfold.join import Joined, join, switched
from waitfold.perfdata import Event
from waitfold.probeset import parse_set, probes_dir
from waitfold.profile import Frames, Traces, read_traces
from waitfold.queries import SET as QUERY_SET
from waitfold.queries import Queries, Query, stand_ins
from waitfold.redact import KINDS, Redactor
from waitfold.sched import SAMPLE, SEEN, SWITCH, Switches, read_switches
from waitfold.show import text
from waitfold.stores import Late
from waitfold.symbols import captured_symbols
from waitfold.waitevents import WaitEvents

FORMAT = 1
"""The bundle format that is written and read."""

TRIMMED = "[trimmed]"
"""The frame of a stack that --max left no room for."""

_MEMBER = re.compile(
    r"manifest|removed\.txt|report\.(?:txt|json)|backends\.tsv|(?:capture|queries|frames)\.json"
    r"|[A-Za-z_][\w-]{0,60}\.(?:set|[a-z_]{1,20}(?:\.table)?\.npy)"
)
_TIME_MAX = 1 << 62
_TABLE_MAX = 1 << 16

# Keys of a manifest that say nothing of a site, and what their values look like.
_MANIFEST = {
    "waitfold": r"[0-9][0-9A-Za-z.+-]{0,30}",
    "sets": r"[\w,-]{1,400}",
    "mode": r"[a-z]{1,20}",
    "engine": r"[a-z-]{1,20}",
    "profiles": r"[a-z,]{0,20}",
    "call_graph": r"[a-z]{1,20}",
    "pids": r"[0-9,]{1,200}",
    "pg_version": r"[0-9]{1,2}[0-9a-z.]{0,12}",
    "postmaster": r"[0-9]{1,9}",
    "build_id": r"[0-9a-f]{1,64}",
    "probes": r"[0-9]{1,9}",
    "ring": r"[0-9]{1,18}",
    "clock": r"CLOCK_[A-Z_]{1,20}",
    "kernel": r"[0-9]{1,4}(?:\.[0-9]{1,6}){0,3}",
    "cpus": r"[0-9]{1,6}",
    "perf": r"perf version [0-9]{1,4}(?:\.[0-9]{1,6}){0,3}",
    "started": r"[0-9TZ:.-]{1,40}",
    "start_ns": r"[0-9]{1,18}",
    "end_ns": r"[0-9]{1,18}",
    "ended_by": r"[a-z]{1,20}",
    "command_status": r"[0-9]{1,3}",
}
# Those that say more, and what they count as.
_TOLD = {"host": "host", "kernel": "host", "binary": "paths", "command": "command"}


@dataclass(frozen=True)
class Bundle:
    """A bundle that was made: its bytes, their number unpacked, and what to tell about it."""

    content: bytes
    unpacked: int
    removed: str


def make_bundle(
    capture: Capture,
    keep: Collection[str] = (),
    largest: int | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Return a bundle of a capture; `keep` are some of redact.KINDS.

    Of one that would have more than `largest` bytes the stacks that were seen once are trimmed,
    then all stacks: no figure of the report is of them.

    Raises
    ------
    WaitfoldError
        The capture cannot be read, or the bundle would be too large without any stack.
    Misuse
        `keep` has something else, or it is of a bundle.

    """
    if strange := sorted(set(keep) - set(KINDS)):
        raise Misuse(f"--keep {strange[0]}: give one of {', '.join(KINDS)}")
    if any(isinstance(file, Bundled) for file in capture.files):
        raise Misuse(f"{capture.path} is a bundle already. To trim it, bundle its capture anew.")
    joined = join(capture, progress)
    held = _held(joined, progress)
    smallest = 0
    for trim in _TRIMS:
        own, trimmed = trim(held)
        if trimmed is None:
            continue
        redactor = Redactor(keep)
        written = _Writer(redactor).members(capture, own)
        removed = _removed(redactor, capture, own, trimmed)
        # Of what is in it: so it says no more, and it is known that it can be read.
        views = {name: memoryview(content) for name, content in written.items()}
        analysis, sets, accounted = report_of(_opened(views, Path("bundle.waitfold")))
        members = {
            archive.FIRST: written[archive.FIRST],
            "removed.txt": removed.encode(),
            "report.txt": text.report_text(analysis, [], False, sets, accounted).encode(),
            "report.json": text.report_json(analysis, sets, accounted).encode(),
            **written,
        }
        content = archive.pack(members)
        if largest is None or len(content) <= largest:
            return Bundle(content, sum(map(len, members.values())), removed)
        smallest = len(content)
    raise WaitfoldError(
        f"{capture.path} takes {size(smallest)} without any stack, more than --max. Record for a "
        f"shorter time, or allow --max {-(-smallest // 1000)}K."
    )


def size(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{-(-count // 1000)} kB"


def open_bundle(input_: Input) -> Capture:
    """Open a bundle, of which archive.is_bundle() has said that it is one.

    Raises
    ------
    WaitfoldError
        It is damaged, or of a newer format.

    """
    return _opened(archive.unpack(input_, _MEMBER), input_.path)


# What a capture holds, by its server's processes alone.


def _held(joined: Joined, progress: Progress | None) -> Bundled:
    capture = joined.capture
    pids = np.array([*joined.backends], np.int32)
    waits = _stream(capture, capture.rule, pids, progress)
    sets = {}
    for name in capture.sets:
        rule = capture.set_rule(name)
        held = _stream(capture, rule, pids, progress)
        sets[rule] = replace(held, started=rule.started.rows, ended=rule.ended.rows)
    queries = None
    if joined.asked:
        rows = np.flatnonzero(np.isin(joined.queries.pid, pids))
        q = joined.queries
        queries = Queries(q.pid[rows], q.time_ns[rows], q.code[rows], q.table)
    data = switched(capture)
    switches = _own_switches(read_switches(data, progress), pids) if data else None
    try:
        file, events = profile_events(capture)
    except Misuse:
        traces = None
    else:
        traces = _own_traces(read_traces(file, events, captured_symbols(capture.path)), pids)
    return Bundled(waits, sets, queries, switches, traces)


def _stream(
    capture: Capture, rule: PairRule | SetRule, pids: NDArray[np.int32], progress: Progress | None
) -> Held:
    stream = transitions(capture.files, rule, progress)
    parts = [Transitions(*(np.empty(0, kind) for kind in ("i8", "u8", "u4", "u1")))]
    for batch in stream:
        # Births and deaths are those of the whole host.
        kept = ~np.isin(batch.mark, (FORK, EXIT)) | np.isin(batch.pid, pids)
        parts.append(batch.take(np.flatnonzero(kept)))
    return Held(joint(parts), replace(stream, batches=iter(())))


def _own_switches(all_: Switches, pids: NDArray[np.int32]) -> Switches:
    own = np.flatnonzero(np.isin(all_.tid, pids))
    own = own[np.argsort(all_.time_ns[own], kind="stable")]
    sampled = None
    if all_.sampled is not None:
        tid, time = all_.sampled
        kept = np.isin(tid, pids)
        sampled = tid[kept], time[kept]
    known = set(pids.tolist())
    others = {tid: pid for tid, pid in all_.others.items() if pid in known}
    return Switches(all_.tid[own], all_.time_ns[own], all_.kind[own], sampled, others)


def _own_traces(all_: Traces, pids: NDArray[np.int32]) -> Traces:
    rows = np.flatnonzero(np.isin(all_.pid, pids))
    # As they come: the numbers of stacks differ from reading to reading.
    kept, first, trace = np.unique(all_.trace[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)
    kept, trace = kept[order], np.argsort(order)[trace]
    return Traces(
        all_.events, all_.time_ns[rows], all_.pid[rows], all_.tid[rows], all_.event[rows],
        all_.weight[rows], np.zeros(len(rows), np.int32), trace.astype(np.int64),
        _some_stacks(all_.frames, kept), ["-"], all_.warnings,
    )  # fmt: skip


def _some_stacks(frames: Frames, which: NDArray[np.int64]) -> Frames:
    """Return some of the stacks, and names each once."""
    lengths = np.diff(frames.starts)[which]
    ends = np.cumsum(lengths)
    inside = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    entries = frames.entries[np.repeat(frames.starts[which], lengths) + inside]
    used, entry = np.unique(entries, return_inverse=True)
    names: dict[str, int] = {}
    number = np.array(
        [names.setdefault(frames.names[i], len(names)) for i in used.tolist()], np.int64
    )
    return Frames(list(names), number[entry], np.append(0, ends))


def _whole(held: Bundled) -> tuple[Bundled, str | None]:
    return held, ""


def _without_rare(held: Bundled) -> tuple[Bundled, str | None]:
    """Make all stacks that were seen once one."""
    traces = held.traces
    if traces is None:
        return held, None
    count = np.bincount(traces.trace, minlength=len(traces.frames.starts) - 1)
    rare = count < 2
    if not rare.any():
        return held, None
    frames = _some_stacks(traces.frames, np.flatnonzero(~rare))
    number = np.where(rare, len(frames.starts) - 1, np.cumsum(~rare) - 1)
    frames = Frames(
        [*frames.names, TRIMMED],
        np.append(frames.entries, len(frames.names)),
        np.append(frames.starts, len(frames.entries) + 1),
    )
    trimmed = f"{int(rare.sum())} of {len(rare)} stacks, each seen once: shown as {TRIMMED}"
    return replace(held, traces=replace(traces, trace=number[traces.trace], frames=frames)), trimmed


def _without_stacks(held: Bundled) -> tuple[Bundled, str | None]:
    if held.traces is None:
        return held, None
    return replace(held, traces=None), f"all stacks, {len(held.traces.time_ns)} samples"


_TRIMS = (_whole, _without_rare, _without_stacks)


class _Writer:
    """Writes the members of a bundle but for the reports."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._members: dict[str, bytes] = {}
        self._first: dict[str, int] = {}

    def members(self, capture: Capture, held: Bundled) -> dict[str, bytes]:
        """Return the members by name."""
        # First of all, as it tells the names that may stand in texts.
        self._members = {archive.FIRST: self._manifest(capture)}
        self._backends(capture.seen)
        streams = {
            WAIT_EVENT: self._stream(capture, WAIT_EVENT, held.waits),
            **{
                name: self._stream(capture, name, one)
                for name, one in zip(capture.sets, held.sets.values(), strict=True)
            },
        }
        about: dict[str, Any] = {
            "pg_version": capture.pg_version,
            "mode": capture.mode if re.fullmatch(_MANIFEST["mode"], capture.mode) else "unknown",
            "start_ns": capture.start_ns,
            "end_ns": capture.end_ns,
            "late": asdict(capture.late) if capture.late else None,
            "warnings": self._warnings(capture, capture.warnings),
            "streams": streams,
            "others": None,
            "profile": None,
        }
        for name in capture.sets:
            self._members[f"{name}.set"] = _set_text(capture, name)
        if held.queries:
            self._queries(held.queries)
        if held.switches:
            about["others"] = sorted(held.switches.others.items())
            self._switches(held.switches)
        if held.traces:
            about["profile"] = {
                "events": [event.name for event in held.traces.events],
                "warnings": self._warnings(capture, held.traces.warnings),
            }
            self._traces(held.traces)
        about["first"] = self._first
        self._members["capture.json"] = _json(about)
        return dict(self._members)

    def _warnings(self, capture: Capture, texts: Sequence[str]) -> list[str]:
        return [self._redactor.warning(one, str(capture.path)) for one in texts]

    def _manifest(self, capture: Capture) -> bytes:
        lines = [("bundle", str(FORMAT)), ("bundled_by", __version__)]
        if "host" in capture.manifest:
            self._redactor.name("host", capture.manifest["host"])
        for key, value in capture.manifest.items():
            kind = _TOLD.get(key)
            if kind in self._redactor.keep:
                lines.append((key, value))
                continue
            match = re.match(_MANIFEST.get(key, "(?!)"), value)
            whole = match is not None and match[0] == value
            if match and (whole or key in ("kernel", "perf")):
                lines.append((key, match[0]))
            if kind and key != "host" and not whole:
                self._redactor.counts[kind] += 1
        return "".join(f"{key}\t{value}\n" for key, value in lines).encode()

    def _stream(self, capture: Capture, name: str, held: Held) -> dict[str, Any]:
        rows, stream = held.rows, held.stream
        self._times(f"{name}.time_ns", rows.time_ns)
        self._column(f"{name}.thread", rows.thread)
        self._column(f"{name}.value", rows.value)
        self._column(f"{name}.mark", rows.mark)
        return {
            "samples": stream.samples,
            "lost": stream.lost,
            "cuts": stream.cuts,
            "first_ns": stream.first_ns,
            "last_ns": stream.last_ns,
            "gaps": stream.gaps,
            "warnings": self._warnings(capture, stream.warnings),
            "started": [self._row(name, row) for row in held.started[2:]],
            "ended": [self._row(name, row) for row in held.ended[2:]],
        }

    def _row(self, name: str, row: Row) -> list[int | str | None]:
        return [self._text(name, v) if isinstance(v, bytes) else v for v in row]

    def _text(self, name: str, value: bytes) -> str:
        shown = value.decode(errors="backslashreplace")
        if name == QUERY_SET:
            return self._redactor.query(shown)
        # Names of LWLock tranches are those that the server, or an extension, has in its code.
        return shown if name == "lwlock-wait" else self._redactor.name("texts", shown, "text")

    def _backends(self, seen: SeenBackends) -> None:
        name = self._redactor.name
        lines = ["pid\ttype\tuser\tdatabase\tapplication\tleader\twait"]
        for pid, who in seen.backends.items():
            names = (name(kind, getattr(who, kind)) for kind in ("user", "database", "application"))
            wait = f"0x{seen.waits[pid]:08x}" if pid in seen.waits else "-"
            lines.append("\t".join((str(pid), who.type, *names, str(who.leader), wait)))
        self._members["backends.tsv"] = "".join(f"{line}\n" for line in lines).encode()

    def _queries(self, queries: Queries) -> None:
        known = stand_ins()
        self._members["queries.json"] = _json(
            [
                {
                    "text": q.text if q.text in known else self._redactor.query(q.text),
                    "query_id": self._redactor.number("queries", q.query_id),
                }
                for q in queries.table
            ]
        )
        # By time: what is alike then compresses well.
        order = np.argsort(queries.time_ns, kind="stable")
        self._times("queries.time_ns", queries.time_ns[order])
        self._column("queries.pid", queries.pid[order])
        self._column("queries.code", queries.code[order])

    def _switches(self, switches: Switches) -> None:
        self._times("switches.time_ns", switches.time_ns)
        self._column("switches.tid", switches.tid)
        self._column("switches.kind", switches.kind)
        if switches.sampled is not None:
            tid, time = switches.sampled
            order = np.argsort(time, kind="stable")
            self._times("sampled.time_ns", time[order])
            self._column("sampled.tid", tid[order])

    def _traces(self, traces: Traces) -> None:
        self._times("samples.time_ns", traces.time_ns)
        for name in ("pid", "tid", "event", "weight", "trace"):
            self._column(f"samples.{name}", getattr(traces, name))
        frames = traces.frames
        self._members["frames.json"] = _json([self._redactor.frame(n) for n in frames.names])
        self._column("stacks.frame", frames.entries)
        self._column("stacks.length", np.diff(frames.starts))

    def _times(self, name: str, column: NDArray[np.int64]) -> None:
        """Write times as differences, each from the one before."""
        if len(column):
            self._first[name] = int(column[0])
        self._members[f"{name}.npy"] = _npy(np.diff(column, prepend=column[:1]))

    def _column(self, name: str, column: NDArray[np.integer[Any]]) -> None:
        """Write numbers as places in a table, where they are few."""
        distinct, place = np.unique(column, return_inverse=True)
        if len(distinct) < min(_TABLE_MAX, len(column) // 2):
            self._members[f"{name}.table.npy"] = _npy(distinct)
            column = place
        self._members[f"{name}.npy"] = _npy(column)


def _removed(redactor: Redactor, capture: Capture, held: Bundled, trimmed: str | None) -> str:
    """Return removed.txt."""
    counts = redactor.counts
    gone = [f"  {kind:<12} {counts[kind]:>6}  {about}" for kind, about in KINDS.items()]
    gone = [line for line, kind in zip(gone, KINDS, strict=True) if kind not in redactor.keep]
    kept = [f"  {kind}: {KINDS[kind]}" for kind in KINDS if kind in redactor.keep]
    has = {
        "queries": held.queries,
        "context switches": held.switches,
        "stacks, by names of functions": held.traces,
    }
    lines = [
        "Removed, and how many of each there were:",
        *gone,
        "  Names became pseudonyms, as database-1, in the texts of queries too, literals became",
        "  ?, ids of queries and addresses numbers. Titles of processes, which have the addresses",
        "  of clients, and what was recorded of other processes, are in no bundle.",
        *([f"Trimmed to be no larger than --max: {trimmed}."] if trimmed else []),
        *(["Kept, as --keep asked for:", *kept] if kept else []),
        "What remains:",
        "  times, process ids, wait events, versions of PostgreSQL, kernel and perf, CPUs",
        *(f"  {what}" for what, there in has.items() if there),
        *(f"  probe set {name}" for name in capture.sets),
    ]
    if QUERY_SET in capture.sets:
        lines += [
            "  In the texts of queries: names of schemas, tables, columns, functions, and all",
            "  other identifiers but those above. Read report.json before you send it.",
        ]
    return "\n".join(lines) + "\n"


def _set_text(capture: Capture, name: str) -> bytes:
    """Return the declaration of a probe set, without its comments."""
    folders = (capture.path, probes_dir())
    file = next(f / f"{name}.set" for f in folders if (f / f"{name}.set").is_file())
    lines = (line.partition("#")[0].rstrip() for line in file.read_text().splitlines())
    return "".join(f"{line}\n" for line in lines if line).encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=0, separators=(",", ":")) + "\n").encode()


def _npy(column: NDArray[np.integer[Any]]) -> bytes:
    """Return a column as NumPy writes it, its numbers as small as they can be."""
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    kinds = ("u1", "u2", "u4", "u8") if low >= 0 else ("i1", "i2", "i4", "i8")
    kind = next(k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    content = io.BytesIO()
    np.lib.format.write_array(content, column.astype(f"<{kind}"), version=(1, 0))
    return content.getvalue()


# Reading


def _opened(members: Mapping[str, memoryview], path: Path) -> Capture:
    """Return the capture that the members of a bundle are."""
    return _Reader(members, path).capture()


_TIME = (int, None)
_ABOUT = {
    "pg_version": str,
    "mode": str,
    "start_ns": _TIME,
    "end_ns": _TIME,
    "late": ({"count": int, "median_ns": int, "max_ns": int, "never": int}, None),
    "warnings": [str],
    "streams": {
        str: {
            "samples": int,
            "lost": int,
            "cuts": int,
            "first_ns": _TIME,
            "last_ns": _TIME,
            "gaps": [[int]],
            "warnings": [str],
            "started": [[(int, str, None)]],
            "ended": [[(int, str, None)]],
        }
    },
    "others": ([[int]], None),
    "profile": ({"events": [str], "warnings": [str]}, None),
    "first": {str: int},
}
"""What capture.json looks like: a list of things alike, one of several, or an object."""


def _is(value: Any, shape: Any) -> bool:
    if isinstance(shape, tuple):
        return any(_is(value, one) for one in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_is(one, shape[0]) for one in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if str in shape:
            return all(_is(one, shape[str]) for one in value.values())
        return value.keys() == shape.keys() and all(_is(value[k], shape[k]) for k in shape)
    if shape is int:
        return type(value) is int and -(1 << 63) <= value < 1 << 64
    return value is None if shape is None else isinstance(value, shape)


class _Reader:
    """Reads the members of a bundle; whatever they hold, only a WaitfoldError comes of it."""

    def __init__(self, members: Mapping[str, memoryview], path: Path) -> None:
        self._members = members
        self._path = path
        self._first: dict[str, int] = {}

    def capture(self) -> Capture:
        manifest = self._manifest()
        about = self._json("capture.json", _ABOUT)
        self._first = about["first"]
        late, start, end = about["late"], about["start_ns"], about["end_ns"]
        if not all(0 <= time < _TIME_MAX for time in (start, end) if time is not None):
            raise self._damaged("capture.json", "start_ns or end_ns is no time")
        events = WaitEvents(about["pg_version"])
        streams = about["streams"]
        if WAIT_EVENT not in streams:
            raise self._damaged("capture.json", "it has no wait events")
        sets = {name: self._set(name) for name in streams if name != WAIT_EVENT}
        bundled = Bundled(
            self._stream(WAIT_EVENT, streams[WAIT_EVENT], None),
            {
                (rule := one.set_rule(_GROUP)): self._stream(name, streams[name], rule)
                for name, one in sets.items()
            },
            self._queries(),
            self._switches(about["others"]),
            self._traces(about["profile"]),
        )
        return Capture(
            self._path,
            [bundled],
            PairRule("wait", "value", "wait", 0),
            about["pg_version"],
            events,
            about["mode"],
            self._backends(),
            start,
            end,
            sets,
            manifest | {"group": _GROUP},
            about["warnings"],
            Late(**late) if late else None,
        )

    def _manifest(self) -> dict[str, str]:
        manifest = {}
        for line in self._text("manifest").split("\n")[:-1]:
            key, _, value = line.partition("\t")
            manifest[key] = value
        form = manifest.pop("bundle", "")
        if form != str(FORMAT):
            raise WaitfoldError(
                f"{self._path} is a bundle of format {form[:9]!r}, and this waitfold reads format "
                f"{FORMAT}: read it with a newer one."
            )
        return manifest

    def _set(self, name: str) -> Any:
        content = self._text(f"{name}.set")
        own = parse_set(self._path / f"{name}.set", content)
        if own.wait_field is not None:
            raise self._damaged(f"{name}.set", "it is one of wait events")
        return own

    def _stream(self, name: str, about: dict[str, Any], rule: SetRule | None) -> Held:
        time = self._times(f"{name}.time_ns", ordered=True)
        rows = Transitions(
            time,
            self._column(f"{name}.thread", "u8", len(time)),
            self._column(f"{name}.value", "u4", len(time)),
            self._column(f"{name}.mark", "u1", len(time)),
        )
        self._threads(f"{name}.thread", rows.pid, rows.tid)
        if int(rows.mark.max(initial=0)) > CUT:
            raise self._damaged(f"{name}.mark.npy", "there is no such mark")
        gaps = about["gaps"]
        if not all(len(gap) == 2 and all(0 <= t < 1 << 63 for t in gap) for gap in gaps):
            raise self._damaged("capture.json", "a gap that is none")
        times = [about[key] for key in ("first_ns", "last_ns") if about[key] is not None]
        if not all(0 <= t < _TIME_MAX for t in times):
            raise self._damaged("capture.json", "first_ns or last_ns is no time")
        stream = TransitionStream(
            samples=about["samples"],
            lost=about["lost"],
            gaps=[(start, end) for start, end in gaps],
            cuts=about["cuts"],
            first_ns=about["first_ns"],
            last_ns=about["last_ns"],
            warnings=about["warnings"],
        )
        started, ended = (self._rows(name, about[key]) for key in ("started", "ended"))
        if rule is not None:
            self._codes(name, rows.value, started, ended)
            for rows_, named in ((started, rule.start_fields), (ended, rule.end_fields)):
                if any(len(row) != len(named) for row in rows_[2:]):
                    raise self._damaged("capture.json", f"rows of {name} do not fit its fields")
        return Held(rows, stream, started, ended)

    def _rows(self, name: str, rows: list[list[int | str | None]]) -> list[Row]:
        texts = [tuple(v.encode() if isinstance(v, str) else v for v in row) for row in rows]
        return [(), (), *texts]

    def _codes(
        self, name: str, value: NDArray[np.uint32], started: list[Row], ended: list[Row]
    ) -> None:
        is_end = value & np.uint32(ENDED) > 0
        ends, starts = value[is_end] & np.uint32(ENDED - 1), value[~is_end]
        if int(ends.max(initial=0)) >= len(ended) or int(starts.max(initial=0)) >= len(started):
            raise self._damaged(f"{name}.value.npy", "a code of nothing")

    def _backends(self) -> SeenBackends:
        backends: dict[int, Backend] = {}
        waits: dict[int, int] = {}
        for number, line in enumerate(self._text("backends.tsv").split("\n")[1:-1], 2):
            try:
                pid, type_, user, database, application, leader, wait = line.split("\t")
                who = Backend(type_, user, database, application, int(leader))
                if not 0 < int(pid) <= PID_MAX or not 0 <= who.leader <= PID_MAX:
                    raise ValueError
                backends[int(pid)] = who
                if wait != "-":
                    waits[int(pid)] = int(wait, 16) & 0xFFFF_FFFF
            except ValueError:
                raise self._damaged("backends.tsv", f"line {number} is not of a process") from None
        return SeenBackends(backends, waits)

    def _queries(self) -> Queries | None:
        if "queries.json" not in self._members:
            return None
        table = self._json("queries.json", [{"text": str, "query_id": int}])
        time = self._times("queries.time_ns", ordered=True)
        pid = self._column("queries.pid", "i4", len(time))
        code = self._column("queries.code", "i4", len(time))
        self._threads("queries.pid", pid)
        if len(table) < 2 or not -1 <= int(code.min(initial=0)) <= int(code.max(initial=0)) < len(
            table
        ):
            raise self._damaged("queries.code.npy", "a code of no query")
        order = np.lexsort((time, pid))
        known = [Query(q["text"], q["query_id"]) for q in table]
        return Queries(pid[order], time[order], code[order], known)

    def _switches(self, others: list[list[int]] | None) -> Switches | None:
        if others is None:
            return None
        time = self._times("switches.time_ns")
        tid = self._column("switches.tid", "i4", len(time))
        self._threads("switches.tid", tid)
        kind = self._column("switches.kind", "u1", len(time))
        if not np.isin(kind, SEEN).all():
            raise self._damaged("switches.kind.npy", "a number that cannot be")
        sampled = None
        if "sampled.time_ns.npy" in self._members:
            when = self._times("sampled.time_ns")
            who = self._column("sampled.tid", "i4", len(when))
            self._threads("sampled.tid", who)
            order = np.lexsort((when, who))
            sampled = who[order], when[order]
        if any(len(pair) != 2 for pair in others):
            raise self._damaged("capture.json", "others are no pairs")
        return Switches(tid, time, kind, sampled, {pair[0]: pair[1] for pair in others})

    def _traces(self, about: dict[str, Any] | None) -> Traces | None:
        if about is None:
            return None
        events = [Event(i, name, (), 0, 0, {}) for i, name in enumerate(about["events"])]
        if not {event.name for event in events} <= {SWITCH, SAMPLE} or len(events) > 2:
            raise self._damaged("capture.json", "a profile of unknown events")
        time = self._times("samples.time_ns")
        n = len(time)
        pid, tid = (self._column(f"samples.{one}", "i4", n) for one in ("pid", "tid"))
        self._threads("samples.pid", pid, tid)
        event = self._column("samples.event", "u1", n)
        weight = self._column("samples.weight", "u8", n)
        trace = self._column("samples.trace", "i8", n)
        names = self._json("frames.json", [str])
        lengths = self._column("stacks.length", "i8")
        entries = self._column("stacks.frame", "i8")
        for name, column, end in (
            ("samples.event", event, len(events)),
            ("samples.trace", trace, len(lengths)),
            ("stacks.frame", entries, len(names)),
            ("stacks.length", lengths, len(entries) + 1),
        ):
            low, high = (int(column.min()), int(column.max())) if len(column) else (0, -1)
            if low < 0 or high >= end:
                raise self._damaged(f"{name}.npy", "a number that cannot be")
        if int(lengths.sum()) != len(entries):
            raise self._damaged("stacks.length.npy", "stacks do not add up")
        frames = Frames(names, entries, np.append(0, np.cumsum(lengths)))
        comm = np.zeros(n, np.int32)
        return Traces(
            events, time, pid, tid, event, weight, comm, trace, frames, ["-"], about["warnings"]
        )

    def _threads(self, name: str, *columns: NDArray[np.int32]) -> None:
        for column in columns:
            if int(column.max(initial=0)) > PID_MAX or int(column.min(initial=0)) < -1:
                raise self._damaged(f"{name}.npy", "a thread that cannot be")

    def _times(self, name: str, ordered: bool = False) -> NDArray[np.int64]:
        steps = self._npy(f"{name}.npy").astype(np.int64)
        times = np.cumsum(steps) + self._first.get(name, 0)
        if len(times) and not 0 <= int(times.min()) <= int(times.max()) < _TIME_MAX:
            raise self._damaged(f"{name}.npy", "a time that cannot be")
        if ordered and (times[1:] < times[:-1]).any():
            raise self._damaged(f"{name}.npy", "times are not in order")
        return times

    def _column(self, name: str, kind: str, rows: int | None = None) -> NDArray[Any]:
        column = self._npy(f"{name}.npy")
        if rows is not None and len(column) != rows:
            raise self._damaged(f"{name}.npy", f"{len(column)} rows, not {rows}")
        if f"{name}.table.npy" in self._members:
            table = self._npy(f"{name}.table.npy")
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < len(table):
                raise self._damaged(f"{name}.npy", "a place behind its table")
            column = table[column]
        info = np.iinfo(kind)
        if len(column) and not info.min <= int(column.min()) <= int(column.max()) <= info.max:
            raise self._damaged(f"{name}.npy", "a number that cannot be")
        return column.astype(kind)

    def _npy(self, member: str) -> NDArray[Any]:
        content = self._content(member)
        head = bytes(content[: 10 + 1024])
        match = re.match(
            rb"\x93NUMPY\x01\0(..)\{'descr': '[<|]([iu][1248])', 'fortran_order': False, "
            rb"'shape': \(([0-9]{1,9}),\), \} *\n",
            head,
            re.DOTALL,
        )
        if match is None or match.end() != 10 + int.from_bytes(match[1], "little"):
            raise self._damaged(member, "it is not as NumPy writes a column of numbers")
        kind = np.dtype(f"<{match[2].decode()}")
        if len(content) - match.end() != int(match[3]) * kind.itemsize:
            raise self._damaged(member, "it has another size than it says")
        return np.frombuffer(content, kind, offset=match.end())

    def _json(self, member: str, shape: Any) -> Any:
        try:
            value = json.loads(self._text(member))
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError):
            raise self._damaged(member, "it is no JSON") from None
        if not _is(value, shape):
            raise self._damaged(member, "it does not hold what it should")
        return value

    def _text(self, member: str) -> str:
        return str(self._content(member), "utf-8", errors="replace")

    def _content(self, member: str) -> memoryview:
        if member not in self._members:
            raise WaitfoldError(f"{self._path} has no member {member}: it is not a whole bundle.")
        return self._members[member]

    def _damaged(self, member: str, why: str) -> WaitfoldError:
        return WaitfoldError(f"{self._path}: {member}: {why}. The bundle is damaged.")


_GROUP = "waitfold"
"""What stands for the group of the sets' own events in a bundle."""
