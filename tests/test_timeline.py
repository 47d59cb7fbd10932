"""The timeline: what it adds up, what it draws, and how large that gets."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from waitfold.analysis import Analysis, analyse, intervals
from waitfold.backends import CLIENT, Backend
from waitfold.capture import Capture, Naming, open_capture
from waitfold.cli import main
from waitfold.events import TransitionStream
from waitfold.join import UNSEEN, Segments, join
from waitfold.pair import Intervals
from waitfold.show import palette, timeline
from waitfold.show.timeline import CUT_ROW, STATES, Columns, Heat
from waitfold.waitevents import is_idle

CAPTURES = [ROOT / "tests/data/mixed", ROOT / "samples/pgbench-cold-reads"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=CAPTURES, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    """A real capture."""
    return request.param


def opened(path: Path) -> Capture:
    """The capture, opened anew."""
    return open_capture(path, Naming())


def heat_of(path: Path, columns: Columns) -> Heat:
    """The heat map of a capture's waits, without idle ones."""
    heat = Heat(columns)
    for batch in intervals(opened(path))[1]:
        heat.add(batch.take(np.flatnonzero(~is_idle(batch.value))))
    return heat


def whole(analysis: Analysis, at_most: int = timeline.COLUMNS_MAX) -> Columns:
    """Columns of all the recording."""
    start, end = analysis.start_ns, analysis.end_ns
    return Columns(start, start, end, timeline._step(end - start, at_most))


@pytest.mark.parametrize("columns", [Columns(0, 0, 1000, 10), Columns(3, 47, 993, 100)])
def test_spread(columns: Columns) -> None:
    """Each column gets what lies in it of each interval, to the nanosecond."""
    rng = np.random.default_rng(1)
    start = rng.integers(-200, 1200, 500)
    end = start + rng.integers(0, 400, 500)
    row = rng.integers(0, 3, 500)
    want = np.zeros((3, columns.count), np.int64)
    edges = columns.edges.tolist()
    assert edges[0] == columns.start_ns and edges[-1] == columns.end_ns
    for r, s, e in zip(row.tolist(), start.tolist(), end.tolist(), strict=True):
        for i, (a, b) in enumerate(pairwise(edges)):
            want[r, i] += max(0, min(e, b) - max(s, a))
    assert (columns.spread(row, start, end, 3) == want).all()


def test_heat_is_the_report(path: Path) -> None:
    """Counts, times and lengths of the heat map are those of the report, event by event."""
    analysis = analyse(opened(path))
    heat = heat_of(path, whole(analysis))
    rows = [row for row in analysis.rows if not row.idle]
    assert heat.counts[:CUT_ROW].sum() == sum(row.count for row in rows) > 100
    assert heat.total_ns.sum() == sum(row.time_ns for row in rows)
    assert heat.total_ns[CUT_ROW].sum() == sum(row.cut_ns for row in rows)
    for wait in analysis.waits(analysis.everything()):
        if not is_idle(wait.value):
            assert heat.time_ns[heat.events.index(wait.value)].sum() == wait.time_ns
    octaves = np.sum(
        [w.stats.histogram for w in analysis.waits(analysis.everything()) if w.stats and
         not is_idle(w.value)], axis=0
    )  # fmt: skip
    assert heat.counts[:CUT_ROW].sum(axis=1).tolist() == octaves.tolist()


def test_zoom_adds_up(path: Path) -> None:
    """Two parts of a recording have together the time of all of it."""
    analysis = analyse(opened(path))
    all_ = whole(analysis)
    middle = all_.start_ns + (all_.end_ns - all_.start_ns) // 3
    parts = [
        Columns(all_.base_ns, start, end, 1_000_000)
        for start, end in ((all_.start_ns, middle), (middle, all_.end_ns))
    ]
    sums = [heat_of(path, columns).total_ns.sum(axis=1) for columns in (all_, *parts)]
    assert (sums[0] == sums[1] + sums[2]).all()


