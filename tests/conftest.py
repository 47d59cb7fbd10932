"""A real server, real sessions and the scripts under test, for every test that traces."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from waitfold import cli

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
TRACEFS = Path("/sys/kernel/tracing")
PG_BIN = max(
    Path("/usr/lib/postgresql").glob("*/bin"),
    key=lambda path: float(path.parent.name),
    default=Path("/usr/lib/postgresql/none/bin"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Where CI=true nothing may be skipped: what a test needs, the Makefile installs."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report


def uprobe_events() -> str:
    """All registered uprobes. A kernel whose tracing hangs ends the run: no test could pass."""
    try:
        return subprocess.run(
            ["cat", TRACEFS / "uprobe_events"], capture_output=True, text=True, timeout=60
        ).stdout
    except subprocess.TimeoutExpired:
        pytest.exit("reading uprobe_events hangs: the kernel's tracing is wedged, reboot", 3)


def parent(pid: str) -> str:
    """The pid of a process's parent; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def of_another_run(text: str) -> bool:
    """Whether a name in the text is of a recorder that runs and is not of this test run."""
    owner = re.search(r"waitfold_\d+_(\d+)_\d+", text)
    pid = owner[1] if owner else ""
    if not parent(pid):
        return False
    while pid not in ("", "0", str(os.getpid())):
        pid = parent(pid)
    return pid != str(os.getpid())


def leftovers() -> list[str]:
    """Probes, instances and perfs of waitfold that are there now."""
    found = uprobe_events().splitlines()
    found += [str(path) for path in (TRACEFS / "instances").iterdir()]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if command.startswith("perf record"):
                found.append(command)
    return [line for line in found if "waitfold_" in line and not of_another_run(line)]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After every test no probe, instance or perf of ours is left."""
    yield
    left = leftovers()
    for _ in range(20):
        if not left:
            return
        time.sleep(0.25)
        left = leftovers()
    # Clean up with the tool itself, so that the tests that follow mean something.
    subprocess.run([SCRIPTS / "waitfold-probes", "list"], capture_output=True, check=False)
    subprocess.run([SCRIPTS / "waitfold-probes", "del"], capture_output=True, check=False)
    pytest.fail(f"left behind: {left[:3]}")


@pytest.fixture(scope="session", autouse=True)
def tracefs() -> None:
    """Tracefs, mounted where it belongs."""
    if os.geteuid() == 0 and not (TRACEFS / "README").exists():
        subprocess.run(["mount", "-t", "tracefs", "nodev", TRACEFS], check=True)


class Psql:
    """A session that stays: one psql, one backend."""

    def __init__(self, cluster: Cluster, *args: str) -> None:
        self.process = subprocess.Popen(
            [*cluster.psql_command, "-Atq", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = int(self.run("SELECT pg_backend_pid()")[0])
        self.host_pid = self.pid  # another one for a server in a pid namespace of its own
        # A new backend's latch is set by its own start (SwitchToSharedLatch) until its first
        # wait for the client. Until then a pg_sleep wakes at once and goes on: an interval
        # more, of microseconds.
        time.sleep(0.1)

    def send(self, sql: str) -> None:
        """Send a statement and do not wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(sql + ";\n\\echo done\n")
        self.process.stdin.flush()

    def wait(self) -> list[str]:
        """Wait until the last statement sent has ended; the lines it gave."""
        assert self.process.stdout is not None
        lines = []
        while (line := self.process.stdout.readline().rstrip("\n")) != "done":
            assert self.process.poll() is None, lines
            lines.append(line)
        return lines

    def run(self, sql: str) -> list[str]:
        """Run a statement; the lines it gave."""
        self.send(sql)
        return self.wait()

    def close(self) -> None:
        """End the session, and wait until its backend has gone."""
        self.process.communicate()
        while Path(f"/proc/{self.host_pid}").exists():
            time.sleep(0.01)


