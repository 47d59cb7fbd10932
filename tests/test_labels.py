"""Codes, labels and pairing of probe sets other than wait events, without a server."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from waitfold import probeset
from waitfold.analysis import analyse, analyse_set, set_intervals
from waitfold.capture import Capture, Naming, open_capture
from waitfold.errors import Misuse, PerfDataError, WaitfoldError
from waitfold.events import (
    ENDED,
    EXIT,
    FORK,
    RESET,
    STORE,
    Codes,
    Column,
    SetRule,
    Transitions,
    TransitionStream,
)
from waitfold.pair import END, LOST, START, pair
from waitfold.show import fold, text, waits

DATA = Path(__file__).parent / "data"

Row = tuple[int, int, int, str, int]  # start_ns, dur_ns, tid, what, flags


def rule(nested: bool = False) -> SetRule:
    """A rule of a start with a field and two ends with another."""
    return SetRule("g:start", ("what",), ("g:end",), ("how",), None, ("g:reset",), nested)


def paired(
    events: Sequence[tuple[int, int, str]],
    one: SetRule,
    gaps: Sequence[tuple[int, int]] = (),
    batch: int = 1000,
    window: tuple[int, int] = (0, 1000),
) -> list[Row]:
    """Pair (time, tid, event): `+x` starts x, `-x` ends as x, `!` resets, FORK and EXIT."""
    codes = one.uses
    marks = {"!": RESET, "fork": FORK, "exit": EXIT}

    def batches() -> Iterator[Transitions]:
        for at in range(0, len(events), batch):
            part = events[at : at + batch]
            values = []
            for _, _, event in part:
                use = codes["+-".find(event[0])] if event not in marks else codes[2]
                column: list[Column] = [[event[1:].encode()]] if use.fields else []
                values.append(int(use.values(column, 1)[0]))
            tid = np.array([tid for _, tid, _ in part], np.uint64)
            yield Transitions(
                np.array([time for time, _, _ in part], np.int64),
                tid << np.uint64(32) | tid,
                np.array(values, np.uint32),
                np.array([marks.get(event, STORE) for _, _, event in part], np.uint8),
            )

    stream = TransitionStream(batches(), gaps=list(gaps), first_ns=0, last_ns=window[1])
    found: list[Row] = []
    for rows in pair(stream, *window, None, one):
        columns = (rows.start_ns, rows.dur_ns, rows.tid, rows.value, rows.flags)
        for start, dur, tid, value, flags in zip(*(c.tolist() for c in columns), strict=True):
            found.append((start, dur, tid, called(one, value), flags))
    return sorted(found)


def called(one: SetRule, code: int) -> str:
    """What an interval's code stands for."""
    if code == 0:
        return "unseen"
    known = one.known(code)
    if known is None:
        return "others"
    parts = [known.get(name) for name in ("what", "how")]
    return "/".join(p.decode() if isinstance(p, bytes) else "?" for p in parts)


@pytest.mark.parametrize("batch", [1, 2, 1000])
@pytest.mark.parametrize("nested", [False, True])
def test_start_and_end(nested: bool, batch: int) -> None:
    """An interval has the fields of its start and of its end."""
    events = [(1, 7, "+a"), (2, 8, "+b"), (5, 7, "-x"), (9, 8, "-y"), (20, 7, "+a"), (21, 7, "-y")]
    assert paired(events, rule(nested), batch=batch) == [
        (1, 4, 7, "a/x", 0),
        (2, 7, 8, "b/y", 0),
        (20, 1, 7, "a/y", 0),
    ]


@pytest.mark.parametrize("batch", [1, 1000])
def test_a_new_start(batch: int) -> None:
    """A new start replaces the old interval, or opens one within it."""
    events = [(1, 7, "+a"), (3, 7, "+b"), (6, 7, "-x"), (10, 7, "-y")]
    flat = [(1, 2, 7, "a/?", 0), (3, 3, 7, "b/x", 0)]
    assert paired(events, rule(), batch=batch) == flat
    nested = [(1, 9, 7, "a/y", 0), (3, 3, 7, "b/x", 0)]
    assert paired(events, rule(nested=True), batch=batch) == nested


@pytest.mark.parametrize("nested", [False, True])
def test_reset(nested: bool) -> None:
    """A reset ends all that is open, and means nothing where nothing is."""
    events = [(1, 7, "!"), (2, 7, "+a"), (5, 7, "!"), (6, 7, "!"), (8, 7, "+b"), (9, 7, "-x")]
    assert paired(events, rule(nested)) == [(2, 3, 7, "a/?", 0), (8, 1, 7, "b/x", 0)]


