"""Read events from text: that of perf script, of trace-cmd report, and of ftrace itself.

A line is taken apart at the first time in it: who stands before, event and arguments behind. What
stands before and behind repeats itself, so each distinct one is parsed once; times are found by
NumPy, a piece at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import WaitfoldError
from .events import EXIT, FORK, PID_MAX, Column, Rule, Transitions, TransitionStream, Use
from .inputs import HEAD, Input

_KNOWN_MAX = 1 << 16  # distinct parts of lines that are kept parsed
_KNOWN_LENGTH = 512  # bytes of one

PERF, FTRACE = "perf script", "ftrace"
"""Whose text it is. That of trace-cmd report is like ftrace's own."""

# What stands before the time: comm, pid and tid, CPU, and of ftrace flags. No comm has more than
# 15 bytes, but perf escapes what it cannot print.
_WHO = {
    PERF: re.compile(
        rb"[ \t]*(?:\S.{0,63}?[ \t]+)??(?P<pid>-?\d{1,10})(?:/(?P<tid>-?\d{1,10}))?"
        rb"(?:[ \t]+\[(?P<cpu>\d{1,5})\])?(?:[ \t]+[A-Za-z]{1,4})?[ \t]*"
    ),
    FTRACE: re.compile(
        rb"[ \t]*.{0,63}?-(?P<pid>\d{1,10})[ \t]+(?:\([ \t]*(?:\d{1,10}|-+)\)[ \t]*)?"
        rb"(?:\[(?P<cpu>\d{1,5})\]|(?P<cpu2>\d{1,5})(?=\D{4}))(?P<tid>)?[ \t]*(?:\S{4,8})?[ \t]*"
    ),
}
_WHO_MAX = 200

# perf puts the period before the event's name.
_EVENT = re.compile(rb"[ \t]*(?:\d+[ \t]+)?(\S.*)", re.DOTALL)
_NOBODY = -2  # in the place of a CPU, where it is not understood who stands before the time

# What an event is that is none of the rule's.
_OTHER, _TASK_RECORD, _BIRTH, _DEATH, _LOSS = -1, -2, -3, -4, -5
_CHILD = re.compile(rb"\bchild_pid=(\d{1,10})")
_TASK = re.compile(rb"PERF_RECORD_(FORK|EXIT)\((\d{1,10}):(\d{1,10})\)")
_LOST = re.compile(rb"PERF_RECORD_LOST(?:_SAMPLES)?:? +(?:lost +)?(\d{1,18})")
_DROPPED = re.compile(
    rb"^.{0,80}?CPU:(\d{1,5}) \[(?:LOST (\d{1,18}) EVENTS|(\d{0,18}) ?EVENTS DROPPED)\]",
    re.MULTILINE,
)
_STARTED = re.compile(rb"^##### CPU \d+ buffer started ####", re.MULTILINE)
_OVERRUN = re.compile(rb"^# entries-in-buffer/entries-written: (\d{1,18})/(\d{1,18})", re.MULTILINE)
_STACK = re.compile(rb"\n[ \t]++[0-9a-f]{4,16}+ [^\n]*\)\r?(?:\n|\Z)")
_FIELD_NAMES = re.compile(rb"(?:^|[\s(,])([A-Za-z_]\w*)=")
_NUMBER = re.compile(rb"-?(?:0x[0-9a-fA-F]{1,16}|\d{1,20})")

_ORDINARY = np.zeros(256, np.bool_)  # first bytes of lines that may be none of samples
_ORDINARY[[*b"# \t\r\n"]] = True
_HEAD_LINE = re.compile(
    rb"(?:cpus=\d|version = |CPU ?:?\d|CPU:\d|FAILED TO PARSE|.{0,80}: +CPU:\d)"
)

_FORK_EVENT, _EXIT_EVENT = "sched:sched_process_fork", "sched:sched_process_exit"

Fields = tuple["int | bytes | None", ...]


