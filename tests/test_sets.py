"""Probe sets of static probes, recorded from a real server together with its wait events."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import PG_BIN, SCRIPTS, Cluster, Recorder, report, run, running_cluster, waitfold

from waitfold.probeset import ProbeSet, load_sets

pytestmark = pytest.mark.usefixtures("nothing_left")
SETS = "lwlock-wait,lock-wait,buffer-read,sort,checkpoint,query,transaction"
TEXT = "SELECT 1 AS \"a,b;c\",\n\t'Привет'"


@dataclass
class Recorded:
    """A capture of a known workload, its report, and which backend did what.

    `plans` has, by relfilenode, what EXPLAIN says of a scan of the table.
    """

    capture: Path
    report: dict[str, Any]
    pids: dict[str, int]
    plans: dict[str, dict[str, int]]

    def names(self, probe_set: str, who: str, flags: str = "") -> pd.DataFrame:
        """Count and sum of durations by name, of one backend's intervals in one set."""
        rows = self.rows(probe_set)
        mine = rows[(rows["pid"] == self.pids[who]) & (rows["flags"] == flags)]
        return mine.groupby("name").dur_ns.agg(["count", "sum"])

    def rows(self, probe_set: str) -> pd.DataFrame:
        """All intervals of a set."""
        file = self.capture / f"{probe_set}.csv"
        if not file.exists():
            answer = waitfold("waits", self.capture, "--set", probe_set, "-o", file)
            assert answer.returncode == 0, answer.stderr
        return pd.read_csv(file, keep_default_na=False)


