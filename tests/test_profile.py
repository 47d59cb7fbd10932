"""Profiles: folded by waitfold, and from perf script's text by stackcollapse-perf.pl's rules."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import Cluster, run, waitfold
from test_perfdata import W_TYPE, made, record, trailed

from waitfold import perfdata, profile
from waitfold.errors import PerfDataError, WaitfoldError
from waitfold.perfdata import PerfData
from waitfold.profile import Map, read_profile, read_traces
from waitfold.show.fold import folded_profile

pytestmark = pytest.mark.skipif(not shutil.which("perf"), reason="perf is missing")

# A known call chain, in a process, a thread, a child and what that execs.
PROGRAM = """#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

volatile unsigned long sink;
static double seconds;

__attribute__((noinline)) void leaf(void)
{
    char from[4096] = "x", to[4096];
    struct timespec now;
    clock_t end = clock() + seconds * CLOCKS_PER_SEC;

    while (clock() < end) {
        for (int i = 0; i < 1000; i++) {
            memcpy(to, from, sizeof to);
            sink += to[i];
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    sink++;
}

__attribute__((noinline)) static void middle(void)
{
    leaf();
    sink++;
}

__attribute__((noinline)) void outer(void)
{
    middle();
    sink++;
}

static void *thread(void *unused)
{
    prctl(PR_SET_NAME, "two words");
    outer();
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t other;

    seconds = atof(argv[1]);
    outer();
    pthread_create(&other, NULL, thread, NULL);
    pthread_join(other, NULL);
    if (fork() == 0) {
        outer();
        if (argc > 2)
            execl(argv[2], argv[2], argv[1], NULL);
        _exit(0);
    }
    wait(NULL);
    return 0;
}
"""
FLAGS = ("-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")


def perf_record(path: Path, *args: str | Path) -> None:
    """Record a profile."""
    result = run("perf", "record", "-q", "-o", path, *args)
    assert result.returncode == 0, result.stderr


def perf_folded(path: Path) -> list[str]:
    """Fold perf script's text as stackcollapse-perf.pl does.

    A line that is not indented begins a sample: comm, thread, CPU, time, weight, event. Only those
    of the first sample's event count, by their weight. The indented lines are frames, leaf first:
    address, symbol+offset or [unknown], (file). One without a name is [FILE], without the path. An
    empty line ends the sample. Of the name of a thread a space becomes an underscore; of a
    function's, a semicolon a colon, and what is in parentheses and quotes go.
    """
    text = run("perf", "script", "--no-inline", "-i", path).stdout
    total: Counter[str] = Counter()
    wanted = ""
    for sample in text.split("\n\n"):
        head, *lines = sample.strip("\n").split("\n")
        match = re.match(r"(\S.*?)\s+-?\d+\s+.*?:\s+(\d+)\s+(\S+):\s*$", head)
        if match is None:
            assert not head, head
            continue
        comm, weight, event = match.groups()
        wanted = wanted or event
        if event != wanted:
            continue
        frames = []
        for line in lines:
            name, file = re.fullmatch(r"\s*[0-9a-f]+ (.*) \((.*)\)", line).groups()  # type: ignore[union-attr]
            name = re.sub(r"\+0x[0-9a-f]+$", "", name)
            if name == "[unknown]" and file != "[unknown]":
                name = "[" + file.rpartition("/")[2] + "]"
            frames.append(re.sub(r"\(.*|[\"']", "", name.replace(";", ":")))
        total[";".join([comm.replace(" ", "_"), *reversed(frames)])] += int(weight)
    return [f"{stack} {n}" for stack, n in sorted(total.items())]


def fold(path: Path) -> list[str]:
    """Fold by the command."""
    answer = waitfold("fold", path)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the program, position-independent and not."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "chain.c").write_text(PROGRAM)
    for name, flag in (("pie", "-pie"), ("fixed", "-no-pie")):
        command = ["gcc", *FLAGS, flag, "-pthread", "-o", folder / name, folder / "chain.c"]
        subprocess.run(command, check=True)
    return folder / "pie", folder / "fixed"


@pytest.fixture(scope="module")
def recorded(programs: tuple[Path, Path]) -> Path:
    """Return a profile of the program."""
    path = programs[0].parent / "perf.data"
    pie, fixed = programs
    perf_record(
        path,
        "-e",
        "task-clock",
        "-F",
        "999",
        "--call-graph",
        "fp",
        "--sample-cpu",
        pie,
        "0.2",
        fixed,
    )
    return path


def test_lines_are_those_of_stackcollapse(recorded: Path) -> None:
    """A process, its thread, its child and what that execs, by perf script and by waitfold."""
    lines = fold(recorded)
    assert lines == perf_folded(recorded)
    stacks = "\n".join(lines)
    for comm in ("pie", "two_words", "fixed"):
        assert re.search(rf"^{comm};.*outer;middle;leaf \d+$", stacks, re.MULTILINE), comm
    assert "__vdso_clock_gettime" in stacks


def test_symbols_that_were_stripped(programs: tuple[Path, Path], tmp_path: Path) -> None:
    """Without .symtab only exported names are known, the others are [FILE]."""
    pie = tmp_path / "bare"
    subprocess.run(
        ["gcc", *FLAGS, "-rdynamic", "-s", "-pthread", "-o", pie, programs[0].parent / "chain.c"],
        check=True,
    )
    path = tmp_path / "perf.data"
    perf_record(path, "-e", "task-clock", "-F", "999", "--call-graph", "fp", pie, "0.1")
    lines = fold(path)
    assert lines == perf_folded(path)
    assert any("outer;[bare];leaf " in line for line in lines)


def test_a_server(cluster: Cluster, tmp_path: Path) -> None:
    """Backends that fork while they are recorded have what the postmaster had mapped."""
    path = tmp_path / "perf.data"
    command = ["-e", "task-clock", "-F", "999", "--call-graph", "fp", "-p", str(cluster.pid)]
    perf = subprocess.Popen(["perf", "record", "-q", "-o", path, *command])
    time.sleep(1)
    subprocess.run(cluster.pgbench("-T", "1", "-c", "2"), check=True, capture_output=True)
    perf.terminate()
    perf.wait()
    lines = fold(path)
    assert lines == perf_folded(path)
    assert any(";PostgresMain;" in line for line in lines)


def test_whole_machine(recorded: Path, tmp_path: Path) -> None:
    """All threads of all processes, that ran before too, and the kernel's."""
    path = tmp_path / "perf.data"
    perf_record(
        path, "-a", "-e", "task-clock", "-F", "499", "--call-graph", "fp", "--",
        sys.executable, "-c", "import json, subprocess; subprocess.run(['true'])",
    )  # fmt: skip
    # Names of C++ are as they are in the file, of deleted files only the name is shown, and
    # stackcollapse-perf.pl takes a thread of one letter for something else.
    odd = re.compile(r"_Z|memfd:|deleted|^.;|;\[unknown\] ")
    ours = {line for line in fold(path) if not odd.search(line)}
    theirs = {line for line in perf_folded(path) if not odd.search(line)}
    assert len(ours & theirs) > 0.9 * len(ours | theirs) > 0


def test_several_events(programs: tuple[Path, Path], tmp_path: Path) -> None:
    """The event of the first sample is folded, and the user is told of the other."""
    path = tmp_path / "perf.data"
    events = ["-e", "task-clock/period=1000000/", "-e", "page-faults/period=1/"]
    perf_record(path, *events, "--call-graph", "fp", programs[0], "0.05")
    answer = waitfold("fold", path)
    assert answer.stdout.splitlines() == perf_folded(path)
    assert re.search(r"warning: only stacks of (\S+) are folded.* also has \S+", answer.stderr)


def test_columns(recorded: Path) -> None:
    """Time, process, thread, CPU and weight are those of perf script."""
    fields = "pid,tid,cpu,time,period"
    text = run("perf", "script", "--ns", "-i", recorded, "-F", fields, "-G").stdout
    rows = re.findall(r"^ *(\d+)/(\d+) +\[(\d+)\] +(\d+)\.(\d{9}): +(\d+)", text, re.MULTILINE)
    want = sorted((int(s + ns), int(p), int(t), int(c), int(w)) for p, t, c, s, ns, w in rows)
    data = PerfData(recorded)
    found = read_profile(data, data.events)
    columns = (found.time_ns, found.pid, found.tid, found.cpu, found.weight)
    assert sorted(zip(*(c.tolist() for c in columns), strict=True)) == want
    assert len(want) > 100


def test_stacks_that_only_perf_unwinds(
    programs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of perf script; where perf is missing that is said, and what to type."""
    path = tmp_path / "perf.data"
    perf_record(
        path, "-e", "task-clock", "-F", "499", "--call-graph", "dwarf,16384", programs[0], "0.05"
    )
    lines = fold(path)
    assert lines == perf_folded(path)
    assert any("main;outer;middle;leaf " in line for line in lines)
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = waitfold("fold", path)
    assert answer.returncode == 1 and "record with --call-graph fp" in answer.stderr


def test_no_stacks(programs: tuple[Path, Path], tmp_path: Path) -> None:
    """A profile without stacks, and one without samples."""
    path = tmp_path / "perf.data"
    perf_record(path, "-e", "task-clock", programs[0], "0.05")
    answer = waitfold("fold", path)
    assert answer.returncode == 2 and "task-clock" in answer.stderr
    answer = waitfold("fold", made(tmp_path, [], TYPE).path)
    assert answer.returncode == 1 and "no sample with a stack" in answer.stderr


def test_idle_is_of_wait_events(recorded: Path) -> None:
    """--idle with a plain profile is called wrongly."""
    answer = waitfold("fold", "--idle", recorded)
    assert answer.returncode == 2 and "--idle" in answer.stderr


# Files made here, to have what no real one has.

TYPE = W_TYPE & ~perfdata._RAW | perfdata._CALLCHAIN
USER, KERNEL = profile._USER, profile._KERNEL


def sample(time: int, tid: int, *chain: int) -> bytes:
    """Make a sample with a callchain."""
    return record(perfdata.SAMPLE, 0, tid << 32 | tid, time, 0, len(chain), *chain)


def words(text: bytes) -> tuple[int, ...]:
    """Return text as words, with zeros behind."""
    padded = text + bytes(8 - len(text) % 8)
    return struct.unpack(f"<{len(padded) // 8}Q", padded)


def comm(time: int, tid: int, name: bytes) -> bytes:
    """Make a COMM."""
    return trailed(perfdata.COMM, tid << 32 | tid, *words(name), time=time)


def mmap(time: int, pid: int, start: int, length: int, offset: int, path: bytes) -> bytes:
    """Make an MMAP of what can be executed."""
    place = (pid << 32 | pid, start, length, offset)
    return trailed(perfdata.MMAP, *place, *words(path), time=time)


def fork(time: int, tid: int, parent: int, misc: int = 0) -> bytes:
    """Make a FORK."""
    threads = parent << 32 | tid
    made_ = trailed(perfdata.FORK, threads, threads, time, time=time)
    return made_[:4] + struct.pack("<H", misc) + made_[6:]


def folded(data: PerfData) -> list[str]:
    """Fold a file that was made here."""
    return folded_profile(read_traces(data, data.events), 0).splitlines()


def test_marks_of_contexts(tmp_path: Path) -> None:
    """Addresses before a mark are the user's; a mark that is not known makes the stack empty."""
    parts = [
        comm(0, 7, b"a b"),
        mmap(0, 7, 0x1000, 0x1000, 0, b"/nowhere/file"),
        sample(5, 7, KERNEL, 0x1010, USER, 0x1010, 0x5000),
        sample(6, 7, 0x1FFF),
        sample(7, 7, USER, 0x1000, profile._CONTEXT_MAX + 5, 0x1000),
        sample(8, 7),
    ]
    assert folded(made(tmp_path, parts, TYPE)) == [
        "a_b 2",
        "a_b;[file] 1",
        "a_b;[unknown];[file];[unknown] 1",
    ]


def test_names_and_maps_through_time(tmp_path: Path) -> None:
    """In order of time, not of the file: names, maps over maps, forks with and without maps."""
    parts = [
        sample(30, 8, USER, 0x1000),  # before the fork
        sample(50, 8, USER, 0x1000),  # behind it
        sample(50, 9, USER, 0x1000),
        fork(40, 8, 7),
        fork(0, 9, 7, profile._WITHOUT_MAPS),
        mmap(45, 7, 0x1000, 0x1000, 0, b"/late"),
        comm(10, 7, b"parent"),
        mmap(20, 7, 0x1000, 0x1000, 0, b"/early (deleted)"),
        comm(60, 8, b"child"),
        sample(70, 8, USER, 0x1000),
        sample(46, 7, USER, 0x1000),
        sample(44, 7, USER, 0x1000),
        mmap(0, 10, 0x1000, 0x1000, 0, b"//anon"),
        sample(1, 10, USER, 0x1000),
        sample(1, 0),
    ]
    assert folded(made(tmp_path, parts, TYPE)) == [
        ":10;[perf-10.map] 1",
        ":8;[unknown] 1",
        ":9;[unknown] 1",
        "child;[early] 1",
        "parent;[early] 2",
        "parent;[late] 1",
        "swapper 1",
    ]


def test_maps_over_maps() -> None:
    """What is mapped last is there; what is left of an older map keeps its place in its file."""
    space: list[Map] = []
    for start, end, path in (
        (10, 50, "a"),
        (20, 30, "b"),
        (25, 60, "c"),
        (5, 12, "d"),
        (9, 9, "e"),
    ):
        profile._insert(space, Map(start, end, 1000, path, ""))
    assert [(m.start, m.end, m.offset, m.path) for m in space] == [
        (5, 12, 1000, "d"),
        (12, 20, 1002, "a"),
        (20, 25, 1000, "b"),
        (25, 60, 1000, "c"),
    ]
    profile._insert(space, Map(13, 15, 0, "f", ""))
    assert [(m.start, m.end, m.offset) for m in space[1:4]] == [
        (12, 13, 1002),
        (13, 15, 0),
        (15, 20, 1005),
    ]


def test_distinct_stacks_are_told_apart(tmp_path: Path) -> None:
    """Wherever pieces end, and by order and length too."""
    rng = np.random.default_rng(3)
    stacks = [tuple(rng.integers(1, 4, rng.integers(0, 6)).tolist()) for _ in range(3000)]
    parts = [sample(i, 7, *stack) for i, stack in enumerate(stacks)]
    data = made(tmp_path, parts, TYPE)
    found = read_profile(data, data.events)
    starts = found.stacks.starts.tolist()
    read = [tuple(found.stacks.entries[starts[i] : starts[i + 1]].tolist()) for i in found.stack]
    assert read == stacks
    assert len(starts) - 1 == len(set(stacks))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(perfdata.SAMPLE, 0, 7 << 32 | 7, 5, 0, 3, 1, 2), "too short for its callchain"),
        (record(perfdata.SAMPLE, 0, 7 << 32 | 7, 5, 0, (1 << 64) - 1, 1), "too short for its"),
        (record(perfdata.SAMPLE, 0, 7 << 32 | 7, 5, 0), "too short for what its event"),
        (sample(5, 0x7FFF_FFFF), "a thread or a time"),
        (sample(1 << 63, 7), "a thread or a time"),
        (record(perfdata.COMM, 7), "too short for what it should hold"),
        (record(perfdata.MMAP2, 7, 7, 7, 7, 7, 7, 7, 7), "too short for what it should hold"),
    ],
)
def test_damaged(tmp_path: Path, bad: bytes, message: str) -> None:
    """The offset in the file is named."""
    data = made(tmp_path, [sample(4, 7, 1), bad], TYPE)
    at = data.data_offset + len(sample(4, 7, 1))
    with pytest.raises(PerfDataError, match=f"at byte {at} .*{message}"):
        read_profile(data, data.events)


def test_any_damage(recorded: Path, tmp_path: Path) -> None:
    """Bytes changed at random give an error in words, or lines."""
    content = recorded.read_bytes()
    rng = np.random.default_rng(4)
    path = tmp_path / "perf.data"
    done = 0
    for _ in range(60):
        bad = bytearray(content)
        for place in rng.integers(0, len(bad), 20).tolist():
            bad[place] = int(rng.integers(256))
        path.write_bytes(bad)
        try:
            folded(PerfData(path))
            done += 1
        except WaitfoldError as error:
            assert str(path) in str(error)
    assert done > 0
