"""Two captures compared: what changed by more than the noise within them.

Each window is cut into slices of equal length, all processes together: what processes do in one
moment is not independent, and a slice is long beside most waits. The bootstrap draws whole slices,
for all rows at once, so that what depends on one another stays together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waitfold.account import shape
from waitfold.analysis import Progress, set_intervals
from waitfold.audit import left, profile_events, rows_of, sampled, stack_of
from waitfold.backends import CLIENT
from waitfold.capture import Capture
from waitfold.errors import Misuse, WaitfoldError
from waitfold.join import UNSEEN, Joined, Segments, join
from waitfold.pair import END, LOST, distinct
from waitfold.profile import Traces, read_traces
from waitfold.queries import IDLE_IN_TRANSACTION, NONE, UNKNOWN
from waitfold.sched import SAMPLE
from waitfold.symbols import captured_symbols
from waitfold.waitevents import is_idle_wait

SLICES = 40
"""Slices of a window: enough to know a spread by, and as long as that allows."""

BLOCKS = (1, 2, 4, 8)
"""Slices taken together for a spread. The greatest counts: noise may be slower than a slice. What
is slower than the window does not show in it; so two windows may differ as fifths of one do."""

LEVEL = 0.99
"""Of pairs that differ by no more than the noise within them, so many show no significant row."""

MARGIN = 0.05
"""A change is significant if more than this part of the greater value is certain: two runs of the
same differ by some per cent for reasons that neither window shows (bench/RESULTS.md)."""

SHARE = 0.01
"""A row with a smaller share of the time of all rows is not judged, in neither capture."""

ENOUGH = SLICES // 2
"""Nor is one whose time lies in fewer slices in effect, (sum of x)^2 / (sum of x^2), in both."""

FOR_OTHERS = ("LWLock", "Lock", "IPC", "BufferPin", "Buffer")
"""Classes of waits for another process: for as long as that one does what another row tells."""

NO_WAIT = "(no wait event)"

_DRAWS = 4000
_SEED = 4

Floats = NDArray[np.float64]

Key = tuple[str, ...]
"""Type of backend, FOREGROUND for clients and parallel workers; and what it did, in parts."""

FOREGROUND = ""


@dataclass(frozen=True)
class Stretches:
    """What processes did from when to when; `key` indexes `keys`.

    Of one that is not `whole`, the window's edges or a loss hid a part. `counted` is False for
    keys whose stretches have no meaning as a number.
    """

    keys: list[Key]
    counted: list[bool]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    key: NDArray[np.int64]
    whole: NDArray[np.bool_]

    def take(self, which: NDArray[np.bool_]) -> Stretches:
        """Return some of them."""
        return replace(
            self,
            start_ns=self.start_ns[which],
            end_ns=self.end_ns[which],
            key=self.key[which],
            whole=self.whole[which],
        )


@dataclass(frozen=True)
class Side:
    """One capture in slices.

    `time`, `whole` and `count` have a row for each slice and a column for each key: ns, ns of
    the stretches that were seen whole, and the number of these. `seconds` is how much of each
    slice is known. `transactions` is how many ended in it, None where the capture does not tell.
    """

    capture: Capture
    window_ns: int
    clients: int
    lost: int
    warnings: list[str]
    keys: list[Key]
    counted: list[bool]
    time: Floats
    whole: Floats
    count: Floats
    seconds: Floats
    transactions: Floats | None

    @property
    def known(self) -> float:
        """The share of the window in which it is known what client backends did."""
        return float(self.seconds.sum()) * 1e9 / self.window_ns

    def unit(self, per_transaction: bool) -> Floats:
        """Return what a slice is divided by: its transactions, which must be known, or seconds."""
        if not per_transaction:
            return self.seconds
        assert self.transactions is not None
        return self.transactions

    @property
    def rate(self) -> float | None:
        """Transactions a second."""
        if self.transactions is None:
            return None
        return float(self.transactions.sum()) * 1e9 / self.window_ns


@dataclass(frozen=True)
class Change:
    """A measure of a row in both captures; None where there is nothing to measure.

    `low` and `high` are the ends of the interval of after - before, None where it is not judged.
    """

    before: float | None
    after: float | None
    low: float | None = None
    high: float | None = None

    @property
    def significant(self) -> bool:
        """Whether more than noise, by its interval and MARGIN."""
        return self.certain > MARGIN * max(self.before or 0.0, self.after or 0.0)

    @property
    def difference(self) -> float | None:
        """After - before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def ratio(self) -> float | None:
        """After / before."""
        return self.after / self.before if self.before and self.after is not None else None

    @property
    def certain(self) -> float:
        """How much of the difference is certain: the end of the interval nearer to 0, or 0."""
        if self.low is None or self.high is None:
            return 0.0
        return max(self.low, -self.high, 0.0)


