"""The reader of trace.dat: against trace-cmd's text of real files, and against damaged ones."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from waitfold import tracedat
from waitfold.errors import PerfDataError, WaitfoldError
from waitfold.events import (
    EXIT,
    FORK,
    STORE,
    Column,
    PairRule,
    Transitions,
    TransitionStream,
    Use,
    transitions,
)
from waitfold.tracedat import TraceDat

DATA = Path(__file__).parent / "data" / "trace"
RULE = PairRule("try_tracedat:w", "v", "try_tracedat:w", 0)
FILES = ("engine", "lost", "ring", "ring2", "killed", "tracecmd")

Row = tuple[int, int, int]


def batch_of(data: TraceDat, rule: Any = RULE) -> tuple[Transitions, TransitionStream]:
    """Return all transitions in the order of the stream."""
    stream = transitions([data], rule)
    none = Transitions(*(np.empty(0, kind) for kind in ("i8", "u8", "u4", "u1")))
    columns = [(b.time_ns, b.thread, b.value, b.mark) for b in (none, *stream)]
    return Transitions(*(np.concatenate(column) for column in zip(*columns, strict=True))), stream


def rows(data: TraceDat, mark: int = STORE) -> list[Row]:
    """Return all transitions of a kind as (time_ns, thread, value)."""
    batch, _ = batch_of(data)
    batch = batch.take(np.flatnonzero(batch.mark == mark))
    assert (batch.pid == batch.tid).all()
    columns = (batch.time_ns, batch.tid, batch.value)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def text_rows(name: str, event: str = "w", thread: str = "") -> list[tuple[int, int, str]]:
    """Read (time_ns, thread, the rest) from what trace-cmd report printed."""
    found = []
    for line in (DATA / f"{name}.txt").read_text().splitlines():
        match = re.fullmatch(
            rf"(?:\w+: *)?.*-(\d+) +\[\d+\] +(\d+)\.(\d{{9}}): {event}: +(.*)", line
        )
        if match:
            time = int(match[2]) * 10**9 + int(match[3])
            other = re.search(rf"\b{thread}=(\d+)", match[4]) if thread else None
            found.append((time, int(other[1] if other else match[1]), match[4]))
    return sorted(found)


def stores(name: str) -> list[Row]:
    """Read the stores."""
    return [(time, tid, int(rest.split("v=")[1], 16)) for time, tid, rest in text_rows(name)]


@pytest.mark.parametrize("piece", [1 << 22, 4096])
@pytest.mark.parametrize("name", FILES)
def test_rows_are_those_of_trace_cmd(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time, thread and value of every event, in order, wherever a piece ends."""
    monkeypatch.setattr(tracedat, "_PIECE", piece)
    data = TraceDat(DATA / f"{name}.dat")
    found = rows(data)
    assert found == stores(name)
    assert len(found) > 10
    assert data.cut is None
    assert data.info["clockid"] == "CLOCK_MONOTONIC"


@pytest.mark.parametrize("name", FILES)
def test_processes(name: str) -> None:
    """Forks and exits of trace-cmd's text are marks."""
    data = TraceDat(DATA / f"{name}.dat")
    for mark, event, thread in ((FORK, "fork", "child_pid"), (EXIT, "exit", "pid")):
        want = [row[:2] for row in text_rows(name, f"sched_process_{event}", thread)]
        assert [row[:2] for row in rows(data, mark)] == want
        assert want or name == "ring2"


@dataclass
class Collect:
    """A rule that only keeps what it is given."""

    event: str
    fields: tuple[str, ...]
    columns: list[list[Any]] = field(default_factory=list)

    @property
    def uses(self) -> list[Use]:
        """Return what the event means."""
        return [Use(self.event, self.fields, self._values)]

    def _values(self, columns: list[Column], rows: int) -> NDArray[np.uint32]:
        self.columns += [list(row) for row in zip(*columns, strict=True)]
        return np.zeros(rows, np.uint32)


def test_strings() -> None:
    """Texts as trace-cmd shows them; a null pointer, of which it says nothing, is None."""
    rule = Collect("try_tracedat:s", ("v", "text"))
    batch, _ = batch_of(TraceDat(DATA / "engine.dat"), rule)
    found = [f'v={v} text="{(text or b"").decode()}"' for v, text in rule.columns]
    want = [rest.split(maxsplit=1)[1] for *_, rest in text_rows("engine", "s")]
    assert sorted(found) == sorted(want)
    assert [2, b"select 1;"] in rule.columns
    assert [1, None] in rule.columns
    assert int((batch.mark == STORE).sum()) == len(found)


