"""From a capture to what the views show: sums by event and process, apart by kind of process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from waitfold.backends import CLIENT, FOREGROUND, UNKNOWN, Backend
from waitfold.capture import Capture
from waitfold.events import TransitionStream, transitions
from waitfold.pair import Intervals, pair
from waitfold.summary import PidValue, Summary, ValueStats
from waitfold.waitevents import CLIENT_READ, is_idle

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Wait:
    """One wait event in a group of processes.

    `stats` is of the complete intervals, None where there are none. `cut_ns` is the part that
    was seen of those that the window or a loss cut, `total_ns` the sum of both.
    """

    value: int
    class_: str
    name: str
    stats: ValueStats | None
    cut_ns: int

    @property
    def total_ns(self) -> int:
        return (self.stats.total_ns if self.stats else 0) + self.cut_ns


@dataclass(frozen=True)
class Process:
    """One process: its complete intervals, its waits (`cut` parts included), and the top one."""

    pid: int
    backend: Backend
    count: int
    total_ns: int
    waiting_ns: int
    idle_ns: int
    top: tuple[str, str] | None


@dataclass
class Analysis:
    """A capture summed up.

    `foreground` are client backends and parallel workers, `other` all other processes. A
    process that no title tells about is a client backend if it ever was in Client:ClientRead.
    """

    capture: Capture
    stream: TransitionStream
    foreground: Summary = field(default_factory=Summary)
    other: Summary = field(default_factory=Summary)
    backends: dict[int, Backend] = field(default_factory=dict)
    first_ns: dict[int, int] = field(default_factory=dict)

    @property
    def start_ns(self) -> int:
        start = self.capture.start_ns
        return (self.stream.first_ns or 0) if start is None else start

    @property
    def end_ns(self) -> int:
        end = self.capture.end_ns
        return max((self.stream.last_ns or 0) if end is None else end, self.start_ns)

    @property
    def window_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def warnings(self) -> list[str]:
        return [*self.capture.warnings, *self.stream.warnings]

    def everything(self) -> Summary:
        """Return the summary over all processes."""
        both = Summary()
        both.merge(self.foreground)
        both.merge(self.other)
        return both

    def waits(self, summary: Summary) -> list[Wait]:
        """Return a summary's wait events, the greatest total first."""
        cut: dict[int, int] = defaultdict(int)
        for (_, value), seen in summary.pid_values().items():
            cut[value] += seen.censored_ns
        stats = {s.value: s for s in summary.values()}
        waits = [
            Wait(value, *self.capture.events.label(value), stats.get(value), cut_ns)
            for value, cut_ns in cut.items()
        ]
        return sorted(waits, key=lambda w: (-w.total_ns, w.value))

    def by_process(self) -> Iterator[tuple[int, Backend, int, PidValue]]:
        """Yield (pid, backend, value, time) of every process and wait event."""
        for summary in (self.foreground, self.other):
            for (pid, value), seen in summary.pid_values().items():
                yield pid, self.backends[pid], value, seen

    def processes(self) -> list[Process]:
        """Return the processes that waited, the longest waiting first, idle time not counted."""
        waits: dict[int, dict[int, PidValue]] = defaultdict(dict)
        for pid, _, value, seen in self.by_process():
            waits[pid][value] = seen
        found = [self._process(pid, by_value) for pid, by_value in waits.items()]
        return sorted(found, key=lambda p: (-p.waiting_ns, -p.idle_ns, p.pid))

    def _process(self, pid: int, by_value: dict[int, PidValue]) -> Process:
        time = {value: seen.total_ns + seen.censored_ns for value, seen in by_value.items()}
        busy = [value for value in time if not is_idle(value)]
        top = max(busy, key=lambda value: time[value], default=None)
        waiting_ns = sum(time[value] for value in busy)
        return Process(
            pid=pid,
            backend=self.backends[pid],
            count=sum(seen.count for seen in by_value.values()),
            total_ns=sum(seen.total_ns for seen in by_value.values()),
            waiting_ns=waiting_ns,
            idle_ns=sum(time.values()) - waiting_ns,
            top=None if top is None else self.capture.events.label(top),
        )

    def db_time_ns(self) -> int:
        """Return the time that client backends and parallel workers lived and were not idle.

        A process lives from its fork, or the window's start, to its exit, or the window's end.
        Where a bare perf.data does not tell what a process did before its first wait, it counts
        from there.
        """
        idle: dict[int, int] = defaultdict(int)
        for (pid, value), seen in self.foreground.pid_values().items():
            idle[pid] += (seen.total_ns + seen.censored_ns) * is_idle(value)
        waits = self.capture.seen.waits
        # One that neither waited nor stored in the whole window worked throughout, if it was
        # read that it was not waiting when the window began.
        working = {
            pid for pid, backend in self.backends.items()
            if backend.type in FOREGROUND and waits.get(pid) == 0
        }
        return sum(self._lifetime_ns(pid) - idle[pid] for pid in working | set(idle))

    def _lifetime_ns(self, pid: int) -> int:
        if pid in self.stream.forks:
            born = self.stream.forks[pid][1]
        elif pid in self.capture.seen.waits:
            born = self.start_ns
        else:
            born = self.first_ns.get(pid, self.start_ns)
        died = self.stream.exits.get(pid, self.end_ns)
        return max(0, min(died, self.end_ns) - max(born, self.start_ns))


def intervals(
    capture: Capture, progress: Progress | None = None
) -> tuple[TransitionStream, Iterator[Intervals]]:
    """Return the transitions of a capture and, lazily, the intervals that they make."""
    stream = transitions(capture.files, capture.rule, progress)
    merged = capture.events.merged
    paired = pair(stream, capture.start_ns, capture.end_ns, capture.seen.waits)
    return stream, (replace(batch, value=merged(batch.value)) for batch in paired)


def analyse(capture: Capture, progress: Progress | None = None) -> Analysis:
    """Read a capture through and sum it up."""
    stream, batches = intervals(capture, progress)
    analysis = Analysis(capture, stream)
    known = {p: b for p, b in capture.seen.backends.items() if b.type != UNKNOWN}
    undecided: dict[int, Summary] = {}
    for batch in batches:
        pids, rows = np.unique(batch.pid, return_inverse=True)
        first = np.full(len(pids), np.iinfo(np.int64).max)
        np.minimum.at(first, rows, batch.start_ns)
        readers = set(np.unique(batch.pid[batch.value == CLIENT_READ]).tolist())
        is_foreground = np.zeros(len(pids), bool)
        is_decided = np.ones(len(pids), bool)
        for i, (pid, first_ns) in enumerate(zip(pids.tolist(), first.tolist(), strict=True)):
            analysis.first_ns.setdefault(pid, first_ns)
            if pid not in known and pid in readers:
                known[pid] = Backend(CLIENT)
                if pid in undecided:
                    analysis.foreground.merge(undecided.pop(pid))
            if pid in known:
                is_foreground[i] = known[pid].type in FOREGROUND
            else:
                is_decided[i] = False
                undecided.setdefault(pid, Summary()).add(batch.take(rows == i))
        analysis.foreground.add(batch.take(is_foreground[rows]))
        analysis.other.add(batch.take((is_decided & ~is_foreground)[rows]))
    for summary in undecided.values():
        analysis.other.merge(summary)
    analysis.backends = known | {pid: Backend(UNKNOWN) for pid in undecided}
    return analysis