@dataclass(frozen=True)
class TextEvent:
    """An event that a text holds; `fields` are the names of its arguments, in its first line."""

    name: str
    fields: tuple[str, ...]


class TraceText:
    """A text of events: what its beginning tells when it is opened, its lines by `sources()`.

    `events` are those among its first lines; `whole` says whether these are all. `kind` is PERF
    or FTRACE; the latter's events have no groups. `has_stacks`: samples with stacks are among them.

    Raises WaitfoldError where it is none.
    """

    def __init__(self, input_: Input) -> None:
        self.input = input_
        self.path = input_.path
        self.cut: str | None = None
        head = input_.head
        self.whole = len(head) < HEAD
        if not self.whole:
            head = head[: head.rfind(b"\n") + 1]
        if not head:
            raise WaitfoldError(not_understood(input_))
        lines = _Lines(head)
        self.kind, rows = max(
            ((kind, lines.named(who)) for kind, who in _WHO.items()), key=lambda pair: len(pair[1])
        )
        if not rows:
            raise WaitfoldError(not_understood(input_))
        self.has_stacks = _STACK.search(head) is not None
        found: dict[str, tuple[str, ...]] = {}
        for name, rest in rows:
            if name not in found and not name.startswith("PERF_RECORD_"):
                names = [m.decode() for m in _FIELD_NAMES.findall(rest)]
                found[name] = tuple(dict.fromkeys(names))
        self.events = [TextEvent(name, fields) for name, fields in found.items()]

    def has(self, pattern: str) -> bool:
        """Return whether an event among the first lines matches."""
        return any(self.matches(event.name, pattern) for event in self.events)

    def matches(self, name: str, pattern: str) -> bool:
        """Return whether an event is what a pattern means; one without a group is by its name."""
        return fnmatchcase(name, pattern if ":" in name else pattern.rpartition(":")[2])

    def lines(self) -> Iterator[str]:
        """Yield all lines, each with its end."""
        for piece in self.input.text():
            for line in piece.decode(errors="backslashreplace").removesuffix("\n").split("\n"):
                yield f"{line.removesuffix(chr(13))}\n"

    def sources(self, rule: Rule, stream: TransitionStream) -> Sequence[_TextSource]:
        """Return what reads the lines."""
        return [_TextSource(self, rule, stream)]


def not_understood(input_: Input) -> str:
    """Return what to say of an input that is nothing which can be read."""
    head = input_.head
    path = input_.path
    wanted = (
        "What is read: a capture folder, perf.data, trace.dat, the text of perf script, of "
        "trace-cmd report, or of /sys/kernel/tracing/trace; each also packed by gzip, xz or zstd."
    )
    if not head.strip():
        return f"{path} is empty. {wanted}"
    if _STACK.search(head) or re.search(rb"^\S.*\s\d+\s.*:\s*$", head[:4096], re.MULTILINE):
        return (
            f"{path} seems to be text of perf script, but no line of it has a time. Wait events "
            "need one: perf script --ns -F comm,pid,tid,cpu,time,event,trace"
        )
    if re.search(rb"^\S[^\n]*;[^\n]* \d+\s*$", head[:4096], re.MULTILINE):
        return f"{path} holds folded stacks already: flamegraph.pl draws them. {wanted}"
    if head[257:262] == b"ustar":
        return f"{path} is a tar, but no bundle of waitfold: name what is in it. {wanted}"
    if head.lstrip()[:1] in (b"{", b"["):
        return f"{path} is JSON, the profile of another tool perhaps. {wanted}"
    if head.startswith(b"# tracer: ") or b" latency trace " in head[:400]:
        return (
            f"{path} is text of ftrace, but no line of it has a time in seconds. Its tracer must "
            "be nop, its option latency-format off, and its trace_clock mono or local"
        )
    if b"\0" in head[:4096]:
        return f"{path} is neither text nor a file that is known. {wanted}"
    return f"{path} is text, but no line of it is an event with a time. {wanted}"


