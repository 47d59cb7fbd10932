"""Read stacks from the text of `perf script`: those of --call-graph dwarf only perf unwinds."""

from __future__ import annotations

import re
import subprocess
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import WaitfoldError

_FIELDS = "comm,pid,tid,time,period,event,ip,sym,dso"
_SAMPLE = re.compile(r" *(.*?) +(-?\d+)/(-?\d+) +(\d+)\.(\d{9}): +(\d+) +(\S+): *(.*)\n")
# Neither names of C++ nor paths are free of blanks and parentheses.
_FRAME = re.compile(r"\s+[0-9a-f]+ (.*) \((?!deleted\)\))(.*)\)\n")


@dataclass
class Script:
    """Samples of perf script, a row each: `stack` is an index of `stacks`, tuples of frames.

    A frame is a function's name and its file as perf calls them, "[unknown]" where it does not
    know; a stack has its leaf first.
    """

    time_ns: array[int] = field(default_factory=lambda: array("q"))
    pid: array[int] = field(default_factory=lambda: array("i"))
    tid: array[int] = field(default_factory=lambda: array("i"))
    weight: array[int] = field(default_factory=lambda: array("Q"))
    event: array[int] = field(default_factory=lambda: array("B"))
    comm: array[int] = field(default_factory=lambda: array("i"))
    stack: array[int] = field(default_factory=lambda: array("q"))
    comms: dict[str, int] = field(default_factory=dict)
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    frames: dict[tuple[str, str], int] = field(default_factory=dict)


def run(path: Path, events: list[str]) -> Script:
    """Run perf script and read the samples with stacks of some events, by their names.

    Two events may have one name, as the two sched_switch of a capture: that with stacks is meant.
    perf shows a sample of the other in one line. (So it shows one of whose stack it could unwind
    nothing, which is left out too.)

    Raises
    ------
    WaitfoldError
        perf is missing, failed, or printed what is not understood.

    """
    command = ["perf", "script", "--ns", "--no-inline", "-F", _FIELDS, "-i", str(path)]
    # What it says goes to a file: nobody reads a pipe of it while it writes the samples.
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as said:
        try:
            perf = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                errors="backslashreplace",
            )
        except OSError:
            raise WaitfoldError(
                f"{path} was recorded with --call-graph dwarf. Only perf unwinds such stacks, and "
                "perf is not here: install it (apt-get install linux-perf), or record with "
                "--call-graph fp"
            ) from None
        with perf:
            assert perf.stdout
            try:
                script = read(perf.stdout, events, str(path))
            except BaseException:
                perf.kill()
                raise
        if perf.returncode:
            said.seek(0)
            lines = said.read().strip().splitlines() or [f"status {perf.returncode}"]
            raise WaitfoldError(f"{path}: perf script failed: {lines[-1]}")
    return script


def read(lines: Iterable[str], events: list[str], name: str) -> Script:
    """Read the text of perf script -F comm,pid,tid,time,period,event,ip,sym,dso --ns."""
    script = Script()
    wanted = {event: i for i, event in enumerate(events)}
    known: dict[str, int] = {}
    head: tuple[str, ...] | None = None
    stack: list[int] = []
    for number, line in enumerate(lines, 1):
        if (frame := known.get(line)) is not None:
            stack.append(frame)
            continue
        if line == "\n":
            _add(script, head, stack, wanted)
            head, stack = None, []
        elif match := _FRAME.fullmatch(line) if head is not None else None:
            symbol, file = match.groups()
            known[line] = script.frames.setdefault((symbol, file), len(script.frames))
            stack.append(known[line])
        elif match := _SAMPLE.fullmatch(line):
            _add(script, head, stack, wanted)
            # An event without stacks has its address on the same line.
            head, stack = match.groups(), []
        else:
            raise WaitfoldError(f"{name}: line {number} of perf script is no sample: {line[:60]!r}")
    _add(script, head, stack, wanted)
    return script


def _add(
    script: Script, head: tuple[str, ...] | None, stack: list[int], wanted: dict[str, int]
) -> None:
    if head is None or head[7] or head[6] not in wanted:
        return
    comm, pid, tid, seconds, nanoseconds, weight, event, _ = head
    script.time_ns.append(int(seconds + nanoseconds))
    script.pid.append(int(pid))
    script.tid.append(int(tid))
    script.weight.append(int(weight))
    script.event.append(wanted[event])
    script.comm.append(script.comms.setdefault(comm, len(script.comms)))
    script.stack.append(script.stacks.setdefault(tuple(stack), len(script.stacks)))
