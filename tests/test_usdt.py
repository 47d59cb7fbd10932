"""SDT probes as the notes say they are, traced: values, counts and semaphores."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TRACEFS, uprobe_events
from test_elf import compiled, find_notes, shell

# Waits, with every kind of operand, of the number on each line of input; the answer is the two
# semaphores.
WAITER = r"""
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>
#include <stdio.h>
#ifdef NOP5
#undef _SDT_NOP
#define _SDT_NOP .nops 5
#endif
__extension__ unsigned short demo_start_semaphore __attribute__((unused, section(".probes")));
__extension__ unsigned short demo_end_semaphore __attribute__((unused, section(".probes")));
struct { int first; unsigned event; } variable;
__attribute__((noinline)) void by_register(unsigned event) { DTRACE_PROBE1(demo, start, event); }
__attribute__((noinline)) void by_memory(unsigned event)
{
    volatile unsigned on_stack = event;
    DTRACE_PROBE1(demo, start, on_stack);
}
__attribute__((noinline)) void by_variable(unsigned event)
{
    variable.event = event;
    __asm__ volatile ("" ::: "memory");
    DTRACE_PROBE1(demo, start, variable.event);
}
__attribute__((noinline)) void by_constant(void) { DTRACE_PROBE1(demo, start, 0xa000021u); }
__attribute__((noinline)) void end(void) { DTRACE_PROBE(demo, end); }
int main(void)
{
    unsigned event;
    while (scanf("%i", (int *)&event) == 1) {
        by_register(event);
        by_memory(event + 1);
        end();
        by_variable(event + 2);
        by_constant();
        end();
        printf("%d %d\n", demo_start_semaphore, demo_end_semaphore);
        fflush(stdout);
    }
    return 0;
}
"""


def probe_lines(event: str, path: Path, provider: str, start: str, end: str) -> str:
    """The lines for uprobe_events that put start and end probes under one event, with v."""
    lines = []
    for owner, name, place, offset, semaphore, _, arguments in find_notes(path):
        if owner != provider or name not in (start, end):
            continue
        value = r"\0:u32"
        if name == start:
            command = 'note_argument "$@" && echo "$REPLY"'
            value = shell(command, arguments, path, place, offset).stdout.strip()
        counter = "" if semaphore == "0x0" else f"({semaphore})"
        lines.append(f"p:{event} {path}:{offset}{counter} v={value.replace(':u32', ':x32')}\n")
    return "".join(lines)


@contextlib.contextmanager
def registered(event: str, lines: str) -> Iterator[None]:
    """The lines, in one write, for the length of a with block."""
    # Not by open("a"), which seeks, and that the kernel refuses.
    file = os.open(TRACEFS / "uprobe_events", os.O_WRONLY | os.O_APPEND)
    try:
        assert os.write(file, lines.encode()) == len(lines)
    finally:
        os.close(file)
    try:
        yield
    finally:
        # By the environment: unregister takes a process with the event on its command line for a
        # user of it. It withdraws while another run asks, too.
        attempts = "for i in {1..20}; do if unregister ${EVENT%/*}; then break; fi; sleep 0.2; done"
        shell(f"check_tracefs; {attempts}", env=os.environ | {"EVENT": event})
        assert event not in uprobe_events()


@contextlib.contextmanager
def instance(event: str) -> Iterator[Path]:
    """An instance of ftrace that records an event by the clock that perf is told to use."""
    path = TRACEFS / "instances" / event.replace("/", "_")
    path.mkdir()
    try:
        (path / "trace_clock").write_text("mono")
        (path / "events" / event / "enable").write_text("1")
        yield path
        (path / "events" / event / "enable").write_text("0")
    finally:
        path.rmdir()


def traced(path: Path, pid: int) -> list[tuple[float, int]]:
    """Time in seconds and value of what an instance recorded of a process."""
    rows = re.findall(
        rf"-{pid} .* (\d+\.\d+): \w+: \(\w+\) v=(\w+)$", (path / "trace").read_text(), re.M
    )
    return [(float(when), int(value, 16)) for when, value in rows]


@pytest.fixture
def group() -> str:
    """A group name of this run's own."""
    return f"try_usdt_{os.getpid()}"


@pytest.mark.parametrize("flags", ["-O2", "-O2 -no-pie", "-O0", "-O2 -mno-red-zone -DNOP5"])
def test_traced(flags: str, group: str, tmp_path: Path) -> None:
    """Every kind of operand arrives with its value, and semaphores count the tracers."""
    program = compiled(tmp_path, WAITER, flags)
    event = f"{group}/w"
    lines = probe_lines(event, program, "demo", "start", "end")
    assert len(lines.splitlines()) == 5
    assert r"v=\167772193:x32" in lines
    assert "(%" in lines  # in memory
    assert flags == "-O0" or "v=%di:x32" in lines and "v=@+" in lines
    assert ("NOP5" in flags) == ("90" not in {row[5] for row in find_notes(program)[:5]})
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiter:
        assert waiter.stdin is not None
        assert waiter.stdout is not None

        def wait(value: int) -> bytes:
            waiter.stdin.write(b"%d\n" % value)
            waiter.stdin.flush()
            return bytes(waiter.stdout.readline())

        assert wait(7) == b"0 0\n"
        with registered(event, lines):
            assert wait(8) == b"0 0\n"
            with instance(event) as trace:
                for value in range(1000, 2000, 10):
                    # A semaphore counts each place that is enabled: four starts, one end.
                    assert wait(value) == b"4 1\n"
                wanted = []
                for value in range(1000, 2000, 10):
                    wanted += [value, value + 1, 0, value + 2, 0xA000021, 0]
                assert [value for _, value in traced(trace, waiter.pid)] == wanted
            assert wait(9) == b"0 0\n"
        waiter.stdin.close()
