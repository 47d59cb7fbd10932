"""What only the engines on ftrace have: buffers that overflow, a drainer, a ring, trace-cmd."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    SCRIPTS,
    TRACEFS,
    Cluster,
    Recorder,
    known_sites,
    manifest,
    report,
    run,
    sleeps,
    waitfold,
    waits,
)

pytestmark = pytest.mark.usefixtures("nothing_left")
PROBES = SCRIPTS / "waitfold-probes"


def instance(recorder: Recorder) -> Path:
    """The instance of ftrace that a recorder has made."""
    found = [*(TRACEFS / "instances").glob(f"waitfold_rec_*_{recorder.process.pid}_*")]
    assert len(found) == 1
    return found[0]


def drainer(recorder: Recorder) -> int:
    """The recorder's child that takes pages out of the buffers."""
    pid = recorder.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children if os.getpgid(int(child)) == int(child)]
    assert len(found) == 1
    return found[0]


def recording(cluster: Cluster, capture: Path, *args: str, until: str = "stops at") -> Recorder:
    """A recorder on ftrace that records."""
    return Recorder(
        "--engine", "ftrace", *args, "-D", cluster.data, "-o", capture, until=until
    )  # fmt: skip


def trace_cmd_stores(trace: Path) -> list[tuple[int, int, int]]:
    """Time, process and value of each store, as trace-cmd reads them."""
    text = run("trace-cmd", "report", "-t", "-i", trace).stdout
    found = re.findall(r"-(\d+) +\[\d+\] +(\d+)\.(\d{9}): w: .*\bv=0x([0-9a-f]+)", text)
    return sorted((int(s) * 10**9 + int(ns), int(pid), int(v, 16)) for pid, s, ns, v in found)


def test_trace_cmd_reads_the_same(cluster: Cluster, tmp_path: Path) -> None:
    """trace-cmd report shows every wait of the capture, and its start and end."""
    capture = tmp_path / "capture"
    recorder = recording(cluster, capture)
    subprocess.run(cluster.pgbench("-n", "-c", "4", "-t", "300"), capture_output=True, check=True)
    assert recorder.end() == 0, recorder.said
    stores = trace_cmd_stores(capture / "trace.dat")
    assert len(stores) > 5000
    assert (capture / "trace.dat").stat().st_mode & 0o777 == 0o600
    assert report(capture)["transitions"] == len(stores)
    starts = {(time_ns, pid) for time_ns, pid, value in stores if value}
    table = waits(capture, "flags == ''")
    assert len(table) > 2000
    assert set(zip(table.start_ns, table.pid, strict=True)) <= starts
    assert {path.name for path in capture.iterdir()} == {
        "manifest", "wait-event.set", "backends.tsv", "sites.tsv", "probes",
        "trace.dat", "ftrace.log",
    }  # fmt: skip


def test_losses_are_counted_and_placed(cluster: Cluster, tmp_path: Path) -> None:
    """With a tiny buffer and a drainer that sleeps, the report has the kernel's count."""
    capture = tmp_path / "capture"
    recorder = recording(cluster, capture)
    (instance(recorder) / "buffer_size_kb").write_text("16")
    reader = drainer(recorder)
    for _ in range(2):
        os.kill(reader, signal.SIGSTOP)
        subprocess.run(
            cluster.pgbench("-n", "-S", "-c2", "-t2000"), capture_output=True, check=True
        )
        os.kill(reader, signal.SIGCONT)
        time.sleep(2.5)
    with cluster.session() as session:
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
    assert recorder.end() == 0, recorder.said
    result = report(capture)
    kernels = re.findall(rb"^overrun: (\d+)$", (capture / "trace.dat").read_bytes(), re.MULTILINE)
    assert result["lost"] == sum(map(int, kernels)) > 1000
    assert result["censored"]["lost"] > 0
    assert len(sleeps(capture, session.pid)) == 5
    assert f"LOST {result['lost']} SAMPLES" in waitfold("report", capture).stdout