@functools.cache
def new_data(binaries: Path) -> Path:
    """A data directory as initdb leaves it; each server of these binaries gets a copy."""
    folder = Path(tempfile.mkdtemp(prefix="waitfold-test-"))
    atexit.register(shutil.rmtree, folder)
    shutil.chown(folder, "postgres")
    initdb = [binaries / "initdb", "--no-sync", "-A", "trust", "-U", "postgres"]
    subprocess.run(
        ["runuser", "-u", "postgres", "--", *initdb, "-D", folder / "data"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd="/",
    )
    return folder / "data"


class Cluster:
    """A throw-away server in a folder of its own, run as user postgres on a unix socket."""

    def __init__(self, folder: Path, binaries: Path = PG_BIN, data: str = "data") -> None:
        self.folder, self.data, self.binaries = folder, folder / data, binaries
        self.psql_command = [
            str(PG_BIN / "psql"), "-X", "-h", str(folder), "-U", "postgres", "postgres",
        ]  # fmt: skip
        shutil.chown(folder, "postgres")
        subprocess.run(["cp", "-a", new_data(binaries), self.data], check=True)
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(
                f"listen_addresses = ''\nunix_socket_directories = '{folder}'\n"
                "shared_buffers = 16MB\nlog_connections = on\nautovacuum = off\n"
            )

    def as_postgres(self, program: str, *args: str | Path) -> None:
        """Run one of the server's programs as user postgres."""
        subprocess.run(
            ["runuser", "-u", "postgres", "--", self.binaries / program, *args],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.as_postgres("pg_ctl", "-w", "-D", self.data, "-l", self.folder / "log", "start")
        self.pid = int((self.data / "postmaster.pid").read_text().split()[0])

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server, if it runs."""
        if (self.data / "postmaster.pid").exists():
            self.as_postgres("pg_ctl", "-w", "-D", self.data, "-m", mode, "stop")

    def sql(self, statement: str) -> str:
        """Run a statement in a session of its own."""
        return subprocess.run(
            [*self.psql_command, "-Atq", "-c", statement],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def pgbench(self, *args: str) -> list[str]:
        """The command line of a pgbench against this server."""
        return [str(PG_BIN / "pgbench"), "-h", str(self.folder), "-Upostgres", *args, "postgres"]

    @contextlib.contextmanager
    def session(self, *args: str) -> Iterator[Psql]:
        """A session for the length of a with block."""
        psql = Psql(self, *args)
        try:
            yield psql
        finally:
            psql.close()


@contextlib.contextmanager
def running_cluster(**options: Any) -> Iterator[Cluster]:
    """A server for the length of a with block; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="waitfold-test-"))
    cluster = None
    try:
        cluster = Cluster(folder, **options)
        cluster.start()
        yield cluster
    finally:
        if cluster:
            cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The server that most tests share, with pgbench's tables in it."""
    with running_cluster() as cluster:
        subprocess.run(cluster.pgbench("-i", "-q", "-s", "2"), check=True, capture_output=True)
        yield cluster


@functools.cache
def known_sites() -> Path:
    """The sites of the server in PG_BIN, found once for all tests: for waitfold-record --sites."""
    folder = tempfile.mkdtemp(prefix="waitfold-test-")
    atexit.register(shutil.rmtree, folder)
    listed = run(SCRIPTS / "waitfold-probes", "sites", PG_BIN / "postgres")
    assert listed.returncode == 0, listed.stderr
    file = Path(folder, "sites.tsv")
    file.write_text(listed.stdout)
    return file


@pytest.fixture(params=["ftrace", "perf"])
def engine(request: pytest.FixtureRequest) -> str:
    """What is to be true of a recording, whatever records it."""
    return str(request.param)


