"""Servers in mount and pid namespaces of their own, seen from outside and from inside."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PG_BIN, SCRIPTS, Cluster, Psql, Recorder, known_sites, report, run, sleeps

pytestmark = pytest.mark.usefixtures("nothing_left")

# What the README asks of a traced host.
HOST_TOOLS = [
    "awk", "basename", "bash", "cat", "chmod", "comm", "cp", "cut", "date", "dd", "df", "dirname",
    "env", "head", "id", "ln", "ls", "mkdir", "mkfifo", "mktemp", "mv", "nproc", "od",
    "readlink", "rm", "rmdir", "sleep", "sort", "stat", "tail", "tr", "true", "uname",
    "wc", "perf",
]  # fmt: skip

# Inside, the data and the server's binary are at paths that are something else outside.
INSIDE = """
mount -t tmpfs none /mnt
mkdir /mnt/data /mnt/lib
cp -a {lib}/. /mnt/lib
mount --bind {data} /mnt/data
mount --bind /mnt/lib {lib}
exec {command}
"""


class Contained(Cluster):
    """A server in a pid and a mount namespace of its own; `pid` is its pid on the host."""

    def start(self) -> None:
        """Start the server and wait until it answers."""
        lib = PG_BIN.parents[1]
        inside = INSIDE.format(
            lib=lib,
            data=self.data,
            command=f"runuser -u postgres -- {PG_BIN}/postgres -D /mnt/data",
        )
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / "log").open("w") as log:
            self.namespace = subprocess.Popen([*unshare, "bash", "-ec", inside], stderr=log)
        for _ in range(100):
            time.sleep(0.1)
            with contextlib.suppress(subprocess.CalledProcessError):
                inner = self.sql("SELECT pg_postmaster_start_time() IS NOT NULL")
                if inner == "t":
                    break
        self.pid = next(
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if own(path.parent) and path.read_bytes().startswith(b"%s/postgres\0" % bytes(PG_BIN))
            and self.inside(int(path.parent.name))
        )  # fmt: skip

    def inside(self, pid: int) -> bool:
        """Whether a process lives in the namespace."""
        with contextlib.suppress(OSError):
            ours = self.namespace.pid
            child = Path(f"/proc/{ours}/task/{ours}/children").read_text().split()[0]
            mine = Path(f"/proc/{child}/ns/pid").readlink()
            return Path(f"/proc/{pid}/ns/pid").readlink() == mine
        return False

    @contextlib.contextmanager
    def session(self, *args: str) -> Iterator[Psql]:
        """A session for the length of a with block."""
        psql = Psql(self, *args)
        psql.host_pid = next(
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if own(path) == psql.pid and self.inside(int(path.name))
        )
        try:
            yield psql
        finally:
            psql.close()

    def stop(self, mode: str = "immediate") -> None:
        """End the namespace and with it all that lives in it."""
        self.namespace.send_signal(signal.SIGKILL)
        self.namespace.wait()
        time.sleep(0.2)


def own(process: Path) -> int:
    """The pid by which a process knows itself; 0 when it has gone."""
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


@contextlib.contextmanager
def contained() -> Iterator[Contained]:
    """A server in namespaces of its own for the length of a with block."""
    folder = Path(tempfile.mkdtemp(prefix="waitfold-test-"))
    cluster = None
    try:
        cluster = Contained(folder)
        cluster.start()
        yield cluster
    finally:
        if cluster:
            cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server() -> Iterator[Contained]:
    """The server that the tests of this file share."""
    with contained() as cluster:
        yield cluster


@pytest.fixture
def no_binutils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH on which is what a traced host must have, and nothing more."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in HOST_TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (folder / tool).symlink_to(found)
    assert not (folder / "objdump").exists()
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize("engine", ["ftrace", "perf"])
def test_from_outside(
    server: Contained,
    tmp_path: Path,
    engine: str,
    request: pytest.FixtureRequest,
) -> None:
    """A site list made elsewhere, no binutils here, the server in a container: exact counts."""
    sites = known_sites()  # by waitfold-probes sites, outside of all namespaces
    with server.session() as session:
        request.getfixturevalue("no_binutils")
        capture = tmp_path / "capture"
        recorder = Recorder(
            "-D", f"/proc/{server.pid}/cwd", "--sites", sites, "-m", "sites", "--engine", engine,
            "-o", capture,
        )  # fmt: skip
        session.run("DO $$ BEGIN FOR i IN 1..23 LOOP PERFORM pg_sleep(0.011); END LOOP; END $$")
        assert recorder.end() == 0, recorder.said
    request.getfixturevalue("monkeypatch").undo()
    assert len(sleeps(capture, session.host_pid)) == 23
    found = report(capture)
    assert found["lost"] == 0
    assert (
        next(row for row in found["backends"] if row["pid"] == session.host_pid)["type"]
        == "client backend"
    )


def test_two_of_one_image(server: Contained, tmp_path: Path) -> None:
    """Two containers run one binary, and their postmasters have the same pid inside: told apart."""
    with contained() as other, server.session() as mine, other.session() as theirs:
        assert own(Path(f"/proc/{server.pid}")) == own(Path(f"/proc/{other.pid}"))
        capture = tmp_path / "capture"
        recorder = Recorder("-D", f"/proc/{server.pid}/cwd", "-o", capture)
        for session in (mine, theirs):
            session.run("DO $$ BEGIN FOR i IN 1..7 LOOP PERFORM pg_sleep(0.011); END LOOP; END $$")
        assert recorder.end() == 0, recorder.said
        pids = {row["pid"] for row in report(capture)["backends"]}
        assert mine.host_pid in pids
        assert theirs.host_pid not in pids


def test_tool_inside(server: Contained, tmp_path: Path) -> None:
    """Recorded from inside the container: pids are the container's own, as psql shows them."""
    capture = tmp_path / "capture"
    enter = ["nsenter", "--target", str(server.pid), "--mount", "--pid"]
    with server.session():
        workload = "DO $$ BEGIN FOR i IN 1..23 LOOP PERFORM pg_sleep(0.011); END LOOP; END $$"
        answer = run(
            *enter, SCRIPTS / "waitfold-record", "--sites", known_sites(), "-o", capture,
            "-d", "20", "--", *server.psql_command, "-c", workload,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert "ftrace would tell other pids" in answer.stderr  # why not ftrace
        found = report(capture)
        pids = {row["pid"] for row in found["backends"]}
        assert pids <= set(range(2, 1000))
        busy = [row for row in found["waits"] if row["name"] == "PgSleep"]
        assert busy[0]["count"] >= 23
