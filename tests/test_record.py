"""Recording a real server: what is seen, what is refused, and what is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    LOCKS,
    PG_BIN,
    SCRIPTS,
    SLEEPS,
    TRACEFS,
    Cluster,
    Recorder,
    count,
    known_sites,
    leftovers,
    manifest,
    perf_of,
    prime_workload,
    report,
    run,
    running_cluster,
    sleeps,
    uprobe_events,
    waitfold,
    waits,
    whole_waits,
)

pytestmark = pytest.mark.usefixtures("nothing_left")
RECORD = SCRIPTS / "waitfold-record"
PROBES = SCRIPTS / "waitfold-probes"
DOCTOR = SCRIPTS / "waitfold-doctor"


## What is seen


def test_prime_numbers(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """23 sleeps and 7 row locks, in an old and in a new backend, are 23 and 7 intervals."""
    capture = tmp_path / "capture"
    cluster.sql("CREATE TABLE IF NOT EXISTS locked (id int)")
    cluster.sql("INSERT INTO locked VALUES (1)")
    with cluster.session() as old, cluster.session() as holder:
        old.run("SELECT 1")
        recorder = Recorder("--engine", engine, "-D", cluster.data, "-o", capture)
        with cluster.session() as new:
            for sleeper in (old, new):
                prime_workload(holder, sleeper)
            assert recorder.end() == 0, recorder.said
            pids = {"old": old.pid, "new": new.pid}
    result = report(capture)
    assert result["lost"] == 0
    assert result["mode"] == "sites"
    for name, pid in pids.items():
        rows = waits(capture, f"pid == {pid} and flags == ''")
        slept = sleeps(capture, pid)
        assert len(slept) == SLEEPS, name
        assert slept.min() >= 53_000_000
        assert slept.median() < 58_000_000
        locks = whole_waits(rows[(rows["class"] == "Lock") & (rows["name"] == "transactionid")])
        assert len(locks) == LOCKS, name
        assert 40_000_000 < locks.median() < 60_000_000


def test_every_backend_of_many(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """With a new connection for each transaction every backend is seen, and no event is lost."""
    capture = tmp_path / "capture"
    before = (cluster.folder / "log").read_text().count("connection authorized")
    recording = run(
        RECORD, "--sites", known_sites(), "--engine", engine, "-D", cluster.data, "-o", capture,
        "--", *cluster.pgbench("-n", "-S", "-C", "-c", "16", "-T", "3"),
    )  # fmt: skip
    assert recording.returncode == 0, recording.stderr
    made = (cluster.folder / "log").read_text().count("connection authorized") - before
    result = report(capture)
    assert made > 100
    assert result["lost"] == 0
    # pgbench's first connection asks for the server's version and is a backend as well.
    assert sum(row["type"] in ("client backend", "unknown") for row in result["backends"]) == made


def test_connections_that_come_and_go_at_the_start(cluster: Cluster, tmp_path: Path) -> None:
    """Backends that are born and die while it attaches are no obstacle."""
    capture = tmp_path / "capture"
    churn = subprocess.Popen(
        cluster.pgbench("-n", "-S", "-C", "-c", "4", "-T", "600"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        recording = run(
            RECORD,
            "--sites",
            known_sites(),
            "-D",
            cluster.data,
            "-o",
            capture,
            "-d",
            "2",
        )
    finally:
        churn.terminate()
        churn.wait()
    assert recording.returncode == 0, recording.stderr
    assert len(report(capture)["backends"]) > 20


def test_one_backend_by_pid(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """With -p PID only that backend is recorded."""
    capture = tmp_path / "capture"
    with cluster.session() as one, cluster.session() as other:
        recorder = Recorder("--engine", engine, "-p", str(one.pid), "-o", capture)
        for session in (one, other):
            session.run("SELECT pg_sleep(0.01)")
        assert recorder.end() == 0
        assert {row["pid"] for row in report(capture)["backends"]} == {one.pid}


def test_backends_and_their_types(cluster: Cluster, tmp_path: Path) -> None:
    """A capture knows the server's processes as pg_stat_activity names them."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = Recorder("-D", cluster.data, "-o", capture)
        session.run("SELECT pg_sleep(0.1)")
        types = dict(
            line.split("|")
            for line in session.run("SELECT pid, backend_type FROM pg_stat_activity")
        )
        session.run("CHECKPOINT")
        time.sleep(1.5)
        assert recorder.end() == 0
    seen = {str(row["pid"]): row["type"] for row in report(capture)["backends"]}
    assert seen[str(session.pid)] == "client backend"
    assert "checkpointer" in seen.values()
    assert {pid: kind for pid, kind in seen.items() if pid in types} == {
        pid: kind for pid, kind in types.items() if pid in seen
    }


