"""Recording the scheduler, stacks and queries beside the waits: what is in perf.data, what not."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import SCRIPTS, Cluster, Recorder, known_sites, perf_of, run

pytestmark = pytest.mark.usefixtures("nothing_left")
RECORD = SCRIPTS / "waitfold-record"


@dataclass(frozen=True)
class Sample:
    """A sample as perf script shows it."""

    comm: str
    tid: int
    time: float
    event: str
    text: str
    frames: list[str]


def script(capture: Path) -> list[Sample]:
    """The samples of a capture, by perf script."""
    text = run(
        "perf", "script", "--no-inline", "-i", capture / "perf.data", "--ns",
        "-F", "comm,tid,time,event,trace,ip,sym,period",
    ).stdout  # fmt: skip
    samples = []
    for line in text.splitlines():
        if match := re.match(r" *(.+?) +(\d+) +([\d.]+): +(\d+)? *([\w:]+): *(.*)", line):
            comm, tid, time, _, event, rest = match.groups()
            samples.append(Sample(comm, int(tid), float(time), event, rest, []))
        elif line.startswith("\t"):
            samples[-1].frames.append(line.split(maxsplit=1)[1])
    return samples


def table(capture: Path) -> list[dict[str, str]]:
    """The lines of backends.tsv."""
    columns, *lines = (
        line.split("\t") for line in (capture / "backends.tsv").read_text().splitlines()
    )
    return [dict(zip(columns, line, strict=True)) for line in lines]


def manifest(capture: Path) -> dict[str, str]:
    """The manifest of a capture."""
    lines = (capture / "manifest").read_text().splitlines()
    return dict(line.split("\t", 1) for line in lines)


@dataclass(frozen=True)
class Recording:
    """What --with all recorded of sessions that slept, burnt CPU, and slept all along."""

    capture: Path
    samples: list[Sample]
    sleeper: int
    burner: int
    long: int


@pytest.fixture(scope="module")
def recording(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """One recording for most of what follows."""
    capture = tmp_path_factory.mktemp("profile") / "capture"
    with cluster.session() as sleeper, cluster.session() as burner, cluster.session() as long:
        long.run("SET application_name = 'the long one'")
        long.send("SELECT\tpg_sleep(60) /* all\n along */")
        recorder = Recorder("--with", "all", "-D", cluster.data, "-o", capture)
        for _ in range(11):
            sleeper.run("SELECT pg_sleep(0.02)")
        burner.run("SELECT sum(n) FROM generate_series(1, 1500000) AS n")
        assert recorder.end() == 0, recorder.said
        assert "not sites by ftrace" in recorder.said
        cluster.sql(f"SELECT pg_cancel_backend({long.pid})")
        long.wait()
        return Recording(capture, script(capture), sleeper.pid, burner.pid, long.pid)


def test_events(recording: Recording) -> None:
    """One perf.data has the events of docs/capture.md, in their order, on one clock."""
    names = run("perf", "evlist", "-i", recording.capture / "perf.data").stdout.splitlines()
    assert [re.sub("^waitfold_.*:", "", name) for name in names if name[0] != "#"] == [
        "w", "query_activity", "query_id",
        "sched:sched_switch", "sched:sched_switch", "sched:sched_wakeup", "oncpu", "dummy:HG",
    ]  # fmt: skip
    facts = manifest(recording.capture)
    assert facts["profiles"] == "offcpu,oncpu"
    assert facts["call_graph"] == "fp"
    assert facts["comm"] == "postgres"
    assert facts["engine"] == "perf"
    assert facts["sets"] == "wait-event,query"
    assert "pids" not in facts
    assert (recording.capture / "symbols" / facts["build_id"]).exists()
    assert (recording.capture / "symbols" / "kernel").exists()


def test_only_the_server(recording: Recording) -> None:
    """No switch between two other programs is recorded, and no CPU that idles."""
    switches = [s for s in recording.samples if s.event == "sched:sched_switch"]
    assert all("prev_comm=postgres" in s.text or "next_comm=postgres" in s.text for s in switches)
    stacks = [s for s in switches if len(s.frames) > 0]
    assert stacks
    assert all(s.comm == "postgres" and "prev_comm=postgres" in s.text for s in stacks)
    wakeups = [s for s in recording.samples if s.event == "sched:sched_wakeup"]
    assert all("comm=postgres" in s.text for s in wakeups)
    oncpu = [s for s in recording.samples if s.event == "oncpu"]
    assert all(s.tid for s in oncpu)
    assert any(
        s.tid == recording.burner and "standard_ExecutorRun" in "".join(s.frames) for s in oncpu
    )


def test_sleeps(recording: Recording) -> None:
    """Each pg_sleep is out, with its stack, wakeup and in, between the wait's start and its end."""
    kinds = defaultdict(list)
    for sample in recording.samples:
        pid = recording.sleeper
        if sample.event.endswith(":w") and sample.tid == pid:
            kinds["wait"].append((sample.time, "v=0x9" in sample.text))
        elif sample.event == "sched:sched_wakeup" and f"pid={pid} " in sample.text:
            kinds["wake"].append(sample.time)
        elif sample.event == "sched:sched_switch" and sample.frames and sample.tid == pid:
            kinds["out"].append((sample.time, sample.frames))
        elif sample.event == "sched:sched_switch" and f"next_pid={pid} " in sample.text:
            kinds["in"].append(sample.time)
    slept = 0
    for (start, begins), (end, _) in zip(kinds["wait"], kinds["wait"][1:], strict=False):
        if not begins or end - start < 0.01:
            continue
        slept += 1
        (out, stack), *_ = [row for row in kinds["out"] if start < row[0] < end]
        # Linux 6.18 can stop to make samples of a CPU's idle task, who wakes and gives way.
        seen = [[t for t in kinds[kind] if out < t < end][:1] for kind in ("wake", "in")]
        order = [start, out, *seen[0], *seen[1], end]
        assert order == sorted(order)
        assert any("pg_sleep" in frame for frame in stack)
        assert any("schedule" in frame for frame in stack)
    assert slept == 11


