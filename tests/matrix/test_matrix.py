"""Each mode by each engine on each server: a known workload gives exact counts and names.

The servers: Debian's; WAITFOLD_SERVERS, a folder with one sub-folder a version; WAITFOLD_USDT, the
prefix of a server with the wait__event probes, and PREFIX-nop5 beside it where there is one.
`make matrix` writes what is seen to docs/matrix.md.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    LOCKS,
    PG_BIN,
    ROOT,
    SCRIPTS,
    SLEEPS,
    Cluster,
    Psql,
    Recorder,
    prime_workload,
    report,
    run,
    running_cluster,
    sleeps,
    waits,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

SLACK_NS = (
    5_000_000  # a probe may fire so much after the store: the backend lost its CPU in between
)

HEAD = f"""\
# Every mode, by every engine, on every server

Made by `make matrix`. On each server two backends, one older than the recording and one begun in
it, each sleep {SLEEPS} times (`pg_sleep(0.053)`) and wait {LOCKS} times for another's row lock,
recorded in each way that this server allows; the counts are those of `waitfold report --json`.
Meanwhile another session asks pg_stat_activity what the two wait for, again and again: "polls" are
those of its answers between two recorded transitions, which must say what was recorded.

| server | mode | engine | places | PgSleep | transactionid | polls | verdict |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Server:
    """A build of PostgreSQL."""

    name: str
    binaries: Path
    patched: bool = False


def servers() -> list[Server]:
    """The builds that are there."""
    found = []
    if "WAITFOLD_SERVERS" in os.environ:
        folders = Path(os.environ["WAITFOLD_SERVERS"]).glob("*/bin")
        found = [Server(path.parent.name, path) for path in folders]
        found.sort(key=lambda server: [int(n) for n in re.findall(r"\d+", server.name)])
    found.append(Server("Debian", PG_BIN))
    if prefix := os.environ.get("WAITFOLD_USDT"):
        found.append(Server("patched", Path(prefix) / "bin", patched=True))
        if (nop5 := Path(f"{prefix}-nop5") / "bin").exists():
            found.append(Server("patched, 5-byte nops", nop5, patched=True))
    return found


WAYS = [
    ("sites", "ftrace"),
    ("sites", "perf"),
    ("mem", "perf"),
    ("usdt", "ftrace"),
    ("usdt", "perf"),
]
MATRIX = [
    (server, mode, engine)
    for server in servers()
    for mode, engine in WAYS
    if server.patched or (mode, engine) != ("usdt", "perf")
]


@pytest.fixture(scope="session")
def table() -> Iterator[dict[tuple[str, str, str], str]]:
    """The rows of docs/matrix.md; written at the end of a run of all of them."""
    rows: dict[tuple[str, str, str], str] = {}
    yield rows
    keys = [(server.name, mode, engine) for server, mode, engine in MATRIX]
    if "WAITFOLD_TABLE" in os.environ and len(rows) == len(keys):
        lines = "".join(rows[key] + "\n" for key in keys)
        (ROOT / os.environ["WAITFOLD_TABLE"]).write_text(HEAD + lines)


@dataclass(frozen=True)
class Running:
    """A server that runs, and the list of its sites, or why there is none."""

    server: Server
    cluster: Cluster
    version: str
    sites: Path


@pytest.fixture(scope="session")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """One of the servers, started for all ways that are tried on it."""
    server: Server = request.param
    sites = tmp_path_factory.mktemp("sites") / "sites.tsv"
    answer = run(SCRIPTS / "waitfold-probes", "sites", server.binaries / "postgres")
    assert answer.returncode == 0, answer.stderr
    sites.write_text(answer.stdout)
    with running_cluster(binaries=server.binaries) as cluster:
        cluster.sql("CREATE TABLE locked (id int)")
        cluster.sql("INSERT INTO locked VALUES (1)")
        version = cluster.sql("SHOW server_version").split()[0]
        yield Running(server, cluster, version, sites)


class Witness(threading.Thread):
    """Asks pg_stat_activity, until told to stop, what the backends named wait for."""

    def __init__(self, session: Psql, pids: list[int]) -> None:
        super().__init__()
        self.session, self.stopping = session, threading.Event()
        self.query = (
            "SELECT pid, coalesce(wait_event_type || ':' || wait_event, '') FROM pg_stat_activity "
            f"WHERE pid IN ({', '.join(map(str, pids))})"
        )
        self.polls: list[tuple[int, int, int, str]] = []
        """Begin and end of the asking in ns of CLOCK_MONOTONIC, pid, what it waited for."""

    def run(self) -> None:
        """Ask."""
        while not self.stopping.is_set():
            begun = time.monotonic_ns()
            answer = self.session.run(self.query)
            ended = time.monotonic_ns()
            for pid, waiting in (line.split("|") for line in answer):
                self.polls.append((begun, ended, int(pid), waiting))
            time.sleep(0.007)

    def stop(self) -> None:
        """Stop asking."""
        self.stopping.set()
        self.join()

    def compare(self, intervals: Any) -> tuple[int, list[str]]:
        """How many answers fall between two recorded transitions, and those that differ."""
        compared, differing = 0, []
        for pid, rows in intervals.sort_values("start_ns").groupby("pid"):
            begins = rows.start_ns.to_numpy()
            ends = begins + rows.dur_ns.to_numpy()
            names = (rows["class"] + ":" + rows["name"]).to_list()
            edges = np.sort(np.concatenate([begins, ends]))
            for begun, ended, of, waiting in self.polls:
                if of != pid or not edges[0] < begun <= ended + SLACK_NS < edges[-1]:
                    continue
                if np.searchsorted(edges, begun) != np.searchsorted(edges, ended + SLACK_NS):
                    continue
                compared += 1
                at = int(np.searchsorted(begins, begun)) - 1
                recorded = names[at] if begun < ends[at] else ""
                if recorded != waiting:
                    differing.append(f"{pid} at {begun}: {recorded!r}, polled {waiting!r}")
        return compared, differing


