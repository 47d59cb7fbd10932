"""From transitions to intervals: who waited for what from when on how long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .events import (
    ATTACH,
    CUT,
    ENDED,
    EXIT,
    PID_MAX,
    STORE,
    SetRule,
    Transitions,
    TransitionStream,
)

START, END, LOST = 1, 2, 4
"""Flags: began before the window; was open at its end or when its thread ended; cut by a loss."""

FLAGS = [
    "|".join(name for bit, name in ((START, "start"), (END, "end"), (LOST, "lost")) if flags & bit)
    for flags in range(8)
]
"""Texts of an interval's flags."""

_NEVER = (1 << 63) - 1
_BEFORE = -(1 << 62)  # time of a store that was made before recording began


@dataclass(frozen=True)
class Intervals:
    """A batch of intervals, a row each. `flags` 0 is a complete one.

    Rows of one thread stand together and in the order of time within a batch. Of a flagged one
    `dur_ns` is what was observed of it. `value` 0 is a wait that was seen only when it ended.
    """

    start_ns: NDArray[np.int64]
    dur_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    value: NDArray[np.uint32]
    flags: NDArray[np.uint8]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.start_ns)

    def take(self, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Intervals:
        """Return some of the rows."""
        return Intervals(*(getattr(self, column.name)[which] for column in fields(self)))


def pair(
    stream: TransitionStream,
    start_ns: int | None = None,
    end_ns: int | None = None,
    initial: Mapping[int, int] | None = None,
    rule: SetRule | None = None,
) -> Iterator[Intervals]:
    """Return the intervals of the window from `start_ns` to `end_ns`.

    None stands for the first and the last sample. `initial` is the value of processes when the
    window began, where it was read from their memory. An interval runs from a store of another
    value than 0 to the thread's next store. Nothing is guessed:

    - What began before the window, or before ATTACH, is flagged START. A thread that was not seen
      to begin, of which `initial` says nothing and whose first store is 0 was waiting for
      something: value 0.
    - What is open at the window's end, or when its thread ends, is flagged END.
    - What overlaps a gap ends where the gap begins and is flagged LOST; what its thread did then
      is unknown until it stores something other than 0. So it is from a CUT on.

    Of a probe set other than wait events, `rule` is that by which the transitions were read, and
    explains the values. Where it is nested a start ends nothing, and an end is that of the newest
    start which is open. Where it is continued, a start of what is open already means nothing.

    A wait is yielded once; where it has several flags it counts under the first of START, LOST
    and END.
    """
    threads = _Stacks(rule) if rule is not None and rule.nested else _Threads(rule)
    window: _Window | None = None
    for batch in stream:
        if end_ns is not None:
            batch = batch.take(slice(0, int(np.searchsorted(batch.time_ns, end_ns, "right"))))
        if window is None:
            stores = np.flatnonzero(batch.mark == STORE)
            if start_ns is None and not len(stores):
                continue
            first = int(batch.time_ns[stores[0]]) if start_ns is None else start_ns
            window = _Window(first)
            threads.begin(initial or {})
        if len(batch):
            for ended in threads.step(batch, stream):
                yield window.cut(ended, stream.gaps)
    if window is None:
        if start_ns is None:
            return
        window = _Window(start_ns)
        threads.begin(initial or {})
    last = stream.last_ns if end_ns is None else end_ns
    if last is not None:
        yield window.cut(threads.finish(max(last, window.start)), stream.gaps)


class Places:
    """Where rows that are sorted by (id, time) stand."""

    def __init__(self, ids: NDArray[np.int32], times: NDArray[np.int64]) -> None:
        distinct, heads = np.unique(ids, return_index=True)
        ends = np.append(heads[1:], len(ids))[: len(heads)].tolist()
        self._times = times
        spans = zip(heads.tolist(), ends, strict=True)
        self._rows = dict(zip(distinct.tolist(), spans, strict=True))

    def latest(self, of: NDArray[np.int32], until: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the latest row of each id up to a time; -1 where there is none."""
        if not len(of):
            return np.empty(0, np.int64)
        order = np.argsort(of, kind="stable")
        distinct, heads = np.unique(of[order], return_index=True)
        found = np.full(len(of), -1, np.int64)
        tails = np.append(heads[1:], len(of)).tolist()
        for one, first, last in zip(distinct.tolist(), heads.tolist(), tails, strict=True):
            if one in self._rows:
                rows = order[first:last]
                head, end = self._rows[one]
                at = np.searchsorted(self._times[head:end], until[rows], "right") - 1
                found[rows] = np.where(at >= 0, head + at, -1)
        return found


def distinct(
    columns: Sequence[NDArray[Any]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of each of the distinct rows of columns, and which of them each row is."""
    place = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if (column != column[:1]).any():
            # Below 2**62: there are fewer rows than 2**31.
            values, code = numbered(column)
            _, place = numbered(place * len(values) + code)
    first = np.empty(int(place.max(initial=-1)) + 1, np.int64)
    # Of those with one number the last that is written stays.
    first[place[::-1]] = np.arange(len(place))[::-1]
    return first, place


def numbered(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return distinct integers in rising order, and which of them each is.

    As np.unique(), which sorts; numbers that lie close together need not be sorted.
    """
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if high - low > 4 * len(values) + 1024 or high >= 1 << 62:
        found, code = np.unique(values, return_inverse=True)
        return found, code
    place = values.astype(np.int64) - low
    seen = np.zeros(high - low + 1, np.bool_)
    seen[place] = True
    number = np.cumsum(seen) - 1
    return (np.flatnonzero(seen) + low).astype(values.dtype), number[place]


def merged(gaps: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return gaps in the order of time, those that touch as one: (n, 2), start and end."""
    apart: list[list[int]] = []
    for start, end in sorted(gaps):
        if apart and start <= apart[-1][1]:
            apart[-1][1] = max(end, apart[-1][1])
        else:
            apart.append([start, end])
    return np.array(apart, np.int64).reshape(-1, 2)


class _Threads:
    """What each thread stored last. Arrays have an element for each thread, by its code."""

    def __init__(self, rule: SetRule | None) -> None:
        self._rule = rule
        self._code = np.zeros(PID_MAX + 1, np.int32)  # by tid; 0 is none, codes begin with 1
        self._count = 1
        self._tid = np.zeros(64, np.int32)
        self._pid = np.zeros(64, np.int32)
        self._since = np.full(64, _BEFORE, np.int64)
        self._value = np.zeros(64, np.uint32)
        self._known = np.zeros(64, np.bool_)  # False: nothing is known of it yet
        self._begun = np.zeros(64, np.bool_)  # its value is older than its time

    def begin(self, initial: Mapping[int, int]) -> None:
        """Take the values that were read from memory when the window began."""
        tids = [tid for tid in initial if 0 <= tid <= PID_MAX]
        codes = self._codes(np.array(tids, np.int32))
        self._pid[codes] = tids
        self._value[codes] = [initial[tid] & 0xFFFF_FFFF for tid in tids]
        self._known[codes] = True

    def step(self, batch: Transitions, stream: TransitionStream) -> Iterator[Intervals]:
        """Yield the intervals that end with the transitions of a batch."""
        if (
            len(batch) and int(batch.tid.min()) < 0
        ):  # of a thread that is already gone (perf_event_tid)
            batch = batch.take(np.flatnonzero(batch.tid >= 0))
        if not len(batch):
            return
        order, thread, heads = _by_thread(batch)
        time = batch.time_ns[order]
        value = batch.value[order]
        how = value
        if self._rule is not None:
            value = np.where(how >= ENDED, np.uint32(0), how)
        twice = self._twice(time, value, thread, heads)
        twice = twice[batch.mark[order[twice]] == STORE]
        stream.twice += len(twice)
        if self._rule is not None and self._rule.continued:
            twice = np.union1d(twice, self._continued(value, thread, heads))
        if len(twice):
            once = np.delete(np.arange(len(batch)), order[twice])
            yield from self.step(batch.take(once), stream)
            return
        tails = np.append(heads[1:], len(thread)) - 1
        threads = self._codes(thread[heads] >> np.uint64(32))

        # The first transition of a thread ends what it stored in an earlier batch.
        what = self._value[threads]
        unknown = ~self._known[threads] & (value[heads] == 0)
        unknown &= batch.mark[order[heads]] == STORE
        open_ = np.flatnonzero((what != 0) | unknown)
        first = heads[open_]
        mark = batch.mark[order] if batch.mark.any() else None
        ended = self._ended(
            thread[first], self._since[threads[open_]], time[first], what[open_], how, mark, first
        )
        ended.flags[self._begun[threads[open_]]] |= START
        yield ended
        self._begun[threads] = mark is not None and mark[tails] == ATTACH
        self._since[threads] = time[tails]
        self._value[threads] = value[tails]
        self._pid[threads] = thread[tails] & np.uint64(0xFFFF_FFFF)
        self._known[threads] = True

        # Each other ends the one before it.
        value[tails] = 0
        begins = np.flatnonzero(value)
        ends = begins + 1
        ended = self._ended(
            thread[begins], time[begins], time[ends], value[begins], how, mark, ends
        )
        if mark is not None:
            ended.flags[mark[begins] == ATTACH] |= START
        yield ended

    def _ended(
        self,
        thread: NDArray[np.uint64],
        begun: NDArray[np.int64],
        ended: NDArray[np.int64],
        value: NDArray[np.uint32],
        how: NDArray[np.uint32],
        mark: NDArray[np.uint8] | None,
        ends: NDArray[np.int64],
    ) -> Intervals:
        """Return intervals: open ones where EXIT is their end's mark, cut ones by CUT, ATTACH."""
        flags = np.zeros(len(thread), np.uint8)
        if mark is not None:
            flags[mark[ends] == EXIT] = END
            flags[(mark[ends] == CUT) | (mark[ends] == ATTACH)] = LOST
        if self._rule is not None:
            value = self._rule.joined(value, how[ends])
        halves = thread.view(np.int32)
        return Intervals(begun, ended - begun, halves[0::2], halves[1::2], value, flags)

    def _twice(
        self,
        time: NDArray[np.int64],
        value: NDArray[np.uint32],
        thread: NDArray[np.uint64],
        heads: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return the rows that repeat the thread's row before them.

        perf writes a few records twice: perf_mmap__push (tools/perf/util/mmap.c) looks up the
        end of a buffer two times and remembers the earlier one. No thread stores twice in a ns.
        """
        same = time[1:] == time[:-1]
        rows = np.flatnonzero(same) + 1
        rows = rows[(thread[rows] == thread[rows - 1]) & (value[rows] == value[rows - 1])]
        threads = self._codes(thread[heads] >> np.uint64(32))
        again = (self._since[threads] == time[heads]) & (self._value[threads] == value[heads])
        return np.concatenate([rows, heads[again]])

    def _continued(
        self, value: NDArray[np.uint32], thread: NDArray[np.uint64], heads: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the rows that start what the thread's row before them started."""
        rows = np.flatnonzero((value[1:] == value[:-1]) & (thread[1:] == thread[:-1])) + 1
        threads = self._codes(thread[heads] >> np.uint64(32))
        rows = np.concatenate([rows, heads[self._value[threads] == value[heads]]])
        starts: NDArray[np.int64] = rows[value[rows] != 0]
        return starts

    def finish(self, time: int) -> Intervals:
        """Return the intervals that are open at `time`."""
        codes = np.flatnonzero(self._value[: self._count])
        begun = self._since[codes]
        value = self._value[codes]
        if self._rule is not None:
            value = self._rule.joined(value, np.zeros(len(codes), np.uint32))
        return Intervals(
            begun,
            time - begun,
            self._pid[codes],
            self._tid[codes],
            value,
            np.where(self._begun[codes], np.uint8(START | END), np.uint8(END)),
        )

    def _codes(self, tids: NDArray[np.integer]) -> NDArray[np.int32]:
        codes: NDArray[np.int32] = self._code[tids]
        if not codes.all():
            new = np.unique(tids[codes == 0])
            count = self._count + len(new)
            if count > len(self._tid):
                size = 2 * count
                self._tid = np.resize(self._tid, size)
                self._pid = np.resize(self._pid, size)
                self._since = np.resize(self._since, size)
                self._value = np.resize(self._value, size)
                self._known = np.resize(self._known, size)
                self._begun = np.resize(self._begun, size)
            fresh = slice(self._count, count)
            self._code[new] = np.arange(self._count, count)
            self._tid[fresh] = new
            self._since[fresh] = _BEFORE
            self._value[fresh] = 0
            self._known[fresh] = False
            self._begun[fresh] = False
            self._count = count
            codes = self._code[tids]
        return codes


class _Stacks(_Threads):
    """What is open in each thread, one within the other; `_since` and `_value` are its last row."""

    def __init__(self, rule: SetRule) -> None:
        super().__init__(rule)
        self._codes_of = rule.joined
        self._open = _Rows.none()  # starts, those of one thread together and the newest last

    def step(self, batch: Transitions, stream: TransitionStream) -> Iterator[Intervals]:
        """Yield the intervals that end with the transitions of a batch."""
        batch = batch.take(np.flatnonzero(batch.tid >= 0))  # see _Threads.step
        if not len(batch):
            return
        order, thread, heads = _by_thread(batch)
        new = _Rows(thread, batch.time_ns[order], batch.value[order], batch.mark[order])
        twice = self._twice(new.time, new.value, thread, heads)
        twice = twice[new.mark[twice] == STORE]
        stream.twice += len(twice)
        threads = self._codes(thread[heads] >> np.uint64(32))
        tails = np.append(heads[1:], len(thread)) - 1
        unknown = ~self._known[threads] & (new.value[heads] >= ENDED)
        unseen = new.take(heads[unknown & (new.mark[heads] == STORE)])
        self._since[threads] = new.time[tails]
        self._value[threads] = new.value[tails]
        self._known[threads] = True

        new = new.take(np.delete(np.arange(len(thread)), twice))
        goes_on = np.isin(self._open.tid, new.tid)
        rows = _Rows.joined(self._open.take(goes_on), new)
        rows = rows.take(np.argsort(rows.tid, kind="stable"))
        starts, ends, left = _nested(rows)
        self._open = _Rows.joined(self._open.take(~goes_on), rows.take(left))

        yield self._intervals(unseen.thread, np.full(len(unseen), _BEFORE), None, unseen)
        begun = rows.take(starts)
        yield self._intervals(begun.thread, begun.time, begun.value, rows.take(ends))

    def finish(self, time: int) -> Intervals:
        """Return the intervals that are open at `time`."""
        open_ = self._open
        end = np.full(len(open_), EXIT, np.uint8)
        ended = _Rows(open_.thread, np.full(len(open_), time), np.zeros_like(open_.value), end)
        return self._intervals(open_.thread, open_.time, open_.value, ended)

    def _intervals(
        self,
        thread: NDArray[np.uint64],
        begun: NDArray[np.int64],
        value: NDArray[np.uint32] | None,
        ended: _Rows,
    ) -> Intervals:
        if value is None:
            value = np.zeros(len(thread), np.uint32)
        flags = np.where(ended.mark == EXIT, np.uint8(END), np.uint8(0))
        halves = thread.view(np.int32)
        return Intervals(
            begun,
            ended.time - begun,
            halves[0::2],
            halves[1::2],
            self._codes_of(value, ended.value),
            flags,
        )


@dataclass(frozen=True)
class _Rows:
    """Transitions, those of one thread together."""

    thread: NDArray[np.uint64]
    time: NDArray[np.int64]
    value: NDArray[np.uint32]
    mark: NDArray[np.uint8]

    @property
    def tid(self) -> NDArray[np.int32]:
        return self.thread.view(np.int32)[1::2]

    def __len__(self) -> int:
        return len(self.thread)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> _Rows:
        return _Rows(*(getattr(self, column.name)[which] for column in fields(self)))

    @staticmethod
    def joined(*parts: _Rows) -> _Rows:
        return _Rows(
            *(np.concatenate([getattr(part, c.name) for part in parts]) for c in fields(_Rows))
        )

    @staticmethod
    def none() -> _Rows:
        return _Rows(
            np.empty(0, np.uint64),
            np.empty(0, np.int64),
            np.empty(0, np.uint32),
            np.empty(0, np.uint8),
        )


def _nested(
    rows: _Rows,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows that start and those that end each interval, and starts still open.

    A mark ends all that its thread has open. So what lies between two marks stands alone, a part;
    in it an end belongs to the newest start of its own level, the number of starts that were open.
    """
    size = len(rows)
    store = rows.mark == STORE
    is_start = store & (rows.value < ENDED)
    is_end = store & ~is_start
    head = np.ones(size, np.bool_)
    head[1:] = (rows.tid[1:] != rows.tid[:-1]) | ~store[:-1]
    part = np.cumsum(head) - 1
    first = np.flatnonzero(head)

    # How many are open after each row, if an end where nothing is open were to count below 0,
    # and the least that this was up to there: where that sinks is such an end.
    count = np.cumsum(is_start.astype(np.int64) - is_end)
    count -= np.repeat(
        count[first] - is_start[first] + is_end[first], np.diff(np.append(first, size))
    )
    below = 2 * size * part  # so that each part begins anew
    least = np.minimum(np.minimum.accumulate(count - below) + below, 0)
    sinks = least < np.where(head, 0, np.append(0, least[:-1]))
    level = count - least + is_end

    paired = np.flatnonzero(is_start | (is_end & ~sinks))
    paired = paired[np.argsort((part * (size + 1) + level)[paired], kind="stable")]
    same = np.diff(part[paired]) == 0
    same &= np.diff(level[paired]) == 0
    closed = np.append(same & is_start[paired[:-1]] & is_end[paired[1:]], False)
    closed = closed[: len(paired)]
    starts, ends = paired[closed], paired[np.append(False, closed[:-1])[: len(paired)]]

    open_ = np.sort(paired[is_start[paired] & ~closed])
    last = np.append(first[1:], size) - 1  # of each part
    stop = last[part[open_]]
    marked = ~store[stop]
    starts = np.concatenate([starts, open_[marked]])
    ends = np.concatenate([ends, stop[marked]])
    in_time = np.argsort(ends, kind="stable")
    return starts[in_time], ends[in_time], open_[~marked]


def _by_thread(
    batch: Transitions,
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
    """Return the order that puts each thread's rows together, the threads, where each begins."""
    # NumPy sorts 16-bit integers by radix, several times faster than it does longer ones.
    low = np.ascontiguousarray(batch.thread.view(np.uint16)[2::4])
    order = np.argsort(low, kind="stable")
    thread = batch.thread[order]
    heads = np.flatnonzero(np.append(True, thread[1:] != thread[:-1]))
    if len(np.unique(thread[heads] >> np.uint64(32))) < len(heads):
        order = np.argsort(batch.tid, kind="stable")  # some agree in their lower 16 bits
        thread = batch.thread[order]
        tid = thread >> np.uint64(32)
        heads = np.flatnonzero(np.append(True, tid[1:] != tid[:-1]))
    return order, thread, heads


class _Window:
    """Cuts intervals at the window's start and at gaps."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._gaps = 0
        self._gap_start = self._gap_end = np.empty(0, np.int64)

    def cut(self, all_: Intervals, gaps: list[tuple[int, int]]) -> Intervals:
        """Return the intervals as far as they were observed within the window."""
        begun, flags = all_.start_ns, all_.flags
        early = begun < self.start
        some_early = bool(early.any())
        if not some_early and not gaps:
            return all_
        end = begun + all_.dur_ns
        keep = np.ones(len(begun), np.bool_)
        if gaps:
            # What was read from memory, or what nobody knows, is so at the window's start.
            since = np.where(begun == _BEFORE, self.start, begun)
            gap_start = self._first_gap(gaps, since)
            lost = gap_start < end
            keep &= ~(lost & (all_.value == 0))
            end = np.where(lost, np.maximum(since, gap_start), end)
            flags = np.where(lost, LOST, flags).astype(np.uint8)
        if some_early:
            keep &= ~early | (end > self.start) | ((begun == _BEFORE) & (flags & LOST > 0))
            begun = np.where(early, self.start, begun)
            flags = flags | early.view(np.uint8) * np.uint8(START)
        cut = Intervals(begun, np.maximum(end - begun, 0), all_.pid, all_.tid, all_.value, flags)
        return cut if keep.all() else cut.take(keep)

    def _first_gap(
        self, gaps: list[tuple[int, int]], since: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the start of the first gap that ends after each time of `since`."""
        if self._gaps != len(gaps):
            self._gaps = len(gaps)
            apart = merged(gaps)
            self._gap_start = np.append(apart[:, 0], _NEVER)
            self._gap_end = apart[:, 1]
        return self._gap_start[np.searchsorted(self._gap_end, since, "right")]