def work(cluster: Cluster, recorder: Recorder) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Do what the tests look for; return the pids of the sessions, and what EXPLAIN counted."""
    pids, plans = {}, {}
    with cluster.session() as one:
        pids["transactions"] = one.pid
        for _ in range(97):
            one.run("SELECT 1")
        for _ in range(4):
            one.run("SELECT 1/0")
    with cluster.session() as one:
        pids["queries"] = one.pid
        for _ in range(41):
            one.run("SELECT 41")
        for _ in range(5):
            one.run(TEXT)
        one.run("SELECT 1/0")
        one.run(f"SELECT '{'x' * 10_000}'")
    with cluster.session() as one:
        pids["sorts"] = one.pid
        for _ in range(13):
            one.run("SELECT FROM many ORDER BY t LIMIT 1")
        one.run("SET work_mem = '64kB'")
        for _ in range(2):
            one.run("SELECT FROM many ORDER BY t OFFSET 9999")
        one.run("RESET work_mem")
        one.run("SELECT FROM many a JOIN many b USING (t) LIMIT 1")
        one.run("SELECT FROM many ORDER BY 1 / (i - 5000), t")
        one.run("SELECT FROM many ORDER BY t LIMIT 1")
    with cluster.session() as holder, cluster.session() as one:
        pids["locks"] = one.pid
        for _ in range(7):
            holder.run("BEGIN")
            holder.run("SELECT FROM many WHERE i = 1 FOR UPDATE")
            one.send("SELECT FROM many WHERE i = 1 FOR UPDATE")
            until = time.monotonic() + 30
            while holder.run("SELECT 1 FROM pg_locks WHERE NOT granted") == []:
                assert time.monotonic() < until
            holder.run("COMMIT")
            one.wait()
        one.run("SET lock_timeout = '50ms'")
        holder.run("SELECT pg_advisory_lock(3, 4)")
        for _ in range(3):
            one.run("SELECT pg_advisory_lock_shared(3, 4)")
    with cluster.session() as one:
        pids["checkpoints"] = one.pid
        for _ in range(3):
            one.run("CHECKPOINT")
    with cluster.session() as one:
        pids["reads"] = one.pid
        # One that is in the buffer pool, and one that has no room there.
        for table in ("many", "pgbench_accounts"):
            (filenode,) = one.run(f"SELECT pg_relation_filenode('{table}')")
            lines = one.run(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) TABLE {table}")
            plans[filenode] = json.loads("".join(lines))[0]["Plan"]
    subprocess.run(
        cluster.pgbench("-n", "-M", "extended", "-S", "-t", "11"), check=True, capture_output=True
    )
    subprocess.run(cluster.pgbench("-n", "-c", "8", "-t", "50"), check=True, capture_output=True)
    with cluster.session() as one:
        pids["long"] = one.pid
        one.send("SELECT pg_sleep(7)")
        time.sleep(0.1)
        assert recorder.end() == 0, recorder.said
        one.process.kill()
        cluster.sql(f"SELECT pg_terminate_backend({one.pid})")
    return pids, plans


@pytest.fixture(scope="module", params=["ftrace", "perf"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorded]:
    """The workload recorded with every set."""
    capture = tmp_path_factory.mktemp("sets") / "capture"
    with running_cluster() as cluster:
        subprocess.run(cluster.pgbench("-i", "-q", "-s", "2"), check=True, capture_output=True)
        cluster.sql(
            "CREATE TABLE many AS SELECT i, md5(i::text) AS t FROM generate_series(1, 10000) i"
        )
        cluster.sql("ALTER TABLE many ADD filler text DEFAULT repeat('x', 500)")
        cluster.sql("VACUUM FULL ANALYZE many")
        for setting in (
            "max_parallel_workers_per_gather = 0",
            "enable_hashjoin = off",
            "enable_nestloop = off",
        ):
            cluster.sql(f"ALTER SYSTEM SET {setting}")
        cluster.sql("SELECT pg_reload_conf()")
        recorder = Recorder(
            "--engine", request.param, "-D", cluster.data, "--with", SETS, "-o", capture
        )
        pids, plans = work(cluster, recorder)
    yield Recorded(capture, report(capture), pids, plans)


def test_nothing_is_lost(recorded: Recorded) -> None:
    """The capture names its sets, and the report has all of them, without a warning."""
    assert recorded.report["lost"] == 0
    assert recorded.report["warnings"] == []
    assert ",".join(recorded.report["sets"]) == SETS
    for name, one in recorded.report["sets"].items():
        assert one["censored"]["lost"] == 0, name
        assert sum(row["count"] for row in one["rows"]) == one["intervals"], name


def test_transactions(recorded: Recorded) -> None:
    """97 transactions that committed and 4 that did not."""
    counts = recorded.names("transaction", "transactions")["count"].to_dict()
    # The session's start and its own first question are one each.
    assert counts == {"committed": 97 + 2, "aborted": 4}


def test_queries(recorded: Recorded) -> None:
    """Statements by their whole text, also those that fail; one of 10 KB is `?`."""
    counts = recorded.names("query", "queries")["count"]
    assert counts["SELECT 41;"] == 41
    assert counts[f"{TEXT};"] == 5
    assert counts["SELECT 1/0;"] == 1
    assert counts["?"] == 1
    # Parse, bind and execute are one.
    extended = "SELECT abalance FROM pgbench_accounts WHERE aid = $1;"
    rows = {row["name"]: row["count"] for row in recorded.report["sets"]["query"]["rows"]}
    assert rows[extended] == 11


def test_a_query_that_has_not_ended(recorded: Recorded) -> None:
    """What is open at the end of the window is cut there."""
    cut = recorded.names("query", "long", "end")
    assert cut["count"].to_dict() == {"SELECT pg_sleep(7);": 1}
    assert 100_000_000 <= cut["sum"].iloc[0] < 5_000_000_000


def test_sorts(recorded: Recorded) -> None:
    """13 sorts in memory and what came after: on disk, two at once, and one that failed."""
    counts = recorded.names("sort", "sorts")["count"].to_dict()
    assert counts == {"heap memory": 13 + 2 + 1, "heap disk": 2, "heap ?": 1}


def test_lock_waits(recorded: Recorded) -> None:
    """7 waits for a row, 3 for an advisory lock that ended by a timeout."""
    found = recorded.names("lock-wait", "locks")
    assert found["count"].to_dict() == {"transactionid Share -": 7, "advisory Share 3": 3}
    assert 150_000_000 < found["sum"]["advisory Share 3"] < 250_000_000


def test_lwlock_waits(recorded: Recorded) -> None:
    """There are as many of each tranche as wait events of class LWLock."""
    by_tranche: dict[str, int] = {}
    for row in recorded.report["sets"]["lwlock-wait"]["rows"]:
        tranche = row["fields"]["tranche"]
        assert row["fields"]["mode"] in ("Exclusive", "Shared", "WaitUntilFree")
        by_tranche[tranche] = by_tranche.get(tranche, 0) + row["count"]
    events = {
        wait["name"]: wait["count"]
        for wait in recorded.report["waits"]
        if wait["class"] == "LWLock" and wait["count"]
    }
    assert by_tranche == events != {}


def test_checkpoints(recorded: Recorded) -> None:
    """3 checkpoints, by the checkpointer."""
    rows = recorded.report["sets"]["checkpoint"]["rows"]
    assert sum(row["count"] for row in rows) == 3
    assert {row["name"] for row in rows} == {"immediate+force+wait+requested"}


def test_buffer_reads(recorded: Recorded) -> None:
    """A scan's hits and misses are those that EXPLAIN (BUFFERS) counts."""
    counts = recorded.names("buffer-read", "reads")["count"]
    for filenode, plan in recorded.plans.items():
        assert counts.get(f"hit {filenode}", 0) == plan["Shared Hit Blocks"]
        assert counts.get(f"miss {filenode}", 0) == plan["Shared Read Blocks"]
    in_pool, too_big = recorded.plans.values()
    assert in_pool["Shared Hit Blocks"] > 500
    assert too_big["Shared Read Blocks"] > 500


