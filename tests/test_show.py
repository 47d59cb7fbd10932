"""Report, rows, folded stacks: against perf's own text, paired here one line at a time."""

from __future__ import annotations

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from waitfold.analysis import Analysis, Lives, analyse, intervals
from waitfold.capture import Naming, open_capture
from waitfold.errors import WaitfoldError
from waitfold.events import EXIT, FORK, Transitions
from waitfold.show import fold, text, waits
from waitfold.show.text import count, human
from waitfold.waitevents import CLIENT_READ

DATA = Path(__file__).parent / "data"
START, END = 1, 2


@dataclass
class Truth:
    """What perf's text says: (start_ns, dur_ns, pid, value, flags), and when processes lived."""

    rows: list[tuple[int, int, int, int, int]]
    lives: dict[int, tuple[int, int]]
    window: tuple[int, int]


def _truth(initial: dict[int, int], window: tuple[int, int]) -> Truth:
    start, end = window
    rows = []
    waiting = {pid: (start - 1, value) for pid, value in initial.items() if value}
    born: dict[int, int] = {}
    died: dict[int, int] = {}

    def close(pid: int, now: int, flag: int) -> None:
        since, value = waiting.pop(pid)
        if now > start:
            flags = START * (since < start) | flag
            rows.append((max(since, start), now - max(since, start), pid, value, flags))

    for line in (DATA / "mixed.events.txt").read_text().splitlines():
        who, stamp, what = line.split()
        pid, now = int(who.split("/")[0]), int(stamp.rstrip(":").replace(".", ""))
        if now > end:
            break
        if match := re.match(r"PERF_RECORD_FORK\((\d+)", what):
            born[int(match[1])] = now
        elif what.startswith("PERF_RECORD_EXIT"):
            died[pid] = now
            if pid in waiting:
                close(pid, now, END)
        else:
            if pid in waiting:
                close(pid, now, 0)
            if value := int(what.removeprefix("v="), 16):
                waiting[pid] = (now, value)
    for pid in list(waiting):
        close(pid, end, END)
    pids = {pid for _, _, pid, _, _ in rows}
    lives = {pid: (max(born.get(pid, 0), start), min(died.get(pid, end), end)) for pid in pids}
    return Truth(sorted(rows), lives, window)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """Sum the capture up."""
    return analyse(open_capture(DATA / "mixed", Naming()))


@pytest.fixture(scope="module")
def truth(analysis: Analysis) -> Truth:
    """Pair perf's text."""
    return _truth(analysis.capture.seen.waits, (analysis.start_ns, analysis.end_ns))


def _sums(rows: Iterator[tuple[object, int]]) -> dict[object, int]:
    sums: dict[object, int] = defaultdict(int)
    for key, amount in rows:
        sums[key] += amount
    return dict(sums)


def test_json(analysis: Analysis, truth: Truth) -> None:
    """Counts, totals, percentiles of every event, and sums by process, are those of perf's text."""
    report = json.loads(text.report_json(analysis))
    label = analysis.capture.events.label
    whole: dict[tuple[str, str], list[int]] = defaultdict(list)
    for _, dur_ns, _, value, flags in truth.rows:
        whole[label(value)] += [] if flags else [dur_ns]
    assert {(w["class"], w["name"]) for w in report["waits"]} == set(whole)
    for wait in report["waits"]:
        durations = sorted(whole[wait["class"], wait["name"]])
        assert (wait["count"], wait["total_ns"]) == (len(durations), sum(durations))
        if durations:
            assert wait["mean_ns"] == round(sum(durations) / len(durations))
            assert wait["max_ns"] == durations[-1]
            for percent in (50, 95, 99):
                rank = math.ceil(len(durations) * percent / 100) - 1
                assert wait[f"p{percent}_ns"] == durations[rank]
    assert [w["total_ns"] for w in report["waits"]] == sorted(
        (w["total_ns"] for w in report["waits"]), reverse=True
    )
    assert report["intervals"] == sum(len(durations) for durations in whole.values())
    flags = [row[4] for row in truth.rows]
    assert report["censored"] == {
        "start": sum(f & START for f in flags),
        "end": sum(f == END for f in flags),
        "lost": 0,
    }
    by_pid = _sums((pid, dur) for _, dur, pid, _, flags in truth.rows if not flags)
    assert {b["pid"]: b["total_ns"] for b in report["backends"] if b["total_ns"]} == by_pid
    cut = sum(dur for _, dur, _, _, flags in truth.rows if flags)
    assert sum(wait["cut_ns"] for wait in report["waits"]) == cut
    assert (report["lost"], report["pg_version"], report["mode"]) == (0, "15.18", "sites")
    assert report["window_ns"] == truth.window[1] - truth.window[0]


