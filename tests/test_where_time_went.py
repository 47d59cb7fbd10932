"""Where all the time went: scheduling, stacks and queries, joined with waits of real work."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import TRACEFS, Cluster, Psql, Recorder, report, waitfold, waits

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing needs root"),
    pytest.mark.skipif(not shutil.which("perf"), reason="perf is missing"),
    pytest.mark.skipif(
        not (TRACEFS / "events/sched").exists(), reason="the kernel has no sched events"
    ),
]

# In one string: what goes by between two of a client's messages is not to count.
LOCK = (
    "BEGIN\\; LOCK pgbench_accounts\\; "
    "SELECT sum(abalance) AS {} FROM pgbench_accounts\\; COMMIT;\n"
)
ALONE, EIGHT = "one", "all"  # what a folded query has room for
CONF = """
shared_buffers = 256MB
compute_query_id = on
max_parallel_workers_per_gather = 0
"""
SQL = """
CREATE TABLE counter AS SELECT 1 AS id, 0 AS n;
CREATE TABLE cold AS SELECT generate_series(1, 100000) AS id;
CREATE TABLE shared WITH (parallel_workers = 2) AS
    SELECT generate_series(1, 60) AS id, repeat('x', 1500) AS pad;
CREATE FUNCTION nap(float) RETURNS void LANGUAGE plpgsql AS
    'BEGIN PERFORM pg_sleep($1); PERFORM pg_sleep($1); END';
"""
NAP, ROUNDS = 0.05, 6
SHARED = 60 * 0.01
PAUSE = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A server whose tables fit into its shared buffers, and that has read none of them."""
    folder = Path(tempfile.mkdtemp(prefix="waitfold-test-"))
    cluster = Cluster(folder)
    try:
        with (cluster.data / "postgresql.conf").open("a") as conf:
            conf.write(CONF)
        cluster.start()
        subprocess.run(cluster.pgbench("-i", "-q", "-s", "4"), check=True, capture_output=True)
        cluster.sql(SQL)
        cluster.sql("VACUUM")
        cluster.stop("fast")
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Life:
    """A recording of sessions that wait as is known; `blocks` are those of the table `cold`."""

    capture: Path
    folder: Path
    blocks: int