@pytest.mark.parametrize("probe_set", SETS.split(","))
def test_every_interval(recorded: Recorded, probe_set: str) -> None:
    """Each interval is what a loop over perf's or trace-cmd's text finds."""
    rows = recorded.rows(probe_set)
    whole = rows[rows["flags"] == ""]
    found = sorted(zip(whole["tid"], whole["start_ns"], whole["dur_ns"], strict=True))
    assert found == sorted(by_text(recorded.capture, load_sets()[probe_set]))
    assert len(found) > 0


@functools.cache
def events_by_text(capture: Path) -> list[tuple[str, ...]]:
    """Tid, seconds, nanoseconds, name and values of each event, as perf or trace-cmd prints it."""
    if (capture / "perf.data").exists():
        fields = ["-F", "tid,time,event,trace"]
        text = run("perf", "script", "--ns", *fields, "-i", capture / "perf.data").stdout
    else:
        text = run("trace-cmd", "report", "-t", "-i", capture / "trace.dat").stdout
    line = re.compile(r"(?:^|-) *(\d+) .*?(\d+)\.(\d{9}): +(?:\w+:)?(\w+): +(.*)$", re.MULTILINE)
    return line.findall(text)


def by_text(capture: Path, probe_set: ProbeSet) -> Iterator[tuple[int, int, int]]:
    """Yield tid, start and duration of the complete intervals, from the events as text."""
    facts = dict(line.split("\t", 1) for line in (capture / "manifest").read_text().splitlines())
    window = int(facts["start_ns"]), int(facts["end_ns"])
    pairing = {probe_set.start, *probe_set.ends, *probe_set.resets}
    open_: dict[int, list[int]] = {}
    last: dict[int, tuple[int, str]] = {}
    said: dict[int, str] = {}
    for tid_text, seconds, ns, event, values in events_by_text(capture):
        tid, time_ns = int(tid_text), int(seconds + ns)
        if event not in pairing or last.get(tid) == (time_ns, event):
            continue
        last[tid] = time_ns, event
        starts = event == probe_set.start
        if starts and probe_set.end_value:
            starts = not re.search(rf"\b{probe_set.end_value[0]}=0(x0)?\b", values)
        begun = open_.setdefault(tid, [])
        if starts and begun and probe_set.continued:
            assert len(begun) == 1
            if said.get(tid) == values.partition("text=")[2]:
                continue
        said[tid] = values.partition("text=")[2]
        if probe_set.nested and event not in probe_set.resets:
            ended = [] if starts else begun[-1:]
        else:
            ended = begun[:]
        for start_ns in ended:
            begun.remove(start_ns)
            if window[0] <= start_ns and time_ns <= window[1]:
                yield tid, start_ns, time_ns - start_ns
        if starts:
            begun.append(time_ns)