@dataclass(frozen=True)
class Row:
    """One row: ns a unit, number a unit, ns each.

    `cut` is the share of its time, before and after, that is of stretches not seen whole. They
    count in `time` alone. `size` is how much of the change is certain, in ns a unit, by the
    measure that tells most; of a wait for others by as many as there are clients, as what one
    of them does all others may wait for.
    """

    key: Key
    time: Change
    count: Change
    mean: Change
    cut: tuple[float, float]
    size: float

    @property
    def judged(self) -> bool:
        """Whether there is enough of it to judge any of the measures."""
        return any(change.low is not None for change in (self.time, self.count, self.mean))

    @property
    def greatest(self) -> float:
        """The greater of the times, in ns a unit."""
        return max(self.time.before or 0.0, self.time.after or 0.0)

    @property
    def significant(self) -> bool:
        """Whether any of the measures changed."""
        return any(change.significant for change in (self.time, self.count, self.mean))


def event_stretches(joined: Joined) -> Stretches:
    """Return the waits that are not idle, and what client backends did in no wait."""
    segments, events = joined.segments, joined.capture.events
    type_, names = _types(joined, segments.pid)
    value = segments.value
    kept = np.where(value == 0, type_ == 0, ~is_idle_wait(value) & (value != UNSEEN))
    codes, key = np.unique(type_ << 32 | value, return_inverse=True)
    of_event = [(names[code >> 32], code & 0xFFFF_FFFF) for code in codes.tolist()]
    keys: list[Key] = [(name, *(events.label(v) if v else (NO_WAIT,))) for name, v in of_event]
    seen = value != UNSEEN
    return _joined(segments, key, keys, [v != 0 for _, v in of_event], kept, seen)


def query_stretches(joined: Joined) -> Stretches:
    """Return the statements that client backends ran, and their idle time in transactions."""
    if not joined.asked:
        raise Misuse(
            f"{joined.capture.path} does not hold the queries: waitfold record --with query ..."
        )
    segments = joined.segments
    type_, _ = _types(joined, segments.pid)
    query = segments.query
    kept = (type_ == 0) & (query != UNKNOWN) & (query != NONE)
    codes, row = np.unique(query, return_inverse=True)
    table = joined.queries.table
    # Queries that differ in their constants alone are one; one text may be with an id and without.
    texts = [shape(table[code].text) for code in codes.tolist()]
    place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    key = np.array([place[text] for text in texts], np.int64)[row]
    keys: list[Key] = [(FOREGROUND, text) for text in place]
    idle = table[IDLE_IN_TRANSACTION].text
    counted = [text != idle for text in place]
    return _joined(segments, key, keys, counted, kept, query != UNKNOWN)


def stack_stretches(joined: Joined) -> Stretches:
    """Return the time off and on the CPU by stack, root first, and wait event where there was one.

    Idle waits are left out, and the postmaster, which has none and is nothing but idle. A sample on
    the CPU stands for the time before it; their number means nothing.
    """
    capture, segments, sleeps = joined.capture, joined.segments, joined.sleeps
    traces = read_traces(*profile_events(capture), captured_symbols(capture.path))
    stacks = _Stacks(joined, traces)

    trace = np.full(len(segments), -1, np.int64)
    asleep = np.flatnonzero(segments.sleep >= 0)
    if len(asleep):
        trace[asleep] = left(sleeps, traces)[segments.sleep[asleep]]
    key = stacks.keys_of(segments.pid, trace, segments.value)
    idle = is_idle_wait(segments.value) | np.isin(segments.pid, joined.postmasters)
    idle |= segments.value == UNSEEN
    kept = (trace >= 0) & ~idle
    off = _joined(segments, key, stacks.keys, [True] * len(stacks.keys), kept, trace >= -1)

    rows = rows_of(traces, SAMPLE)
    value, trace = sampled(segments, traces)
    time = traces.time_ns[rows]
    ours = np.isin(traces.pid[rows], segments.pid)
    ours &= (time > joined.start_ns) & (time <= joined.end_ns)
    rows, value, trace, time = rows[ours], value[ours], trace[ours], time[ours]
    since = np.maximum(time - traces.weight[rows].astype(np.int64), joined.start_ns)
    key = stacks.keys_of(traces.pid[rows], trace, value, on_cpu=True)
    every = np.ones(len(rows), np.bool_)
    counted = [True] * len(off.keys) + [False] * (len(stacks.keys) - len(off.keys))
    return Stretches(
        stacks.keys,
        counted,
        np.append(off.start_ns, since),
        np.append(off.end_ns, time),
        np.append(off.key, key),
        np.append(off.whole, every),
    )


