"""All of a process's time accounted for: against the kernel's own sums, and by hand."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Cluster, Recorder

from waitfold.account import BUSY, IDLE, IN_TRANSACTION, Account, account, shape
from waitfold.backends import CLIENT, POSTMASTER, Backend
from waitfold.capture import Naming, open_capture
from waitfold.cli import main
from waitfold.join import BLOCKED, ON_CPU, RUN_QUEUE, UNKNOWN, UNSEEN, Joined, Segments, join
from waitfold.queries import Queries, Query
from waitfold.sched import NO_SLEEPS

READ, CLIENT_READ, SYNC = 0x0A00000F, 0x06000000, 0x0A000043


@dataclass(frozen=True)
class Run:
    """A recorded load, and what the kernel summed up: pid -> twice (when, run, run queue) in ns."""

    capture: Path
    joined: Joined
    account: Account
    witness: dict[int, list[tuple[int, int, int]]]


def schedstats(cluster: Cluster) -> dict[int, tuple[int, int, int]]:
    """When each process of a server was looked at, how long it had run, and waited for a CPU."""
    children = Path(f"/proc/{cluster.pid}/task/{cluster.pid}/children").read_text()
    found = {}
    for pid in map(int, children.split()):
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
            found[pid] = now, int(ran), int(waited)
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[Run]:
    """Four clients of pgbench, recorded for two seconds with all that there is."""
    capture = tmp_path_factory.mktemp("account") / "capture"
    # Not all that they can, or the recorder takes long to start.
    pgbench = cluster.pgbench("-n", "-c", "4", "-T", "600", "-R", "300")
    load = subprocess.Popen(pgbench, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        recorder = Recorder("-D", cluster.data, "--with", "all", "-o", capture)
        first = schedstats(cluster)
        time.sleep(2)
        last = schedstats(cluster)
        witness = {pid: [first[pid], last[pid]] for pid in first.keys() & last.keys()}
        assert recorder.end() == 0, recorder.said
    finally:
        load.terminate()
        load.wait()
    joined = join(open_capture(capture, Naming()))
    yield Run(capture, joined, account(joined), witness)


def test_nothing_is_missing(recorded: Run) -> None:
    """Of every process that lived through the capture at most 1 % is not accounted for."""
    assert not recorded.joined.lost
    window = recorded.joined.end_ns - recorded.joined.start_ns
    through = [pid for pid, wall in recorded.account.wall.items() if wall == window]
    clients = [pid for pid in through if recorded.joined.backends[pid].type == CLIENT]
    assert len(clients) == 4
    for pid in through:
        assert recorded.account.residual[pid] <= window / 100, pid


def test_as_the_kernel_sums_it_up(recorded: Run) -> None:
    """Time on a CPU and in the run queue is what /proc/PID/schedstat says."""
    rows = recorded.joined.segments
    for pid, (first, last) in recorded.witness.items():
        own = rows.take(rows.pid == pid)
        shared = np.minimum(own.end_ns, last[0]) - np.maximum(own.start_ns, first[0])
        shared = np.maximum(shared, 0)
        ran, waited = (int(shared[own.run == run].sum()) for run in (ON_CPU, RUN_QUEUE))
        # The kernel's does not count interrupts, nor what the host took away.
        kernels = last[1] - first[1]
        assert 0.97 * kernels - 3e6 <= ran <= 1.3 * kernels + 10e6, pid
        assert waited == pytest.approx(last[2] - first[2], rel=0.05, abs=30e6), pid


def test_adds_up(recorded: Run) -> None:
    """Whatever it is told apart by, it is the same time, to the nanosecond."""
    of = recorded.account.of("foreground")
    total = of.times().total
    for by in (["event"], ["query", "backend"], ["database", "user", "application"]):
        rows = recorded.account.by(by, of)
        assert sum(r.busy.total + r.idle_ns + r.in_transaction_ns for r in rows) == total
    rows = recorded.account.by(["application", "database"], of)
    assert rows[0].names == ("pgbench", "postgres")


def test_same_waits_as_the_report(recorded: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The time of each wait event is that of its intervals, and the JSON holds all of it."""
    assert main(["report", str(recorded.capture), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sums: Counter[str] = Counter()
    walls: Counter[int] = Counter()
    for row in told["accounting"]["rows"]:
        walls[row["pid"]] += row["total_ns"]
        if row["event"]:
            sums[row["event"]] += row["total_ns"]
        parts = ("on_cpu_ns", "run_queue_ns", "blocked_ns", "unknown_ns")
        assert sum(row[part] for part in parts) == row["total_ns"]
    assert walls == {p["pid"]: p["wall_ns"] for p in told["accounting"]["processes"]}
    waits = {f"{w['class']}:{w['name']}": w["total_ns"] + w["cut_ns"] for w in told["waits"]}
    assert sums == waits
    assert told["db_time_ns"] == recorded.account.db_time_ns()


@pytest.mark.parametrize("options", [[], ["--by", "query,event"], ["--audit"]])
def test_fits_a_terminal(
    recorded: Run, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is longer than 80 characters."""
    assert main(["report", str(recorded.capture), *options]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert "IO:WALSync" in told


def test_audit(recorded: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """CPU inside wait events is what the accounting says."""
    assert main(["report", str(recorded.capture), "--audit", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    events = {row["event"]: row["on_cpu_ns"] for row in told["on_cpu_in_event"]}
    rows = recorded.account.by(["event"], recorded.account.cells)
    busy = {row.names[0]: row.busy.on_cpu for row in rows}
    assert events["IO:WALSync"] == busy["IO:WALSync"] > 0
    for row in told["blocked_without_event"]:
        assert row["max_ns"] <= row["total_ns"]


def test_called_wrongly(recorded: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """What --by does not know, or knows twice, and what does not go together, is told."""
    for options in (["--by", "host"], ["--by", "user,user"], ["--by", "user", "--audit"]):
        assert main(["report", str(recorded.capture), *options]) == 2, options
        assert capsys.readouterr().out == ""


def by_hand(*rows: tuple[int, int, int, int, int]) -> Account:
    """An account of segments (pid, length, value, run, query), one behind the other."""
    pid, ns, value, run, query = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    end = np.cumsum(ns)
    segments = Segments(
        pid.astype(np.int32), end - ns, end, value.astype(np.uint32), run.astype(np.uint8),
        query.astype(np.int32), np.full(len(pid), -1, np.int32),
    )  # fmt: skip
    none = np.empty(0, np.int64)
    table = [Query("(none)", 0), Query("(idle in transaction)", 0), Query("SELECT 17", 0)]
    queries = Queries(none.astype(np.int32), none, none.astype(np.int32), table)
    label = SimpleNamespace(events=SimpleNamespace(label=lambda value: ("Class", f"{value:x}")))
    capture: Any = label
    backends = {2: Backend(POSTMASTER), 3: Backend(CLIENT), 5: Backend(CLIENT, "app", "shop")}
    return account(
        Joined(capture, segments, NO_SLEEPS, queries, backends, [], 0, int(end[-1]), True, True, 0)
    )


def test_kinds() -> None:
    """ClientRead is idle in no query, idle in transaction in one, and busy within a query."""
    told = by_hand(
        (3, 7, CLIENT_READ, BLOCKED, 0),
        (3, 11, CLIENT_READ, BLOCKED, 1),
        (3, 13, CLIENT_READ, RUN_QUEUE, 2),
        (3, 17, CLIENT_READ, ON_CPU, -1),
        (3, 19, 0, ON_CPU, 2),
        (2, 23, 0, BLOCKED, 0),
        (2, 29, 0, ON_CPU, 0),
    )
    cells = told.cells
    sums = [int(cells.ns[cells.kind == kind].sum()) for kind in (BUSY, IDLE, IN_TRANSACTION)]
    assert sums == [13 + 19 + 29, 7 + 17 + 23, 11]
    assert told.db_time_ns() == 13 + 19
    assert told.wall == {3: 67, 2: 52}


def test_residual() -> None:
    """A wait that is not known counts, and a known one of which it is not known if it ran."""
    told = by_hand(
        (3, 7, READ, BLOCKED, 2),
        (3, 11, UNSEEN, UNKNOWN, 2),
        (3, 13, SYNC, UNKNOWN, 2),
        (5, 17, 0, ON_CPU, 2),
    )
    assert told.residual == {3: 24, 5: 0}
    assert (told.unseen_ns, told.unknown_ns) == (11, 13)
    rows = told.by(["query", "user"], told.cells)
    assert [(row.names, row.busy.total) for row in rows] == [
        (("SELECT ?", "-"), 31),
        (("SELECT ?", "app"), 17),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("UPDATE t1 SET a = a + -17  WHERE\n b = 'it''s 3'", "UPDATE t1 SET a = a + ? WHERE b = ?"),
        ("SELECT $1, x.y2, 1.5e-3, 0x1F", "SELECT $1, x.y2, ?, ?"),
    ],
)
def test_shape(text: str, expected: str) -> None:
    """Statements that differ in their literals alone are one; names and parameters stay."""
    assert shape(text) == expected