def test_table(recorded: Recorded) -> None:
    """The report has a table for each set, in 80 columns and at most 20 rows."""
    answer = waitfold("report", recorded.capture)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "sort: sorts, by kind and by where they were done" in lines
    assert any(line.startswith("heap ?") for line in lines)
    queries = answer.stdout.partition("\nquery: ")[2].partition("\n\n")[0]
    assert " more, " in queries
    assert queries.count("\n") <= 2 + 2 * 20 + 2


def test_folded(recorded: Recorded) -> None:
    """Folded stacks: type of backend, set, fields."""
    answer = waitfold("fold", recorded.capture, "--set", "lock-wait")
    assert ";lock-wait;advisory;Share;3 " in answer.stdout
    answer = waitfold("fold", recorded.capture, "--set", "checkpoint")
    assert answer.stdout.startswith("checkpointer;checkpoint;immediate+force+wait+requested ")
    assert waitfold("fold", recorded.capture, "--set", "query").returncode == 0
    svg = recorded.capture / "x.svg"
    assert waitfold("flamegraph", recorded.capture, "--set", "sort", "-o", svg).returncode == 0
    assert ">sort of PostgreSQL" in svg.read_text()


def test_a_set_that_is_not_there(recorded: Recorded) -> None:
    """Asking for what was not recorded is a misuse that names what was."""
    answer = waitfold("waits", recorded.capture, "--set", "vacuum", "-o", "-")
    assert answer.returncode == 2
    assert "does not hold the probe set 'vacuum', but: wait-event, lwlock-wait," in answer.stderr
    answer = waitfold("fold", recorded.capture, "--set", "sort", "--idle")
    assert answer.returncode == 2


def define(binary: Path, pg_version: str, probe_set: str) -> tuple[int, str]:
    """Status and words of define_set_probes, for a server of a version."""
    script = define_script(binary, pg_version, probe_set)
    answer = run("bash", "-euo", "pipefail", "-c", script)
    return answer.returncode, answer.stdout + answer.stderr


def define_script(binary: Path, pg_version: str, probe_set: str) -> str:
    """The call as a script."""
    return (
        f". {SCRIPTS}/lib.bash; PG_VERSION={pg_version}; START_TIME=4096;"
        f"define_set_probes g {binary} {probe_set}"
    )


@pytest.mark.parametrize("probe_set", SETS.split(","))
def test_places(probe_set: str) -> None:
    """Each place of an event has the same fields and types; a static probe has its semaphore."""
    status, said = define(PG_BIN / "postgres", "15.18", probe_set)
    assert status == 0, said
    fields: dict[str, list[str]] = {}
    for line in said.splitlines():
        event, where, *words = line.split(" ")
        assert ("(0x" in where) == (probe_set != "query")
        shape = [word.partition("=")[0] + word.rpartition(":")[2] for word in words]
        assert fields.setdefault(event, shape) == shape
        assert words[-1].startswith("server=@+")


@pytest.mark.parametrize(("probe_set", "status"), [("query", 1), ("sort", 0)])
def test_kernel_that_panics(tmp_path: Path, probe_set: str, status: int) -> None:
    """Where the kernel panics at warnings, sets with strings are refused."""
    (tmp_path / "panic_on_warn").write_text("1\n")
    script = f"mount --bind {tmp_path}/panic_on_warn /proc/sys/kernel/panic_on_warn; "
    script += define_script(PG_BIN / "postgres", "15.18", probe_set)
    answer = run("unshare", "-m", "bash", "-euo", "pipefail", "-c", script)
    assert answer.returncode == status, answer.stderr
    assert ("kernel.panic_on_warn" in answer.stderr) == bool(status)


