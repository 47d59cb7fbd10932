"""From context switches to off-CPU intervals: when each process slept, was woken, and ran again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import PerfDataError
from .events import PID_MAX
from .pair import END, LOST, START
from .perfdata import Event, Field, PerfData, Piece

SWITCH, WAKEUP, SAMPLE = "sched:sched_switch", "sched:sched_wakeup", "oncpu"
"""Names of the events that a capture's perf.data has them by."""

# What happens to a thread, in the order in which it does where times are equal. The first three and
# the last three are the edges of what is known: of its life in the window, and of a gap.
_BORN, _SINCE, _RESUMED, _OUT, _YIELD, _WOKEN, _IN, _GAP, _UNTIL, _DIED = range(10)

SEEN = (_OUT, _YIELD, _WOKEN, _IN)
"""The kinds of Switches."""

_RAN, _READY, _SLEPT, _UNKNOWN = 0, 1, 2, 3

# Bits of prev_state that are states; above them is TASK_REPORT_MAX, preempted (sched.h).
_STATES = 0xFF


@dataclass(frozen=True)
class Sleeps:
    """Off-CPU intervals, sorted by (tid, out_ns), a row each.

    The thread left the CPU at `out_ns`, was blocked until `wake_ns`, and waited for a CPU until
    `in_ns`. `runnable`: it did not block, but was preempted or gave way; then `wake_ns` is
    `out_ns`. `flags` is 0 where all three were seen, else of pair: START, the window's start or
    its birth stands for `out_ns`; END, the window's end stands for the times that would have
    come; LOST, a loss stands for either; GUESSED, `in_ns` is when it was next seen to run. Only
    without START and LOST there is a sample at `out_ns`.
    """

    tid: NDArray[np.int32]
    out_ns: NDArray[np.int64]
    wake_ns: NDArray[np.int64]
    in_ns: NDArray[np.int64]
    runnable: NDArray[np.bool_]
    flags: NDArray[np.uint8]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tid)

    def take(self, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Sleeps:
        """Return some of the rows."""
        return Sleeps(*(getattr(self, column.name)[which] for column in fields(self)))


GUESSED = 8
"""Flag of a sleep, beside those of pair: its end has no sample of its own."""

NO_SLEEPS = Sleeps(*(np.empty(0, dtype) for dtype in ("i4", "i8", "i8", "i8", "?", "u1")))


@dataclass(frozen=True)
class Unknown:
    """Where it is not known whether a thread ran, sorted by (tid, start_ns), a row each.

    `lost`: samples were; else a switch is missing, or none was seen in all its life.
    """

    tid: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    lost: NDArray[np.bool_]


NO_UNKNOWN = Unknown(*(np.empty(0, dtype) for dtype in ("i4", "i8", "i8", "?")))


@dataclass(frozen=True)
class Lives:
    """When processes lived in the window, sorted by (tid, since_ns), a row each.

    `born` and `died` say whether it began and ended then, or only the window did.
    """

    tid: NDArray[np.int32]
    since_ns: NDArray[np.int64]
    until_ns: NDArray[np.int64]
    born: NDArray[np.bool_]
    died: NDArray[np.bool_]


@dataclass(frozen=True)
class Switches:
    """What the scheduler did, a row each, in no order; `kind` as above.

    `sampled`, (tid, time_ns) sorted, is which thread a sample of the CPU's time saw run when; None
    where none were taken. `others` are threads that are not the first of their process, and that:
    they have no rows but as what comes and what is woken.
    """

    tid: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    kind: NDArray[np.uint8]
    sampled: tuple[NDArray[np.int32], NDArray[np.int64]] | None
    others: dict[int, int]


# Where the fields are that are read (include/trace/events/sched.h, 64 bit).
_SWITCH_FIELDS = {
    "prev_pid": Field("prev_pid", 24, 4, True),
    "prev_state": Field("prev_state", 32, 8, True),
    "next_pid": Field("next_pid", 56, 4, True),
}
_WAKEUP_FIELDS = {"pid": Field("pid", 24, 4, True)}


def name_events(data: PerfData, profiles: Sequence[str]) -> None:
    """Name the events of a capture's profiles in a file whose perf was killed: by their order."""
    named: list[tuple[str, dict[str, Field]]] = []
    if "offcpu" in profiles:
        named += [(SWITCH, _SWITCH_FIELDS), (SWITCH, _SWITCH_FIELDS), (WAKEUP, _WAKEUP_FIELDS)]
    for i, event in enumerate(data.events):
        if event.name == "task-clock" and "oncpu" in profiles:
            data.events[i] = replace(event, name=SAMPLE)
        elif event.name == f"event {i}" and named:
            name, fields_ = named.pop(0)
            data.events[i] = replace(event, name=name, fields=fields_)


class Scheduled(Protocol):
    """A file of which the context switches are known already; None where it has none."""

    @property
    def switches(self) -> Switches | None:
        """Return them."""


def has_switches(data: PerfData | Scheduled) -> bool:
    """Return whether a file has what read_switches() reads."""
    if not isinstance(data, PerfData):
        return data.switches is not None
    names = [event.name for event in data.events]
    return SWITCH in names and WAKEUP in names


def read_switches(
    data: PerfData | Scheduled, progress: Callable[[int, int], None] | None = None
) -> Switches:
    """Return the context switches and wakeups of a file, docs/capture.md says by which events.

    Of threads of any process whose name the events were filtered by.

    Raises
    ------
    PerfDataError
        The file is damaged.

    """
    if not isinstance(data, PerfData):
        assert data.switches is not None
        return data.switches
    return _Reader(data, progress).switches()


class _Reader:
    """Reads one file."""

    def __init__(self, data: PerfData, progress: Callable[[int, int], None] | None) -> None:
        self._data = data
        self._progress = progress
        named = [event for event in data.events if event.name == SWITCH]
        # The first keeps who leaves, the last who comes. One alone is both.
        self._out, self._in = named[0], named[-1]
        self._wakeup = next(event for event in data.events if event.name == WAKEUP)
        self._sample = next((event for event in data.events if event.name == SAMPLE), None)
        self._check(self._out, "prev_pid", "prev_state")
        self._check(self._in, "next_pid")
        self._check(self._wakeup, "pid")
        if self._sample:
            self._check(self._sample)
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._samples: list[tuple[NDArray[Any], ...]] = []
        self._pairs: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._others: dict[int, int] = {}

    def _check(self, event: Event, *names: str) -> None:
        layout = self._data.layouts[event.index]
        raw = layout.has_raw and event.fields.keys() >= {*names}
        if not (layout.tid_at and layout.time_at and (raw or not names)):
            wanted = ", ".join(["thread", "time", *names])
            raise PerfDataError(
                f"{self._data.path}: samples of {event.name} do not hold all of {wanted}. The file "
                "is damaged, or was not recorded by waitfold."
            )

    def switches(self) -> Switches:
        for piece in self._data.pieces():
            of = self._data.event_of(piece, piece.samples)
            self._read_out(piece, piece.samples[of == self._out.index])
            self._read(piece, piece.samples[of == self._in.index], self._in, "next_pid", _IN)
            at = piece.samples[of == self._wakeup.index]
            self._read(piece, at, self._wakeup, "pid", _WOKEN)
            if self._sample:
                at = piece.samples[of == self._sample.index]
                tid = self._thread(piece, at, self._sample)[1]
                self._samples.append((tid[tid > 0], self._time(piece, at, self._sample)[tid > 0]))
            if self._progress:
                begun = self._data.data_offset
                self._progress(piece.end - begun, self._data.data_size)
        tid, time, kind = _joined(self._parts, ("i4", "i8", "u1"))
        sampled = None
        if self._sample:
            who, when = _joined(self._samples, ("i4", "i8"))
            order = np.lexsort((when, who))
            sampled = who[order], when[order]
        return Switches(self._translated(tid, kind), time, kind, sampled, self._others)

    def _read_out(self, piece: Piece, at: NDArray[np.int64]) -> None:
        state = self._field(piece, at, self._out, "prev_state") & _STATES
        raw = self._host(piece, at, self._out, "prev_pid")
        pid, tid = self._thread(piece, at, self._out)
        for other in np.flatnonzero(pid != tid).tolist():
            self._others[int(tid[other])] = int(pid[other])
        kind = np.where(state == 0, np.uint8(_YIELD), np.uint8(_OUT))
        time = self._time(piece, at, self._out)
        # A thread that has exited has no id of its own left (perf_event_tid).
        kept = (tid > 0) & (pid == tid)
        pairs = np.unique(raw.astype(np.uint64) << np.uint64(32) | tid.astype(np.uint64))
        self._pairs = np.union1d(self._pairs, pairs[pairs & np.uint64(0xFFFF_FFFF) < PID_MAX])
        self._parts.append((tid[kept], time[kept], kind[kept]))

    def _read(
        self, piece: Piece, at: NDArray[np.int64], event: Event, field: str, kind: int
    ) -> None:
        tid = self._host(piece, at, event, field).astype(np.int32)
        self._parts.append((tid, self._time(piece, at, event), np.full(len(at), kind, np.uint8)))

    def _time(self, piece: Piece, at: NDArray[np.int64], event: Event) -> NDArray[np.int64]:
        layout = self._data.layouts[event.index]
        self._data.long_enough(piece, at, layout.fixed)
        return piece.words[layout.time_at :].take(at).view(np.int64)

    def _thread(
        self, piece: Piece, at: NDArray[np.int64], event: Event
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return pid and tid of samples; -1 and 0 for one that is gone or of the kernel."""
        layout = self._data.layouts[event.index]
        self._data.long_enough(piece, at, layout.fixed)
        both = piece.words[layout.tid_at :].take(at).view(np.int32)
        self._possible(piece, at, np.asarray((both.reshape(-1, 2) > PID_MAX).any(axis=1)))
        return both[0::2], both[1::2]

    def _host(
        self, piece: Piece, at: NDArray[np.int64], event: Event, name: str
    ) -> NDArray[np.uint32]:
        """Return a field that is a thread's id on the host."""
        tid = self._field(piece, at, event, name)
        self._possible(piece, at, tid > PID_MAX)
        return tid

    def _possible(self, piece: Piece, at: NDArray[np.int64], bad: NDArray[np.bool_]) -> None:
        if bad.any():
            raise self._data.damaged(piece, at, bad, "has a thread that cannot be")

    def _field(
        self, piece: Piece, at: NDArray[np.int64], event: Event, name: str
    ) -> NDArray[np.uint32]:
        """Return the lower 32 bits of a field of the raw data."""
        layout = self._data.layouts[event.index]
        field = event.fields[name]
        need = field.offset + field.size
        self._data.long_enough(piece, at, layout.fixed + 1)
        raw, end = layout.raw_at(piece.words, at)
        halves = piece.words.view(np.uint32)
        if end is None:
            end = at + (piece.words[at] >> np.uint64(51)).astype(np.int64)
        bad = (halves.take(2 * raw) < need) | (8 * raw + 4 + need > 8 * end)
        if bad.any():
            raise self._data.damaged(piece, at, bad, f"is too short for its field {name}")
        return halves[1 + field.offset // 4 :].take(2 * raw)

    def _translated(self, tid: NDArray[np.int32], kind: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Return the threads by their ids in perf's own namespace, as samples have them; 0: none.

        Who comes and who is woken stand in the raw data alone, by their ids on the host. Who
        leaves stands there too, and is also the sample's own thread.
        """
        host = (self._pairs >> np.uint64(32)).astype(np.int64)
        own = (self._pairs & np.uint64(0xFFFF_FFFF)).astype(np.int32)
        if (host == own).all():
            return tid
        table = np.zeros(PID_MAX + 1, np.int32)
        table[host] = own
        raw = ((kind == _IN) | (kind == _WOKEN)) & (tid >= 0) & (tid <= PID_MAX)
        return np.where(raw, table[np.where(raw, tid, 0)], tid)


def _joined(parts: list[tuple[NDArray[Any], ...]], kinds: Sequence[str]) -> list[NDArray[Any]]:
    """Return the columns of all parts, and empty the list."""
    columns = list(zip(*parts, strict=True)) or [()] * len(kinds)
    parts.clear()
    return [np.concatenate([np.empty(0, kind), *columns.pop(0)]) for kind in kinds]


def off_cpu(
    switches: Switches,
    lives: Lives,
    gaps: NDArray[np.int64],
    waiting: NDArray[np.int32],
    stored: Callable[[int, int], int],
) -> tuple[Sleeps, Unknown]:
    """Return when the processes of `lives` were off CPU, and where that is not known.

    In the rest of their lives they ran. In `gaps`, as pair.merged() returns them, samples were
    lost, and nothing is known. `waiting` are the processes that were in a wait when the window
    began. `stored` tells when a thread stored something next after a time.

    - A wakeup counts if it is the first after its thread has left the CPU to block.
    - A process that was born waits for a CPU until it first gets one.
    - What was seen last before the window holds at its start.
    - After a gap, and at the window's start of whom nothing was seen before, what is seen first
      tells what was before: who leaves the CPU ran; who comes waited for it, and until he was woken
      was blocked. But who was in a wait had left the CPU.
    - Of whom nothing is seen in the whole window, he was blocked if no sample saw him run, or,
      where none were taken, if he was in a wait. If samples saw him run, he ran.
    - Where a thread leaves the CPU twice, that it came in between has no sample: it is one of
      whoever left then, and some tasks, idle ones among them, stop making any (seen with 6.18).
      It came when it was next seen to run, by a sample or a store, or when it left: GUESSED.
    - Where it comes twice, it is not known when it left.
    """
    tid, time, kind = _rows(switches, lives, gaps, waiting)
    tid, time, kind, guessed = _come(tid, time, kind, switches.sampled, stored)
    state = _states(tid, time, kind, switches.sampled, waiting)

    off = (state == _SLEPT) | (state == _READY)
    first = np.flatnonzero(off & (kind != _WOKEN))
    first = first[(kind[first] != _SINCE) | (time[first + 1] > time[first])]
    woken = kind[first + 1] == _WOKEN
    last = first + 1 + woken
    ends = time[last]
    runnable = state[first] == _READY
    wake = np.where(runnable, time[first], np.where(woken, time[first + 1], ends))
    flags = np.zeros(len(first), np.uint8)
    flags[(kind[first] == _BORN) | (kind[first] == _SINCE)] = START
    # What stands for what had happened before the window.
    flags[(kind[first - 1] == _SINCE) & (time[first - 1] == time[first])] = START
    flags[(kind[first] == _RESUMED) | (kind[last] == _GAP)] |= LOST
    flags[kind[last] == _UNTIL] |= END
    flags[guessed[last]] |= GUESSED
    sleeps = Sleeps(tid[first], time[first], wake, ends, runnable, flags)

    vague = np.flatnonzero(state == _UNKNOWN)
    unknown = Unknown(tid[vague], time[vague], time[vague + 1], kind[vague] == _GAP)
    return sleeps, unknown


def _rows(
    switches: Switches, lives: Lives, gaps: NDArray[np.int64], waiting: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint8]]:
    """Return all that happened to each thread and means something: tid, time, kind, in order."""
    n = len(lives.tid)
    # Each gap, cut at each life.
    life, gap = np.divmod(np.arange(n * len(gaps)), max(len(gaps), 1))
    since, until = lives.since_ns[life], lives.until_ns[life]
    lost, found = gaps[gap, 0], gaps[gap, 1]
    hit = (lost < until) & (found > since)
    life, lost, found = life[hit], lost[hit], found[hit]
    since, until = since[hit], until[hit]
    starts = np.where(lives.born, np.uint8(_BORN), np.uint8(_SINCE))
    ends = np.where(lives.died, np.uint8(_DIED), np.uint8(_UNTIL))
    own = np.isin(switches.tid, lives.tid, kind="table")
    tid = np.concatenate(
        [switches.tid[own], lives.tid, lives.tid, lives.tid[life], lives.tid[life]]
    )
    time = np.concatenate(
        [
            switches.time_ns[own],
            lives.since_ns,
            lives.until_ns,
            np.maximum(lost, since),
            np.minimum(found, until),
        ]
    )
    kind = np.concatenate(
        [
            switches.kind[own],
            starts,
            ends,
            np.full(len(life), _GAP, np.uint8),
            np.full(len(life), _RESUMED, np.uint8),
        ]
    )
    del own
    order = np.lexsort((kind, time, tid))
    tid, time, kind = tid[order], time[order], kind[order]
    del order
    earlier, was = _earlier(tid, time, kind, gaps, waiting)
    time = np.insert(time, earlier + 1, time[earlier])
    tid, kind = np.insert(tid, earlier + 1, tid[earlier]), np.insert(kind, earlier + 1, was)

    # Only within a life and outside of gaps.
    seen = (kind >= _OUT) & (kind <= _IN)
    alive = np.cumsum((kind <= _SINCE).astype(np.int8) - (kind >= _UNTIL), dtype=np.int8)
    lost_ = np.cumsum((kind == _GAP).astype(np.int8) - (kind == _RESUMED), dtype=np.int8)
    kept = ~seen | ((alive == 1) & (lost_ == 0))
    # perf writes a few records twice (pair._Threads._twice).
    kept[1:] &= (
        ~seen[1:] | (time[1:] != time[:-1]) | (kind[1:] != kind[:-1]) | (tid[1:] != tid[:-1])
    )
    tid, time, kind = tid[kept], time[kept], kind[kept]

    # Wakeups that tell something: the first after what it may end.
    wakeups = np.flatnonzero(kind == _WOKEN)
    before = kind[wakeups - 1]
    counts = before == _OUT
    for row in np.flatnonzero((before == _SINCE) | (before == _RESUMED)).tolist():
        after = int(wakeups[row])
        while kind[after] == _WOKEN:
            after += 1
        counts[row] = kind[after] not in (_OUT, _YIELD)
    kept = np.ones(len(kind), np.bool_)
    kept[wakeups[~counts]] = False
    return tid[kept], time[kept], kind[kept]


def _earlier(
    tid: NDArray[np.int32],
    time: NDArray[np.int64],
    kind: NDArray[np.uint8],
    gaps: NDArray[np.int64],
    waiting: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return rows where the window begins, and what had happened last before it, where known.

    Perf records some time before. Of whom nothing was seen then, but that he was in a wait when the
    window began and then left the CPU: he had left it before, and that he came has no sample.
    """
    rows: list[int] = []
    was: list[int] = []
    in_wait = set(waiting.tolist())
    for row in np.flatnonzero(kind == _SINCE).tolist():
        thread, last = tid[row], row - 1
        while last >= 0 and tid[last] == thread and kind[last] == _WOKEN:
            last -= 1
        seen = last >= 0 and tid[last] == thread and _OUT <= kind[last] <= _IN
        if seen and not ((gaps[:, 0] < time[row]) & (gaps[:, 1] > time[last])).any():
            rows.append(row)
            was.append(int(kind[last]))
            if kind[last] == _OUT and last < row - 1:
                rows.append(row)
                was.append(_WOKEN)
        elif int(thread) in in_wait and kind[row + 1] in (_OUT, _YIELD):
            rows.append(row)
            was.append(_OUT)
    return np.array(rows, np.int64), np.array(was, np.uint8)


def _come(
    tid: NDArray[np.int32],
    time: NDArray[np.int64],
    kind: NDArray[np.uint8],
    sampled: tuple[NDArray[np.int32], NDArray[np.int64]] | None,
    stored: Callable[[int, int], int],
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the same rows and those that are missing, in which a thread comes; which they are."""
    after = kind[1:]
    off = (kind[:-1] == _OUT) | (kind[:-1] == _YIELD) | (kind[:-1] == _BORN)
    off |= kind[:-1] == _WOKEN
    missing = np.flatnonzero(off & ((after == _OUT) | (after == _YIELD) | (after == _DIED)))
    came = np.empty(len(missing), np.int64)
    for i, row in enumerate(missing.tolist()):
        thread, since = int(tid[row]), int(time[row])
        came[i] = min(stored(thread, since), int(time[row + 1]))
        if sampled is not None:
            head, end = np.searchsorted(sampled[0], [thread, thread + 1]).tolist()
            first = head + int(np.searchsorted(sampled[1][head:end], since, "right"))
            if first < end:
                came[i] = min(came[i], int(sampled[1][first]))
    return (
        np.insert(tid, missing + 1, tid[missing]),
        np.insert(time, missing + 1, came),
        np.insert(kind, missing + 1, np.uint8(_IN)),
        np.insert(np.zeros(len(kind), np.bool_), missing + 1, True),
    )


def _states(
    tid: NDArray[np.int32],
    time: NDArray[np.int64],
    kind: NDArray[np.uint8],
    sampled: tuple[NDArray[np.int32], NDArray[np.int64]] | None,
    waiting: NDArray[np.int32],
) -> NDArray[np.uint8]:
    """Return what each row's thread does from then on until its next row."""
    after = np.append(kind[1:], np.uint8(_DIED))
    state = np.full(len(kind), _RAN, np.uint8)
    state[(kind == _YIELD) | (kind == _WOKEN) | (kind == _BORN)] = _READY
    state[kind == _OUT] = _SLEPT
    state[(kind == _GAP) | ((kind == _IN) & (after == _IN))] = _UNKNOWN
    first = (kind == _SINCE) | (kind == _RESUMED)
    state[first & (after == _IN)] = _READY
    state[first & (after == _WOKEN)] = _SLEPT
    vague = np.flatnonzero(first & ((after == _UNTIL) | (after == _GAP)))
    state[vague] = _UNKNOWN
    # Of whom nothing is seen in the whole window.
    quiet = vague[(kind[vague] == _SINCE) & (after[vague] == _UNTIL)]
    if sampled is None:
        state[quiet[np.isin(tid[quiet], waiting)]] = _SLEPT
    else:
        state[quiet] = np.where(np.isin(tid[quiet], sampled[0]), np.uint8(_RAN), np.uint8(_SLEPT))
    return state