@pytest.fixture
def killed(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A capture whose recorder and drainer were killed with -9, and the session recorded."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = recording(cluster, capture)
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
        subprocess.run(cluster.pgbench("-n", "-S", "-c2", "-T3"), capture_output=True, check=True)
        reader = drainer(recorder)
        os.kill(reader, signal.SIGKILL)
        recorder.process.kill()
        recorder.process.communicate()
        assert session.run("SELECT 1") == ["1"]
        left = instance(recorder)
        assert left.exists()
        yield capture, session.pid
        answer = run(PROBES, "list")
        assert answer.returncode == 0, answer.stderr
        assert not left.exists()
        assert session.run("SELECT 1") == ["1"]


def test_all_killed(killed: tuple[Path, int]) -> None:
    """Raw pages that a killed recorder and drainer left are read; the next run removes the rest."""
    capture, pid = killed
    assert (capture / "trace.head").exists()
    assert not (capture / "trace.dat").exists()
    answer = waitfold("report", capture)
    assert answer.returncode == 0, answer.stderr
    assert "was not finished" in answer.stdout + answer.stderr
    assert len(sleeps(capture, pid)) == 5


def test_the_drainer_finishes_for_a_killed_recorder(cluster: Cluster, tmp_path: Path) -> None:
    """When the recorder alone is killed, the drainer makes the file and removes the instance."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = recording(cluster, capture)
        left = instance(recorder)
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
        recorder.process.kill()
        recorder.process.communicate()
        for _ in range(200):
            if not left.exists():
                break
            time.sleep(0.1)
        assert not left.exists()
    assert not [*capture.glob("trace.cpu*")]
    assert len(trace_cmd_stores(capture / "trace.dat")) > 10
    assert len(sleeps(capture, session.pid)) == 5
    assert run(PROBES, "list").returncode == 0


def test_the_drainer_killed(cluster: Cluster, tmp_path: Path) -> None:
    """When the drainer alone is killed, the recorder says so and makes the file itself."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = recording(cluster, capture)
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
        os.kill(drainer(recorder), signal.SIGKILL)
        assert recorder.wait() == 1
    assert "ended by itself" in recorder.said
    assert manifest(capture)["ended_by"] == "engine"
    assert len(sleeps(capture, session.pid)) == 5
    assert not [*capture.glob("trace.cpu*")]


def test_ring(cluster: Cluster, tmp_path: Path) -> None:
    """Each dump holds what came since the one before, as far as the ring reaches back."""
    capture = tmp_path / "capture"
    recorder = recording(cluster, capture, "--ring", "1M", until="kept in memory")
    pids = []
    for number in range(2):
        subprocess.run(cluster.pgbench("-n", "-S", "-c2", "-T3"), capture_output=True, check=True)
        with cluster.session() as session:
            for _ in range(5 + number):
                session.run("SELECT pg_sleep(0.01)")
        pids.append(session.pid)
        answer = run(SCRIPTS / "waitfold-record", "dump", capture)
        assert answer.returncode == 0, answer.stderr
    with cluster.session() as session:
        session.run("SELECT pg_sleep(0.01)")
    assert recorder.end() == 0, recorder.said
    for number, pid in enumerate(pids):
        dump = tmp_path / f"capture-{number + 1}"
        result = report(dump)
        assert result["lost"] == 0
        assert result["intervals"] > 1000
        assert result["window_ns"] < 4 * 10**9  # the ring does not hold all of pgbench
        assert len(sleeps(dump, pid)) == 5 + number
        assert len(sleeps(dump, pids[1 - number])) == 0
        assert (dump / "trace.dat").stat().st_size < 1200_000
    assert len(sleeps(capture, session.pid)) == 1
    assert len(sleeps(capture, pids[1])) == 0


def test_a_pid_namespace(cluster: Cluster, tmp_path: Path) -> None:
    """Within a pid namespace, where ftrace's pids are not ours, the engine is refused."""
    refused = run(
        "unshare", "--pid", "--fork", SCRIPTS / "waitfold-record", "--engine", "ftrace",
        "--sites", known_sites(), "-D", cluster.data, "-o", tmp_path / "capture", "-d", "1",
    )  # fmt: skip
    assert refused.returncode == 1
    assert "pid namespace" in refused.stderr
    assert "--engine perf" in refused.stderr
    assert not (tmp_path / "capture").exists()


## trace-cmd


def test_trace_cmd_that_may_not(cluster: Cluster, tmp_path: Path) -> None:
    """Where trace-cmd may not write what it wants to, the refusal names it and what to do."""
    enabled = "/proc/sys/kernel/ftrace_enabled"
    forbid = f"mount --bind {enabled} {enabled}; mount -o remount,bind,ro {enabled}"
    refused = run(
        "unshare", "--mount", "sh", "-ec", f'{forbid}; exec "$@"', "sh",
        SCRIPTS / "waitfold-record", "--sites", known_sites(), "--engine", "trace-cmd",
        "-D", cluster.data, "-o", tmp_path / "capture", "-d", "1",
    )  # fmt: skip
    assert refused.returncode == 1
    assert "ftrace_enabled" in refused.stderr
    assert "--engine ftrace" in refused.stderr
    assert not (tmp_path / "capture").exists()