def test_lanes_are_the_report(path: Path) -> None:
    """The lanes of a capture without context switches have the report's time of each class."""
    analysis = analyse(opened(path))
    joined = join(opened(path))
    lanes = timeline._lanes(joined, whole(analysis))
    total = sum(lane.time_ns.sum(axis=1) for lane in lanes)
    want = dict.fromkeys(STATES, 0)
    for row in analysis.rows:
        state = palette.IDLE if row.idle else row.class_
        want[state if state in want else palette.OTHER] += row.time_ns
    got = dict(zip(STATES, total.tolist(), strict=True))
    apart = {palette.NOT_WAITING, palette.UNSEEN}
    assert {s: n for s, n in got.items() if s not in apart} == {
        s: n for s, n in want.items() if s not in apart
    }
    assert sum(got.values()) == int(joined.segments.dur_ns[_of_lanes(joined)].sum())


def _of_lanes(joined: object) -> np.ndarray:
    backends = joined.backends  # type: ignore[attr-defined]
    pids = [pid for pid, backend in backends.items() if backend.type != "postmaster"]
    return np.isin(joined.segments.pid, pids)  # type: ignore[attr-defined]


def test_heights() -> None:
    """States are stacked in proportion, none that occurs is too low to be seen, none is gone."""
    rng = np.random.default_rng(2)
    time = rng.integers(0, 1000, (len(STATES), 400)) ** 4 // 10**6
    time[rng.random(time.shape) < 0.5] = 0
    whole_ns = time.sum(axis=0) + rng.integers(0, 10**6, 400)
    tops = timeline._heights(time, whole_ns)
    heights = np.diff(tops, axis=0, prepend=0)
    assert (heights[time > 0] >= 1).all() and (heights[time == 0] == 0).all()
    assert tops.max() <= timeline._LANE
    true = time * timeline._LANE / whole_ns
    assert np.abs(heights - true)[true > 3].max() <= len(STATES) / 2


def test_many_short_waits_and_one_long() -> None:
    """A million waits of 10 us are as much as one of 10 s, and neither hides the other."""
    columns = Columns(0, 0, 10**10, 10**8)
    short, one = np.arange(10**6) * 10_000, np.zeros(1, np.int64)
    heat = Heat(columns)
    for start, length in ((short, 10_000), (one, 10**10)):
        n = np.zeros(len(start), np.int32)
        heat.add(
            Intervals(
                start,
                np.full(len(start), length),
                n,
                n,
                np.full(len(start), 0x0A00_0001, np.uint32),
                n.astype(np.uint8),
            )
        )
    used = {
        int(row): set(heat.total_ns[row].tolist()) for row in np.flatnonzero(heat.total_ns.any(1))
    }
    assert used == {13: {10**8}, 33: {10**8}}


def hostile(monkeypatch: pytest.MonkeyPatch, processes: int, each: int) -> Capture:
    """A capture in which everything occurs everywhere, with names that are no good."""
    capture = opened(CAPTURES[1])
    rng = np.random.default_rng(0)
    length, n = 10**10, processes * each
    times = np.sort(rng.integers(0, length, (processes, each)), axis=1)
    values = np.array(list(capture.events._names), np.uint32)
    value = rng.choice([*values.tolist(), 0, 0, 0, UNSEEN], n).astype(np.uint32)
    none = np.full(n, -1)
    segments = Segments(
        np.repeat(np.arange(1000, 1000 + processes, dtype=np.int32), each),
        times.ravel(),
        np.append(times[:, 1:], np.full((processes, 1), length), axis=1).ravel(),
        value,
        rng.integers(0, 4, n).astype(np.uint8),
        none.astype(np.int32),
        none,
    )
    who = Backend(CLIENT, "<script>&" * 7, '"]]>\x00\x1b\u202e\ud800-->')
    joined = SimpleNamespace(
        capture=capture,
        segments=segments,
        backends=dict.fromkeys(range(1000, 1000 + processes), who),
        warnings=[],
        start_ns=0,
        end_ns=length,
    )
    start = rng.integers(0, length, n)
    dur = np.minimum(2.0 ** rng.uniform(5, 33, n), length - start).astype(np.int64)
    pid = np.zeros(n, np.int32)
    flags = (rng.random(n) < 0.01).astype(np.uint8)
    waits = Intervals(start, dur, pid, pid, rng.choice(values, n), flags)
    gaps = [(i, i + 10**6) for i in range(0, length, 2 * 10**8)]
    monkeypatch.setattr(timeline, "join", lambda *_: joined)
    monkeypatch.setattr(
        timeline, "intervals", lambda *_: (TransitionStream(gaps=gaps, lost=9), iter([waits]))
    )
    return capture


