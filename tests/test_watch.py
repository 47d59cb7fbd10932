"""Watching writes to a global: the values are those that backends really got."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import SCRIPTS, Cluster, Psql, run, running_cluster

WATCH = SCRIPTS / "waitfold-watch"

Writes = dict[int, list[str]]
"""Values by pid, in order."""


class Watch:
    """A waitfold-watch in the background, from the moment that it watches."""

    def __init__(self, *args: str | Path, each: bool = True) -> None:
        # Whatever else is tested on this host may hold all breakpoints for a while.
        for _ in range(60):
            self.process = subprocess.Popen(
                [WATCH, *(["--each"] if each else []), *args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert self.process.stderr is not None
            self.said = self.process.stderr.readline()
            if "all hardware breakpoints" not in self.said:
                break
            self.process.communicate()
            time.sleep(1)
        assert self.said.startswith("watching "), self.said

    def end(self) -> str:
        """End it as Ctrl-C does; its output."""
        self.process.send_signal(signal.SIGINT)
        out, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        assert not said
        return out

    def writes(self) -> Writes:
        """End it; the values of each process."""
        return values_of(self.end())


def values_of(out: str) -> Writes:
    """The values of each process in the output of --each."""
    found: Writes = {}
    for line in out.partition("\n\n")[0].splitlines()[1:]:
        _, pid, value = line.split("\t")
        found.setdefault(int(pid), []).append(value)
    return found


def hand_out_xids(sessions: Sequence[Psql], count: int) -> Writes:
    """Make transactions, every third with a subtransaction; the xids that the sessions got."""
    got: Writes = {session.pid: [] for session in sessions}
    turn = 0
    while (left := count - sum(map(len, got.values()))) > 0:
        session = sessions[turn % len(sessions)]
        turn += 1
        if turn % 3 or left == 1:
            got[session.pid] += session.run("SELECT txid_current()")
        else:
            session.run("BEGIN")
            got[session.pid] += session.run("SELECT txid_current()")
            session.run("SAVEPOINT s")
            session.run(f"INSERT INTO counted VALUES ({turn})")
            got[session.pid] += session.run(f"SELECT xmin FROM counted WHERE turn = {turn}")
            session.run("COMMIT")
    return got


def hand_out_oids(sessions: Sequence[Psql], count: int) -> Writes:
    """Make large objects; the oids that the sessions got."""
    got: Writes = {session.pid: [] for session in sessions}
    for turn in range(count):
        session = sessions[turn % len(sessions)]
        got[session.pid] += session.run("SELECT lo_create(0)")
    return got


def check_xids(cluster: Cluster) -> None:
    """101 xids of three backends are seen with their values and backends, and no others."""
    cluster.sql("CREATE TABLE counted (turn int)")
    with cluster.session() as a, cluster.session() as b:
        watch = Watch("-D", cluster.data, "xid")
        with cluster.session() as new:
            expected = hand_out_xids([a, b, new], 101)
        assert watch.writes() == expected
    cluster.sql("DROP TABLE counted")


def check_oids(cluster: Cluster) -> None:
    """53 oids of two backends are seen with their values and backends, and no others."""
    with cluster.session() as a:
        watch = Watch("-D", cluster.data, "oid")
        with cluster.session() as new:
            expected = hand_out_oids([a, new], 53)
        assert watch.writes() == expected


def poke(cluster: Cluster, name: str, value: int) -> None:
    """Set the next xid or oid in the server's memory, at the address where the tool watches it."""
    watch = Watch("-D", cluster.data, name)
    watch.end()
    size, where = watch.said.split(": ")[1].split(" bytes at ")
    with Path(f"/proc/{cluster.pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(int(where, 16))
        memory.write((value % 2 ** (8 * int(size))).to_bytes(int(size), "little"))


def check_wrap(cluster: Cluster) -> None:
    """The numbers that are never handed out are not shown where the counters pass over them.

    The server is of no use afterwards.
    """
    (cluster.data / "pg_xact/0FFF").write_bytes(bytes(32 * 8192))
    os.chown(cluster.data / "pg_xact/0FFF", *_owner(cluster.data))
    with cluster.session() as session:
        poke(cluster, "xid", 2 * 2**32 - 2)
        watch = Watch("-D", cluster.data, "xid")
        got = [session.run("SELECT txid_current()")[0] for _ in range(5)]
        out = watch.end()
        before = 2**32 if "8 bytes" in watch.said else 0
        expected = [
            before + 2**32 - 2,
            before + 2**32 - 1,
            *(2 * before + xid for xid in (3, 4, 5)),
        ]
        assert values_of(out)[session.pid] == [str(xid) for xid in expected]
        assert [int(xid) % 2**32 for xid in got] == [xid % 2**32 for xid in expected]
        assert "; 0 skipped, 0 backwards or again, 1 wrapped around" in out
    with cluster.session() as session:
        poke(cluster, "oid", 2**32 - 2)
        watch = Watch("-D", cluster.data, "oid")
        expected = hand_out_oids([session], 3)
        out = watch.end()
        values = values_of(out)[session.pid]
        assert values[:3] == [str(2**32 - 2), str(2**32 - 1), "16384"]
        assert set(expected[session.pid]) <= set(values)


def _owner(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_uid, status.st_gid


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test no perf and no awk of the tool is left."""
    yield
    for _ in range(40):
        left = processes_of_watch()
        if not left:
            return
        time.sleep(0.25)
    pytest.fail(f"left behind: {left[:3]}")


def processes_of_watch() -> list[str]:
    """The command lines of what the tool has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith("/watch.awk") for word in words) or "--user-regs=ax" in " ".join(
                words
            ):
                found.append(" ".join(words))
    return found


## What is seen


def test_xids(cluster: Cluster) -> None:
    """101 xids, some of subtransactions."""
    check_xids(cluster)


def test_oids(cluster: Cluster) -> None:
    """53 oids."""
    check_oids(cluster)


def test_wrap() -> None:
    """Both counters wrap around."""
    with running_cluster() as own:
        check_wrap(own)


def test_a_variable_that_is_set(cluster: Cluster) -> None:
    """SET of an integer setting is a write to its variable, in the backend that does it."""
    with cluster.session() as a, cluster.session() as b:
        watch = Watch("-D", cluster.data, "work_mem")
        expected: Writes = {a.pid: [], b.pid: []}
        for kib in (64, 101, 2_147_483_647):
            for session in (a, b):
                session.run(f"SET work_mem = {kib}")
                expected[session.pid].append(str(kib))
        b.run("SET work_mem = 73")
        expected[b.pid].append("73")
        assert watch.writes() == expected


def test_a_counter_that_is_added_to(cluster: Cluster) -> None:
    """An instruction that adds to memory: the values follow from what was there before."""
    with cluster.session() as old:
        old.run("SELECT count(*) FROM pg_class")
        watch = Watch("-D", cluster.data, "pgBufferUsage+0/8")
        with cluster.session() as new:
            for session in (old, new):
                for _ in range(5):
                    session.run("SELECT count(*) FROM pg_attribute")
            where = int(watch.said.rpartition(" at ")[2], 16)
            last = {}
            for session in (old, new):
                with Path(f"/proc/{session.pid}/mem").open("rb") as memory:
                    memory.seek(where)
                    last[session.pid] = str(int.from_bytes(memory.read(8), "little"))
            values = watch.writes()
    for pid, final in last.items():
        assert values[pid][-1] == final
        numbers = [int(value) for value in values[pid]]
        assert len(numbers) > 10
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert values[new.pid][0] == "1"


def test_a_value_that_cannot_be_known(cluster: Cluster) -> None:
    """A store from a floating point register is seen, its value is said to be unknown."""
    with cluster.session() as session:
        watch = Watch("-p", str(session.pid), "seq_page_cost")
        session.run("SET seq_page_cost = 7")
        out = watch.end()
    assert values_of(out) == {session.pid: ["-"]}
    assert "1 with a value that cannot be told" in out


def test_a_table_at_the_end(cluster: Cluster) -> None:
    """A line a second while it runs, then a table by process; nothing is wider than 80 columns."""
    with cluster.session() as session:
        watch = Watch("-D", cluster.data, "oid", each=False)
        got = []
        for _ in range(5):
            got += session.run("SELECT lo_create(0)")
            time.sleep(0.5)
        out = watch.end()
    live, _, table = out.partition("\n\n")
    assert live.splitlines()[0].split() == [
        "TIME",
        "OIDS/S",
        "PROCESSES",
        "FIRST",
        "LAST",
        "UNKNOWN",
    ]
    assert len(live.splitlines()) >= 3
    assert table.splitlines()[0].split() == [
        "PID",
        "OIDS",
        "PER",
        "S",
        "FIRST",
        "LAST",
        "UNKNOWN",
        "PROCESS",
    ]
    row = table.splitlines()[1].split()
    assert [row[i] for i in (0, 1, 3, 4, 5, 6, 7)] == [
        str(session.pid), "5", got[0], got[-1], "0", "postgres", "postgr",
    ]  # fmt: skip
    assert f"5 distinct, {got[0]} to {got[-1]}; 0 skipped" in table
    assert max(map(len, out.splitlines())) <= 80


def test_only_the_processes_named(cluster: Cluster) -> None:
    """With -p only the writes of those backends are shown."""
    with cluster.session() as a, cluster.session() as b, cluster.session() as c:
        watch = Watch("-p", f"{a.pid},{c.pid}", "work_mem")
        for session in (a, b, c):
            session.run("SET work_mem = 4711")
        assert watch.writes() == {a.pid: ["4711"], c.pid: ["4711"]}


def test_for_some_seconds(cluster: Cluster) -> None:
    """-d ends it, with status 0."""
    answer = run(WATCH, "-D", cluster.data, "-d", "1", "xid")
    assert answer.returncode == 0
    assert "0 xids in 1." in answer.stdout


## How a value is known

# What stores to a word of 4 bytes at 0x10000000, and what is in it then.
STORES = [
    ("incl (%rbx)", "-"),  # nobody knows what was there
    ("movl $0x2a, (%rbx)", "42"),
    ("movl $7, 0x10000000", "7"),
    ("mov %eax, (%rbx)", str(0x55667788)),
    ("mov %rax, -4(%rbx)", str(0x11223344)),
    ("mov %r9d, (%rdx,%rcx,8)", str(0xFFFFFFFF)),
    ("movq $0x4000, (%rbx)", "16384"),
    ("addl $5, (%rbx)", "16389"),
    ("incl (%rbx)", "16390"),
    ("cmpl $5, (%rbx)", None),
    ("subl $-1, (%rbx)", "16391"),
    ("sub %ecx, (%rbx)", "16389"),
    ("lock xadd %eax, (%rbx)", "-"),
    ("incl (%rbx)", "-"),
    ("mov (%rbx), %ecx", None),  # a load: there were 2
    ("decl (%rbx)", "1"),
    ("decl (%rbx)", "0"),
    ("decl (%rbx)", str(0xFFFFFFFF)),
    ("lock cmpxchg %ecx, (%rbx)", "2"),
    ("movups %xmm0, (%rbx)", "-"),
    ("movb $1, (%rbx)", "-"),  # a part of it
    ("mov %eax, 8(%rbx)", "-"),  # this cannot have been the store
]
REGISTERS = (
    "ABI:2 AX:0x1122334455667788 BX:0x10000000 CX:0x2 DX:0xffffff0 "
    "FLAGS:0x246 R9:0xffffffffffffffff"
)


@pytest.mark.parametrize("awk", ["gawk", "mawk"])
def test_forms_of_a_store(tmp_path: Path, awk: str) -> None:
    """Each form of an instruction gives its value, or none."""
    lines = [f"{text}\nafter{i}:" for i, (text, _) in enumerate(STORES)]
    source = ".globl f\n.type f, @function\nf:\n" + "\n".join(lines) + "\n"
    (tmp_path / "code.s").write_text(source)
    subprocess.run(["as", "-o", "code.o", "code.s"], cwd=tmp_path, check=True)
    subprocess.run(["ld", "-e", "f", "-o", "code", "code.o"], cwd=tmp_path, check=True)
    symbols = dict(line.split()[::-2] for line in run("nm", tmp_path / "code").stdout.splitlines())
    samples = [
        f"7/7 1.{i:09d}: {int(symbols[f'after{i}'], 16):16x} {REGISTERS}"
        for i in range(len(STORES))
    ]
    variables = {
        "what": "value", "address": 0x10000000, "size": 4, "exe": tmp_path / "code", "base": 0,
        "shared": 1, "server": 2**31 - 1, "only": "", "each": 1, "about": "",
    }  # fmt: skip
    answer = subprocess.run(
        [
            awk,
            *(word for item in variables.items() for word in ("-v", f"{item[0]}={item[1]}")),
            "-f", SCRIPTS / "watch.awk",
        ],
        input="\n".join(["start 1000000000 7", *samples, *samples[:1], "end 2000000000\n"]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert values_of(answer.stdout) == {7: [value for _, value in STORES if value]}


## What is refused


@pytest.mark.parametrize(
    "args",
    [
        [], ["-d"], ["-d", "x", "xid"], ["-p", "x", "xid"], ["--what"], ["xid", "oid"], ["xid+4"],
        ["oid/4"], ["work_mem/3"], ["work_mem+x"], ["1x"], ["-D", "/", "-p", "1", "xid"],
    ],
)  # fmt: skip
def test_called_wrongly(args: list[str]) -> None:
    """A wrong command line is status 2, and one line that says what is wrong."""
    answer = run(WATCH, *args)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "--help" in answer.stderr


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("workmem", 1, "alike are: work_mem"),
        ("work_memory", 1, "alike are: work_mem"),
        ("xyzzy_frobnicate", 1, 'exports no variable "xyzzy_frobnicate"'),
        ("pgBufferUsage", 2, "pgBufferUsage+0/4"),
        ("pgBufferUsage+1/4", 2, "multiple of 4"),
        ("work_mem+4/4", 2, "beyond the end"),
    ],
)
def test_a_variable_that_cannot_be_watched(
    cluster: Cluster, target: str, status: int, words: str
) -> None:
    """What is no variable, too long, or not aligned, and what to type instead."""
    answer = run(WATCH, "-D", cluster.data, "-d", "1", target)
    assert answer.returncode == status
    assert words in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_no_breakpoint_is_free(cluster: Cluster) -> None:
    """When others hold the processor's four breakpoints it says so, and who may be asked."""
    taken = [word for slot in range(1, 5) for word in ("-e", f"mem:{4096 * slot:#x}/4:w")]
    holder = subprocess.Popen(
        ["perf", "stat", "-a", *taken, "--", "sleep", "60"], stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(1)
        answer = run(WATCH, "-D", cluster.data, "-d", "1", "xid")
    finally:
        holder.terminate()
        holder.wait()
    assert answer.returncode == 1
    assert answer.stderr.startswith("waitfold-watch: all hardware breakpoints of a CPU are taken")
    assert answer.stderr.count("\n") == 1


def test_without_root(cluster: Cluster) -> None:
    """An ordinary user is told to be root."""
    nobody = ["setpriv", "--reuid", "65534", "--clear-groups"]
    answer = run(*nobody, WATCH, "-D", cluster.data, "-d", "1", "xid", cwd="/")
    assert answer.returncode == 1
    assert "as root" in answer.stderr


@pytest.mark.parametrize(("tool", "word"), [("perf", "linux-perf"), ("objdump", "binutils")])
def test_without_a_tool(cluster: Cluster, tmp_path: Path, tool: str, word: str) -> None:
    """A missing tool is named, with the command that installs it."""
    for folder in ("/bin", "/usr/bin", "/usr/sbin", "/sbin"):
        for program in Path(folder).iterdir():
            if program.name != tool and not (tmp_path / program.name).exists():
                (tmp_path / program.name).symlink_to(program)
    answer = run(WATCH, "-D", cluster.data, "-d", "1", "xid", env={"PATH": str(tmp_path)})
    assert answer.returncode == 1
    assert word in answer.stderr


## How it ends


def test_the_server_ends() -> None:
    """When the server ends, what was seen is shown, with status 1."""
    with running_cluster() as own:
        watch = Watch("-D", own.data, "xid")
        with own.session() as session:
            (xid,) = session.run("SELECT txid_current()")
        own.stop("fast")
        out, said = watch.process.communicate(timeout=60)
    assert watch.process.returncode == 1
    assert "ended" in said
    assert [xid] in values_of(out).values()


def test_killed(cluster: Cluster) -> None:
    """kill -9: perf and awk end by themselves, and the server lives."""
    with cluster.session() as session:
        watch = Watch("-D", cluster.data, "xid")
        session.run("SELECT txid_current()")
        assert processes_of_watch()
        watch.process.kill()
        watch.process.communicate()
        assert session.run("SELECT 1") == ["1"]


def test_its_reader_ends(cluster: Cluster) -> None:
    """`waitfold-watch | head -n 1` ends when head does, without a word."""
    answer = run("bash", "-c", f"{WATCH} -D {cluster.data} xid | head -n 1")
    assert answer.stdout.startswith("TIME")
    assert answer.stderr.count("\n") == 1, answer.stderr
