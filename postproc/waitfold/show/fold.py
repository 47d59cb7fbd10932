"""Folded stacks, `backend type;frame;... N` with N in ns, and the flame graph of them."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from waitfold.account import shape
from waitfold.analysis import Analysis, SetAnalysis
from waitfold.audit import left, sampled_in
from waitfold.errors import WaitfoldError
from waitfold.join import BLOCKED, ON_CPU, RUN_QUEUE, UNSEEN, Joined, Segments
from waitfold.pair import distinct
from waitfold.profile import UNKNOWN, Frames, Traces
from waitfold.queries import UNKNOWN as UNKNOWN_QUERY
from waitfold.sched import SAMPLE, SWITCH
from waitfold.show import palette
from waitfold.show.text import one_line
from waitfold.waitevents import is_idle_wait

# Where Debian's libdevel-nytprof-perl keeps FlameGraph's script.
DEBIAN_FLAMEGRAPH = Path("/usr/share/perl5/Devel/NYTProf/flamegraph.pl")

STATES = {ON_CPU: "[on-CPU]", RUN_QUEUE: "[run queue]", BLOCKED: "[blocked]"}
"""Last frames of wall-clock stacks."""

_GO_METHOD = re.compile(r"\.\(.*\)\.")  # net/http.(*Client).Do
_ARGUMENTS = re.compile(r"\((?!anonymous namespace\)).*")
_BRACKETS = str.maketrans("<>", "()")  # flamegraph.pl's way with what would be a tag
_QUERY_WIDTH, _QUERY_MAX = 60, 1024


def folded(analysis: Analysis, with_idle: bool) -> str:
    """Return the folded wait events, one a line, sorted; idle waits only if asked for.

    N is the sum of the complete intervals and of what was seen of those that were cut.
    """
    times = analysis.times()
    if not with_idle:
        times = times[~times["idle"]]
    stacks = times["type"] + ";" + times["class"] + ";" + times["name"]
    sums = times["time_ns"].groupby(stacks).sum()
    return "".join(f"{stack} {ns}\n" for stack, ns in sums.items() if ns > 0)


def folded_set(one: SetAnalysis) -> str:
    """Return the same of a probe set, `backend type;set;field;... N`."""
    sums: Counter[str] = Counter()
    for type_, texts, ns in one.times():
        frames = (one_line(text, 100).replace(";", ",") or "-" for text in texts)
        if ns > 0:
            sums[";".join([type_, one.probe_set.name, *frames])] += ns
    return _text(sums)


def folded_profile(traces: Traces, event: int) -> str:
    """Return the folded stacks of a profile's event, `comm;frame;... N`, leaf last, sorted.

    N is the sum of the samples' weights. The lines are those of FlameGraph's
    stackcollapse-perf.pl, which also says what a frame without a name is called, and what of a name
    does not fit.
    """
    rows = np.flatnonzero(traces.event == event)
    (comm, trace), sums = _grouped([traces.comm[rows], traces.trace[rows]], traces.weight[rows])
    roots = [comm.replace(" ", "_").replace(";", ":") for comm in traces.comms]
    lines = _lines(traces.frames)
    total: Counter[str] = Counter()
    for i, j, n in zip(comm.tolist(), trace.tolist(), sums.tolist(), strict=True):
        total[roots[i] + lines[j]] += n
    return _text(total)


class Kind(NamedTuple):
    """Which time is folded, and FlameGraph's palette for it."""

    about: str
    on: bool
    off: bool
    colors: str

    @property
    def events(self) -> list[str]:
        """The events whose stacks it is of."""
        return [SAMPLE] * self.on + [SWITCH] * self.off


KINDS = {
    "oncpu": Kind("On-CPU time", True, False, "hot"),
    "offcpu": Kind("Off-CPU time", False, True, "io"),
    "wall": Kind("Wall-clock time (red: on-CPU, blue: off-CPU)", True, True, "io"),
}


class Shown(NamedTuple):
    """What stands in stacks besides the frames, and whether idle waits are folded."""

    event: bool
    query: bool
    idle: bool


class _Rows(NamedTuple):
    """Time of the server's processes by what they did: `trace` -1 where the stack is not known."""

    pid: NDArray[np.int32]
    ns: NDArray[np.int64]
    value: NDArray[np.uint32]
    query: NDArray[np.int32]
    run: NDArray[np.uint8]
    trace: NDArray[np.int64]


