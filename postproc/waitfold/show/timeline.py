"""A picture of a capture over time: a heat map of its waits above a lane for each process.

Both are histograms over the same columns of time, so the size of the picture does not grow with
the capture. The heat map is that of Gregg (Communications of the ACM 53(7), 2010), but for
its colour: a wait is spread over the columns that it lasted, so that colour is time and a wait of
seconds is as visible as a million short ones. A lane's column shows all that the process did
then, in proportion.

The SVG is written here, as what matplotlib writes has neither figures under the mouse nor a dark
ground, and grows with the number of cells and lanes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from waitfold.analysis import Progress, intervals
from waitfold.backends import KINDS, POSTMASTER
from waitfold.capture import Capture
from waitfold.errors import Misuse, WaitfoldError
from waitfold.join import BLOCKED, ON_CPU, RUN_QUEUE, UNSEEN, Joined, join
from waitfold.pair import Intervals
from waitfold.show import palette
from waitfold.show.text import human, one_line, seconds
from waitfold.waitevents import is_idle

COLUMNS_MAX, LANES_MAX = 250, 32
"""At most so many columns of time and lanes: with all in use the SVG stays below 1 MB."""

CUT_ROW = 64
"""Row of the heat map, above those of 2**0 to 2**63 ns, of waits whose length is not known."""

_ROWS = CUT_ROW + 1
_EVENTS_MAX = 256  # of which the heat map tells the time apart
_CHUNK = 1 << 20  # segments

STATES = [*palette.COLOURS, palette.UNSEEN]
"""What a process may be doing, from the bottom of a lane to its top."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Columns of time, of `width_ns` each, counted from the beginning of the recording.

    They cover `start_ns` to `end_ns`; the first and the last may be cut by that. `base_ns` is
    when the recording began.
    """

    base_ns: int
    start_ns: int
    end_ns: int
    width_ns: int

    @property
    def first(self) -> int:
        """The number of the first column, counted from `base_ns`."""
        return (self.start_ns - self.base_ns) // self.width_ns

    @property
    def count(self) -> int:
        """Number of columns."""
        return (self.end_ns - 1 - self.base_ns) // self.width_ns + 1 - self.first

    @property
    def edges(self) -> Counts:
        """Where the columns begin, and the last one ends, in ns; inside start and end."""
        edges = self.base_ns + (self.first + np.arange(self.count + 1)) * self.width_ns
        return np.clip(edges, self.start_ns, self.end_ns)

    def of(self, time_ns: Counts) -> Counts:
        """Return the columns of times; what is outside is in the first or the last."""
        place = (time_ns - self.base_ns) // self.width_ns - self.first
        return np.clip(place, 0, self.count - 1)

    def spread(self, row: Counts, start_ns: Counts, end_ns: Counts, rows: int) -> Counts:
        """Return the time in ns, (rows, count), that intervals spent in each column.

        `row` says of each interval to which row its time is added.
        """
        start_ns, end_ns = np.maximum(start_ns, self.start_ns), np.minimum(end_ns, self.end_ns)
        some = end_ns > start_ns
        row, start_ns, end_ns = row[some], start_ns[some], end_ns[some]
        first, last = self.of(start_ns), self.of(end_ns - 1)
        edges = self.edges
        # In its last column until its end, in its first from its start; between them all of it.
        size = rows * (self.count + 1)
        at = row * (self.count + 1)
        time = np.bincount(at + last, end_ns - np.maximum(edges[last], start_ns), size)
        long = np.flatnonzero(last > first)
        at, first, last, start_ns = at[long], first[long], last[long], start_ns[long]
        time += np.bincount(at + first, edges[first + 1] - start_ns, size)
        whole = np.bincount(at + first + 1, minlength=size) - np.bincount(at + last, minlength=size)
        whole = np.cumsum(whole.reshape(rows, self.count + 1), axis=1)[:, :-1]
        # Doubles hold the sums of a batch exactly: 2**53 ns are 104 days.
        sums = np.rint(time).astype(np.int64).reshape(rows, self.count + 1)[:, :-1]
        spread: Counts = sums + whole * np.diff(edges)
        return spread


class Heat:
    """Waits by column of time and by length, in octaves: row i is of 2**i to below 2**(i+1) ns.

    `counts`, (65, columns), has the waits that ended in a column; `time_ns`, (events, 65,
    columns), the time that was waited in it, with the value of each event in `events`, -1
    standing for all after the first 256. Row 64 is of waits that the window or a loss cut.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.counts = np.zeros((_ROWS, columns.count), np.int64)
        self.time_ns = np.zeros((0, *self.counts.shape), np.int64)
        self._places: dict[int, int] = {}

    @property
    def events(self) -> list[int]:
        """What `time_ns` is of."""
        return list(self._places)

    def add(self, batch: Intervals) -> None:
        """Add intervals."""
        columns = self.columns
        end_ns = batch.start_ns + batch.dur_ns
        row = np.where(batch.flags > 0, CUT_ROW, np.frexp(np.maximum(batch.dur_ns, 1))[1] - 1)
        inside = (end_ns >= columns.start_ns) & (end_ns <= columns.end_ns)
        at = row[inside] * columns.count + columns.of(end_ns[inside] - 1)
        self.counts += np.bincount(at, minlength=self.counts.size).reshape(self.counts.shape)
        values, code = np.unique(batch.value, return_inverse=True)
        place = np.array([self._place(value) for value in values.tolist()], np.int64)
        events = len(self._places)
        rows = place[code] * _ROWS + row
        time = columns.spread(rows, batch.start_ns, end_ns, events * _ROWS)
        time = time.reshape(events, *self.counts.shape)
        time[: len(self.time_ns)] += self.time_ns
        self.time_ns = time

    def _place(self, value: int) -> int:
        if value not in self._places and len(self._places) >= _EVENTS_MAX:
            value = -1
        return self._places.setdefault(value, len(self._places))

    @property
    def total_ns(self) -> Counts:
        """Time waited, (65, columns)."""
        total: Counts = self.time_ns.sum(axis=0)
        return total