class _Stacks:
    """Keys of stacks, one for each type of backend, stack and wait event."""

    def __init__(self, joined: Joined, traces: Traces) -> None:
        self.keys: list[Key] = []
        self._joined = joined
        self._traces = traces
        self._place: dict[Key, int] = {}

    def keys_of(
        self,
        pid: NDArray[np.int32],
        trace: NDArray[np.int64],
        value: NDArray[np.uint32],
        on_cpu: bool = False,
    ) -> NDArray[np.int64]:
        """Return the key of each row."""
        type_, names = _types(self._joined, pid)
        label = self._joined.capture.events.label
        first, row = distinct([type_, trace, value])
        found = []
        for code, stack, event in zip(
            type_[first].tolist(), trace[first].tolist(), value[first].tolist(), strict=True
        ):
            frames = stack_of(self._traces, stack, None)[::-1] or ("[unknown]",)
            waits = (":".join(label(event)),) if event not in (0, UNSEEN) else ()
            key = (names[code], *frames, *waits, *(("[on-CPU]",) if on_cpu else ()))
            found.append(self._place.setdefault(key, len(self._place)))
        self.keys = [*self._place]
        return np.array(found, np.int64)[row]


def _types(joined: Joined, pid: NDArray[np.int32]) -> tuple[NDArray[np.int64], list[str]]:
    """Return the type of backend of each row, and what they are called: row 0 is the foreground."""
    pids, place = np.unique(pid, return_inverse=True)
    backends = [joined.backends[p] for p in pids.tolist()]
    types = [FOREGROUND if b.kind == "foreground" else b.type for b in backends]
    names = sorted({FOREGROUND, *types})
    return np.array([names.index(type_) for type_ in types], np.int64)[place], names


def _joined(
    segments: Segments,
    key: NDArray[np.int64],
    keys: list[Key],
    counted: list[bool],
    kept: NDArray[np.bool_],
    seen: NDArray[np.bool_],
) -> Stretches:
    """Return the segments with neighbours of one key made one.

    One is whole if its process was seen to do something else before and after.
    """
    follows = segments.pid[1:] == segments.pid[:-1]
    follows &= segments.start_ns[1:] == segments.end_ns[:-1]
    head = np.flatnonzero(np.append(True, ~(follows & (key[1:] == key[:-1])))[: len(key)])
    last = np.append(head[1:], len(key))[: len(head)] - 1
    bounded = follows & seen[1:] & seen[:-1]
    whole = np.append(False, bounded)[head] & np.append(bounded, False)[last]
    all_ = Stretches(
        keys, counted, segments.start_ns[head], segments.end_ns[last], key[head], whole
    )
    return all_.take(kept[head])


STRETCHES = {"event": event_stretches, "query": query_stretches, "stack": stack_stretches}
"""What can be compared."""


def read_side(capture: Capture, by: str, progress: Progress | None = None) -> Side:
    """Read a capture through for what it is to be compared by, one of STRETCHES."""
    joined = join(capture, progress)
    return sliced(joined, STRETCHES[by](joined), transaction_ends(joined, progress))


def transaction_ends(joined: Joined, progress: Progress | None = None) -> NDArray[np.int64] | None:
    """Return when transactions of client backends ended, None where the capture does not tell.

    They are those of the probe set `transaction`; else, by `query`, each time that a backend
    became idle, outside of a transaction, after a query.
    """
    clients = [pid for pid, backend in joined.backends.items() if backend.type == CLIENT]
    if "transaction" in joined.capture.sets:
        _, batches, _ = set_intervals(joined.capture, "transaction", progress)
        ends = [np.empty(0, np.int64)]
        for batch in batches:
            # One that lacks its start has an end all the same.
            ended = (batch.flags & (END | LOST) == 0) & np.isin(batch.pid, clients)
            ends.append((batch.start_ns + batch.dur_ns)[ended])
        return np.concatenate(ends)
    if not joined.asked:
        return None
    queries = joined.queries
    ended = (queries.code[1:] == NONE) & (queries.code[:-1] > NONE)
    ended &= (queries.pid[1:] == queries.pid[:-1]) & np.isin(queries.pid[1:], clients)
    times: NDArray[np.int64] = queries.time_ns[1:][ended]
    return times


