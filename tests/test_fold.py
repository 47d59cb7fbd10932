"""Folded stacks of a capture: on-CPU, off-CPU and wall-clock time, and flame graphs of them."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import Cluster, Recorder, waitfold

from waitfold import perfscript
from waitfold.audit import profile_events
from waitfold.capture import Naming, open_capture
from waitfold.errors import WaitfoldError
from waitfold.join import ON_CPU, Joined, join
from waitfold.profile import Traces, read_traces
from waitfold.show import fold
from waitfold.show.fold import KINDS, Shown, folded_times
from waitfold.symbols import captured_symbols

NAP = "SELECT pg_sleep(0.05) AS nap"
BURN = "SELECT sum(n) FROM generate_series(1, 1500000) AS n"
NAPS = 4
HELD_S = 0.4


@dataclass(frozen=True)
class Recording:
    """What --with all recorded of sessions that slept, burnt CPU and waited for a lock."""

    capture: Path
    joined: Joined
    traces: Traces

    def fold(self, kind: str, event: bool = False, query: bool = False, idle: bool = False) -> str:
        """Fold one kind of time."""
        shown = Shown(event, query, idle)
        return folded_times(self.joined, self.traces, KINDS[kind], shown)


@pytest.fixture(scope="module")
def recording(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """One recording for all of it."""
    if os.geteuid() != 0 or not shutil.which("perf"):
        pytest.skip("needs root and perf")
    capture = tmp_path_factory.mktemp("fold") / "capture"
    cluster.sql("CREATE TABLE IF NOT EXISTS held AS SELECT 1 AS n")
    with cluster.session() as napper, cluster.session() as holder, cluster.session() as waiter:
        recorder = Recorder("--with", "all", "-D", cluster.data, "-o", capture)
        for _ in range(NAPS):
            napper.run(NAP)
        napper.run(BURN)
        holder.run("BEGIN; LOCK held")
        waiter.send("SELECT n FROM held")
        holder.run(f"SELECT pg_sleep({HELD_S})")
        holder.run("COMMIT")
        waiter.wait()
        assert recorder.end() == 0, recorder.said
    opened = open_capture(capture, Naming())
    data, events = profile_events(opened, KINDS["wall"].events)
    traces = read_traces(data, events, captured_symbols(capture))
    return Recording(capture, join(opened), traces)


def sums(stacks: str, frame: int = 0) -> Counter[str]:
    """Return the sums by a frame: 0 the first, -1 the last."""
    found: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, ns = line.rpartition(" ")
        found[stack.split(";")[frame]] += int(ns)
    return found


def total(stacks: str, pattern: str) -> int:
    """Return the sum of the lines that match."""
    return sum(
        int(line.rpartition(" ")[2]) for line in stacks.splitlines() if re.search(pattern, line)
    )


def test_off_cpu_is_all_sleeps(recording: Recording) -> None:
    """Each process's sleeps, as far as they lie in its life, are in the lines of its type."""
    segments, sleeps = recording.joined.segments, recording.joined.sleeps
    want: Counter[str] = Counter()
    for pid in np.unique(segments.pid).tolist():
        own = segments.pid == pid
        born, died = segments.start_ns[own].min(), segments.end_ns[own].max()
        slept = sleeps.take(sleeps.tid == pid)
        length = np.minimum(slept.in_ns, died) - np.maximum(slept.out_ns, born)
        want[recording.joined.backends[pid].type] += int(np.maximum(length, 0).sum())
    assert +want == sums(recording.fold("offcpu", idle=True))


def test_on_cpu_is_all_samples(recording: Recording) -> None:
    """Each sample of a process of the server in its life counts its period, of nobody else any."""
    segments, traces = recording.joined.segments, recording.traces
    ns = 0
    for pid, time, weight, event in zip(
        *(c.tolist() for c in (traces.pid, traces.time_ns, traces.weight, traces.event)),
        strict=True,
    ):
        lived = (segments.pid == pid) & (segments.start_ns <= time) & (time < segments.end_ns)
        ns += weight * bool(lived.any()) * (traces.events[event].name == "oncpu")
    assert ns == sums(recording.fold("oncpu")).total() > 50e6


def test_wall_is_both(recording: Recording) -> None:
    """The last frame tells them apart, and off-CPU time by whether it was blocked."""
    states = sums(recording.fold("wall", idle=True), -1)
    assert set(states) == set(fold.STATES.values())
    assert states["[on-CPU]"] == sums(recording.fold("oncpu")).total()
    segments = recording.joined.segments
    for run, state in fold.STATES.items():
        if run != ON_CPU:
            of = (segments.run == run) & (segments.sleep >= 0)
            assert states[state] == segments.dur_ns[of].sum()


def test_event_and_query(recording: Recording) -> None:
    """Known sleeps are under their query, end in their wait event, and have the stack of it."""
    stacks = recording.fold("offcpu", event=True, query=True)
    naps = total(
        stacks, r"^client backend;SELECT pg_sleep\(\?\) AS nap;.*;pg_sleep;.*;Timeout:PgSleep "
    )
    assert 0.05e9 * NAPS < naps < 0.06e9 * NAPS
    held = total(stacks, r"^client backend;SELECT n FROM held;.*;ProcSleep;.*;Lock:relation ")
    assert HELD_S * 1e9 < held < (HELD_S + 0.3) * 1e9
    under_others = (
        r"^(?!client backend;SELECT (pg_sleep|n FROM held)).*;(Timeout:PgSleep|Lock:\w+) "
    )
    assert total(stacks, under_others) == 0
    burnt = recording.fold("oncpu", query=True)
    assert total(burnt, r"^client backend;SELECT sum\(n\).*standard_ExecutorRun") > 50e6