def test_without_dtrace(tmp_path: Path) -> None:
    """A server that lacks a set's probes is refused by the name of the set."""
    binary = tmp_path / "postgres"
    run("objcopy", "--remove-section", ".note.stapsdt", PG_BIN / "postgres", binary)
    assert define(binary, "15.18", "query")[0] == 0
    status, said = define(binary, "15.18", "sort")
    assert status == 1
    assert 'the set "sort" needs the static probe sort__start' in said
    assert "--enable-dtrace" in said


def test_set_of_others() -> None:
    """A set that names what somebody else registered cannot be recorded."""
    status, said = define(PG_BIN / "postgres", "15.18", "wait-event-usdt")
    assert status == 1
    assert "has no probes of its own" in said


@pytest.mark.parametrize(
    ("probe_set", "version", "words"),
    [
        ("buffer-read", "18.1", "is for PostgreSQL from 10 to 17 only, and the server is 18.1"),
        ("checkpoint", "11.22", "is for PostgreSQL from 12 only, and the server is 11.22"),
    ],
)
def test_versions(probe_set: str, version: str, words: str) -> None:
    """A set that would be wrong for the server's version is refused."""
    assert define(PG_BIN / "postgres", "17.2", probe_set)[0] == 0
    status, said = define(PG_BIN / "postgres", version, probe_set)
    assert status == 1
    assert words in said


# Instructions of a function, and how many bytes behind its first one the probe goes.
ENTRIES = {
    "push": ("push %rbp; mov %rsp, %rbp; pop %rbp", 0),
    "endbr": ("endbr64; push %r12; pop %r12", 4),
    "loads": ("mov variable(%rip), %rax; test %rax, %rax; je 1f; nop; 1:", 10),
    "saves": ("mov %rbx, -8(%rsp); mov %rsi, %rbp; sub $8, %rsp; call push; add $8, %rsp", 12),
    "loop": ("mov variable(%rip), %rax; 1: test %rax, %rax; je 2f; dec %rax; jmp 1b; 2:", 0),
    "argument": ("mov variable(%rip), %rdi; push %rdi; pop %rdi", 0),
    "unknown": ("endbr64; lea 1(%rdi), %rax; push %rax; pop %rax", 0),
    "short": ("mov %rax, %rbx", 0),
}


def test_entries(tmp_path: Path) -> None:
    """A function's probe goes where the kernel emulates, if the arguments are as they were."""
    source = "".join(
        f".globl {name}\n.type {name}, @function\n{name}: {code}; ret\n.size {name}, . - {name}\n"
        for name, (code, _) in ENTRIES.items()
    )
    (tmp_path / "it.s").write_text(
        f".text\n{source}.data\n.globl variable\nvariable: .quad 0\n"
        '.section .note.GNU-stack,"",@progbits\n'
    )
    library = tmp_path / "it.so"
    run("gcc", "-shared", "-Wl,-Bsymbolic", "-o", library, tmp_path / "it.s", check=True)
    symbols = run("nm", library).stdout
    for name, (_, behind) in ENTRIES.items():
        (address,) = re.findall(rf"^(\w+) T {name}$", symbols, re.MULTILINE)
        script = f'. {SCRIPTS}/lib.bash; function_entry {library} {name}; echo "$PLACE $OFFSET"'
        answer = run("bash", "-euo", "pipefail", "-c", script)
        assert (
            answer.stdout == f"{int(address, 16) + behind:#x} {int(address, 16) + behind:#x}\n"
        ), name


def test_no_function() -> None:
    """A file that does not export a set's function is refused by the name of both."""
    status, said = define(Path("/bin/bash"), "15.18", "query")
    assert status == 1
    assert 'the set "query" needs the function pgstat_report_activity' in said


def test_event_of_some_majors() -> None:
    """There are ids from 14 on; before, they are left out."""
    for version, events in (("13.4", ["query_activity"]), ("14.1", ["query_activity", "query_id"])):
        _, said = define(PG_BIN / "postgres", version, "query")
        assert re.findall(r"^p:g/(\w+)", said, re.MULTILINE) == events