@dataclass(frozen=True)
class Lane:
    """A process, or several: `time_ns` is (states, columns).

    `processes` at once fill the lane.
    """

    label: str
    about: str
    time_ns: Counts
    processes: int = 1


def timeline(
    capture: Capture,
    title: str,
    from_s: float | None = None,
    to_s: float | None = None,
    progress: Progress | None = None,
) -> tuple[str, list[str]]:
    """Return the SVG, below 1 MB, and what to warn of.

    `from_s` and `to_s` are seconds since the recording began, by default all of it.

    Raises
    ------
    WaitfoldError
        There is nothing to draw.
    Misuse
        There is nothing between `from_s` and `to_s`.

    """
    joined = join(capture, progress)
    return picture(joined, title, from_s, to_s, progress)


def picture(
    joined: Joined,
    title: str,
    from_s: float | None = None,
    to_s: float | None = None,
    progress: Progress | None = None,
    styled: bool = True,
) -> tuple[str, list[str]]:
    """Return the same of a capture that is joined already.

    If not `styled`, it is to stand in a page which has the rules of FORMS and colours().
    """
    capture = joined.capture
    columns = _columns(joined, from_s, to_s)
    stream, batches = intervals(capture, progress)
    heat = Heat(columns)
    for batch in batches:
        heat.add(batch.take(np.flatnonzero(~is_idle(batch.value))))
    lanes = _lanes(joined, columns)
    if not lanes:
        raise WaitfoldError(f"nothing to draw: no process of the server is in {capture.path}")
    lost = _lost(columns, stream.gaps)
    about = seconds(joined.end_ns - joined.start_ns)
    if "started" in capture.manifest:
        about += f" from {capture.manifest['started']}"
    if columns.end_ns - columns.start_ns < joined.end_ns - joined.start_ns:
        about += f", here {_span(columns, 0, columns.count)}"
    about += f"; {stream.lost} samples lost" if stream.lost else "; no samples lost"
    svg = _svg(title, about, heat, lanes, lost, capture.events.label, styled)
    warnings = [*joined.warnings, *stream.warnings]
    if stream.lost:
        warnings.append(f"{stream.lost} samples were lost")
    return svg, list(dict.fromkeys(warnings))