def test_idle(recording: Recording) -> None:
    """Only what was blocked in an idle wait is left out, and the postmaster's sleep."""
    busy, all_ = (recording.fold("wall", event=True, idle=idle) for idle in (False, True))
    assert set(busy.splitlines()) < set(all_.splitlines())
    left_out = "\n".join(sorted(set(all_.splitlines()) - set(busy.splitlines())))
    assert all(
        re.search(
            r"^postmaster;.*;\[blocked\] |;(Activity:\w+|Client:ClientRead);\[blocked\] ", line
        )
        for line in left_out.splitlines()
    )
    assert not re.search(r"(Activity:\w+|Client:ClientRead);\[blocked\] ", busy)


def test_commands(recording: Recording, tmp_path: Path) -> None:
    """The commands print the same lines, and draw them: states and wait events have colours."""
    answer = waitfold("fold", recording.capture, "--kind", "wall", "--event", "--query")
    assert answer.stdout == recording.fold("wall", event=True, query=True), answer.stderr
    svg = tmp_path / "w.svg"
    answer = waitfold("flamegraph", recording.capture, "--kind", "wall", "--event", "-o", svg)
    if "are both missing" in answer.stderr:
        pytest.skip("no flamegraph.pl here")
    assert answer.returncode == 0, answer.stderr
    shown = dict(
        re.findall(
            r"<title>(\S.*?) \([\d,]+ ns.*?</title>.*?fill=\"(rgb\(.*?\))\"", svg.read_text()
        )
    )
    red, _, blue = (int(n) for n in re.findall(r"\d+", shown["[on-CPU]"]))
    assert red > blue + 100
    red, _, blue = (int(n) for n in re.findall(r"\d+", shown["[blocked]"]))
    assert blue > red + 60
    assert shown["Lock:relation"] == fold.event_colours("a;Lock:relation 1\n")["Lock:relation"]


def test_what_was_not_recorded(recording: Recording, tmp_path: Path) -> None:
    """What a capture lacks is said with what to type, and options that go with nothing."""
    mixed = Path(__file__).parent / "data" / "mixed"
    answer = waitfold("fold", mixed, "--kind", "wall")
    assert answer.returncode == 2 and "waitfold record --with offcpu,oncpu" in answer.stderr
    answer = waitfold("fold", mixed, "--event")
    assert answer.returncode == 2 and "--kind oncpu" in answer.stderr
    answer = waitfold("fold", recording.capture, "--kind", "oncpu", "--set", "query")
    assert answer.returncode == 2 and "--set goes without" in answer.stderr


def test_names_that_are_in_both() -> None:
    """A frame is the redder the more of its time was on the CPU, the bluer the more was off it."""
    colours = fold.temperatures(
        "a;on;[on-CPU] 50\na;off;[blocked] 30\na;off;[run queue] 20\na;busy;[on-CPU] 3\n"
        "a;busy;[blocked] 1\n"
    )
    rgb = {name: [int(n) for n in re.findall(r"\d+", rgb)] for name, rgb in colours.items()}
    warmth = {name: red - blue for name, (red, _, blue) in rgb.items()}
    assert warmth["on"] > warmth["busy"] > abs(warmth["a"]) and warmth["off"] < -60
    assert warmth["[on-CPU]"] > 100 and warmth["[blocked]"] < -60


SCRIPT = """\
       two words    7/8       12.000000345:   10101010              oncpu: \n\
\tffffffff81000130 entry_SYSCALL_64_after_hwframe ([kernel.kallsyms])
\t           c0de std::sort<int, bool (*)(int)> (/tmp/a file (deleted))
\t            123 [unknown] (/usr/lib/postgresql/15/bin/postgres)

postgres     7/7    13.100000000:          1 sched:sched_switch:  ffffffff8 f ([kernel.kallsyms])
postgres     7/7    14.000000000:          1   sched:sched_switch: \n\
\tffffffff821facd8 __schedule ([kernel.kallsyms])

postgres     7/7    14.500000000:          1   waitfold_1:w: \n\
\tffffffff821facd8 __schedule ([kernel.kallsyms])

"""


def test_text_of_perf_script() -> None:
    """Samples of the wanted events with their stacks, not those of an event without any."""
    script = perfscript.read(SCRIPT.splitlines(True), ["oncpu", "sched:sched_switch"], "x")
    assert list(script.time_ns) == [12_000_000_345, 14_000_000_000]
    assert list(script.pid) == [7, 7] and list(script.tid) == [8, 7]
    assert list(script.weight) == [10101010, 1] and list(script.event) == [0, 1]
    assert list(script.comms) == ["two words", "postgres"]
    frames = list(script.frames)
    assert [[frames[i] for i in stack] for stack in script.stacks] == [
        [
            ("entry_SYSCALL_64_after_hwframe", "[kernel.kallsyms]"),
            ("std::sort<int, bool (*)(int)>", "/tmp/a file (deleted)"),
            ("[unknown]", "/usr/lib/postgresql/15/bin/postgres"),
        ],
        [("__schedule", "[kernel.kallsyms]")],
    ]
    with pytest.raises(WaitfoldError, match="line 2 of perf script"):
        perfscript.read([SCRIPT.splitlines(True)[0], "what is this\n"], ["oncpu"], "x")