def sliced(joined: Joined, stretches: Stretches, ended_ns: NDArray[np.int64] | None) -> Side:
    """Cut a capture into slices; `ended_ns` is when transactions ended."""
    edges = np.linspace(joined.start_ns, joined.end_ns, SLICES + 1).round().astype(np.int64)
    if edges[0] == edges[-1]:
        raise WaitfoldError(f"nothing was recorded in {joined.capture.path}")
    known = _known(joined, edges)
    if not known.any():
        raise WaitfoldError(f"{joined.capture.path}: all samples of client backends were lost")
    stretches = _used(stretches)
    time, _ = _spread(stretches, edges)
    whole, count = _spread(stretches.take(stretches.whole), edges)
    return Side(
        joined.capture,
        joined.end_ns - joined.start_ns,
        sum(backend.type == CLIENT for backend in joined.backends.values()),
        joined.lost,
        joined.warnings,
        stretches.keys,
        stretches.counted,
        time,
        whole,
        count,
        np.diff(edges) / 1e9 * known,
        None if ended_ns is None else np.histogram(ended_ns, edges)[0].astype(np.float64),
    )


def _used(stretches: Stretches) -> Stretches:
    """Return them with no keys but their own."""
    used, key = np.unique(stretches.key, return_inverse=True)
    return replace(
        stretches,
        keys=[stretches.keys[i] for i in used.tolist()],
        counted=[stretches.counted[i] for i in used.tolist()],
        key=key,
    )