def test_size_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is, the picture stays small and one; whatever a name holds, it is text."""
    capture = hostile(monkeypatch, 1000, 400)
    svg, _ = timeline.timeline(capture, "</title><script>\x00")
    assert len(svg.encode()) < 1_000_000
    root = ET.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        *("svg", "title", "style", "rect", "text", "g", "path", "defs", "pattern", "clipPath")
    }
    assert not re.search(r"href|https?:(?!//www\.w3\.org/2000/svg)| on\w+=", svg)
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "</title><script>?" in texts
    assert "969 others, 969 at once at most" in texts
    assert sum(text.startswith("1") and "<script>&" in text for text in texts) == 31
    assert len(list(root.iter(f"{SVG}rect"))) > 50  # hatched where samples were lost
    assert "prefers-color-scheme:dark" in svg


def test_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU and run queue go before the wait event; what blocks is of its class, or of none."""
    capture = opened(CAPTURES[1])
    lock, read = 0x0300_0000, 0x0600_0000
    value = [lock, lock, lock, 0, 0, 0, read, read, UNSEEN, lock]
    runs = [0, 1, 2, 0, 1, 2, 2, 0, 3, 3]
    n = len(value)
    start, none = np.arange(n) * 10, np.full(n, -1)
    segments = Segments(
        np.full(n, 7, np.int32),
        start,
        start + 10,
        np.array(value, np.uint32),
        np.array(runs, np.uint8),
        none.astype(np.int32),
        none,
    )
    joined = SimpleNamespace(
        capture=capture, segments=segments, backends={7: Backend(CLIENT)}, start_ns=0, end_ns=10 * n
    )
    (lane,) = timeline._lanes(joined, Columns(0, 0, 10 * n, 10))  # type: ignore[arg-type]
    states, columns = np.nonzero(lane.time_ns)
    got = [STATES[state] for state in states[np.argsort(columns)]]
    cpu, queue = palette.ON_CPU, palette.RUN_QUEUE
    assert got == [
        cpu, queue, "Lock", cpu, queue, palette.NO_EVENT, palette.IDLE, cpu, palette.UNSEEN, "Lock",
    ]  # fmt: skip


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes a picture of the part that is asked for, and refuses one that is not."""
    out = tmp_path / "t.svg"
    command = ["timeline", str(CAPTURES[1]), "-o", str(out)]
    assert main([*command, "--from", "0.5", "--to", "1"]) == 0
    texts = [element.text for element in ET.parse(out).iter(f"{SVG}text")]
    assert "0.50" in texts and "1.00" in texts and "0.00" not in texts
    for wrong in ("--from 99", "--to 0", "--from nan", "--from 1 --to 0.5"):
        out.unlink(missing_ok=True)
        assert main([*command, *wrong.split()]) == 2
        assert "there is nothing between --from" in capsys.readouterr().err
        assert not out.exists()


# Machado, Oliveira and Fernandes, 2009: protanopia, deuteranopia, tritanopia.
DICHROMATS = (
    "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881",
    "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
)
# Ottosson, 2020: linear sRGB to cone responses, their cube roots to OKLab.
OKLAB = (
    "0.41222147 0.53633254 0.05144599 0.21190350 0.68069955 0.10739696 "
    "0.08830246 0.28171884 0.62997870",
    "0.21045426 0.79361779 -0.00407205 1.97799850 -2.42859221 0.45059371 "
    "0.02590404 0.78277177 -0.80867577",
)


def _matrix(text: str) -> np.ndarray:
    return np.array(text.split(), float).reshape(3, 3)


def test_palette() -> None:
    """No two colours of states look alike, on either ground, to the colour-blind neither."""
    eyes = [np.eye(3), *(_matrix(text) for text in DICHROMATS)]
    to_lms, to_lab = map(_matrix, OKLAB)
    for ground in ("light", "dark"):
        colours = [getattr(c, ground) for c in (palette.GROUND, *palette.COLOURS.values())]
        rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        for eye in eyes:
            lab = np.cbrt(np.clip(linear @ eye.T, 0, 1) @ to_lms.T) @ to_lab.T
            apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
            assert apart[~np.eye(len(lab), dtype=bool)].min() > 0.1