def test_a_wait_that_spans_the_capture_is_censored(
    cluster: Cluster, tmp_path: Path, engine: str
) -> None:
    """A wait that began before or ended after the capture is censored, not an interval."""
    capture = tmp_path / "capture"
    with cluster.session() as whole, cluster.session() as begun, cluster.session() as ending:
        whole.send("SELECT pg_sleep(60)")
        begun.send("SELECT pg_sleep(60)")
        recorder = Recorder("--engine", engine, "-D", cluster.data, "-o", capture)
        ending.send("SELECT pg_sleep(60)")
        cluster.sql(f"SELECT pg_cancel_backend({begun.pid})")
        begun.wait()
        time.sleep(0.1)
        assert recorder.end() == 0, recorder.said
        rows = waits(capture, "name == 'PgSleep'").set_index("pid")
        for session in (whole, ending):
            cluster.sql(f"SELECT pg_cancel_backend({session.pid})")
            session.wait()
    assert dict(rows["flags"]) == {whole.pid: "start|end", begun.pid: "start", ending.pid: "end"}
    assert report(capture)["censored"]["start"] >= 2


## The capture


def test_manifest(cluster: Cluster, tmp_path: Path) -> None:
    """The manifest says what was recorded, and how it ended."""
    capture = tmp_path / "with blanks\tand a tab"
    recording = run(
        RECORD,
        "--sites",
        known_sites(),
        "-D",
        cluster.data,
        "-o",
        capture,
        "--",
        "sh",
        "-c",
        "exit 3",
    )
    assert recording.returncode == 0
    assert "status 3" in recording.stderr
    facts = manifest(capture)
    version = run(PG_BIN / "postgres", "--version").stdout.split()[2]
    assert facts["format"] == "2"
    assert facts["pg_version"] == version
    assert facts["ended_by"] == "command"
    assert facts["command_status"] == "3"
    assert int(facts["end_ns"]) > int(facts["start_ns"])
    assert report(capture)["window_ns"] == int(facts["end_ns"]) - int(facts["start_ns"])
    assert len((capture / "probes").read_text().splitlines()) == int(facts["probes"])
    assert {path.name for path in capture.iterdir()} <= {
        "manifest", "wait-event.set", "backends.tsv", "sites.tsv", "probes",
        "perf.data", "perf.log", "trace.dat", "ftrace.log",
    }  # fmt: skip


def test_an_existing_capture_is_not_overwritten(cluster: Cluster, tmp_path: Path) -> None:
    """What -o names must not exist, be it a folder, a file or a dangling link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        refused = run(RECORD, "-D", cluster.data, "-o", tmp_path / name, "-d", "1")
        assert refused.returncode == 1
        assert "exists" in refused.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ended_by_a_signal(cluster: Cluster, tmp_path: Path, how: int) -> None:
    """Ctrl-C, or a polite kill, ends early and keeps all that was recorded."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = Recorder("-D", cluster.data, "-o", capture)
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
        assert recorder.end(how) == 0, recorder.said
    assert manifest(capture)["ended_by"] == "signal"
    assert len(sleeps(capture, session.pid)) == 5


def test_stopped_before_it_recorded(cluster: Cluster, tmp_path: Path) -> None:
    """Ctrl-C while the server's code is still read leaves nothing, not even the folder."""
    capture = tmp_path / "capture"
    recorder = Recorder("-D", cluster.data, "-o", capture, until="", sites=False)
    while not capture.exists():
        time.sleep(0.01)
    time.sleep(0.5)
    assert recorder.end() == 1
    assert "nothing is left behind" in recorder.said
    assert not capture.exists()