def folded_times(joined: Joined, traces: Traces, kind: Kind, shown: Shown) -> str:
    """Return the folded stacks of a capture, `backend type;[query;]frame;...[;event][;state] N`.

    N is in ns: of on-CPU time the sum of the samples' weights, of off-CPU time what passed from
    when the process left the CPU, with this stack, until it ran again. `traces` are of the events
    that `kind` names. Time blocked in an idle wait, or by the postmaster, is left out unless
    `shown.idle`.
    """
    of = []
    if kind.on:
        of.append(_on_cpu(joined.segments, traces))
    if kind.off:
        of.append(_off_cpu(joined, traces))
    columns: list[NDArray[Any]] = [np.concatenate(parts) for parts in zip(*of, strict=True)]
    rows = _Rows(*columns)
    if not shown.idle:
        idle = is_idle_wait(rows.value) | np.isin(rows.pid, joined.postmasters)
        keep = np.flatnonzero(~((rows.run == BLOCKED) & idle))
        columns = [column[keep] for column in rows]
        rows = _Rows(*columns)

    types: dict[str, int] = {}
    pids, pid = np.unique(rows.pid, return_inverse=True)
    type_ = np.array(
        [types.setdefault(joined.backends[p].type, len(types)) for p in pids.tolist()], np.int64
    )
    roots = list(types)
    zero = np.zeros(len(rows.ns), np.int64)
    keys, sums = _grouped(
        [
            type_[pid],
            rows.query if shown.query else zero,
            rows.trace,
            rows.value if shown.event else zero,
            rows.run if kind.on and kind.off else zero,
        ],
        rows.ns,
    )
    queries = {
        code: f";{_query(joined, code)}" if shown.query else ""
        for code in np.unique(keys[1]).tolist()
    }
    events = {value: _event(joined, value) for value in np.unique(keys[3]).tolist()}
    states = {run: f";{frame}" if kind.on and kind.off else "" for run, frame in STATES.items()}
    # The tracepoint's own caller is there or not by what else traces it.
    lines = [line.removesuffix(";__traceiter_sched_switch") for line in _lines(traces.frames)]
    lines.append(f";{UNKNOWN}")
    total: Counter[str] = Counter()
    for i, query, trace, value, run, ns in zip(
        *(column.tolist() for column in (*keys, sums)), strict=True
    ):
        if ns > 0:
            total[roots[i] + queries[query] + lines[trace] + events[value] + states[run]] += ns
    return _text(total)


def look(stacks: str, kind: Kind, shown: Shown, title: str) -> Look:
    """Return how a flame graph of stacks that folded_times() made looks."""
    paint = temperatures(stacks) if kind.on and kind.off else {}
    if shown.event:
        paint |= event_colours(stacks)
    return Look(title, "ns", kind.colors, paint)


def _on_cpu(segments: Segments, traces: Traces) -> _Rows:
    """Return the samples, in the window, of the processes that the segments are of."""
    rows, at = sampled_in(segments, traces)
    rows, at = rows[at >= 0], at[at >= 0]
    return _Rows(
        traces.pid[rows],
        traces.weight[rows].astype(np.int64),
        segments.value[at],
        segments.query[at],
        np.full(len(rows), ON_CPU, np.uint8),
        traces.trace[rows],
    )


def _off_cpu(joined: Joined, traces: Traces) -> _Rows:
    """Return the segments that were off the CPU, with the stacks that it was left with."""
    segments = joined.segments
    is_off = (segments.run == BLOCKED) | (segments.run == RUN_QUEUE)
    own = segments.take(np.flatnonzero(is_off & (segments.sleep >= 0)))
    trace = left(joined.sleeps, traces)[own.sleep]
    return _Rows(own.pid, own.dur_ns, own.value, own.query, own.run, trace)


def _grouped(
    columns: Sequence[NDArray[np.integer]], ns: NDArray[np.integer]
) -> tuple[list[NDArray[np.int64]], NDArray[np.integer]]:
    """Return the distinct rows of columns, and the sums over those that are equal."""
    first, place = distinct(columns)
    sums = np.zeros(len(first), ns.dtype)
    np.add.at(sums, place, ns)
    return [column[first].astype(np.int64) for column in columns], sums


def _lines(frames: Frames) -> list[str]:
    """Return the stacks as text, root first, a semicolon before each frame."""
    names = [f";{_frame(name)}" for name in frames.names]
    entries, starts = frames.entries.tolist(), frames.starts.tolist()
    return [
        "".join([names[j] for j in reversed(entries[start:end])]) for start, end in pairwise(starts)
    ]


def _frame(name: str) -> str:
    """Return a function's name without what would not fit: arguments, quotes, a semicolon."""
    name = name.replace(";", ":")
    if "(" in name and not _GO_METHOD.search(name):
        name = _ARGUMENTS.sub("", name)
    return name.replace('"', "").replace("'", "")


def _event(joined: Joined, value: int) -> str:
    """Return the frame of a wait event, none where the process was in none."""
    if value == 0:
        return ""
    if value == UNSEEN:
        return ";(wait not seen)"
    return ";" + ":".join(joined.capture.events.label(value))


def _query(joined: Joined, code: int) -> str:
    """Return the frame of a query: constants as ?, as many queries differ by them alone."""
    if code == UNKNOWN_QUERY:
        return "(not seen)"
    text = shape(joined.queries.table[code].text[:_QUERY_MAX].rstrip("; \n"))
    return one_line(text, _QUERY_WIDTH).replace(";", ",")


def _text(sums: Counter[str]) -> str:
    return "".join(f"{stack} {n}\n" for stack, n in sorted(sums.items()))