def test_what_backends_did(recording: Recording) -> None:
    """backends.tsv tells the application, and what was being run when the recording began."""
    rows = {int(row["pid"]): row for row in reversed(table(recording.capture))}
    long = rows[recording.long]
    assert long["application"] == "the long one"
    assert long["query"] == "SELECT pg_sleep(60) /* all  along */;"
    assert int(long["wait"], 16) >> 24 == 0x09  # Timeout
    assert rows[recording.sleeper]["application"] == "psql"
    assert rows[recording.sleeper]["query"] == "-"
    assert {row["application"] for row in rows.values() if "checkpointer" in row["title"]} == {"-"}
    assert (recording.capture / "backends.tsv").stat().st_mode & 0o077 == 0


def test_processes_named(cluster: Cluster, tmp_path: Path) -> None:
    """With -p the switches of other backends are not recorded; without stacks there are none."""
    capture = tmp_path / "capture"
    with cluster.session() as one, cluster.session() as other:
        recorder = Recorder(
            "--with", "offcpu", "--call-graph", "none", "-p", str(one.pid), "-o", capture
        )
        for session in (one, other) * 5:
            session.run("SELECT pg_sleep(0.01)")
        assert recorder.end() == 0, recorder.said
    samples = script(capture)
    assert {s.tid for s in samples if s.event.endswith(":w")} == {one.pid}
    switches = [s.text for s in samples if s.event.startswith("sched:")]
    assert len(switches) > 5
    assert all(f"pid={one.pid} " in text for text in switches)
    assert not any(s.frames for s in samples)
    assert manifest(capture)["pids"] == str(one.pid)


def test_dwarf(cluster: Cluster, tmp_path: Path) -> None:
    """Copied stacks unwind to the outermost function; a flight recorder's dump has all it needs."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = Recorder(
            "--with", "offcpu,oncpu", "--call-graph", "dwarf", "--ring", "16M",
            "-p", str(session.pid), "-o", capture, until="dump",
        )  # fmt: skip
        for _ in range(3):
            session.run("SELECT pg_sleep(0.01)")
        dump = Path(run(RECORD, "dump", capture).stdout.strip())
        killed(recorder, capture)
        stacks = [
            s.frames for s in script(dump) if s.tid == session.pid and s.event.endswith("switch")
        ]
    whole = [stack for stack in stacks if any(frame.split()[-1] == "main" for frame in stack)]
    assert len(whole) >= 3
    assert any(any("WaitLatch" in frame for frame in stack) for stack in whole)
    assert (dump / "symbols" / "kernel").exists()


def killed(recorder: Recorder, capture: Path) -> None:
    """Kill a recorder with -9: what records for it ends by itself, the next run does the rest."""
    recorder.process.kill()
    recorder.wait()
    end = time.monotonic() + 20
    while perf_of(capture) and time.monotonic() < end:
        time.sleep(0.1)
    assert not perf_of(capture)
    run(SCRIPTS / "waitfold-probes", "list")


def test_killed(cluster: Cluster, tmp_path: Path) -> None:
    """Killed with -9, what was recorded can be read, and nothing records any more."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = Recorder("--with", "offcpu,oncpu", "-D", cluster.data, "-o", capture)
        session.run("SELECT pg_sleep(0.5)")
        killed(recorder, capture)
    assert any(s.tid == session.pid and s.frames for s in script(capture))


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["--with", "offcpu", "--engine", "ftrace"], 2),
        (["--with", "oncpu", "--engine", "trace-cmd"], 2),
        (["--with", "offcpu", "-m", "mem"], 2),
        (["--call-graph", "fp"], 2),
        (["--with", "query", "--call-graph", "fp"], 2),
        (["--with", "all", "--call-graph", "lbr"], 2),
        (["--with", "oncpuu"], 1),
    ],
)
def test_refused(args: list[str], status: int) -> None:
    """A wrong combination is refused with one line."""
    answer = run(RECORD, "--sites", known_sites(), *args)
    assert answer.returncode == status
    assert answer.stderr.count("\n") == 1