def test_losses() -> None:
    """The losses that trace-cmd shows, each between the CPU's events around it."""
    _, stream = batch_of(TraceDat(DATA / "lost.dat"))
    text = (DATA / "lost.txt").read_text()
    dropped = [int(n) for n in re.findall(r"\[(\d+) EVENTS DROPPED\]", text)]
    assert stream.lost == sum(dropped) == 12211
    assert len(stream.gaps) == len(dropped)
    times = {int(s) * 10**9 + int(ns) for s, ns in re.findall(r"(\d+)\.(\d{9}): ", text)}
    for start, end in stream.gaps:
        assert start in times | {0}
        assert end in times
        assert start < end


def test_ring() -> None:
    """A ring's first page lost nothing; from where all CPUs are known, the ring holds all."""
    data = TraceDat(DATA / "ring.dat", ring=True)
    _, stream = batch_of(data)
    assert stream.lost == 0
    assert stream.gaps == [(0, data.since_ns)]
    text = (DATA / "ring.txt").read_text()
    after = re.search(r"DROPPED\]\n.* (\d+)\.(\d{9}): ", text)
    assert after and data.since_ns == int(after[1]) * 10**9 + int(after[2])
    assert batch_of(TraceDat(DATA / "ring.dat"))[1].lost == 2100
    assert TraceDat(DATA / "ring2.dat", ring=True).since_ns == 0


## Recordings that were not finished


def test_killed() -> None:
    """What a killed recorder left is read as it is."""
    data = TraceDat(DATA / "killed")
    assert data.cut and "was not finished" in data.cut
    found, whole = rows(data), stores("killed")
    assert 100 < len(found) < len(whole)
    assert set(found) <= set(whole)
    assert found == sorted(found)


def test_killed_before_a_page_was_full(tmp_path: Path) -> None:
    """There is nothing to read then, and that is said."""
    shutil.copy(DATA / "killed" / "trace.head", tmp_path)
    data = TraceDat(tmp_path)
    assert data.cut and "was not finished" in data.cut
    assert rows(data) == []


def test_many_cpus(tmp_path: Path) -> None:
    """The CPUs' events come in the order of time; of an odd number of pages, each one is read."""
    rng = np.random.default_rng(4)
    cpus = []
    for cpu in range(100):
        times = np.sort(rng.integers(1000, 10**6, int(rng.integers(0, 40)))).tolist()
        cpus.append([page(time, event(0, 50 + cpu, 1) + event(7, 50 + cpu, 2)) for time in times])
    found = rows(made(tmp_path, *cpus))
    assert len(found) == 2 * sum(len(pages) for pages in cpus)
    assert [row[0] for row in found] == sorted(row[0] for row in found)


def test_killed_while_it_was_put_together(tmp_path: Path) -> None:
    """A CPU's file that is still there counts, and not its part of a trace.dat that was cut."""
    whole = TraceDat(DATA / "engine.dat")
    content = (DATA / "engine.dat").read_bytes()
    last = whole.cpus[-1]
    for left in (0, 100, 5000):
        (tmp_path / "trace.dat").write_bytes(content[: last.offset + left])
        (tmp_path / f"trace.cpu{last.cpu}").write_bytes(content[last.offset :])
        data = TraceDat(tmp_path)
        assert data.cut
        assert rows(data) == stores("engine")


@pytest.mark.parametrize("name", ["engine", "tracecmd"])
def test_truncated_at_any_byte(tmp_path: Path, name: str) -> None:
    """A truncated file is an error or a report that says so, and has no rows but true ones."""
    content = (DATA / f"{name}.dat").read_bytes()
    begin = min(pages.offset for pages in TraceDat(DATA / f"{name}.dat").cpus if pages.size)
    want = set(stores(name))
    path = tmp_path / "trace.dat"
    read = 0
    for size in [*range(0, begin, 97), *range(begin, len(content), 331), len(content) - 1]:
        path.write_bytes(content[:size])
        try:
            data = TraceDat(path)
            found = rows(data)
        except PerfDataError as error:
            assert str(path) in str(error)
            continue
        assert data.cut
        assert found == sorted(found) and set(found) <= want
        read += 1
    assert read > 20