def _spread(stretches: Stretches, edges: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return ns and number of stretches by slice and key.

    What crosses an edge counts on either side by the share of it that lies there.
    """
    start, end = stretches.start_ns, stretches.end_ns
    slices, keys = len(edges) - 1, len(stretches.keys)
    first = np.clip(np.searchsorted(edges, start, "right") - 1, 0, slices - 1)
    last = np.clip(np.searchsorted(edges, end, "left") - 1, first, slices - 1)
    pieces = last - first + 1
    row = np.repeat(np.arange(len(start)), pieces)
    place = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    ns = np.minimum(end[row], edges[place + 1]) - np.maximum(start[row], edges[place])
    length = (end - start)[row]
    share = np.divide(ns, length, out=np.ones(len(row)), where=length > 0)
    cell = place * keys + stretches.key[row]
    size = slices * keys
    # Of no rows bincount counts in integers.
    total, number = (np.bincount(cell, x, size).astype(np.float64) for x in (ns, share))
    return total.reshape(slices, keys), number.reshape(slices, keys)


def _known(joined: Joined, edges: NDArray[np.int64]) -> Floats:
    """Return the share of client backends' time in each slice of which the wait is known."""
    segments = joined.segments
    kept = _types(joined, segments.pid)[0] == 0
    unseen = (segments.value == UNSEEN).astype(np.int64)
    keys: list[Key] = [("seen",), ("unseen",)]
    all_ = Stretches(keys, [False, False], segments.start_ns, segments.end_ns, unseen, kept)
    ns, _ = _spread(all_.take(kept), edges)
    total = ns.sum(axis=1)
    return _ratio(ns[:, 0], total, 1.0)


def in_terms_of(before: Side, after: Side) -> Side:
    """Return `after` with the names of wait events as the server of `before` spells them."""
    names = {(c, n.lower()): (c, n) for c, n in before.capture.events.names}
    return replace(
        after,
        keys=[
            (key[0], *names.get((key[1], key[2].lower()), key[1:])) if len(key) == 3 else key
            for key in after.keys
        ],
    )


def differences(before: Side, after: Side, by: str) -> tuple[list[str], set[Key]]:
    """Return what else differs between two captures, and rows that cannot be compared for it."""
    found: list[str] = []
    one, other = before.capture, after.capture
    apart: set[Key] = set()
    if one.pg_version != other.pg_version:
        found.append(f"PostgreSQL {one.pg_version} before, {other.pg_version} after")
    if one.pg_version != other.pg_version and by == "event":
        for side, events in ((before, other.events), (after, one.events)):
            known = {(class_, name.lower()) for class_, name in events.names}
            apart |= {k for k in side.keys if len(k) == 3 and (k[1], k[2].lower()) not in known}
        if apart:
            names = ", ".join(sorted({":".join(key[1:]) for key in apart}))
            found.append(f"only one of the two versions has, so not judged: {names}")
    means = [f"{c.mode} by {c.manifest.get('engine', 'unknown')}" for c in (one, other)]
    if means[0] != means[1]:
        found.append(f"recorded in mode {means[0]} before, {means[1]} after, whose costs differ")
    for key, name in (
        ("sets", "probe sets"),
        ("profiles", "profiles"),
        ("call_graph", "call graph"),
        ("cpus", "CPUs"),
        ("kernel", "kernel"),
        ("host", "host"),
    ):
        values = [c.manifest.get(key, "none") for c in (one, other)]
        if values[0] != values[1]:
            found.append(f"{name}: {values[0]} before, {values[1]} after")
    if before.clients != after.clients:
        found.append(f"client backends: {before.clients} before, {after.clients} after")
    return found, apart


def per_transaction(before: Side, after: Side, per: str | None) -> bool:
    """Return whether to compare by transaction: as asked for, else where both captures tell.

    Raises
    ------
    Misuse
        It is asked for, and one of them does not.

    """
    silent = [side for side in (before, after) if not side.rate]
    if per == "transaction" and silent:
        held = (
            "no transaction ended in it"
            if silent[0].rate == 0
            else ("waitfold record --with transaction, or --with query")
        )
        raise Misuse(
            f"{silent[0].capture.path} does not tell how many transactions there were: {held}"
        )
    return per != "second" and not silent


def compare(
    before: Side, after: Side, per_transaction: bool, apart: Collection[Key] = ()
) -> list[Row]:
    """Return the rows of two captures, those with a significant change first, each by size.

    Time and number a unit, and time each, are ratios of sums over slices. The spread of one is that
    of the deviations from it of its slices, or BLOCKS of them. An interval reaches as many spreads
    to either side as the greatest deviation, of any judged measure of any row, stays below in LEVEL
    of the draws: so all intervals hold at once (single-step max-t of Westfall and Young, by
    the bootstrap as in Romano and Wolf). Those `apart` are not judged.
    """
    keys = list(dict.fromkeys([*before.keys, *after.keys]))
    counted = dict(zip((*before.keys, *after.keys), (*before.counted, *after.counted), strict=True))
    sides = [_aligned(before, keys), _aligned(after, keys)]
    rng = np.random.default_rng(_SEED)
    draws = [_draws(rng) for _ in sides]
    units = [side.unit(per_transaction)[:, None] for side in sides]

    shares = [_ratio(side.time.sum(axis=0), side.time.sum()) for side in sides]
    large = np.max(shares, axis=0) >= SHARE
    large &= np.array([key not in apart for key in keys], np.bool_)
    number = large & np.array([counted[key] for key in keys], np.bool_)
    some = [_effective(side.time) for side in sides]
    often = [_effective(side.count) for side in sides]
    # What is divided by what, and which rows can be judged by it.
    measures = {
        "time": ([s.time for s in sides], units, large & (some[0] | some[1])),
        "count": ([s.count for s in sides], units, number & (often[0] | often[1])),
        "mean": (
            [s.whole for s in sides],
            [s.count for s in sides],
            number & often[0] & often[1],
        ),
    }
    estimates = {
        what: [_estimate(*three, judged) for three in zip(tops, bottoms, draws, strict=True)]
        for what, (tops, bottoms, judged) in measures.items()
    }
    greatest = np.zeros(_DRAWS)
    for one, other in estimates.values():
        deviation = np.abs(
            _ratio(other.off - one.off, np.sqrt(one.off_variance + other.off_variance))
        )
        greatest = np.maximum(greatest, deviation.max(axis=1, initial=0.0))
    width = float(np.quantile(greatest, LEVEL))

    cuts = [1 - _ratio(side.whole.sum(axis=0), side.time.sum(axis=0), 1.0) for side in sides]
    clients = max(before.clients, after.clients, 1)
    rows = []
    for i, key in enumerate(keys):
        changes = {
            what: _change(one, other, i, width if measures[what][2][i] else None)
            for what, (one, other) in estimates.items()
        }
        if not counted[key]:
            changes |= {"count": Change(None, None), "mean": Change(None, None)}
        waiting = clients if key[0] == FOREGROUND and key[1] in FOR_OTHERS else 1
        size = _certain_ns(**changes) / waiting
        rows.append(Row(key, cut=(float(cuts[0][i]), float(cuts[1][i])), size=size, **changes))
    return sorted(
        rows,
        key=lambda row: (not row.significant, -row.size * row.significant, -row.greatest, row.key),
    )


def _certain_ns(time: Change, count: Change, mean: Change) -> float:
    number, each = (min(of.before or 0.0, of.after or 0.0) for of in (count, mean))
    return max(time.certain, mean.certain * number, count.certain * each)


def _draws(rng: np.random.Generator) -> Floats:
    """Return how often each slice is in each draw."""
    return rng.multinomial(SLICES, np.full(SLICES, 1 / SLICES), _DRAWS).astype(np.float64)


def _aligned(side: Side, keys: list[Key]) -> Side:
    """Return the side with columns for all of these keys, which hold its own."""
    place = {key: i for i, key in enumerate(keys)}
    columns = [place[key] for key in side.keys]

    def aligned(of: Floats) -> Floats:
        wide = np.zeros((SLICES, len(keys)))
        np.add.at(wide.T, columns, of.T)
        return wide

    return replace(
        side, time=aligned(side.time), whole=aligned(side.whole), count=aligned(side.count)
    )


def _effective(x: Floats) -> NDArray[np.bool_]:
    """Return of which columns enough slices hold a part, and there are as many if it is a count."""
    sums = x.sum(axis=0)
    enough: NDArray[np.bool_] = (_ratio(sums**2, (x**2).sum(axis=0)) >= ENOUGH) & (sums >= ENOUGH)
    return enough


@dataclass(frozen=True)
class _Estimate:
    """Ratios of sums, one a column, and their variances.

    `off` is by how much the ratios of each draw are off, `off_variance` the variance by the draw
    itself: of the columns that are judged.
    """

    value: Floats
    variance: Floats
    off: Floats
    off_variance: Floats


def _estimate(top: Floats, bottom: Floats, draws: Floats, judged: NDArray[np.bool_]) -> _Estimate:
    """Estimate sum(top) / sum(bottom) of each column; `draws` says how often each slice counts.

    The variance is that of a ratio of sums by linearisation: with r the ratio, the slices' sum of
    squares of (top - r bottom) / sum(bottom).
    """
    sums = bottom.sum(axis=0)
    value = _ratio(top.sum(axis=0), sums, np.nan)
    off = _ratio(top - value * bottom, sums)
    variance = np.zeros(len(value))
    for block in BLOCKS:
        blocks = SLICES // block
        square = (off.reshape(blocks, block, -1).sum(axis=1) ** 2).sum(axis=0)
        variance = np.maximum(variance, square * blocks / (blocks - 1))
    # The last is the longest: a window is one such block, not the mean of several.
    variance = np.maximum(variance, square * blocks**2 / (blocks - 1))

    top = top[:, judged]
    bottom = np.broadcast_to(bottom, off.shape)[:, judged]
    drawn_sums = draws @ bottom
    drawn = _ratio(draws @ top, drawn_sums)
    square = draws @ top**2 - 2 * drawn * (draws @ (top * bottom)) + drawn**2 * (draws @ bottom**2)
    drawn_variance = _ratio(square.clip(0), drawn_sums**2) * SLICES / (SLICES - 1)
    return _Estimate(value, variance, drawn - value[judged], drawn_variance)


def _change(one: _Estimate, other: _Estimate, i: int, width: float | None) -> Change:
    before, after = float(one.value[i]), float(other.value[i])
    if width is None:
        return Change(*(None if np.isnan(x) else x for x in (before, after)))
    reach = width * float(np.sqrt(one.variance[i] + other.variance[i]))
    return Change(before, after, after - before - reach, after - before + reach)


def _ratio(top: Any, bottom: Any, else_: float = 0.0) -> Floats:
    """Return the quotient, `else_` where there is nothing to divide by."""
    top, bottom = np.broadcast_arrays(np.asarray(top, np.float64), bottom)
    quotient: Floats = np.divide(top, bottom, out=np.full(top.shape, else_), where=bottom > 0)
    return quotient