def test_max_size(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """The recording stops at --max-size, says so, and keeps what it has."""
    capture = tmp_path / "capture"
    recording = run(
        RECORD, "--sites", known_sites(), "--engine", engine, "-D", cluster.data,
        "-o", capture, "--max-size", "4M",
        "--", *cluster.pgbench("-n", "-S", "-c", "4", "-T", "60"),
    )  # fmt: skip
    assert recording.returncode == 0
    assert "--max-size" in recording.stderr
    assert manifest(capture)["ended_by"] == "size"
    trace = capture / ("perf.data" if engine == "perf" else "trace.dat")
    assert 1 << 20 < trace.stat().st_size < 6 << 20
    assert report(capture)["intervals"] > 1000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with little more than the room that a recording insists on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=262M", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_disk_full(cluster: Cluster, small_disk: Path, engine: str) -> None:
    """A recording leaves room on the disk: it ends in good order, and does not begin without."""
    capture = small_disk / "capture"
    recording = run(
        RECORD, "--sites", known_sites(), "--engine", engine, "-D", cluster.data, "-o", capture,
        "--", *cluster.pgbench("-n", "-S", "-c", "4", "-T", "60"),
    )  # fmt: skip
    assert recording.returncode == 1
    assert "less than 256 MiB" in recording.stderr
    assert report(capture)["intervals"] > 1000
    again = run(
        RECORD,
        "--sites",
        known_sites(),
        "--engine",
        engine,
        "-D",
        cluster.data,
        "-o",
        small_disk / "again",
        "-d",
        "1",
    )
    assert again.returncode == 1
    assert "choose another place" in again.stderr
    assert not (small_disk / "again").exists()


def test_flight_recorder(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """A ring is written when told, twice, and at the end; each holds what came since the last."""
    capture = tmp_path / "box"
    with cluster.session() as session:
        recorder = Recorder(
            "--engine", engine, "--ring", "8M", "-D", cluster.data, "-o", capture, until="dump"
        )
        dumped = []
        for count in (5, 7, 11):
            for _ in range(count):
                session.run("SELECT pg_sleep(0.01)")
            if count < 11:
                answer = run(RECORD, "dump", capture)
                assert answer.returncode == 0, answer.stderr
                dumped.append(Path(answer.stdout.strip()))
        assert recorder.end() == 0, recorder.said
    assert [path.name for path in dumped] == ["box-1", "box-2"]
    assert manifest(dumped[0])["ended_by"] == "dump"
    assert [len(sleeps(path, session.pid)) for path in (*dumped, capture)] == [5, 7, 11]
    assert "no recorder" in run(RECORD, "dump").stderr


def test_ring_wraps(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """A full ring holds the newest; the window begins where no CPU's events are missing."""
    capture = tmp_path / "box"
    recorder = Recorder(
        "--engine", engine, "--ring", "1M", "-D", cluster.data, "-o", capture, until="dump"
    )
    run(*cluster.pgbench("-n", "-S", "-c", "2", "-T", "3"))
    with cluster.session() as session:
        for _ in range(13):
            session.run("SELECT pg_sleep(0.001)")
        assert recorder.end() == 0, recorder.said
    found = report(capture)
    assert found["window_ns"] < int(manifest(capture)["end_ns"]) - int(
        manifest(capture)["start_ns"]
    )
    assert found["lost"] == 0
    assert len(waits(capture, f"pid == {session.pid} and name == 'PgSleep' and flags == ''")) >= 13


## What is refused


@pytest.mark.parametrize(
    "args",
    [
        ["-d"], ["-d", "0"], ["-d", "x"], ["-p", "x"], ["-p", "1,"], ["-m", "magic"], ["--what"],
        ["--max-size", "0K"], ["--max-size", "7"], ["-D", "/", "-p", "1"], ["--"], ["capture"],
        ["--engine", "magic"], ["-m", "mem", "--engine", "ftrace"], ["--ring", "x"],
        ["--ring", "1M", "--max-size", "1M"], ["-m", "mem", "--ring", "1M"],
        ["-m", "mem", "--with", "query"],
        ["--with", "wait-event"], ["dump", "a", "b"],
    ],
)  # fmt: skip
def test_called_wrongly(args: list[str]) -> None:
    """A wrong command line is status 2, and one line that says what is wrong."""
    answer = run(RECORD, *args)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "--help" in answer.stderr


@pytest.mark.parametrize("script", [RECORD, PROBES, DOCTOR])
def test_help_and_version(script: Path) -> None:
    """--help is the header's text, within 80 columns or so, and --version names waitfold."""
    text = run(script, "--help").stdout
    assert text.startswith(f"{script.name} - ")
    for word in ("usage:", "cost:", "needs:", "See also:"):
        assert word in text
    assert max(map(len, text.splitlines())) < 100
    assert re.fullmatch(r"waitfold \d+\.\d+\.\d+\n", run(script, "--version").stdout)


def test_no_such_server(cluster: Cluster, tmp_path: Path) -> None:
    """A folder that is absent, no data directory, or one with a stale postmaster.pid."""
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "postmaster.pid").write_text("1\n")
    for folder, word in (
        (tmp_path / "absent", "no directory"),
        (tmp_path, "no postmaster.pid"),
        (stale, "left over"),
    ):
        answer = run(RECORD, "-D", folder, "-d", "1")
        assert answer.returncode == 1
        assert word in answer.stderr


def test_not_postgresql(tmp_path: Path) -> None:
    """A process that is none, and one that is not PostgreSQL's."""
    for pid, word in (("4194305", "no process"), (str(os.getpid()), "not a PostgreSQL")):
        answer = run(RECORD, "-p", pid, "-o", tmp_path / "capture", "-d", "1")
        assert answer.returncode == 1
        assert word in answer.stderr
    assert not (tmp_path / "capture").exists()


def test_no_such_command(cluster: Cluster, tmp_path: Path) -> None:
    """A command that does not exist is found out before anything is done."""
    answer = run(RECORD, "-D", cluster.data, "-o", tmp_path / "capture", "--", "no-such-command")
    assert answer.returncode == 1
    assert "no command" in answer.stderr
    assert not (tmp_path / "capture").exists()


def test_without_root(cluster: Cluster, tmp_path: Path) -> None:
    """An ordinary user is told to be root, or the server's user."""
    nobody = ["setpriv", "--reuid", "65534", "--clear-groups"]
    answer = run(*nobody, RECORD, "-D", cluster.data, "-d", "1", cwd="/")
    assert answer.returncode == 1
    assert "as root" in answer.stderr


@pytest.mark.parametrize(
    ("tool", "word"), [("perf", "linux-perf"), ("objdump", "binutils"), ("readelf", "binutils")]
)
def test_without_a_tool(cluster: Cluster, tmp_path: Path, tool: str, word: str) -> None:
    """A missing tool is named, with the command that installs it; the doctor says the same."""
    path = tmp_path / "bin"
    path.mkdir()
    for folder in ("/bin", "/usr/bin", "/usr/sbin", "/sbin"):
        for program in Path(folder).iterdir():
            if program.name != tool and not (path / program.name).exists():
                (path / program.name).symlink_to(program)
    # With sites at hand binutils would not be missed; without them the code is read for seconds.
    server = ["-D", cluster.data, *(["--sites", known_sites()] if tool == "perf" else [])]
    answer = run(
        RECORD, "-m", "sites", "--engine", "perf", *server, "-d", "1", env={"PATH": str(path)}
    )
    assert answer.returncode == 1
    assert word in answer.stderr
    answer = run(DOCTOR, *server, env={"PATH": str(path)})
    assert re.search(rf"^no .*\n.*{word}", answer.stdout, re.MULTILINE)


def test_without_tracefs(cluster: Cluster, tmp_path: Path) -> None:
    """Where tracefs is not mounted, the command that mounts it is shown."""
    script = (
        f"umount {TRACEFS}; umount /sys/kernel/debug; exec {RECORD} -m sites -D {cluster.data} -d 1"
    )
    answer = run("unshare", "--mount", "sh", "-c", script)
    assert answer.returncode == 1
    assert "mount -t tracefs" in answer.stderr


## Servers that are not as usual


def test_pgdata_with_blanks_and_a_second_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """Of two clusters of one binary, with blanks in a path, just the one meant is recorded."""
    capture = tmp_path / "capture"
    with running_cluster(data="my data 'x'") as second:
        several = run(RECORD, "-d", "1", "-o", capture)
        assert several.returncode == 1
        assert str(cluster.data) in several.stderr
        assert "my\\ data" in several.stderr
        recorder = Recorder("-D", second.data, "-o", capture)
        with second.session() as mine, cluster.session() as other:
            mine.run("SELECT pg_sleep(0.01)")
            other.run("SELECT pg_sleep(0.01)")
        assert recorder.end() == 0
        rows = waits(capture, "name == 'PgSleep'")
        assert set(rows.pid) == {mine.pid}


def test_two_recorders_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Two recorders see the same, and the end of one does not disturb the other."""
    captures = [tmp_path / "a", tmp_path / "b"]
    with cluster.session() as session:
        recorders = [Recorder("-D", cluster.data, "-o", capture) for capture in captures]
        for _ in range(11):
            session.run("SELECT pg_sleep(0.01)")
        assert recorders[0].end() == 0
        for _ in range(2):
            session.run("SELECT pg_sleep(0.01)")
        assert recorders[1].end() == 0
    assert [len(sleeps(capture, session.pid)) for capture in captures] == [11, 13]


def test_the_server_ends(tmp_path: Path) -> None:
    """A server that is stopped in mid-capture ends the recording; what was recorded is kept."""
    capture = tmp_path / "capture"
    with running_cluster() as own:
        recorder = Recorder("-D", own.data, "-o", capture)
        with own.session() as session:
            session.run("SELECT pg_sleep(0.01)")
        own.stop("fast")
        own.start()
        assert recorder.wait() == 1
        assert "ended" in recorder.said
    assert manifest(capture)["ended_by"] == "server"
    assert len(sleeps(capture, session.pid)) == 1


def test_a_binary_that_was_replaced(tmp_path: Path) -> None:
    """A server whose binary an upgrade has replaced is recorded by the file that it runs."""
    capture = tmp_path / "capture"
    tree = Path("/usr") / PG_BIN.relative_to("/usr")
    # The server finds its other files from where its binary is.
    with running_cluster() as model:
        copy = model.folder / "usr" / tree.relative_to("/usr")
        copy.mkdir(parents=True)
        for program in tree.iterdir():
            if program.name == "postgres":
                shutil.copy(program, copy)
            else:
                (copy / program.name).symlink_to(program)
        share = model.folder / "usr/share/postgresql"
        share.mkdir(parents=True)
        (share / PG_BIN.parent.name).symlink_to(f"/usr/share/postgresql/{PG_BIN.parent.name}")
        (copy.parent / "lib").symlink_to(tree.parent / "lib")
        model.stop("fast")
        model.binaries = copy
        (copy / "pg_ctl").unlink()
        shutil.copy(PG_BIN / "pg_ctl", copy)
        model.start()
        assert Path(f"/proc/{model.pid}/exe").readlink() == copy / "postgres"
        replacement = copy / "new"
        replacement.write_bytes(b"\x7fELF, but of another build")
        replacement.rename(copy / "postgres")
        with model.session() as session:
            recorder = Recorder("-D", model.data, "-o", capture, sites=False)
            session.run("SELECT pg_sleep(0.01)")
            assert recorder.end() == 0, recorder.said
        model.binaries = PG_BIN
    assert "(deleted)" in manifest(capture)["binary"]
    assert len(sleeps(capture, session.pid)) == 1


## Killed


def append_uprobe_event(line: str) -> None:
    """Write one line to uprobe_events; the file cannot seek, as Python's append mode does."""
    events = os.open(TRACEFS / "uprobe_events", os.O_WRONLY | os.O_APPEND)
    os.write(events, line.encode())
    os.close(events)


@pytest.fixture
def others_probe() -> Iterator[str]:
    """A probe of somebody else on the same binary; of one place, so it may be removed by name."""
    dynamic = run("readelf", "--dyn-syms", "-W", PG_BIN / "postgres").stdout
    address = next(
        int(line.split()[1], 16)
        for line in dynamic.splitlines()
        if line.endswith(" pgstat_report_activity")
    )
    for line in run("readelf", "-lW", PG_BIN / "postgres").stdout.splitlines():
        if line.split()[:1] == ["LOAD"]:
            in_file, start, _, length, *_ = (int(word, 16) for word in line.split()[1:6])
            if start <= address < start + length:
                offset = address - start + in_file
    append_uprobe_event(f"p:other_test/activity {PG_BIN}/postgres:{offset:#x}\n")
    yield "other_test/activity"
    append_uprobe_event("-:other_test/activity\n")


def clean_up_by_the_next_run() -> None:
    """The next run of a script removes what a killed one left, as soon as its perf has ended."""
    for _ in range(40):
        run(PROBES, "list")
        if not leftovers():
            return
        time.sleep(0.25)
    raise AssertionError(leftovers())


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.5])
def test_recorder_killed(
    cluster: Cluster, tmp_path: Path, others_probe: str, engine: str, seconds: float
) -> None:
    """kill -9 on the recorder: the server lives, the next run cleans up, others' probes stay."""
    capture = tmp_path / "capture"
    recorder = Recorder("--engine", engine, "-D", cluster.data, "-o", capture, until="")
    time.sleep(seconds)
    recorder.process.kill()
    recorder.process.communicate()
    assert cluster.sql("SELECT 1") == "1"
    clean_up_by_the_next_run()
    assert others_probe in uprobe_events()