def test_reset_of_nested() -> None:
    """A reset ends each of several that are open."""
    events = [(1, 7, "+a"), (2, 7, "+b"), (3, 8, "+a"), (5, 7, "!"), (6, 8, "-x")]
    assert paired(events, rule(nested=True)) == [
        (1, 4, 7, "a/?", 0),
        (2, 3, 7, "b/?", 0),
        (3, 3, 8, "a/x", 0),
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_cut_by_the_window(nested: bool) -> None:
    """What began before the window is unseen, what has not ended is open; a second end is none."""
    events = [(3, 7, "-x"), (4, 7, "-x"), (6, 8, "+a"), (9, 9, "+b"), (12, 9, "exit")]
    events += [(13, 10, "fork"), (14, 10, "-x")]
    assert paired(events, rule(nested)) == [
        (0, 3, 7, "unseen", START),
        (6, 994, 8, "a/?", END),
        (9, 3, 9, "b/?", END),
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_cut_by_a_loss(nested: bool) -> None:
    """What overlaps a gap ends where that begins; nothing is made up behind it."""
    events = [(1, 7, "+a"), (30, 7, "-x"), (31, 7, "-x"), (40, 7, "+b"), (44, 7, "-y")]
    assert paired(events, rule(nested), gaps=[(10, 20)]) == [
        (1, 9, 7, "a/x", LOST),
        (40, 4, 7, "b/y", 0),
    ]


def test_written_twice() -> None:
    """A record that perf wrote twice opens one interval, not two."""
    events = [(1, 7, "+a"), (1, 7, "+a"), (3, 7, "-x"), (3, 7, "-x"), (5, 7, "+b"), (9, 7, "-y")]
    assert paired(events, rule(nested=True)) == [(1, 2, 7, "a/x", 0), (5, 4, 7, "b/y", 0)]


@pytest.mark.parametrize("seed", range(20))
def test_total_of_nested(seed: int) -> None:
    """The sum of nested intervals does not depend on which end belongs to which start."""
    random = np.random.default_rng(seed)
    events, starts, ends, depth = [], [], [], 0
    for time in range(200):
        if depth and random.random() < 0.5:
            events.append((time, 7, "-x"))
            ends.append(time)
            depth -= 1
        else:
            events.append((time, 7, "+a"))
            starts.append(time)
            depth += 1
    found = paired(events, rule(nested=True), batch=int(random.integers(1, 50)))
    assert len(found) == len(starts)
    assert sum(dur for _, dur, _, _, _ in found) == sum(ends) - sum(starts) + 1000 * depth
    assert sum(flags == END for *_, flags in found) == depth


def test_end_by_value() -> None:
    """One event can start and end, by a field that need not be in the label."""
    one = SetRule("g:status", ("text",), (), (), ("pointer", 0))
    (use,) = one.uses
    assert use.fields == ("text", "pointer")
    pointers = np.array([5, 0, 6, 0, 5], np.uint64)
    texts: Column = [b"select 1", None, None, None, b"select 1"]
    values = use.values([texts, pointers], 5)
    assert values.tolist() == [2, 0, 3, 0, 2]
    assert one.known(int(one.joined(values, np.zeros(5, np.uint32))[2])) == {"text": None}


def by_hand(events: Sequence[tuple[int, int, str]]) -> list[Row]:
    """Pair nested intervals one event at a time; the window is 0 to 1000."""
    found: list[Row] = []
    stacks: dict[int, list[tuple[int, str]]] = {}
    for time, tid, event in events:
        if tid not in stacks and event[0] == "-":
            found.append((0, time, tid, "unseen", START))
        stack = stacks.setdefault(tid, [])
        if event[0] == "+":
            stack.append((time, event[1:]))
        elif event[0] == "-":
            for start, what in [stack.pop()] if stack else []:
                found.append((start, time - start, tid, f"{what}/{event[1:]}", 0))
        else:
            flags = END if event == "exit" else 0
            found += [(start, time - start, tid, f"{what}/?", flags) for start, what in stack]
            stack.clear()
    for tid, stack in stacks.items():
        found += [(start, 1000 - start, tid, f"{what}/?", END) for start, what in stack]
    return sorted(found)


@pytest.mark.parametrize("seed", range(40))
def test_nested_as_by_hand(seed: int) -> None:
    """Whatever comes in whatever batches, the intervals are those of a loop with a stack."""
    random = np.random.default_rng(seed)
    kinds = ["+a", "+b", "-x", "-y", "-z", "!", "exit", "fork"]
    weights = np.array([4, 4, 3, 3, 3, 0.5, 0.3, 0.3]) if seed % 2 else np.ones(8)
    picked = random.choice(kinds, 300, p=weights / weights.sum()).tolist()
    tids = random.integers(1, 5, 300).tolist()
    events = list(zip(range(1, 301), tids, picked, strict=True))
    batch = int(random.choice([2, 7, 50, 1000]))
    assert paired(events, rule(nested=True), batch=batch) == by_hand(events)


@pytest.mark.parametrize("batch", [1, 2, 1000])
def test_continued(batch: int) -> None:
    """A start of what is open already goes on with it; a new one replaces it."""
    one = replace(rule(), continued=True)
    events = [(1, 7, "+a"), (2, 8, "+a"), (4, 7, "+a"), (6, 7, "+a"), (7, 7, "+b"), (8, 7, "+a")]
    events += [(10, 7, "-x"), (11, 7, "-x"), (12, 7, "+a"), (15, 8, "-y"), (16, 7, "-y")]
    assert paired(events, one, batch=batch) == [
        (1, 6, 7, "a/?", 0),
        (2, 13, 8, "a/y", 0),
        (7, 1, 7, "b/?", 0),
        (8, 2, 7, "a/x", 0),
        (12, 4, 7, "a/y", 0),
    ]


def test_codes() -> None:
    """Equal rows of all columns have equal codes, in every batch."""
    codes = Codes()
    random = np.random.default_rng(1)
    seen: dict[tuple[int, int, bytes | None], int] = {}
    for _ in range(5):
        a = random.integers(-3, 3, 500).astype(np.int32)
        b = random.integers(0, 3, 500).astype(np.uint64) << np.uint64(62)
        c = [None if n == 0 else b"x" * n for n in random.integers(0, 4, 500).tolist()]
        for *row, code in zip(a.tolist(), b.tolist(), c, codes.of([a, b, c], 500), strict=True):
            assert seen.setdefault(tuple(row), int(code)) == code
            assert codes.rows[code] == tuple(row)
    assert sorted(seen.values()) == list(range(2, len(seen) + 2))
    assert codes.of([], 3).tolist() == [len(seen) + 2] * 3
    assert codes.of([np.empty(0, np.int32)], 0).tolist() == []


def test_codes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of rows, or of bytes, all that is new is one: others."""
    codes = Codes()
    first = codes.of([np.arange(50_000)], 50_000)
    again = codes.of([np.arange(100_000)], 100_000)
    assert (again[:50_000] == first).all()
    assert (again[65_535:] == Codes.OTHERS).all()
    assert int(again.max()) == 65_536
    monkeypatch.setattr(Codes, "_BYTES", 1000)
    codes = Codes()
    texts: Column = [b"%d" % n * 10 for n in range(1000)]
    found = codes.of([texts], 1000)
    assert 0 < len(codes.rows) < 100
    assert (found[200:] == Codes.OTHERS).all()
    assert codes.of([texts], 1000).tolist() == found.tolist()


def test_others() -> None:
    """An interval whose start, or whose end, was one of the others is one of them."""
    one = rule()
    values = one.joined(
        np.array([Codes.OTHERS, 0, 2], np.uint32), np.array([ENDED | 5, ENDED | 5, ENDED | 1])
    )
    assert [called(one, code) for code in values.tolist()] == ["others", "unseen", "others"]


@pytest.fixture(autouse=True)
def sets_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe sets, but query with the one static probe that it had in data/sets."""
    folder = tmp_path / "probes"
    shutil.copytree(ROOT / "probes", folder)
    shutil.copy(DATA / "sets/query.set", folder)
    monkeypatch.setattr(probeset, "probes_dir", lambda: folder)


@pytest.fixture
def capture() -> Capture:
    """A real capture with six sets; see tests/data/README.md."""
    return open_capture(DATA / "sets", Naming())


def names(capture: Capture, probe_set: str) -> dict[str, int]:
    """How many complete intervals there are of each name."""
    waits = analyse_set(capture, probe_set).waits()
    return {wait.name: wait.stats.count for wait in waits if wait.stats}


def test_names(capture: Capture) -> None:
    """What the capture's workload did, by set."""
    assert names(capture, "sort") == {"heap disk": 1, "index memory": 2, "heap memory": 2}
    assert names(capture, "checkpoint") == {"immediate+force+wait+requested": 1}
    assert names(capture, "transaction") == {"committed": 15, "?": 1, "aborted": 1}
    assert [name.rsplit(" ", 1)[0] for name in names(capture, "lock-wait")] == [
        "relation AccessShare"
    ]
    assert set(names(capture, "lwlock-wait")) == {"WALWrite Exclusive"}
    queries = names(capture, "query")
    assert queries["select from t order by t limit 1"] == 2
    assert queries["?"] == 1  # 5 KB
    assert queries["begin"] == 2


def test_set_that_is_not_held(capture: Capture) -> None:
    """The message names the sets that are."""
    with pytest.raises(Misuse, match="'buffer-read', but: wait-event, lwlock-wait, lock-wait,"):
        analyse_set(capture, "buffer-read")


def test_text_is_bounded_and_whole_elsewhere(capture: Capture) -> None:
    """A long text with control characters is one line on a terminal, and itself in JSON and CSV."""
    sets = [analyse_set(capture, name) for name in capture.sets]
    analysis = analyse(capture)
    shown = text.report_text(analysis, False, False, sets)
    assert all(len(line) <= text.WIDTH for line in shown.splitlines())
    assert "select '?[31mred', 'two; lines' /* ......" in shown
    report = json.loads(text.report_json(analysis, sets))
    (whole,) = [r["name"] for r in report["sets"]["query"]["rows"] if "mred" in r["name"]]
    assert whole.startswith("select '\x1b[31mred', 'two;\nlines' /* .....")
    assert len(whole) == 338
    file = io.BytesIO()
    _, batches, labels = set_intervals(capture, "query")
    waits.write_csv(batches, labels.label, file, quoted=True)
    rows = list(csv.DictReader(io.StringIO(file.getvalue().decode())))
    assert [row["name"] for row in rows if "mred" in row["name"]] == [whole]
    assert Counter(row["name"] for row in rows) == names(capture, "query")
    assert {row["class"] for row in rows} == {"query"}


def test_frames(capture: Capture) -> None:
    """A frame is one line without a semicolon."""
    stacks = fold.folded_set(analyse_set(capture, "query")).splitlines()
    assert any(";select '?[31mred', 'two, lines' /* ...." in stack for stack in stacks)
    assert all(stack.count(";") == 2 for stack in stacks)
    stacks = fold.folded_set(analyse_set(capture, "sort")).splitlines()
    assert [stack.rsplit(" ", 1)[0].split(";", 1)[1] for stack in stacks] == [
        "sort;heap;disk",
        "sort;heap;memory",
        "sort;index;memory",
    ]


def test_rows_of_the_report(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 20 rows a table says how many more there are."""
    monkeypatch.setattr(text, "SET_ROWS", 4)
    one = analyse_set(capture, "query")
    shown = text.report_text(analyse(capture), False, False, [one])
    table = shown.partition("\nquery: ")[2].partition("\n\n")[0]
    assert f"\n{len(one.waits()) - 4} more, " in table
    assert table.count("\n") <= 1 + 2 * 4 + 2


def test_one_line() -> None:
    """Blanks are joined, what cannot be printed is replaced, what is too long is cut."""
    assert text.one_line(" a\t\n b\x07c ") == "a b?c"
    assert text.one_line("x" * 100, 10) == "xxxxxxx..."
    assert len(text.one_line("y" * 1_000_000)) == 79


def killed(folder: Path) -> Path:
    """A copy of the capture as it would be had perf been killed: no names of events."""
    folder.mkdir()
    for name in ("manifest", "backends.tsv", "perf.data"):
        (folder / name).write_bytes((DATA / "sets" / name).read_bytes())
    data = bytearray((folder / "perf.data").read_bytes())
    at, size = struct.unpack_from("<2Q", data, 40)
    struct.pack_into("<Q", data, 48, 0)
    data[72:104] = bytes(32)
    (folder / "perf.data").write_bytes(data[: at + size])
    return folder


def test_killed_perf(capture: Capture, tmp_path: Path) -> None:
    """Where perf did not write the names of events, the order of the sets tells them."""
    broken = open_capture(killed(tmp_path / "capture"), Naming())
    for name in capture.sets:
        assert names(broken, name) == names(capture, name)


@pytest.mark.parametrize("seed", range(30))
def test_damaged(tmp_path: Path, seed: int) -> None:
    """Bytes that were overwritten are an error of ours or other numbers, but no crash."""
    folder = killed(tmp_path / "capture")
    data = bytearray((folder / "perf.data").read_bytes())
    (at,) = struct.unpack_from("<Q", data, 40)
    random = np.random.default_rng(seed)
    for place in random.integers(at, len(data), 20).tolist():
        data[place] = int(random.integers(256))
    (folder / "perf.data").write_bytes(data)
    for name in ("query", "sort"):
        with contextlib.suppress(PerfDataError, WaitfoldError):
            analyse_set(open_capture(folder, Naming()), name)


def test_bare_file(tmp_path: Path) -> None:
    """A perf.data by itself has the sets whose events are all there."""
    naming = Naming(pg_version="15.18")
    bare = open_capture(DATA / "sets/perf.data", naming)
    assert set(bare.sets) == set(open_capture(DATA / "sets", Naming()).sets)
    assert names(bare, "sort") == {"heap disk": 1, "index memory": 2, "heap memory": 2}
    renamed = tmp_path / "perf.data"
    content = (DATA / "sets/perf.data").read_bytes()
    renamed.write_bytes(content.replace(b"sort_done", b"sort_dont"))
    assert "sort" not in open_capture(renamed, naming).sets