class Look(NamedTuple):
    """How a flame graph looks."""

    title: str
    unit: str = "ns"  # what N is of
    colors: str = "io"  # FlameGraph's palette: io of off-CPU graphs, hot of on-CPU ones
    paint: Mapping[str, str] = {}  # frames that have a colour of their own


def flamegraph(stacks: str, look: Look) -> bytes:
    """Return the SVG of folded stacks, drawn by flamegraph.pl or inferno-flamegraph.

    Raises
    ------
    WaitfoldError
        There is nothing to draw, neither program is there, or it failed.

    """
    if not stacks:
        raise WaitfoldError("nothing to draw; --idle adds the idle waits")
    program = _renderer()
    title = look.title
    if program[0] != "inferno-flamegraph":
        title = html.escape(title)  # flamegraph.pl writes it as it is
    command = [*program, "--countname", look.unit, "--colors", look.colors, "--title", title]
    with tempfile.TemporaryDirectory() as folder:
        if look.paint:
            # Both take colours by name from a file of this name.
            command.append("--cp")
            Path(folder, "palette.map").write_text(
                "".join(
                    f"{name}->{rgb}\n"
                    for frame, rgb in look.paint.items()
                    for name in {frame, frame.translate(_BRACKETS)}
                    if "->" not in name
                )
            )
        result = subprocess.run(
            command, cwd=folder, input=stacks.encode(), capture_output=True, check=False
        )
    if result.returncode != 0 or not result.stdout.rstrip().endswith(b"</svg>"):
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise WaitfoldError(f"{program[0]} failed: {said[-1] if said else 'it said nothing'}")
    return result.stdout


def _renderer() -> list[str]:
    if found := shutil.which("flamegraph.pl"):
        return [str(Path(found).absolute())]
    if DEBIAN_FLAMEGRAPH.exists() and shutil.which("perl"):
        return ["perl", str(DEBIAN_FLAMEGRAPH)]
    if shutil.which("inferno-flamegraph"):
        return ["inferno-flamegraph"]
    raise WaitfoldError(
        "flamegraph.pl and inferno-flamegraph are both missing: "
        "apt-get install libdevel-nytprof-perl, or put one of them on PATH"
    )


def event_colours(stacks: str) -> dict[str, str]:
    """Return colours for the frames of wait events in stacks, `class:event`, by their class."""
    found: dict[str, str] = {}
    for frame in {frame for line in parsed(stacks) for frame in line[0]}:
        class_, colon, _ = frame.partition(":")
        if colon and class_ in palette.COLOURS:
            found[frame] = _class_colour(class_)
    return found


def class_colours(stacks: str) -> dict[str, str]:
    """Return the same for folded wait events, `backend type;class;event`."""
    found: dict[str, str] = {}
    for frames, _ in parsed(stacks):
        class_, event = frames[-2:]
        found[class_] = found[event] = _class_colour(class_)
    return found


def _class_colour(class_: str) -> str:
    colour = palette.COLOURS.get(class_, palette.COLOURS[palette.OTHER])
    return _rgb(_pale(_number(colour.light)))


def temperatures(stacks: str) -> dict[str, str]:
    """Return colours for the frames of wall-clock stacks: red on the CPU, blue off it.

    A frame's colour is by the share of its time that was off the CPU, over all stacks that it is
    in: names that are in both kinds are pale.
    """
    total: Counter[str] = Counter()
    off: Counter[str] = Counter()
    for frames, ns in parsed(stacks):
        for frame in set(frames):
            total[frame] += ns
            off[frame] += ns * (frames[-1] != STATES[ON_CPU])
    found = {"": _rgb(_PALE)}  # what all stand on
    for frame, ns in total.items():
        share = off[frame] / ns
        shade = zlib.crc32(frame.encode()) / 2**32  # neighbours differ a little
        end = _BLUE if share > 0.5 else _RED
        colour = [edge + round((to - edge) * shade) for edge, to in zip(*end, strict=True)]
        found[frame] = _rgb(_mixed(_PALE, colour, abs(2 * share - 1)))
    found[STATES[RUN_QUEUE]] = _rgb(_number(palette.COLOURS[palette.RUN_QUEUE].light))
    return found


# From and to which the shades go: the red part of FlameGraph's hot, and a lighter io.
_RED = ((225, 60, 30), (250, 120, 60))
_BLUE = ((105, 125, 225), (160, 175, 255))
_PALE = [232, 228, 216]


def parsed(stacks: str) -> Iterator[tuple[list[str], int]]:
    """Yield the frames of each folded stack, and its N."""
    for line in stacks.split("\n")[:-1]:
        stack, _, ns = line.rpartition(" ")
        yield stack.split(";"), int(ns)


def _number(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _pale(colour: list[int]) -> list[int]:
    """Return a colour as light as black text wants its ground."""
    return _mixed((255, 255, 255), colour, 0.6)


def _mixed(one: Sequence[int], other: Sequence[int], share: float) -> list[int]:
    return [round(a + (b - a) * share) for a, b in zip(one, other, strict=True)]


def _rgb(colour: list[int]) -> str:
    return f"rgb({colour[0]},{colour[1]},{colour[2]})"