class Recorder:
    """A waitfold-record in the background, from the moment that it records.

    It gets the sites of the server in PG_BIN, unless `sites` is False: to find them takes seconds.
    """

    def __init__(self, *args: str | Path, until: str = "stops at", sites: bool = True) -> None:
        given = ["--sites", known_sites()] if sites and "--sites" not in args else []
        self.process = subprocess.Popen(
            [SCRIPTS / "waitfold-record", *given, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        assert self.process.stderr is not None
        while until and until not in self.said:
            line = self.process.stderr.readline()
            assert line, f"waitfold-record ended: {self.said}"
            self.said += line

    def end(self, how: int = signal.SIGINT) -> int:
        """End the recording; the exit status."""
        self.process.send_signal(how)
        return self.wait()

    def wait(self) -> int:
        """Wait for the recorder's end; the exit status. What it said is in `said`."""
        _, rest = self.process.communicate(timeout=120)
        self.said += rest
        return self.process.returncode


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its output as text."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL, **options
    )


def waitfold(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the post-processor's command, in this process: to start one takes most of a second.

    What is of the process itself, as streams and signals, is in test_cli.py.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            status = cli.main([str(arg) for arg in args])
        except SystemExit as called_wrongly:
            status = called_wrongly.code
    said = [bytes(stream.buffer.getvalue()).decode() for stream in streams]
    return subprocess.CompletedProcess(args, status, *said)


def report(capture: Path, *args: str) -> dict[str, Any]:
    """The report of a capture as `waitfold report --json` gives it."""
    answer = waitfold("report", capture, "--json", *args)
    assert answer.returncode == 0, answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def waits(capture: Path, condition: str | None = None) -> Any:
    """The intervals of a capture as a DataFrame."""
    import pandas as pd

    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        answer = waitfold("waits", capture, "-o", file.name)
        assert answer.returncode == 0, answer.stderr
        table = pd.read_csv(file.name, keep_default_na=False)
    return table.query(condition) if condition else table


@pytest.fixture(scope="session")
def whole_capture(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of all that --with all records: sleeps, a row lock, idle, work on a CPU."""
    path = tmp_path_factory.mktemp("whole") / "capture"
    with cluster.session() as holder, cluster.session() as waiter:
        holder.run("CREATE TABLE whole AS SELECT 1 AS n")
        recorder = Recorder("-D", cluster.data, "-d", "600", "--with", "all", "-o", path)
        holder.run("BEGIN")
        holder.run("SELECT FROM whole FOR UPDATE")
        waiter.send("SELECT FROM whole FOR UPDATE")
        holder.run("SELECT pg_sleep(0.2)")
        holder.run("COMMIT")
        waiter.wait()
        holder.run("SELECT sum(n % 7) FROM generate_series(1, 1000000) AS n")
        assert recorder.end() == 0, recorder.said
        holder.run("DROP TABLE whole")
    return path


SLEEPS, LOCKS = 23, 7
"""What prime_workload() makes, in prime numbers."""


def prime_workload(holder: Psql, sleeper: Psql) -> None:
    """Sleep 53 ms, and wait for the holder's row lock, each a known number of times."""
    for _ in range(SLEEPS):
        sleeper.run("SELECT pg_sleep(0.053)")
    for _ in range(LOCKS):
        holder.run("BEGIN")
        holder.run("SELECT FROM locked FOR UPDATE")
        sleeper.send("SELECT FROM locked FOR UPDATE")
        time.sleep(0.05)
        holder.run("COMMIT")
        sleeper.wait()


def manifest(capture: Path) -> dict[str, str]:
    """The manifest of a capture; of two lines with a key the second counts."""
    lines = (capture / "manifest").read_text().splitlines()
    return dict(line.split("\t", 1) for line in lines)


def sleeps(capture: Path, pid: int) -> Any:
    """How long each pg_sleep of a backend was, in ns.

    pg_sleep waits again while its time is not up, and a timer may fire some microseconds
    before that by the other clock that it looks at: what is shorter than 1 ms is the rest of
    the sleep before.
    """
    rows = waits(capture, f"pid == {pid} and name == 'PgSleep' and flags == ''")
    durations = rows.sort_values("start_ns")["dur_ns"]
    return durations.groupby((durations >= 1_000_000).cumsum().clip(lower=1)).sum()


def whole_waits(rows: Any) -> Any:
    """How long each wait of one backend was, in ns, where the server may have waited in pieces.

    A latch that is set for something else, as an invalidation message, ends a wait, and
    the server goes on waiting within microseconds.
    """
    rows = rows.sort_values("start_ns")
    since = rows["start_ns"] - (rows["start_ns"] + rows["dur_ns"]).shift(fill_value=0)
    return rows["dur_ns"].groupby((since > 100_000).cumsum()).sum()


def perf_of(capture: Path) -> list[int]:
    """The pids of the perfs that write into a capture."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0] == b"perf" and any(str(capture).encode() in word for word in words):
                found.append(int(path.parent.name))
    return found


def count(backends: Sequence[dict[str, Any]], pid: int) -> int:
    """How many intervals the report counts for a backend."""
    return next((row["count"] for row in backends if row["pid"] == pid), 0)