def refusal(way: Running, mode: str, engine: str, capture: Path) -> str:
    """Why the recorder refuses; it must leave nothing."""
    options = ["-D", way.cluster.data, "-m", mode, "--engine", engine, "-o", capture]
    answer = run(SCRIPTS / "waitfold-record", *options, "-d", "1")
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr.count("\n") == 1
    assert not capture.exists()
    return answer.stderr.removeprefix("waitfold-record: ").partition(". To mend it")[0].strip()


def attached(capture: Path, pid: int) -> None:
    """In mode mem: wait until the backend has its watchpoint; that may take 100 ms and no more."""
    deadline = time.monotonic() + 2
    while f"\n{pid}\t" not in (capture / "attached.tsv").read_text():
        assert time.monotonic() < deadline, f"{pid} has no watchpoint after 2 s"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("running", "mode", "engine"),
    MATRIX,
    ids=[f"{server.name}-{mode}-{engine}" for server, mode, engine in MATRIX],
    indirect=["running"],
)
def test_known_workload(
    running: Running,
    mode: str,
    engine: str,
    table: dict[tuple[str, str, str], str],
    tmp_path: Path,
) -> None:
    """Counts and names are exact, and at each moment what pg_stat_activity said."""
    cluster, capture = running.cluster, tmp_path / "capture"
    name = running.server.name
    kind = "" if name.startswith(running.version) else f", {name}"
    cells = [running.version + kind, mode, engine]
    table[name, mode, engine] = f"| {' | '.join(cells)} | | | | | FAILED |"
    if mode == "usdt" and not running.server.patched:
        reason = refusal(running, mode, engine, capture)
        cells[2] = "any"
        reason = reason.replace(str(running.server.binaries), "bin")
        table[name, mode, engine] = f"| {' | '.join(cells)} | | | | | refused: {reason} |"
        return
    options = ["-D", cluster.data, "-m", mode, "--engine", engine, "-o", capture]
    if mode != "usdt":
        options += ["--sites", running.sites]
    with cluster.session() as old, cluster.session() as holder, cluster.session() as polling:
        recorder = Recorder(*options, sites=False)
        with cluster.session() as new:
            if mode == "mem":
                attached(capture, new.pid)
            witness = Witness(polling, [old.pid, new.pid])
            witness.start()
            for sleeper in (old, new):
                prime_workload(holder, sleeper)
            witness.stop()
            assert recorder.end() == 0, recorder.said
            pids = [old.pid, new.pid]
    manifest = dict(line.split("\t", 1) for line in (capture / "manifest").read_text().splitlines())
    assert (manifest["mode"], manifest["engine"]) == (mode, engine)
    result = report(capture)
    assert result["lost"] == 0
    assert result["mode"] == mode
    count = {f"{row['class']}:{row['name']}": row["count"] for row in result["waits"]}
    intervals = waits(capture)
    whole = intervals[intervals["flags"] == ""]
    # A timer may fire just before the time by the clock that pg_sleep looks at: it sleeps the rest.
    rests = int(((whole["name"] == "PgSleep") & (whole.dur_ns < 1_000_000)).sum())
    assert count["Timeout:PgSleep"] - rests == 2 * SLEEPS
    assert count["Lock:transactionid"] == 2 * LOCKS
    for pid in pids:
        slept = sleeps(capture, pid)
        assert len(slept) == SLEEPS
        assert slept.min() >= 53_000_000
        mine = whole[whole.pid == pid]
        assert (mine["name"] == "transactionid").sum() == LOCKS
        assert "Client:ClientRead" in set(mine["class"] + ":" + mine["name"])
    compared, differing = witness.compare(intervals[intervals.pid.isin(pids)])
    assert compared > 300
    assert not differing
    places = manifest.get("probes", "one watchpoint a backend")
    slept_text = f"{2 * SLEEPS}" + (f" (and {rests} rests below 1 ms)" if rests else "")
    cells += [
        places,
        slept_text,
        f"{count['Lock:transactionid']}",
        f"{compared}, all equal",
        "exact",
    ]
    table[name, mode, engine] = f"| {' | '.join(cells)} |"