def _columns(joined: Joined, from_s: float | None, to_s: float | None) -> Columns:
    base, length = joined.start_ns, joined.end_ns - joined.start_ns
    if not length:
        raise WaitfoldError(f"nothing to draw: {joined.capture.path} holds no time at all")
    begin = 0.0 if from_s is None else from_s
    end = length / 1e9 if to_s is None else min(to_s, length / 1e9)
    if not 0 <= begin < end:
        raise Misuse(
            f"there is nothing between --from {begin:g} and --to {end:g}: "
            f"the recording is {seconds(length)} long"
        )
    start_ns = base + math.floor(begin * 1e9)
    end_ns = base + (length if end * 1e9 >= length else math.ceil(end * 1e9))
    return Columns(base, start_ns, end_ns, _step(end_ns - start_ns, COLUMNS_MAX))


def _step(length: int, at_most: int) -> int:
    """Return the least of 1, 2, 5, 10, 20 ... of which at most so many make up the length."""
    power = 1
    while True:
        for step in (power, 2 * power, 5 * power):
            if step * at_most >= length:
                return step
        power *= 10


def _lost(columns: Columns, gaps: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return the columns in which samples were lost."""
    lost = np.zeros(columns.count, np.bool_)
    for start, end in gaps:
        if start < columns.end_ns and end > columns.start_ns:
            first, last = columns.of(np.array([start, min(end, columns.end_ns) - 1])).tolist()
            lost[first : last + 1] = True
    return lost


def _lanes(joined: Joined, columns: Columns) -> list[Lane]:
    """Return a lane for each of the processes that did most, and one for all others together."""
    segments = joined.segments
    pids, heads = np.unique(segments.pid, return_index=True)
    backends = [joined.backends[pid] for pid in pids.tolist()]
    wanted = np.array([b.type != POSTMASTER for b in backends], np.bool_)
    busy = np.zeros(len(pids), np.int64)
    lived = np.zeros(len(pids), np.int64)
    whole = Columns(columns.base_ns, columns.start_ns, columns.end_ns, columns.end_ns)
    resting = [STATES.index(state) for state in (palette.IDLE, palette.UNSEEN)]
    chunks = [slice(i, i + _CHUNK) for i in range(0, len(segments), _CHUNK)]
    for chunk in chunks:
        row = np.searchsorted(pids, segments.pid[chunk])
        first, end = int(row[0]), int(row[-1]) + 1
        times = _times(joined, chunk, row - first, end - first, whole)[:, :, 0]
        lived[first:end] += times.sum(axis=1)
        busy[first:end] += times.sum(axis=1) - times[:, resting].sum(axis=1)
    found = np.flatnonzero(wanted & (lived > 0))
    best = found[np.argsort(-busy[found], kind="stable")]
    if len(best) > LANES_MAX:
        best = best[: LANES_MAX - 1]
    since = segments.start_ns[heads].tolist()
    order = sorted(
        best.tolist(), key=lambda i: (KINDS.index(backends[i].kind), backends[i].type, since[i], i)
    )
    # Each process's lane; the last is of all others, and what is of none is below that.
    place = np.full(len(pids), len(order) + 1, np.int64)
    place[found] = len(order)
    place[order] = np.arange(len(order))
    times = np.zeros((len(order) + 2, len(STATES), columns.count), np.int64)
    for chunk in chunks:
        row = place[np.searchsorted(pids, segments.pid[chunk])]
        times += _times(joined, chunk, row, len(times), columns)
    lanes = []
    for i, time in zip(order, times, strict=False):
        backend, pid = backends[i], int(pids[i])
        who = " ".join(filter(None, (backend.who, backend.application)))
        label = f"{pid} {who or backend.type}"
        lanes.append(Lane(label, f"{pid} {backend.type} {who}".rstrip(), time))
    if more := len(found) - len(order):
        time = times[len(order)]
        most = math.ceil((time.sum(axis=0) / np.maximum(np.diff(columns.edges), 1)).max())
        name = f"{more} others, {most} at once at most"
        lanes.append(Lane(name, name, time, max(most, 1)))
    return lanes


def _times(joined: Joined, chunk: slice, row: Counts, rows: int, columns: Columns) -> Counts:
    """Return the time, (rows, states, columns), that segments spent in each state."""
    segments = joined.segments.take(chunk)
    values, code = np.unique(segments.value, return_inverse=True)
    of_value = np.array([_state(value, joined.capture.events.label) for value in values.tolist()])
    waits = of_value[code]
    run, none = segments.run, segments.value == 0
    state = np.select(
        [run == ON_CPU, run == RUN_QUEUE, (run == BLOCKED) & none],
        [STATES.index(s) for s in (palette.ON_CPU, palette.RUN_QUEUE, palette.NO_EVENT)],
        waits,
    )
    time = columns.spread(
        row * len(STATES) + state, segments.start_ns, segments.end_ns, rows * len(STATES)
    )
    return time.reshape(rows, len(STATES), -1)


def _state(value: int, label: Callable[[int], tuple[str, str]]) -> int:
    """Return the state of a process that blocked in a wait, or of which only that is known."""
    if value == UNSEEN:
        return STATES.index(palette.UNSEEN)
    if value == 0:
        return STATES.index(palette.NOT_WAITING)
    if is_idle(value):
        return STATES.index(palette.IDLE)
    class_ = label(value)[0]
    return STATES.index(class_ if class_ in palette.COLOURS else palette.OTHER)


_WIDTH, _LEFT, _PLOT = 1200, 236, 940
_ROW, _LANE, _PITCH = 9, 20, 23
_LEVELS = len(palette.HEAT)
_TIPS_MAX = 2000
_LABEL = 36  # characters

Label = Callable[[int], tuple[str, str]]


def _svg(
    title: str,
    about: str,
    heat: Heat,
    lanes: Sequence[Lane],
    lost: NDArray[np.bool_],
    label: Label,
    styled: bool,
) -> str:
    columns = heat.columns
    ended, cut = int(heat.counts[:CUT_ROW].sum()), int(heat.counts[CUT_ROW].sum())
    about += f"; {ended} waits seen to end and {cut} cut, {human(heat.total_ns.sum())} together, "
    about += f"idle ones left out; columns of {human(columns.width_ns)}"
    body = [_text(20, 28, one_line(title, 120), "big"), _text(20, 48, one_line(about, 180))]
    top = 92
    body.append(_text(20, top - 14, "How long waits were, and how much time went into them"))
    heat_map, bottom = _draw_heat(heat, label, top)
    body += [*heat_map, *_hatched(columns, lost, top, bottom), *_time_axis(columns, top, bottom)]
    top = bottom + 74
    body.append(_text(20, top - 14, "What processes did, in shares of each column"))
    legend, top = _lane_legend(lanes, top)
    body += [*legend, *_draw_lanes(columns, lanes, top)]
    bottom = top + len(lanes) * _PITCH
    body += _time_axis(columns, top, bottom)
    size = bottom + 56
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {size}" width="{_WIDTH}" '
        f'height="{size}" role="img"><title>{_escaped(title)}</title>'
        f"{_style() if styled else ''}{_definitions(columns)}"
        f'<rect class="ground" width="{_WIDTH}" height="{size}"/>'
    )
    return "\n".join([head, *body, "</svg>\n"])


FORMS = (
    "text{font:12px sans-serif}.big{font-size:17px}.small{font-size:11px}"
    ".end{text-anchor:end}.mid{text-anchor:middle}.cells{shape-rendering:crispEdges}"
    ".tip{fill:none;pointer-events:all}.lost{fill:url(#lost)}"
    f".s{len(STATES) - 1}{{fill:url(#unseen)}}"
)
"""Rules of CSS for what a picture is made of."""


def colours(of: Callable[[palette.Colour], str]) -> str:
    """Return the rules of CSS for what has a colour."""
    classes = {"ground": palette.GROUND, "ink": palette.INK, "faint": palette.FAINT}
    classes |= {f"h{i}": colour for i, colour in enumerate(palette.HEAT)}
    classes |= {f"s{i}": palette.COLOURS[s] for i, s in enumerate(STATES[:-1])}
    return "".join(f".{name}{{fill:{of(colour)}}}" for name, colour in classes.items())


def _style() -> str:
    light, dark = colours(lambda colour: colour.light), colours(lambda colour: colour.dark)
    return f"<style>{FORMS}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def _definitions(columns: Columns) -> str:
    # Hatched in the same way where x counts columns.
    hatch = (
        '<pattern id="{}" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="{}rotate(45)"><path class="ink" opacity=".6" d="M0 0h1.5v6h-1.5z"/>'
        "</pattern>"
    )
    unscaled = f"scale({1 / _scale(columns):.6g} 1) "
    return (
        f"<defs>{hatch.format('lost', '')}{hatch.format('unseen', unscaled)}"
        f'<clipPath id="plot"><rect x="{_LEFT}" width="{_PLOT}" height="9999"/></clipPath></defs>'
    )


def _scale(columns: Columns) -> float:
    """Return the width of a column in pixels."""
    return _PLOT * columns.width_ns / (columns.end_ns - columns.start_ns)


def _x(columns: Columns, time_ns: float) -> float:
    return _LEFT + _PLOT * (time_ns - columns.start_ns) / (columns.end_ns - columns.start_ns)


def _in_columns(columns: Columns, top: float) -> str:
    """Return the start of a group in which x counts columns."""
    x = _x(columns, columns.base_ns + columns.first * columns.width_ns)
    return (
        f'<g class="cells" clip-path="url(#plot)"><g transform="translate({x:.3f} {top:g}) '
        f'scale({_scale(columns):.6f} 1)">'
    )


def _draw_heat(heat: Heat, label: Label, top: int) -> tuple[list[str], int]:
    """Return the heat map and where it ends."""
    columns, time = heat.columns, heat.total_ns
    rows, cells = np.nonzero(time + heat.counts)
    lengths = rows[rows < CUT_ROW]
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (10, 20)
    # From a power of ten to one, so that the axis has labels.
    powers = math.floor(math.log10(2**low)), math.ceil(math.log10(2 ** (high + 1)))
    low, high = math.floor(math.log2(10 ** powers[0])), math.ceil(math.log2(10 ** powers[1])) - 1
    first = _ROW + 10  # below the row of waits of unknown length
    bottom = top + first + (high + 1 - low) * _ROW
    body = [
        f'<rect class="faint" opacity=".25" x="{_LEFT}" y="{top}" width="{_PLOT}" '
        f'height="{bottom - top}"/>',
        f"<g>{_text(_LEFT - 6, top + _ROW, 'cut, length unknown', 'end')}"
        f"{_tip('under way when the recording began or ended, or when samples were lost')}</g>",
    ]
    for power in range(powers[0], powers[1] + 1):
        y = min(bottom - (math.log2(10**power) - low) * _ROW, bottom)
        body.append(f'<path class="faint" d="M{_LEFT} {y:.1f}h{_PLOT}v1h-{_PLOT}z"/>')
        body.append(_text(_LEFT - 6, y + 4, _power(power), "end"))
    if not time.any():
        body.append(_text(_LEFT + _PLOT / 2, (top + bottom) / 2, "no waits but idle ones", "mid"))
        return body, bottom

    waiting = time / np.diff(columns.edges)
    # Twice the power of ten at which the colours end; each is half a power of ten.
    end = math.floor(2 * math.log10(waiting.max())) + 1
    level = np.floor(2 * np.log10(np.maximum(waiting, 1e-99))).astype(int) - end + _LEVELS
    level = np.maximum(level, 0)
    told = np.zeros(time.shape, np.bool_)
    most = np.argsort(-time[rows, cells], kind="stable")[:_TIPS_MAX]
    told[rows[most], cells[most]] = True
    plain: list[list[str]] = [[] for _ in range(_LEVELS)]
    body += [*_heat_legend(end, top - 26), _in_columns(columns, top)]
    for row, cell in zip(rows.tolist(), cells.tolist(), strict=True):
        y = 0 if row == CUT_ROW else first + (high - row) * _ROW
        box = f"M{cell} {y}h1v{_ROW}h-1z"
        if told[row, cell]:
            tip = _tip(_about_cell(heat, row, cell, label))
            body.append(f'<path class="h{level[row, cell]}" d="{box}">{tip}</path>')
        else:
            plain[level[row, cell]].append(box)
    rest = _tip("no figures, as other cells have more: zoom in with --from and --to")
    for i, boxes in enumerate(plain):
        if boxes:
            body.append(f'<path class="h{i}" d="{"".join(boxes)}">{rest}</path>')
    return [*body, "</g></g>"], bottom


def _about_cell(heat: Heat, row: int, cell: int, label: Label) -> str:
    length = f"{human(2**row)} to {human(2 ** (row + 1))}"
    if row == CUT_ROW:
        length = "unknown length"
    times = heat.time_ns[:, row, cell]
    ns, most = int(times.sum()), int(times.argmax())
    value = heat.events[most]
    name = ":".join(label(value)) if value >= 0 else "others"
    return (
        f"{_span(heat.columns, cell, cell + 1)}, waits of {length}: {heat.counts[row, cell]} "
        f"ended, {_exact(ns)} waited, {_percent(int(times[most]), ns)} {name}"
    )


def _hatched(columns: Columns, lost: NDArray[np.bool_], top: int, bottom: int) -> list[str]:
    """Return what marks the columns in which samples were lost."""
    parts = []
    for first, last in _runs(lost):
        x, end = _x(columns, columns.edges[first]), _x(columns, columns.edges[last])
        parts.append(
            f'<rect class="lost" x="{x:.1f}" y="{top}" width="{end - x:.1f}" '
            f'height="{bottom - top}">'
            f"{_tip(f'{_span(columns, first, last)}: samples were lost')}</rect>"
        )
    return parts


def _power(power: int) -> str:
    """Return a power of ten ns in its unit: `100 us`."""
    unit = min(power // 3, 3)
    return f"{10 ** (power - 3 * unit)} {('ns', 'us', 'ms', 's')[unit]}"


def _heat_legend(end: int, top: int) -> list[str]:
    size = 40
    x = _LEFT + _PLOT - _LEVELS * size
    parts = [_text(x - 10, top + 10, "processes waiting, on average in the cell", "end small")]
    for i in range(_LEVELS):
        at = x + i * size
        parts.append(f'<rect class="h{i}" x="{at}" y="{top}" width="{size}" height="10"/>')
        power, half = divmod(end - _LEVELS + i, 2)
        if i and not half:
            parts.append(_text(at, top + 22, f"{10.0**power:g}", "mid small"))
    return parts


def _lane_legend(lanes: Sequence[Lane], top: int) -> tuple[list[str], int]:
    """Return the legend of the states that occur, and where it ends."""
    total = sum((lane.time_ns.sum(axis=1) for lane in lanes), np.zeros(len(STATES), np.int64))
    parts, x, y = [], 20, top
    for i in np.flatnonzero(total).tolist():
        width = 34 + 7 * len(STATES[i])
        fill = "lost" if STATES[i] == palette.UNSEEN else f"s{i}"
        if x + width > _WIDTH - 20:
            x, y = 20, y + 20
        parts.append(
            f'<g><rect class="{fill} cells" x="{x}" y="{y}" width="14" height="12"/>'
            f"{_text(x + 20, y + 10, STATES[i])}"
            f"{_tip(f'{STATES[i]}: {_exact(int(total[i]))} in all')}</g>"
        )
        x += width
    return parts, y + 24


def _draw_lanes(columns: Columns, lanes: Sequence[Lane], top: int) -> list[str]:
    body = []
    slices = _slices(columns)
    for i, lane in enumerate(lanes):
        y = top + i * _PITCH
        name, about = one_line(lane.label, _LABEL), one_line(lane.about, 300)
        body.append(
            f"<g>{_text(_LEFT - 6, y + 14, name, 'end small')}"
            f"{_tip(f'{about}: {_shares(lane.time_ns.sum(axis=1))}')}</g>"
        )
        body.append(_in_columns(columns, y))
        heights = _heights(lane.time_ns, np.diff(columns.edges) * lane.processes)
        # Each state is drawn from the ground to its top; those below it then cover the rest.
        for state in range(len(STATES) - 1, -1, -1):
            if lane.time_ns[state].any():
                body.append(f'<path class="s{state}" d="{_area(heights[state])}"/>')
        for first, last in slices:
            shares = _shares(lane.time_ns[:, first:last].sum(axis=1))
            if shares:
                what = f"{name}\n{_span(columns, first, last)}: {shares}"
                body.append(
                    f'<path class="tip" d="M{first} 0h{last - first}v{_LANE}h{first - last}z">'
                    f"{_tip(what)}</path>"
                )
        body.append("</g></g>")
    return body


def _heights(time_ns: Counts, whole_ns: Counts) -> Counts:
    """Return the tops, (states, columns) in pixels, of the states stacked in their order.

    Each state that occurs in a column is at least 1 pixel high, so that it can be seen.
    """
    whole = np.maximum(whole_ns, 1)
    tops = np.rint(np.cumsum(time_ns, axis=0) * _LANE / whole).astype(np.int64)
    some = (time_ns > 0).astype(np.int64)
    for state in range(len(tops)):
        below = tops[state - 1] if state else 0
        tops[state] = np.maximum(tops[state], below + some[state])
    room = np.full(tops.shape[1], _LANE)
    for state in range(len(tops) - 1, -1, -1):
        tops[state] = np.minimum(tops[state], room)
        room = tops[state] - some[state]
    return tops


def _area(tops: Counts) -> str:
    """Return the path of a step line over the columns, closed along the ground."""
    heads = np.flatnonzero(np.append(True, tops[1:] != tops[:-1]))
    lengths = np.diff(np.append(heads, len(tops)))
    rises = np.diff(tops[heads], prepend=0)
    steps = [f"v{-rise}h{n}" for rise, n in zip(rises.tolist(), lengths.tolist(), strict=True)]
    return f"M0 {_LANE}{''.join(steps)}V{_LANE}z"


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return where runs of True begin, and end."""
    change = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return list(zip(change[::2].tolist(), change[1::2].tolist(), strict=True))


def _ticks(columns: Columns) -> tuple[int, list[int]]:
    """Return the distance of the axis's ticks, and the ticks, in ns from the recording's start."""
    step = _step(columns.end_ns - columns.start_ns, 10)
    first = -(-(columns.start_ns - columns.base_ns) // step)
    last = (columns.end_ns - columns.base_ns) // step
    return step, [i * step for i in range(first, last + 1)]


def _slices(columns: Columns) -> list[tuple[int, int]]:
    """Return the columns between ticks."""
    ticks = np.array(_ticks(columns)[1], np.int64) + columns.base_ns
    inner = np.searchsorted(columns.edges, ticks)
    edges = np.unique(np.concatenate([[0], inner, [columns.count]])).tolist()
    return list(pairwise(edges))


def _time_axis(columns: Columns, top: float, bottom: float) -> list[str]:
    """Return ticks with their labels below a plot, and lines through it."""
    step, ticks = _ticks(columns)
    parts = []
    for tick in ticks:
        x = _x(columns, columns.base_ns + tick)
        parts.append(
            f'<path class="ink" opacity=".15" d="M{x:.1f} {top:g}h.7V{bottom:g}h-.7z"/>'
            f'<path class="ink" d="M{x:.1f} {bottom:g}h1v5h-1z"/>'
        )
        parts.append(_text(x, bottom + 18, _at(tick, step), "mid"))
    parts.append(_text(_LEFT + _PLOT / 2, bottom + 36, "seconds since the recording began", "mid"))
    return parts


def _at(ns: int, step: int) -> str:
    """Return seconds with as many digits as steps of `step` need."""
    return f"{ns / 1e9:.{max(0, 9 - (len(str(step)) - 1))}f}"


def _span(columns: Columns, first: int, last: int) -> str:
    edges = columns.edges - columns.base_ns
    start, end = (_at(int(edges[i]), columns.width_ns) for i in (first, last))
    return f"{start} to {end} s"


def _exact(ns: int) -> str:
    return f"{ns / 1e6:.6f} ms"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def _shares(time_ns: Counts) -> str:
    """Return the time in each state that occurs, the greatest first."""
    whole = int(time_ns.sum())
    order = np.argsort(-time_ns, kind="stable").tolist()
    return ", ".join(
        f"{STATES[i]} {_exact(int(time_ns[i]))} ({_percent(int(time_ns[i]), whole)})"
        for i in order
        if time_ns[i]
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    kind = f"ink {style}".rstrip()
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{_escaped(text)}</text>'


def _tip(text: str) -> str:
    return f"<title>{_escaped(text)}</title>"


def _escaped(text: str) -> str:
    """Return a text as XML; of what cannot be printed only line ends stay."""
    printable = "".join(c if c == "\n" or c.isprintable() else "?" for c in text)
    return html.escape(printable, quote=False)