def test_db_time(analysis: Analysis, truth: Truth) -> None:
    """DB time is the foreground's lives less idle time, and the main table adds up to it."""
    foreground = {pid for pid, b in analysis.backends.items() if b.kind == "foreground"}
    lives = sum(truth.lives[pid][1] - truth.lives[pid][0] for pid in foreground)
    idle = sum(d for _, d, pid, value, _ in truth.rows if pid in foreground and value == 0x06000000)
    # The time in a FORK or EXIT record is about a microsecond off from that which perf shows.
    assert analysis.db_time_ns() == pytest.approx(lives - idle, abs=3000 * len(foreground), rel=0)
    table = text.report_text(analysis, False, False).split("\n\n")[2].splitlines()
    shares = [float(line.split()[-1]) for line in table[2:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


def test_processes_without_titles(analysis: Analysis) -> None:
    """Without titles a process is a client backend from its first wait on if it is one at all."""
    bare = analyse(open_capture(DATA / "mixed" / "perf.data", Naming(pg_version="15.18")))
    clients = {pid for pid, b in bare.backends.items() if b.type == "client backend"}
    titled = {pid for pid, b in analysis.backends.items() if b.type == "client backend"}
    assert titled - clients == {20461}  # slept throughout: no transition in the file
    whole = analysis.times()[analysis.times()["pid"].isin(clients)]
    same = bare.times()[bare.times()["kind"] == "foreground"]
    key = ["pid", "value"]
    columns = ["count", "total_ns"]
    whole, same = (t[t["value"] > 0].set_index(key)[columns].sort_index() for t in (whole, same))
    pd.testing.assert_frame_equal(whole, same)
    busy = same.drop(CLIENT_READ, level="value")
    assert bare.parts["foreground"].intervals == busy["count"].sum()


def test_pid_given_out_again() -> None:
    """A pid's lives add up; one without a birth counts from when it is known of."""
    rows = [
        (20, 7, EXIT),
        (30, 7, FORK),
        (35, 8, FORK),
        (50, 7, EXIT),
        (90, 7, FORK),
    ]
    thread = np.array([pid << 32 | pid for _, pid, _ in rows], np.uint64)
    marks = np.array([mark for _, _, mark in rows], np.uint8)
    times = np.array([time for time, _, _ in rows], np.int64)
    batch = Transitions(times, thread, np.zeros(len(rows), np.uint32), marks)
    lives = Lives()
    assert list(lives.watch(iter([batch]))) == [batch]
    assert lives.length_ns(7, 5, 10, 100) == (20 - 10) + (50 - 30) + (100 - 90)
    assert lives.length_ns(7, 15, 10, 40) == (20 - 15) + (40 - 30)
    assert lives.length_ns(8, 0, 10, 100) == 100 - 35
    assert lives.length_ns(9, 60, 10, 100) == 100 - 60


def test_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is, to the letter, the one that was looked at."""
    monkeypatch.chdir(DATA)
    report = text.report_text(analyse(open_capture(Path("mixed"), Naming())), False, False)
    assert report == Path("mixed.report.txt").read_text()


@pytest.mark.parametrize(("by_backend", "histogram"), [(False, True), (True, False)])
def test_width(analysis: Analysis, by_backend: bool, histogram: bool) -> None:
    """No line is wider than a terminal of 80 columns."""
    report = text.report_text(analysis, by_backend, histogram)
    assert max(map(len, report.splitlines()[1:])) <= 80


def test_by_backend(analysis: Analysis) -> None:
    """A process has its type, whose it is, its time without idle waits, and its top wait."""
    report = text.report_text(analysis, True, False)
    assert re.search(r"22266 client postgres/shop +\d+ +2\.01s  IPC:ExecuteGather", report)
    assert re.search(r"22267 parallel worker +9 +2\.00s  Timeout:PgSleep", report)
    assert re.search(r"14276 checkpointer +0 +0ns  -", report)


def test_histogram(analysis: Analysis) -> None:
    """A histogram counts every complete interval once."""
    report = text.report_text(analysis, False, True)
    histogram = report.partition("IO:WALSync, all processes\n")[2].partition("\n\n")[0]
    rows = [line.split() for line in histogram.splitlines()[1:]]
    stats = {w.name: w.stats for w in analysis.waits(analysis.everything())}["WALSync"]
    assert stats and sum(int(row[2]) for row in rows) == stats.count
    assert max(rows, key=lambda row: int(row[2]))[3] == "#" * 40


def test_rows(truth: Truth) -> None:
    """CSV and Parquet hold the same intervals as perf's text does."""
    capture = open_capture(DATA / "mixed", Naming())
    csv, parquet = io.BytesIO(), io.BytesIO()
    waits.write_csv(intervals(capture)[1], capture.events.label, csv)
    capture = open_capture(DATA / "mixed", Naming())
    waits.write_parquet(intervals(capture)[1], capture.events.label, parquet)
    assert csv.getvalue().startswith(b"start_ns,dur_ns,pid,tid,class,name,flags\n")
    frame = pd.read_csv(io.BytesIO(csv.getvalue()), keep_default_na=False)
    pd.testing.assert_frame_equal(
        frame, pd.read_parquet(parquet), check_dtype=False, check_column_type=False
    )
    names = {0: "", START: "start", END: "end", START | END: "start|end"}
    want = sorted(
        (start, dur, pid, pid, *capture.events.label(value), names[flags])
        for start, dur, pid, value, flags in truth.rows
    )
    assert sorted(frame.itertuples(index=False, name=None)) == want


def test_folded(analysis: Analysis, truth: Truth) -> None:
    """Folded stacks add up to all waits; idle ones are in them only if asked for."""
    stacks = fold.folded(analysis, True)
    assert sum(int(line.split()[-1]) for line in stacks.splitlines()) == sum(
        dur for _, dur, _, _, _ in truth.rows
    )
    assert "client backend;Client;ClientRead " in stacks
    assert "checkpointer;Activity;CheckpointerMain " in stacks
    busy = fold.folded(analysis, False)
    assert "Activity" not in busy and "ClientRead" not in busy
    assert set(busy.splitlines()) < set(stacks.splitlines())
    assert re.search(r"^parallel worker;Timeout;PgSleep 200\d{7}$", busy, re.MULTILINE)


def test_flamegraph_title() -> None:
    """A title with XML in it stays text."""
    try:
        svg = fold.flamegraph("client backend;IO;WALSync 5\n", fold.Look("a < b & c"))
    except WaitfoldError:
        pytest.skip("no flamegraph.pl here")
    assert b">a &lt; b &amp; c</text>" in svg
    assert b"WALSync (5 ns, 100" in svg


def test_no_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a renderer the error names the package; with nothing to draw it says so."""
    monkeypatch.setattr(fold, "DEBIAN_FLAMEGRAPH", Path("/nowhere"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(WaitfoldError, match="libdevel-nytprof-perl"):
        fold.flamegraph("a;b;c 1\n", fold.Look("t"))
    with pytest.raises(WaitfoldError, match="nothing to draw"):
        fold.flamegraph("", fold.Look("t"))


def test_renderer_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the renderer says when it fails is passed on."""
    script = tmp_path / "flamegraph.pl"
    script.write_text("#!/bin/sh\necho 'out of ink' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(WaitfoldError, match="out of ink"):
        fold.flamegraph("a;b;c 1\n", fold.Look("t"))


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (None, "-"),
        (0, "0ns"),
        (999, "999ns"),
        (1000, "1.00us"),
        (9_994, "9.99us"),
        (9_996, "10.0us"),
        (99_960, "100us"),
        (999_499, "999us"),
        (999_600, "1.00ms"),
        (12_345_678, "12.3ms"),
        (1_500_000_000, "1.50s"),
        (9_999_000_000_000, "9999s"),
        (36_000_000_000_000, "10.0h"),
        (3_600_000_000_000_000, "1000h"),
    ],
)
def test_human(ns: int | None, shown: str) -> None:
    """A time has three digits and fits six characters."""
    assert human(ns) == shown
    assert len(shown) <= 6


@pytest.mark.parametrize(
    ("n", "shown"), [(0, "0"), (9_999_999, "9999999"), (10**7, "10M"), (123_456_789, "123.5M")]
)
def test_count(n: int, shown: str) -> None:
    """A count fits seven characters."""
    assert count(n) == shown
    assert len(count(10**15 - 1)) <= 7