HEAD = (DATA / "killed" / "trace.head").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (bytes(4096), "not a trace.dat"),
        (b"PERFILE2" + bytes(100), "not a trace.dat"),
        (HEAD[:5], "not a trace.dat"),
        (HEAD[:10] + b"8\0" + HEAD[12:], "version 8.*convert"),
        (HEAD[:12] + b"\1" + HEAD[13:], "big-endian"),
        (HEAD[:14] + b"\1\2\3\4" + HEAD[18:], "size of a page is 67305985"),
        (HEAD.replace(b"type_len    :    5", b"type_len    :    6"), "not known here"),
        (HEAD.replace(b"offset:8;\tsize:8", b"offset:9;\tsize:8"), "not known here"),
        (HEAD[:18] + b"x" * 5000, "a name should end"),
        (HEAD, "should stand at byte"),
        (HEAD[:-8] + b"\xff" * 4, "4294967295 bytes should stand"),
        (HEAD + bytes(8) + b"\2\0\0\0latency  \0", "table of the CPUs"),
        (HEAD + bytes(8) + b"\2\0\0\0flyrecord\0", "should stand at byte"),
        (HEAD + bytes(8) + b"\xff\xff\xff\xffflyrecord\0", "4294967295 CPUs"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Each kind by its name, with the path."""
    path = tmp_path / "trace.dat"
    path.write_bytes(content)
    with pytest.raises(PerfDataError, match=message) as error:
        TraceDat(path)
    assert str(path) in str(error.value)


def test_names_that_the_file_does_not_have() -> None:
    """The message lists what there is."""
    data = TraceDat(DATA / "engine.dat")
    with pytest.raises(WaitfoldError, match="sched:sched_process_exit, try_tracedat:w"):
        transitions([data], PairRule("no:w", "v", "no:w", 0))
    with pytest.raises(WaitfoldError, match="It has: __probe_ip, v"):
        transitions([data], PairRule("try_tracedat:w", "value", "try_tracedat:w", 0))
    with pytest.raises(PerfDataError, match="No such file"):
        TraceDat(DATA / "none.dat")
    with pytest.raises(PerfDataError, match="not a regular file"):
        TraceDat("/dev/null")


## Pages made here, to have what no real one has

W = next(e for e in TraceDat(DATA / "engine.dat").events if e.name == "try_tracedat:w").id
DATA_MAX = 4080


def head(kind: int, delta: int, *words: int) -> bytes:
    """Make a record's first word, and more."""
    return struct.pack(f"<{1 + len(words)}I", delta << 5 | kind, *words)


def event(delta: int, tid: int, value: int, extra: int = 0, id_: int = W) -> bytes:
    """Make a record of an event: common fields, __probe_ip, v; with words behind them."""
    body = struct.pack("<HBBiQI", id_, 0, 0, tid, 0x1234, value) + bytes(4 * extra)
    words = len(body) // 4
    if words <= 28 and extra >= 0 and not extra % 2:
        return head(words, delta) + body
    return head(0, delta, len(body) + 4) + body  # as the kernel does where it is long


def page(time: int, content: bytes, missed: int | None = None) -> bytes:
    """Make a page; `missed` is a count, or 0 for one that had no room."""
    assert len(content) <= DATA_MAX
    size = len(content)
    if missed is not None:
        size |= 1 << 31
        if missed:
            size |= 1 << 30
            content += struct.pack("<Q", missed)
    return struct.pack("<QQ", time, size) + content.ljust(DATA_MAX, b"\0")


def made(folder: Path, *cpus: Sequence[bytes]) -> TraceDat:
    """Make a recording as a killed recorder leaves it."""
    shutil.copy(DATA / "killed" / "trace.head", folder / "trace.head")
    for cpu, pages in enumerate(cpus):
        (folder / f"trace.cpu{cpu}").write_bytes(b"".join(pages))
    return TraceDat(folder)


EXTEND = 1 << 27
BASE = 7 << 59  # an absolute time has 59 bits; a page's time may have more


def test_time_extends(tmp_path: Path) -> None:
    """More than 2**27 ns between two events, once and many times as long."""
    content = event(0, 5, 1)
    content += head(30, 3, 1) + event(2, 5, 2)
    content += head(30, EXTEND - 1, (1 << 32) - 1) + event(EXTEND - 1, 5, 3)
    want = [1000, 1000 + EXTEND + 5]
    want.append(want[-1] + ((1 << 32) - 1 << 27) + 2 * (EXTEND - 1))
    assert rows(made(tmp_path, [page(1000, content)])) == [
        (time, 5, value) for value, time in enumerate(want, 1)
    ]


def test_absolute_times(tmp_path: Path) -> None:
    """An absolute time stands for itself and keeps the bits above its own."""
    low = 12345 << 27 | 678
    content = event(0, 5, 1) + head(31, 678, 12345) + event(9, 5, 2)
    pages = [page(1000, content), page((1 << 59) + 5, content)]
    times = [row[0] for row in rows(made(tmp_path, pages))]
    assert times == [1000, low + 9, (1 << 59) + 5, (1 << 59) + low + 9]


def test_records_that_are_no_events(tmp_path: Path) -> None:
    """Discarded records take time and room; padding without time ends the page."""
    content = event(0, 5, 1) + head(29, 7, 12) + b"\xff" * 8 + event(3, 5, 2)
    content += event(1, 5, 9, id_=W + 999) + event(4, 5, 3, extra=30) + event(4, 5, 4, extra=2)
    content += head(29, 0) + b"\xff" * 40
    found = rows(made(tmp_path, [page(100, content), page(0, b""), page(300, event(0, 5, 5))]))
    assert found == [(100, 5, 1), (110, 5, 2), (115, 5, 3), (119, 5, 4), (300, 5, 5)]


def decoded(content: bytes, time: int) -> list[Row]:
    """Read a page's content record by record."""
    found = []
    at = 0
    while at < len(content):
        word, *_ = struct.unpack_from("<I", content, at)
        kind, time = word & 31, time + (word >> 5)
        more = struct.unpack_from("<I", content, at + 4)[0] if at + 8 <= len(content) else 0
        if kind == 30:
            time += more << 27
        elif kind == 31:
            time = more << 27 | word >> 5
        elif kind < 29:
            data = at + (4 if kind else 8)
            id_, _, tid = struct.unpack_from("<HHi", content, data)
            if id_ == W:
                found.append((time, tid, struct.unpack_from("<I", content, data + 16)[0]))
        at += 8 if kind > 29 else 4 + more if kind in (0, 29) else 4 + 4 * kind
    return found


@pytest.mark.parametrize("piece", [1 << 22, 3 * 4096])
def test_any_mixture(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of records of all kinds, walked together, are what each is by itself."""
    monkeypatch.setattr(tracedat, "_PIECE", piece)
    rng = np.random.default_rng(3)
    want: list[Row] = []
    cpus = []
    for cpu in range(3):
        pages = []
        time = 10**9
        for _ in range(40):
            content = b""
            room = int(rng.choice([0, 28, 400, DATA_MAX - 100, DATA_MAX]))
            while True:
                delta = int(rng.integers(1 << 20))
                kind = int(rng.choice([1, 1, 1, 1, 2, 3, 4, 5]))
                record = {
                    1: event(delta, 50 + cpu, len(want) + len(content)),
                    2: event(delta, 60, 1, int(rng.integers(0, 40))),
                    3: event(delta, 70, 1, id_=W + 1),
                    4: head(30, delta, int(rng.integers(1 << 10))),
                    5: head(29, delta + 1, 20) + bytes(16),
                }[kind]
                if len(content) + len(record) > room:
                    break
                content += record
            pages.append(page(time, content))
            found = decoded(content, time)
            want += found
            time = max([time, *(row[0] for row in found)]) + (1 << 40)
        cpus.append(pages)
    assert sorted(rows(made(tmp_path, *cpus))) == sorted(want)
    assert len(want) > 1000


def test_missed_events(tmp_path: Path) -> None:
    """A loss is between the CPU's event before and the page's first one."""
    first = [page(100, event(0, 5, 1) + event(7, 5, 2)), page(0, b"")]
    first += [page(300, event(0, 5, 3), missed=42), page(400, event(0, 5, 4), missed=0)]
    second = [page(150, event(0, 6, 1), missed=3)]
    _, stream = batch_of(made(tmp_path, first, second))
    assert sorted(stream.gaps) == [(0, 150), (107, 300), (300, 400)]
    assert stream.lost == 42 + 1 + 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (head(28, 0) + bytes(8), "ends behind its page"),
        (head(0, 0, 5000) + bytes(8), "ends behind its page"),
        (event(0, 5, 1) + head(30, 1), "ends behind its page"),
        (head(30, 0, (1 << 32) - 1) * 16, "has a time that cannot be"),
        (head(4, 0) + event(0, 5, 1)[4:20], "is too short for its try_tracedat:w"),
        (head(0, 0, 12) + event(0, 5, 1)[4:12], "is too short for its try_tracedat:w"),
        (event(0, -5, 1), "has a thread that cannot be"),
        (event(0, 1 << 23, 1), "has a thread that cannot be"),
    ],
)
def test_damaged_records(tmp_path: Path, content: bytes, message: str) -> None:
    """The offset in the file is named."""
    good = event(0, 5, 1)
    data = made(tmp_path, [page(10, good), page(100, good + content)])
    with pytest.raises(PerfDataError, match=rf"at byte \d+ {message}") as error:
        rows(data)
    match = re.search(r"at byte (\d+)", str(error.value))
    assert match
    at = int(match[1])
    assert 4096 + 16 + len(good) <= at <= 4096 + 16 + len(good) + len(content)
    assert "trace.cpu0" in str(error.value)


@pytest.mark.parametrize(("time", "size"), [(100, 4084), (100, 30), (1 << 63, 24), (100, 1 << 26)])
def test_damaged_pages(tmp_path: Path, time: int, size: int) -> None:
    """Sizes and times that no page has."""
    bad = struct.pack("<QQ", time, size) + bytes(DATA_MAX)
    with pytest.raises(PerfDataError, match="at byte 4096 is no page"):
        rows(made(tmp_path, [page(10, event(0, 5, 1)), bad]))