class _Lines:
    """The lines of a piece that have a time, a row each: the time, and where all parts are.

    Who stands from `starts` to `before`, the event's name between `time_end` and `name_end`, and
    its arguments behind that, up to `ends`. `line` is a row's number among all `lines`. `others`
    are numbers and beginnings of lines that have none, and are no comment and no stack either.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        data = np.frombuffer(content, np.uint8)
        newlines = np.flatnonzero(data == 10)
        if len(content) and content[-1] != 10:
            newlines = np.append(newlines, len(content))
        starts = np.append(0, newlines[:-1] + 1)
        # A time ends in a colon, 6 or 9 digits behind its point.
        colons = np.flatnonzero(data[:-1] == 58)
        colons = colons[(data[colons + 1] <= 32) & (colons > 7)]
        times = colons[data[colons - 1] - np.uint8(48) < 10]
        short = data[times - 7] == 46
        long = ~short & (times > 10)
        long[long] = data[times[long] - 10] == 46
        is_time = short | long
        times, short = times[is_time], short[is_time]
        first = np.searchsorted(times, starts)
        found = np.flatnonzero(first < len(times))
        found = found[times[first[found]] < newlines[found]]
        self.starts, self.ends = starts[found], newlines[found]
        self.line = found
        self.lines = len(starts)
        is_other = ~_ORDINARY[data[np.minimum(starts, max(len(data) - 1, 0))]]
        is_other[found] = False
        self.others = [
            *zip(np.flatnonzero(is_other).tolist(), starts[is_other].tolist(), strict=True)
        ]
        self.time_end = times[first[found]]
        self.is_us = short[first[found]]
        digits = np.where(self.is_us, 6, 9)
        fraction, _ = _number(data, self.time_end, 9, digits)
        seconds, length = _number(data, self.time_end - digits - 1, 10)
        scale = np.where(self.is_us, 1000, 1)
        self.time_ns = seconds * 1_000_000_000 + fraction * scale
        before = self.time_end - digits - 1 - length
        # The event's name ends in the next colon before a blank, or the line does.
        place = np.searchsorted(colons, self.time_end, "right")
        name_end = colons[np.minimum(place, len(colons) - 1)] if len(colons) else self.ends
        self.name_end = np.where(
            (place < len(colons)) & (name_end < self.ends), name_end, self.ends
        )
        self.before = before

    def named(self, who: re.Pattern[bytes]) -> list[tuple[str, bytes]]:
        """Return name and arguments of the events of all rows of which it is understood who."""
        found = []
        parts = (self.starts, self.before, self.time_end, self.name_end, self.ends)
        for start, before, begin, name_end, end in zip(*(p.tolist() for p in parts), strict=True):
            name = _name(self.content[begin + 1 : name_end])
            if name and _who(who, self.content[start:before]) is not None:
                found.append((name, self.content[name_end + 1 : end]))
        return found

    def by(
        self, known: _Known, begins: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return for parts of the content where what they mean is in the values of `known`."""
        known.forget()
        content = self.content
        parts = zip(begins.tolist(), ends.tolist(), strict=True)
        return np.array([known[content[begin:end]] for begin, end in parts], np.int64)


class _Known(dict[bytes, int]):
    """What parts of lines mean: each distinct one is parsed once, and is a place in `values`."""

    def __init__(self, parse: Callable[[bytes], Any]) -> None:
        self.values_: list[Any] = []
        self._parse = parse

    def forget(self) -> None:
        """Make room, if there is none left."""
        if len(self.values_) >= _KNOWN_MAX:
            self.clear()
            self.values_.clear()

    def __missing__(self, text: bytes) -> int:
        place = len(self.values_)
        self.values_.append(self._parse(text))
        if len(text) <= _KNOWN_LENGTH:
            self[text] = place
        return place