@pytest.fixture(scope="module")
def life(server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """One recording of all."""
    folder = tmp_path_factory.mktemp("life")
    relation, size = server.sql(
        "SELECT pg_relation_filepath('cold'), pg_relation_size('cold') / 8192"
    ).split("|")
    with contextlib.ExitStack() as stack:
        names = (
            "sleep",
            "prepared",
            "function",
            "string",
            "shared",
            "row",
            "cold",
            "holder",
            "idle",
        )
        sessions = {name: stack.enter_context(server.session()) for name in names}
        sessions["prepared"].run("PREPARE nap(float) AS SELECT pg_sleep($1)")
        sessions["shared"].run(
            "SET max_parallel_workers_per_gather = 2; SET parallel_setup_cost = 0;"
            "SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0"
        )
        evict(server.data / relation)
        recorder = Recorder("-D", server.data, "--with", "all", "-o", folder / "capture")
        query_shapes(sessions)
        contention(server, folder)
        assert recorder.end() == 0, recorder.said
    return Life(folder / "capture", server.folder, int(size))


def evict(file: Path) -> None:
    """Take a file out of the system's cache, and nothing else."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def query_shapes(sessions: dict[str, Psql]) -> None:
    """Have sessions wait, each in queries of its own."""
    sessions["holder"].run("BEGIN")
    sessions["holder"].run("UPDATE counter SET n = n + 1 WHERE id = 1")
    sessions["row"].send("UPDATE counter SET n = 10 WHERE id = 1")
    sessions["idle"].run("BEGIN")
    sessions["cold"].run("SELECT count(*) FROM cold")
    for _ in range(ROUNDS):
        sessions["sleep"].send(f"SELECT pg_sleep({NAP})")
        sessions["prepared"].send(f"EXECUTE nap({NAP})")
        sessions["function"].send(f"SELECT nap({NAP})")
        sessions["string"].send(f"SELECT 6, 6, pg_sleep({NAP}) \\; SELECT 7, pg_sleep({NAP})")
    sessions["shared"].run("SELECT count(pg_sleep(0.01)) FROM shared")
    for name in ("sleep", "prepared", "function", "string"):
        for _ in range(ROUNDS):
            sessions[name].wait()
    time.sleep(PAUSE)
    sessions["holder"].run("COMMIT")
    sessions["row"].wait()
    sessions["idle"].run("ROLLBACK")


def contention(server: Cluster, folder: Path) -> None:
    """Sum up a table under a lock of it, for two seconds of CPU: one client alone, then eight."""
    scripts = {}
    for name in (ALONE, EIGHT):
        scripts[name] = str(folder / name)
        Path(scripts[name]).write_text(LOCK.format(name))
    for name, clients in ((ALONE, "1"), (EIGHT, "8")):
        pgbench = subprocess.Popen(
            server.pgbench("-n", "-c", clients, "-j", clients, "-T", "90", "-f", scripts[name]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # By their ids, statements are the same whatever their columns' names.
            env=os.environ | {"PGOPTIONS": "-c compute_query_id=off"},
        )
        before, spent = cpu(server), Counter[str]()
        try:
            while spent.total() < 2_000_000_000:
                time.sleep(0.1)
                assert pgbench.poll() is None
                spent = cpu(server) - before
        finally:
            pgbench.kill()
            pgbench.wait()


def cpu(server: Cluster) -> Counter[str]:
    """CPU time of each of a server's processes, in ns."""
    spent = Counter[str]()
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            spent[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return spent


@pytest.fixture(scope="module")
def rows(life: Life) -> Rows:
    """The accounting's rows, each with its query's text and its process."""
    accounting = report(life.capture)["accounting"]
    processes = {process["pid"]: process for process in accounting["processes"]}
    return [
        row | {"query": accounting["queries"][row["query"]]["text"], "of": processes[row["pid"]]}
        for row in accounting["rows"]
    ]


def waited(rows: Rows, sign: str, kind: str = "busy") -> Counter[str]:
    """The waits of the queries in whose text something stands, in seconds."""
    events = Counter[str]()
    for row in rows:
        if sign in row["query"] and row["kind"] == kind:
            events[row["event"]] += row["total_ns"] / 1e9
    return events


@pytest.mark.parametrize(
    ("sign", "event", "least", "most"),
    [
        ("SELECT pg_sleep(", "Timeout:PgSleep", ROUNDS * NAP, 1.3),
        ("EXECUTE nap(", "Timeout:PgSleep", ROUNDS * NAP, 1.3),
        ("SELECT nap(", "Timeout:PgSleep", 2 * ROUNDS * NAP, 1.3),
        ("SELECT 6, 6", "Timeout:PgSleep", 2 * ROUNDS * NAP, 1.3),
        ("FROM shared", "Timeout:PgSleep", SHARED, 1.5),
        ("SET n = 10", "Lock:transactionid", PAUSE, 4),
        ("FROM cold", "IO:DataFileRead", 0, math.inf),
    ],
)
def test_query(rows: Rows, sign: str, event: str, least: float, most: float) -> None:
    """A query has its own waits, as long as they are known to be, and no other's."""
    events = waited(rows, sign)
    assert least < events[event] < most * max(least, 1e-9)
    mine = {"Timeout:PgSleep", "Lock:transactionid", "Lock:relation"} - {event}
    assert not mine & set(events)


def test_cold_read(life: Life, rows: Rows) -> None:
    """The query that reads a table from its file has a wait for each block."""
    (pid,) = {row["pid"] for row in rows if "FROM cold" in row["query"]}
    assert len(waits(life.capture, f"pid == {pid} and name == 'DataFileRead'")) >= life.blocks


def test_parallel_workers(rows: Rows) -> None:
    """Parallel workers that lived for a moment only have their leader's query, and are its."""
    mine = {row["pid"]: row["of"] for row in rows if "FROM shared" in row["query"]}
    (leader,) = (pid for pid, of in mine.items() if of["type"] == "client backend")
    workers = [of for of in mine.values() if of["type"] == "parallel worker"]
    assert [of["leader"] for of in workers] == [leader] * 2


def test_idle_in_transaction(rows: Rows) -> None:
    """A client that thinks in a transaction is in no query, and has a row of its own."""
    idle = [row for row in rows if row["kind"] == "idle in transaction"]
    assert {row["event"] for row in idle} == {"Client:ClientRead"}
    assert {row["query"] for row in idle} == {"(idle in transaction)"}
    long = Counter[int]()
    for row in idle:
        long[row["pid"]] += row["total_ns"]
    assert len(long) == 2  # `holder` and `idle`
    assert min(long.values()) >= PAUSE * 1e9


def test_all_the_time(rows: Rows) -> None:
    """What is known of each process's time adds up to its wall time, but for 1 %."""
    total, known = Counter[int](), Counter[int]()
    for row in rows:
        total[row["pid"]] += row["total_ns"]
        if row["seen"]:
            known[row["pid"]] += row["on_cpu_ns"] + row["run_queue_ns"] + row["blocked_ns"]
    processes = {row["pid"]: row["of"] for row in rows}
    assert len(processes) > 20
    for pid, process in processes.items():
        assert total[pid] == process["wall_ns"]
        assert total[pid] - known[pid] == process["residual_ns"] <= 0.01 * total[pid]


def on_cpu(capture: Path, query: str) -> dict[str, float]:
    """The part of a query's on-CPU time in each function, or in what it called that has no name."""
    answer = waitfold("fold", "--kind", "oncpu", "--query", capture)
    assert answer.returncode == 0, answer.stderr
    spent = Counter[str]()
    for line in answer.stdout.splitlines():
        stack, _, weight = line.rpartition(" ")
        if f" AS {query}" in stack:
            named = [frame for frame in stack.split(";") if not frame.startswith("[")]
            spent[named[-1]] += int(weight)
    assert spent.total() > 1_000_000_000
    return {name: weight / spent.total() for name, weight in spent.items()}


def test_profile_under_contention(life: Life, rows: Rows) -> None:
    """One client and eight that lock by turns: alike on a CPU, and by the clock 7/8 is the lock."""
    alone, eight = on_cpu(life.capture, ALONE), on_cpu(life.capture, EIGHT)
    assert sum(min(alone[name], eight.get(name, 0)) for name in alone) > 0.6
    for name, clients in ((ALONE, 1), (EIGHT, 8)):
        events = waited(rows, f" AS {name} FROM")
        share = events["Lock:relation"] / events.total()
        assert share == pytest.approx((clients - 1) / clients, abs=0.03), name