def test_a_killed_recorders_capture_is_read(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """What a killed recorder had recorded can be read, to the last event."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = Recorder("--engine", engine, "-D", cluster.data, "-o", capture)
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
        time.sleep(0.5)
        recorder.process.kill()
        recorder.process.communicate()
        clean_up_by_the_next_run()
        assert session.run("SELECT 1") == ["1"]
    assert len(sleeps(capture, session.pid)) == 5
    assert "end_ns" not in manifest(capture)


def test_perf_killed(cluster: Cluster, tmp_path: Path, others_probe: str) -> None:
    """kill -9 on perf: the recorder says so, cleans up, and what perf had written can be read."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = Recorder("--engine", "perf", "-D", cluster.data, "-o", capture)
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
        time.sleep(1)
        for pid in perf_of(capture):
            os.kill(pid, signal.SIGKILL)
        assert recorder.wait() == 1
        assert "perf ended by itself" in recorder.said
        assert session.run("SELECT 1") == ["1"]
    assert others_probe in uprobe_events()
    answer = waitfold("report", capture)
    assert answer.returncode == 0, answer.stderr
    assert len(sleeps(capture, session.pid)) == 5


## Probes by hand


@pytest.fixture
def registered(cluster: Cluster) -> Iterator[str]:
    """Probes put in by hand, as perf names their event."""
    answer = run(PROBES, "add", "-D", cluster.data)
    assert answer.returncode == 0, answer.stderr
    yield answer.stdout.split()[1].rstrip(",")
    assert run(PROBES, "del").returncode == 0


def test_probes_by_hand(cluster: Cluster, tmp_path: Path, registered: str) -> None:
    """A perf.data recorded by hand with the probes of `add`, which stay while perf uses them.

    The kernel would half remove an event of many places that is in use, and crash.
    """
    data = tmp_path / "perf.data"
    version = cluster.sql("SHOW server_version").split()[0]
    assert registered in run(PROBES, "list").stdout
    assert run(PROBES, "add", "-D", cluster.data).returncode == 1
    places = uprobe_events().count(registered.replace(":", "/"))
    with cluster.session() as session:
        command = ["perf", "record", "-q", "-k", "CLOCK_MONOTONIC", "-e", registered, "-o", data]
        perf = subprocess.Popen([*command, "-p", str(session.pid)])
        time.sleep(1)
        for _ in range(3):
            session.run("SELECT pg_sleep(0.01)")
        answer = run(PROBES, "del")
        assert perf.poll() is None
        perf.terminate()
        perf.wait()
    assert answer.returncode == 1
    assert "in use" in answer.stderr
    assert uprobe_events().count(registered.replace(":", "/")) == places
    unnamed = waitfold("report", data)
    assert unnamed.returncode == 2
    assert "--pg-version" in unnamed.stderr
    result = report(data, "--pg-version", version)
    assert sum(row["count"] for row in result["waits"] if row["name"] == "PgSleep") in (3, 4)
    assert count(result["backends"], session.pid) >= 3
    by_hand = ["--pg-version", version, "--start", registered, "--value", "v"]
    assert report(data, *by_hand)["waits"] == result["waits"]


def test_show_changes_nothing(cluster: Cluster) -> None:
    """`show` prints what `add` would register, and registers nothing."""
    answer = run(PROBES, "show", "-D", cluster.data)
    assert answer.returncode == 0
    assert all(line.startswith("p:waitfold_keep_") for line in answer.stdout.splitlines())
    assert "waitfold_keep_" not in uprobe_events()