def _who(pattern: re.Pattern[bytes], text: bytes) -> tuple[int, int, int] | None:
    match = pattern.fullmatch(text) if len(text) <= _WHO_MAX else None
    if match is None:
        return None
    parts = match.groupdict()
    pid, tid = int(parts["pid"]), int(parts["tid"] or parts["pid"])
    cpu = parts["cpu"] or parts.get("cpu2")
    if max(pid, tid) > PID_MAX:
        return None
    return pid, tid, -1 if cpu is None else int(cpu)


def _name(text: bytes) -> str:
    match = _EVENT.fullmatch(text)
    return match[1].decode(errors="backslashreplace").rstrip(":\r ") if match else ""


def _number(
    data: NDArray[np.uint8],
    ends: NDArray[np.int64],
    most: int,
    width: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers whose last digits stand before `ends`, and how many digits they have."""
    value = np.zeros(len(ends), np.int64)
    length = np.zeros(len(ends), np.int64)
    going = np.ones(len(ends), np.bool_)
    for place in range(most):
        digit = data[ends - 1 - place] - np.uint8(48)
        going &= digit < 10
        if width is not None:
            going &= place < width
        value += np.where(going, digit, 0).astype(np.int64) * 10**place
        length += going
    return value, length


class _TextSource:
    """The transitions of a text."""

    def __init__(self, text: TraceText, rule: Rule, stream: TransitionStream) -> None:
        self.data_size = text.input.size
        self.done = 0
        self.complete = -1
        self._text = text
        self._stream = stream
        self._uses = rule.uses
        self._pieces = text.input.text()
        self._lines = 0  # before the piece
        self._who = _Known(lambda part: _who(_WHO[text.kind], part))
        self._kinds = _Known(self._kind)
        self._arguments = [_Known(self._parser(use)) for use in self._uses]
        self._names: dict[str, None] = {}
        self._last_by_cpu: dict[int, int] = {}
        self._dropped: list[int] = []  # CPUs that lost something before the next line
        self._lost = self._lost_samples = 0
        self._overrun = False
        self._us = False
        self._strange = 0
        self._first_strange = ""
        self._seen: set[int] = set()

    def read(self) -> Transitions | None:
        """Return the transitions of the next lines, None at the end."""
        content = next(self._pieces, None)
        if content is None:
            return None
        lines = _Lines(content)
        batch = self._rows(lines)
        self._lines += lines.lines
        self.done = self._text.input.taken
        return batch

    def close(self) -> None:
        """Say what was strange, once all is read."""
        text, stream = self._text, self._stream
        stream.lost += max(self._lost, self._lost_samples)
        if text.input.cut:
            stream.warnings.append(text.input.cut)
        if self._us:
            more = "perf script --ns" if text.kind == PERF else "trace-cmd report -t"
            stream.warnings.append(
                f"the times in {text.path} are in microseconds: each wait is right to 1 us only, "
                f"and shorter ones may count as 0. {more} prints nanoseconds"
            )
        if self._strange:
            stream.warnings.append(
                f"{self._strange} lines of {text.path} are no events, and were left out; the "
                f"first is {self._first_strange}"
            )
        if 0 not in self._seen:
            has = ", ".join([*self._names][:20]) or "no events"
            raise WaitfoldError(
                f"no event '{self._uses[0].event}' in {text.path}, which has: {has}. Name the one "
                "that wait events begin with as --start and that which ends them as --end."
            )

    def _kind(self, part: bytes) -> int:
        """Return what an event's name means: the number of its use, or one of those below 0."""
        name = _name(part)
        text = self._text
        if text.kind == PERF and name.startswith("PERF_RECORD_"):
            return (
                _TASK_RECORD if _TASK.match(name.encode()) else _LOSS if "_LOST" in name else _OTHER
            )
        if len(self._names) < 1000:
            self._names[name] = None
        for number, use in enumerate(self._uses):
            if text.matches(name, use.event):
                return number
        if text.kind == FTRACE:
            for kind, event in ((_BIRTH, _FORK_EVENT), (_DEATH, _EXIT_EVENT)):
                if text.matches(name, event):
                    return kind
        return _OTHER

    def _parser(self, use: Use) -> Callable[[bytes], Fields]:
        patterns = [
            re.compile(
                rb"(?:^|.*?[\s(,])"
                + re.escape(name).encode()
                + rb'=(?:"(.*?)(?:"(?=\s+\w+=|\s*$)|$)|(\S+?)(?=[,)]?(?:\s|$)))',
                re.DOTALL,
            )
            for name in use.fields
        ]

        def parse(rest: bytes) -> Fields:
            values: list[int | bytes | None] = []
            for name, pattern in zip(use.fields, patterns, strict=True):
                match = pattern.match(rest)
                if match is None:
                    has = [field.decode() for field in _FIELD_NAMES.findall(rest)]
                    raise WaitfoldError(
                        f"{self._text.path}: {use.event} has no field {name}. It has: "
                        f"{', '.join(has[:20]) or 'none'}. Name the one that holds the wait event "
                        "as --value."
                    )
                string, word = match.groups()
                if word is None:
                    values.append(string)
                elif _NUMBER.fullmatch(word):
                    values.append(int(word, 0 if b"x" in word else 10))
                else:
                    values.append(None if word == b"(fault)" else word)
            return tuple(values)

        return parse

    def _rows(self, lines: _Lines) -> Transitions:
        place = lines.by(self._who, lines.starts, lines.before)
        people = np.array([each or (0, 0, _NOBODY) for each in self._who.values_], np.int64)
        pid, tid, cpu = people.reshape(-1, 3)[place].T
        known = cpu != _NOBODY
        place = lines.by(self._kinds, lines.time_end + 1, lines.name_end)
        kinds = np.array(self._kinds.values_, np.int8)[place]
        time = lines.time_ns
        self._note(lines, known)
        self._losses(lines, kinds, cpu, known)
        if known.any():
            self._us = self._us or bool(lines.is_us[known].any())
            # The next lines may be of the same time.
            self.complete = max(self.complete, int(time[known][-1]) - 1)
        value = np.zeros(len(time), np.uint32)
        mark = np.zeros(len(time), np.uint8)
        for number, use in enumerate(self._uses):
            rows = np.flatnonzero((kinds == number) & known)
            if len(rows):
                value[rows] = use.values(self._columns(lines, number, rows), len(rows))
                mark[rows] = use.mark
                self._count(number, time[rows])
        kept = known & (kinds > _OTHER)
        for row in np.flatnonzero(known & (kinds == _TASK_RECORD)).tolist():
            task = _TASK.search(lines.content[lines.time_end[row] : lines.ends[row]])
            if task and int(time[row]) > 0:
                mark[row] = FORK if task[1] == b"FORK" else EXIT
                pid[row], tid[row] = int(task[2]), int(task[3])
                kept[row] = True
        for row in np.flatnonzero(known & (kinds == _BIRTH)).tolist():
            child = _CHILD.search(lines.content[lines.name_end[row] : lines.ends[row]])
            if child:
                mark[row], pid[row], tid[row], kept[row] = FORK, int(child[1]), int(child[1]), True
        deaths = known & (kinds == _DEATH)
        mark[deaths], kept[deaths] = EXIT, True
        rows = np.flatnonzero(kept & (pid <= PID_MAX) & (tid <= PID_MAX))
        low = np.uint64(0xFFFF_FFFF)
        thread = tid[rows].view(np.uint64) << np.uint64(32) | pid[rows].view(np.uint64) & low
        return Transitions(time[rows], thread, value[rows], mark[rows])

    def _columns(self, lines: _Lines, number: int, rows: NDArray[np.int64]) -> list[Column]:
        known = self._arguments[number]
        place = lines.by(known, lines.name_end[rows] + 1, lines.ends[rows])
        return [_column(column, place) for column in zip(*known.values_, strict=True)]

    def _count(self, number: int, time: NDArray[np.int64]) -> None:
        stream = self._stream
        self._seen.add(number)
        stream.samples += len(time)
        first, last = int(time.min()), int(time.max())
        stream.first_ns = first if stream.first_ns is None else min(first, stream.first_ns)
        stream.last_ns = last if stream.last_ns is None else max(last, stream.last_ns)

    def _note(self, lines: _Lines, known: NDArray[np.bool_]) -> None:
        """Take down lines that are not understood."""
        unknown = zip(lines.line[~known].tolist(), lines.starts[~known].tolist(), strict=True)
        strange = [
            (number, start)
            for number, start in (*lines.others, *unknown)
            if not _HEAD_LINE.match(lines.content, start)
        ]
        if strange and not self._strange:
            number, start = min(strange)
            line = lines.content[start : start + 60].split(b"\n")[0]
            shown = line.decode(errors="backslashreplace")
            self._first_strange = f"line {self._lines + number + 1}: {shown!r}"
        self._strange += len(strange)

    def _losses(
        self,
        lines: _Lines,
        kinds: NDArray[np.int8],
        cpu: NDArray[np.int64],
        known: NDArray[np.bool_],
    ) -> None:
        """Take down what was lost, and when each CPU was last seen."""
        time, content, stream = lines.time_ns, lines.content, self._stream

        def since(row: int, on: int) -> int:
            """Return when a CPU was last seen before a row."""
            before = np.flatnonzero(known[:row] & (cpu[:row] == on) & (kinds[:row] > _LOSS))
            if on >= 0 and len(before):
                return int(time[before[-1]])
            return self._last_by_cpu.get(on, 0)

        for row in np.flatnonzero(known & (kinds == _LOSS)).tolist():
            part = content[lines.time_end[row] : lines.ends[row]]
            lost = _LOST.search(part)
            count = int(lost[1]) if lost else 1
            if b"_SAMPLES" in part:
                self._lost_samples += count
            else:
                self._lost += count
                stream.gaps.append((since(row, int(cpu[row])), int(time[row])))
        found: list[tuple[int, int]] = []  # place and CPU
        if b"EVENTS" in content:
            for dropped in _DROPPED.finditer(content):
                self._lost += int(dropped[2] or dropped[3] or 1)
                found.append((dropped.start(), int(dropped[1])))
        if b"# entries-in-buffer" in content and (ring := _OVERRUN.search(content)):
            self._overrun = int(ring[2]) > int(ring[1])
        if self._overrun and b"buffer started" in content:
            found += [(match.start(), -1) for match in _STARTED.finditer(content)]
        # What was lost stands before the CPU's next event.
        found = [*((0, on) for on in self._dropped), *found]
        self._dropped.clear()
        rows = np.flatnonzero(known)
        for place, on in found:
            next_ = int(np.searchsorted(lines.starts[rows], place))
            if next_ == len(rows):
                self._dropped.append(on)
            else:
                row = int(rows[next_])
                stream.gaps.append((since(row, on), int(time[row])))
        if len(rows):
            for on in np.unique(cpu[known]).tolist():
                self._last_by_cpu[on] = int(time[np.flatnonzero(known & (cpu == on))[-1]])


def _column(values: Sequence[int | bytes | None], place: NDArray[np.int64]) -> Column:
    """Return a field of samples, whose values are at `place`: numbers, or texts if any is one."""
    if set(map(type, values)) == {int}:
        try:
            return np.array(values, np.int64)[place]
        except OverflowError:
            return np.array([int(v or 0) & (1 << 64) - 1 for v in values], np.uint64)[place]
    texts = [str(value).encode() if isinstance(value, int) else value for value in values]
    return [texts[at] for at in place.tolist()]
