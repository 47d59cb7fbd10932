"""Mode mem: a hardware watchpoint on each backend, as root and as an ordinary user."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    LOCKS,
    SCRIPTS,
    SLEEPS,
    Cluster,
    Recorder,
    count,
    known_sites,
    perf_of,
    prime_workload,
    report,
    run,
    sleeps,
    waitfold,
    waits,
    whole_waits,
)
from test_container import contained

from waitfold.account import account
from waitfold.capture import Naming, open_capture
from waitfold.errors import WaitfoldError
from waitfold.events import ATTACH, CUT, STORE, Transitions, joined, transitions
from waitfold.join import join
from waitfold.pair import LOST, START, pair
from waitfold.stores import Attachment, Late, Stores, lateness, read_attached

pytestmark = pytest.mark.usefixtures("nothing_left")
RECORD = SCRIPTS / "waitfold-record"
HEAD = "pid\tborn_ns\tattached_ns\tread_ns\twait\tfile\twhy\n"


def attached(capture: Path) -> dict[int, list[str]]:
    """The lines of attached.tsv by pid."""
    lines = (capture / "attached.tsv").read_text().splitlines()[1:]
    return {int(line.split("\t")[0]): line.split("\t")[1:] for line in lines}


def until_attached(capture: Path, *pids: int) -> None:
    """Wait until backends have their watchpoints."""
    deadline = time.monotonic() + 20
    while not attached(capture).keys() >= set(pids):
        assert time.monotonic() < deadline, f"no watchpoint: {pids}"
        time.sleep(0.02)


def stored(capture: Path, pid: int) -> tuple[Any, Transitions]:
    """A capture and one backend's stores in it."""
    opened = open_capture(capture, Naming())
    stream = transitions(opened.files, opened.rule)
    everything = joined(list(stream))
    assert stream.lost == 0
    assert stream.warnings == []
    rows = everything.take(np.flatnonzero((everything.pid == pid) & (everything.mark == STORE)))
    # perf writes a few records twice (bench/RESULTS.md); no backend stores twice in a nanosecond.
    return opened, rows.take(np.flatnonzero(np.diff(rows.time_ns, prepend=-1)))


