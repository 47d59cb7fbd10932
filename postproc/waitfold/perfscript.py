"""Read stacks from the text of `perf script`.

That of somebody else, or what perf itself is asked for, as only perf unwinds --call-graph dwarf.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import WaitfoldError
from .events import PID_MAX
from .perfdata import PerfData

UNKNOWN = "[unknown]"
"""A frame of which not even the file is known."""

_KNOWN_MAX = 1 << 20  # distinct lines of frames that are kept parsed
_EVENTS_MAX = 254

_FIELDS = "comm,pid,tid,time,period,event,ip,sym,dso"
# Fields that perf may leave out: comm, pid or tid, CPU, time, period. What follows the event is of
# a tracepoint, or the address of a sample without a stack.
_SAMPLE = re.compile(
    r"[ \t]*+(?:(\S.{0,63}?)[ \t]++)??(-?\d++)(?:/(-?\d++))?[ \t]++(?:\[\d++\][ \t]++)?"
    r"(?:(\d{1,10})\.(\d{9}|\d{6}):[ \t]++)?(?:(\d{1,19})[ \t]++)?(\S+?):(?:[ \t]++(.*))?\n"
)
# Neither names of C++ nor paths are free of blanks and parentheses.
_FRAME = re.compile(r"\s++[0-9a-f]++ (.*) \((?!deleted\)\))(.*)\)\n")
_BARE_FRAME = re.compile(r"\s++[0-9a-f]{4,16}+(?: (.*))?\n")  # of -F ip or ip,sym
_OFFSET = re.compile(r"\+0x[0-9a-f]+$")


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


def run(data: PerfData, events: list[str]) -> Script:
    """Run perf script and read the samples with stacks of some events, by their names.

    Two events may have one name, as the two sched_switch of a capture: that with stacks is meant.
    perf shows a sample of the other in one line. (So it shows one of whose stack it could unwind
    nothing, which is left out too.)

    Raises
    ------
    WaitfoldError
        perf is missing, failed, or printed what is not understood.

    """
    path = data.path
    command = ["perf", "script", "--force", "--ns", "--no-inline", "-F", _FIELDS, "-i"]
    # What it says goes to a file: nobody reads a pipe of it while it writes the samples.
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as said, data.open() as file:
        try:
            perf = subprocess.Popen(
                [*command, str(path) if data.is_file else f"/proc/self/fd/{file.fileno()}"],
                pass_fds=[] if data.is_file else [file.fileno()],
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
    reader = _Reader(events)
    for number, line in enumerate(lines, 1):
        if not reader.take(line):
            raise WaitfoldError(f"{name}: line {number} of perf script is no sample: {line[:60]!r}")
    reader.end()
    return reader.script


def read_any(lines: Iterable[str]) -> tuple[Script, list[str], int]:
    """Read any text of perf script.

    Return the samples that have stacks, the names of their events, and how many lines were neither
    of a sample nor a comment. Without a period a sample's weight is 1, without a time that is 0.
    """
    reader = _Reader(None)
    strange = 0
    for line in lines:
        if not reader.take(line):
            # Of source lines, registers and the like perf prints some that begin with a blank.
            strange += not line[0].isspace() and not line.startswith("#")
    reader.end()
    return reader.script, [*reader.wanted], strange


class _Reader:
    """Takes lines; `events` None: those of all events, numbered in `wanted` as they come."""

    def __init__(self, events: list[str] | None) -> None:
        self.script = Script()
        self.wanted = {event: i for i, event in enumerate(events or [])}
        self._any = events is None
        self._known: dict[str, int] = {}
        self._head: tuple[str, ...] | None = None
        self._stack: list[int] = []

    def take(self, line: str) -> bool:
        """Take a line; return False where it is neither a sample's nor a frame's."""
        if (frame := self._known.get(line)) is not None and self._head is not None:
            self._stack.append(frame)
        elif line == "\n":
            self.end()
        elif self._head is not None and (found := self._frame(line)):
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            frames = self.script.frames
            self._known[line] = frames.setdefault(found, len(frames))
            self._stack.append(self._known[line])
        elif match := _SAMPLE.fullmatch(line):
            self.end()
            # An event without stacks has its address on the same line.
            self._head, self._stack = match.groups(""), []
        else:
            return False
        return True

    def _frame(self, line: str) -> tuple[str, str] | None:
        """Return function and file of a frame."""
        # The first also lest a long line without an end is searched for it from each parenthesis.
        if line.endswith(")\n") and (match := _FRAME.fullmatch(line)):
            return (_OFFSET.sub("", match[1]) if self._any else match[1]), match[2]
        if self._any and (match := _BARE_FRAME.fullmatch(line)):
            return _OFFSET.sub("", match[1] or UNKNOWN), UNKNOWN
        return None

    def end(self) -> None:
        """End the sample."""
        head, stack, script = self._head, self._stack, self.script
        self._head, self._stack = None, []
        if head is None:
            return
        comm, pid, tid, seconds, fraction, weight, event, rest = head
        if self._any:
            if (rest and not stack) or (
                event not in self.wanted and len(self.wanted) > _EVENTS_MAX
            ):
                return
            self.wanted.setdefault(event, len(self.wanted))
        elif rest or event not in self.wanted:
            return
        script.time_ns.append(int(seconds + fraction.ljust(9, "0")))
        script.pid.append(_id(pid))
        script.tid.append(_id(tid or pid))
        script.weight.append(min(int(weight or 1), (1 << 64) - 1))
        script.event.append(self.wanted[event])
        script.comm.append(script.comms.setdefault(comm, len(script.comms)))
        script.stack.append(script.stacks.setdefault(tuple(stack), len(script.stacks)))


def _id(text: str) -> int:
    return min(max(int(text[:12]), -1), PID_MAX)