@pytest.fixture
def busy(cluster: Cluster) -> Iterator[int]:
    """A backend that runs short queries without end."""
    pgbench = subprocess.Popen(
        cluster.pgbench("-n", "-S", "-M", "prepared", "-c", "1", "-T", "600"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pid = ""
    while not pid:
        pid = cluster.sql(
            # Its first connection only asks for the server's version.
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgbench'"
            " AND backend_start < clock_timestamp() - interval '1 s'"
        )
    yield int(pid)
    pgbench.terminate()
    pgbench.wait()


## What is seen


def test_prime_numbers(cluster: Cluster, tmp_path: Path) -> None:
    """23 sleeps and 7 row locks, in an old and in a new backend, are 23 and 7 intervals."""
    capture = tmp_path / "capture"
    cluster.sql("CREATE TABLE IF NOT EXISTS locked (id int)")
    cluster.sql("INSERT INTO locked VALUES (1)")
    with cluster.session() as old, cluster.session() as holder:
        recorder = Recorder("-m", "mem", "-D", cluster.data, "-o", capture)
        with cluster.session() as new:
            until_attached(capture, old.pid, new.pid)
            for sleeper in (old, new):
                prime_workload(holder, sleeper)
            assert recorder.end() == 0, recorder.said
            pids = {"old": old.pid, "new": new.pid}
    result = report(capture)
    assert result["lost"] == 0
    assert result["mode"] == "mem"
    assert result["late"]["count"] == 1
    # Nothing is counted of a backend before it was attached to.
    with_states = account(join(open_capture(capture, Naming())))
    assert with_states.db_time_ns() == result["db_time_ns"]
    assert with_states.unseen_ns == 0
    for name, pid in pids.items():
        rows = waits(capture, f"pid == {pid} and flags == ''")
        slept = sleeps(capture, pid)
        assert len(slept) == SLEEPS, name
        assert slept.min() >= 53_000_000
        locks = rows[(rows["class"] == "Lock") & (rows["name"] == "transactionid")]
        assert len(whole_waits(locks)) == LOCKS, name


def test_new_backends(cluster: Cluster, tmp_path: Path) -> None:
    """Each of many new backends has its watchpoint, its file and its line, and the rest is said."""
    capture = tmp_path / "capture"
    recorder = Recorder("-m", "mem", "-D", cluster.data, "-o", capture)
    before = attached(capture)
    sleepers = [
        subprocess.Popen(
            [*cluster.psql_command, "-Atqc", "SELECT pg_backend_pid()", "-c", "SELECT pg_sleep(4)"]
            + ["-c", "SELECT pg_sleep(0.05)"] * 3,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(9)
    ]
    pids = [int(sleeper.communicate()[0].split()[0]) for sleeper in sleepers]
    assert recorder.end() == 0, recorder.said
    lines = attached(capture)
    result = report(capture)
    assert lines.keys() - before.keys() == set(pids)
    assert result["late"]["count"] == len(pids)
    assert result["late"]["never"] == 0
    assert 0 < result["late"]["median_ns"] <= result["late"]["max_ns"]
    rows = waits(capture).sort_values("start_ns")
    for pid in pids:
        slept = rows[(rows["pid"] == pid) & (rows["name"] == "PgSleep")]
        assert (slept["flags"] == "").sum() >= 3
        # It slept already when it was attached to.
        first = slept.iloc[0]
        assert first["flags"] == "start"
        assert first["start_ns"] == int(lines[pid][1])
        assert (capture / lines[pid][4]).exists()
    text = waitfold("report", capture).stdout
    assert re.search(r"late +9 backends attached late: \S+ missed in the median", text)


def test_gone_too_soon(cluster: Cluster, tmp_path: Path) -> None:
    """Backends that live too briefly to be attached to are counted, to the last one."""
    capture = tmp_path / "capture"
    before = (cluster.folder / "log").read_text().count("connection received")
    recorder = Recorder(
        "-m", "mem", "-D", cluster.data, "-o", capture,
        "--", *cluster.pgbench("-n", "-S", "-C", "-c", "2", "-T", "3"),
    )  # fmt: skip
    assert recorder.wait() == 0, recorder.said
    made = (cluster.folder / "log").read_text().count("connection received") - before
    late = report(capture)["late"]
    assert made > 20
    assert late["never"] + late["count"] == made


def test_a_perf_ends_with_its_backend(cluster: Cluster, tmp_path: Path) -> None:
    """When a backend ends its perf does too; the others go on and keep no CPU busy."""
    capture = tmp_path / "capture"
    with cluster.session() as stays:
        with cluster.session() as ends:
            recorder = Recorder("-m", "mem", "-p", f"{ends.pid},{stays.pid}", "-o", capture)
            assert len(perf_of(capture)) == 2
        for _ in range(100):
            if len(perf_of(capture)) == 1:
                break
            time.sleep(0.05)
        (perf,) = perf_of(capture)
        time.sleep(1)
        used = sum(
            map(int, Path(f"/proc/{perf}/stat").read_text().rpartition(")")[2].split()[11:13])
        )
        assert used < 50  # hundredths of a second
        stays.run("SELECT pg_sleep(0.05)")
        assert recorder.end() == 0, recorder.said
    assert len(sleeps(capture, stays.pid)) == 1


def test_all_backends_named_end(cluster: Cluster, tmp_path: Path) -> None:
    """With -p the recording ends when the last backend does."""
    capture = tmp_path / "capture"
    with cluster.session() as one:
        recorder = Recorder("-m", "mem", "-p", str(one.pid), "-o", capture)
        one.run("SELECT pg_sleep(0.05)")
    assert recorder.wait() == 0
    assert "have ended" in recorder.said
    assert len(sleeps(capture, one.pid)) == 1


def test_a_perf_that_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    """A backend whose perf was killed is attached to anew; a wait in between counts as cut."""
    capture = tmp_path / "capture"
    with cluster.session() as session:
        recorder = Recorder("-m", "mem", "-p", str(session.pid), "-o", capture)
        for _ in range(2):
            session.run("SELECT pg_sleep(0.05)")
        (perf,) = perf_of(capture)
        session.send("SELECT pg_sleep(3)")
        time.sleep(0.5)
        os.kill(perf, 9)
        session.wait()
        session.run("SELECT pg_sleep(0.05)")
        assert recorder.end() == 0, recorder.said
    assert len((capture / "attached.tsv").read_text().splitlines()) == 3
    rows = waits(capture, f"pid == {session.pid} and name == 'PgSleep'").sort_values("start_ns")
    assert list(rows["flags"]) in (
        ["", "", "lost", "start", ""],
        ["", "", "start", ""],
        ["start", ""],
    )


def test_losses(cluster: Cluster, busy: int, tmp_path: Path) -> None:
    """What is lost of one backend is counted, and cuts the waits of that one alone."""
    capture = tmp_path / "capture"
    with cluster.session() as quiet:
        recorder = Recorder("-m", "mem", "-p", f"{quiet.pid},{busy}", "-o", capture)
        file = attached(capture)[busy][4]
        (perf,) = (p for p in perf_of(capture) if file in Path(f"/proc/{p}/cmdline").read_text())
        quiet.send("SELECT pg_sleep(4)")
        os.kill(perf, signal.SIGSTOP)
        time.sleep(3)
        os.kill(perf, signal.SIGCONT)
        quiet.wait()
        assert recorder.end() == 0, recorder.said
    result = report(capture)
    assert result["lost"] > 100
    assert re.search(r"LOST \d+ SAMPLES in [1-9]", waitfold("report", capture).stdout)
    rows = waits(capture)
    # Of the busy one a wait was cut, unless it worked just then.
    assert set(rows[rows["flags"] == "lost"]["pid"]) <= {busy}
    busy_waits = rows[(rows["pid"] == busy) & (rows["flags"] == "")]
    assert busy_waits["dur_ns"].max() < 1_000_000_000
    assert len(sleeps(capture, quiet.pid)) == 1


def test_max_size(cluster: Cluster, tmp_path: Path) -> None:
    """The limit is of all files together."""
    capture = tmp_path / "capture"
    recorder = Recorder(
        "-m", "mem", "-D", cluster.data, "-o", capture, "--max-size", "2M",
        "--", *cluster.pgbench("-n", "-S", "-c", "4", "-T", "30"),
    )  # fmt: skip
    assert recorder.wait() == 0, recorder.said
    assert "--max-size" in recorder.said
    size = sum(file.stat().st_size for file in capture.glob("perf.data.*"))
    assert 1 << 19 < size < 16 << 20
    assert report(capture)["intervals"] > 100


def test_recorder_killed(cluster: Cluster, tmp_path: Path) -> None:
    """kill -9 on the recorder: its perfs end by themselves, and what they recorded is read."""
    capture = tmp_path / "capture"
    with cluster.session() as session, cluster.session():
        recorder = Recorder("-m", "mem", "-D", cluster.data, "-o", capture)
        for _ in range(5):
            session.run("SELECT pg_sleep(0.01)")
        assert len(perf_of(capture)) >= 5
        recorder.process.kill()
        recorder.process.communicate()
        for _ in range(100):
            if not perf_of(capture):
                break
            time.sleep(0.05)
        assert perf_of(capture) == []
        assert session.run("SELECT 1") == ["1"]
    assert len(sleeps(capture, session.pid)) == 5


def test_server_in_a_container(tmp_path: Path) -> None:
    """A server in namespaces of its own is watched from the host and from inside."""
    with contained() as server, server.session() as session:
        enter = ["nsenter", "--target", str(server.pid), "--mount", "--pid"]
        for name, where in (("host", []), ("inside", enter)):
            cluster = f"/proc/{server.pid}/cwd" if name == "host" else server.data
            answer = run(
                *where, RECORD, "-m", "mem", "-D", cluster, "--sites", known_sites(),
                "-o", tmp_path / name, "--", *server.psql_command, "-c",
                "DO $$ BEGIN FOR i IN 1..23 LOOP PERFORM pg_sleep(0.05); END LOOP; END $$",
            )  # fmt: skip
            assert answer.returncode == 0, answer.stderr
            result = report(tmp_path / name)
            (slept,) = (row["count"] for row in result["waits"] if row["name"] == "PgSleep")
            # It slept already when it was attached to.
            assert 5 < slept <= 23
            assert (result["late"]["count"], result["late"]["never"]) == (1, 0)
        assert session.host_pid in attached(tmp_path / "host")
        assert session.pid in attached(tmp_path / "inside")


## Without root


def test_ordinary_user(cluster: Cluster) -> None:
    """The server's own user records it, without root and without tracefs."""
    capture = cluster.folder / "ordinary"
    with cluster.session() as session:
        before = time.monotonic_ns()
        recorder = subprocess.Popen(
            [
                *("runuser", "-u", "postgres", "--", RECORD, "-m", "mem", "-D", cluster.data),
                *("--sites", cluster_sites(cluster), "-o", capture, "-d", "5"),
            ],
            cwd="/",
            stderr=subprocess.PIPE,
            text=True,
        )
        assert recorder.stderr is not None
        while "stops at" not in (line := recorder.stderr.readline()):
            assert line
        between = time.monotonic_ns()
        for _ in range(7):
            session.run("SELECT pg_sleep(0.05)")
        _, said = recorder.communicate()
        assert recorder.returncode == 0, said
    assert len(sleeps(capture, session.pid)) == 7
    facts = dict(line.split("\t", 1) for line in (capture / "manifest").read_text().splitlines())
    # It tells CLOCK_MONOTONIC by the wall clock.
    assert before < int(attached(capture)[session.pid][1]) < int(facts["start_ns"]) < between
    rows = waits(capture, f"pid == {session.pid} and name == 'PgSleep'")
    assert rows["start_ns"].min() > between - 1_000_000


def cluster_sites(cluster: Cluster) -> Path:
    """The list of sites where the server's user may read it."""
    file = cluster.folder / "sites.tsv"
    file.write_bytes(known_sites().read_bytes())
    return file


## What is refused


def links(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def hold(pid: int, count: int) -> subprocess.Popen[bytes] | None:
    """A perf that holds so many of a process's breakpoints; None where it does not get them."""
    events = ",".join(f"mem:{4096 * n:#x}:w:u" for n in range(1, count + 1))
    perf = subprocess.Popen(
        ["perf", "stat", "-e", events, "-p", str(pid)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while perf.poll() is None:
        if links(perf.pid).count("anon_inode:[perf_event]") >= count:
            return perf
        time.sleep(0.05)
    return None


@pytest.fixture
def four_taken(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """A backend whose four breakpoints another perf holds; the pids of both."""
    with cluster.session() as session:
        # Somebody may hold one on every process here.
        holders = (hold(session.pid, count) for count in (4, 3, 2, 1))
        holder = next(perf for perf in holders if perf)
        yield session.pid, holder.pid
        holder.terminate()
        holder.wait()


def test_no_breakpoint_left(cluster: Cluster, tmp_path: Path, four_taken: tuple[int, int]) -> None:
    """A backend whose breakpoints others hold is refused, and they are named."""
    pid, holder = four_taken
    answer = run(
        RECORD, "-m", "mem", "--sites", known_sites(), "-p", str(pid), "-o", tmp_path / "one",
        "-d", "1",
    )  # fmt: skip
    assert answer.returncode == 1
    assert f"process {pid}: its four hardware breakpoints are taken" in answer.stderr
    assert f"{holder} (perf)" in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert not (tmp_path / "one").exists()
    recorder = Recorder("-m", "mem", "-D", cluster.data, "-o", tmp_path / "all", "-d", "1")
    assert recorder.wait() == 0
    assert f"process {pid}: its four" in recorder.said
    assert report(tmp_path / "all")["late"]["never"] == 1
    assert "taken" in attached(tmp_path / "all")[pid][-1]
    assert count(report(tmp_path / "all")["backends"], pid) == 0


def test_somebody_elses_server(cluster: Cluster) -> None:
    """A user who is not the server's is told so."""
    answer = run(
        "runuser", "-u", "nobody", "--", RECORD, "-m", "mem", "-p", str(cluster.pid), cwd="/"
    )
    assert answer.returncode == 1
    assert "nobody may not look" in answer.stderr
    assert "postgres" in answer.stderr


## Against other ways to see the same


def in_step(least: int, one: list[int], other: list[int]) -> None:
    """The same values in the same order, but for what only one saw at the ends."""
    for skip in range(5):
        for a, b in ((one[skip:], other), (one, other[skip:])):
            shared = min(len(a), len(b))
            if shared >= least and a[:shared] == b[:shared]:
                return
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    near = slice(max(at - 5, 0), at + 10)
    raise AssertionError(f"of {len(one)} and {len(other)} {at}: {one[near]} {other[near]}")


def test_the_same_as_sites(busy: int, tmp_path: Path) -> None:
    """Watchpoints and probes see the same values of a backend at the same time."""
    recorders = [
        Recorder("-m", mode, "--engine", "perf", "-p", str(busy), "-o", tmp_path / mode)
        for mode in ("mem", "sites")
    ]
    time.sleep(4)
    for recorder in recorders:
        assert recorder.end() == 0, recorder.said
    both = [stored(tmp_path / mode, busy) for mode in ("mem", "sites")]
    # The time in which both recorded; the probe fires a little after the store.
    start = max(opened.start_ns for opened, _ in both) + 50_000_000
    end = min(opened.end_ns for opened, _ in both) - 50_000_000
    values = [
        rows.value[(rows.time_ns > start) & (rows.time_ns < end)].tolist() for _, rows in both
    ]
    in_step(5000, *values)


def test_the_same_as_memory(cluster: Cluster, tmp_path: Path) -> None:
    """What is decoded is what a bpftrace watchpoint reads from the backend's memory."""
    capture, seen = tmp_path / "capture", tmp_path / "seen"
    with cluster.session() as session:
        recorder = Recorder("-m", "mem", "-p", str(session.pid), "-o", capture)
        command = next(
            path.read_bytes().split(b"\0")
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.parent.name in map(str, perf_of(capture))
        )
        address = re.search(r"mem:(0x[0-9a-f]+)/4", b" ".join(command).decode())
        assert address
        program = f'watchpoint:{address[1]}:4:w {{ printf("%u\\n", *(uint32*){address[1]}); }}'
        bpftrace = subprocess.Popen(["bpftrace", "-p", str(session.pid), "-o", seen, "-e", program])
        while not seen.exists() or "Attaching" not in seen.read_text():
            time.sleep(0.1)
        time.sleep(1)
        for n in range(300):
            session.run(
                "SELECT pg_sleep(0.001)" if n % 3 else "SELECT count(*) FROM pgbench_accounts"
            )
        time.sleep(0.5)
        bpftrace.terminate()
        bpftrace.wait()
        assert recorder.end() == 0, recorder.said
    values = [int(line) for line in seen.read_text().split("\n") if line.isdigit()]
    in_step(500, stored(capture, session.pid)[1].value.tolist(), values)


## The reader


def test_stores(tmp_path: Path) -> None:
    """A value is a constant or a register's lower half, by the address behind the store."""
    file = tmp_path / "sites.tsv"
    file.write_text(
        "store\tvalue\tplace\toffset\tbytes\tkind\tafter\n# build_id\tab\n"
        "0x30\t%r14\t0x30\t0x30\t90\tnop\t0x37\n0x10\t0x5000003\t0x10\t0x10\t90\tnop\t0x16\n"
        "0x20\t0x0\t0x20\t0x20\t90\tnop\t0x26\n0x40\t%ax\t0x40\t0x40\t90\tnop\t0x47\n"
    )
    stores = Stores(file, 0x1000)
    assert stores.registers == ["r14", "ax"]
    ip = np.array([0x1016, 0x1026, 0x1037, 0x1047, 0x1016, 0x1017, 0x9999], np.uint64)
    r14 = np.array([1, 2, 0xFFFF_0000_0600_0000, 4, 5, 6, 7], np.uint64)
    ax = np.full(7, 0x0A00_0001, np.uint64)
    values = stores.values([ip, r14, ax], 7)
    assert values.tolist() == [
        0x5000003, 0, 0x6000000, 0xA000001, 0x5000003, 0xFFFF_FFFF, 0xFFFF_FFFF,
    ]  # fmt: skip
    (warning,) = stores.warnings()
    assert warning.startswith("2 stores")
    assert stores.warnings() == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "store\tvalue\n0x1\t0x2\n",
        "value\tafter\n",
        "value\tafter\n0x1\tx\n",
        "value\tafter\n0x1\t0xffffffffffffffff\n",
    ],
)
def test_damaged_sites(tmp_path: Path, text: str) -> None:
    """A list of sites without what is needed is refused by name."""
    file = tmp_path / "sites.tsv"
    file.write_text(text)
    with pytest.raises(WaitfoldError, match=r"sites\.tsv"):
        Stores(file, 0)


def test_attached(tmp_path: Path) -> None:
    """Lines of attached.tsv, and how late backends were."""
    file = tmp_path / "attached.tsv"
    file.write_text(
        f"{HEAD}7\t10\t50\t60\t0x06000000\tperf.data.1\t-\n8\t110\t150\t160\t0x0\tperf.data.2\t-\n"
        "9\t90\t190\t195\t0x0\tperf.data.3\t-\n10\t120\t-\t-\t-\t-\tit ended before\n"
        "11\t1\t-\t-\t-\t-\tno wait_event_info in shared memory\n12\t9"
    )
    lines = read_attached(file)
    assert lines[0] == Attachment(7, 10, 50, 60, 0x0600_0000, "perf.data.1", "-")
    assert lateness(lines, [], 100) == Late(2, 65, 90, 1)
    assert lateness(lines, [(8, 118), (10, 122), (77, 130), (77, 140)], 100) == Late(2, 61, 90, 3)


@pytest.mark.parametrize(
    "text",
    [
        "x\n",
        f"{HEAD}1\n",
        f"{HEAD}1\t2\t3\t-\t0x0\tf\t-\n",
        f"{HEAD}1\t2\t3\t4\t0x0\t../f\t-\n",
        f"{HEAD}0\t2\t3\t4\t0x0\tf\t-\n",
        f"{HEAD}1\t2\t{1 << 63}\t4\t0x0\tf\t-\n",
        f"{HEAD}1\t2\t3\t4\t0x100000000\tf\t-\n",
    ],
)
def test_damaged_attached(tmp_path: Path, text: str) -> None:
    """A damaged attached.tsv is refused, with the line."""
    file = tmp_path / "attached.tsv"
    file.write_text(text)
    with pytest.raises(WaitfoldError, match=r"attached\.tsv:[12]"):
        read_attached(file)


def test_marks() -> None:
    """What was begun before ATTACH is flagged START, what a CUT ends LOST, also between batches."""
    from waitfold.events import TransitionStream

    rows = [(10, 5, ATTACH), (20, 0, STORE), (30, 6, STORE), (40, 0, CUT), (50, 0, STORE)]
    rows += [(60, 7, STORE), (70, 8, ATTACH), (80, 0, STORE), (90, 9, ATTACH)]
    time_ns, value, mark = (np.array(column) for column in zip(*rows, strict=True))
    batch = Transitions(
        time_ns.astype(np.int64), np.full(9, 1 << 32 | 1, np.uint64),
        value.astype(np.uint32), mark.astype(np.uint8),
    )  # fmt: skip
    for pieces in ([batch], [batch.take(slice(i, i + 1)) for i in range(9)]):
        found = [
            (int(b.start_ns[i]), int(b.dur_ns[i]), int(b.value[i]), int(b.flags[i]))
            for b in pair(TransitionStream(batches=iter(pieces)), 0, 100)
            for i in range(len(b))
        ]
        assert found == [
            (10, 10, 5, START), (30, 10, 6, LOST), (60, 10, 7, LOST), (70, 10, 8, START),
            (90, 10, 9, START | 2),
        ]  # fmt: skip
