"""What the server's wait events do not say: blocked in none, and CPU burnt inside one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from waitfold.account import Account
from waitfold.bundled import Bundled
from waitfold.capture import Capture
from waitfold.errors import Misuse
from waitfold.join import BLOCKED, UNSEEN, Segments
from waitfold.perfdata import Event, PerfData
from waitfold.profile import Traces
from waitfold.sched import SAMPLE, SWITCH, Sleeps

# What stands in a stack because the CPU is left there, or because of the way into the kernel.
_WAY = frozenset(
    (
        "__schedule", "schedule", "schedule_timeout", "__traceiter_sched_switch",
        "entry_SYSCALL_64_after_hwframe", "do_syscall_64", "irqentry_exit_to_user_mode",
        "exit_to_user_mode_loop", "asm_exc_int3", "asm_sysvec_reschedule_ipi",
        "asm_sysvec_apic_timer_interrupt", "[unknown]", "__libc_start_call_main", "_start", "main",
        "PostmasterMain",
    )
)  # fmt: skip

_PROFILES = {SWITCH: "offcpu", SAMPLE: "oncpu"}

FRAMES = 10
"""Stacks are told apart by so many frames: their callers are many, and what they did is one."""


@dataclass(frozen=True)
class Unexplained:
    """Time blocked in no wait event, by the stack with which the CPU was left.

    `stack` is its innermost FRAMES, leaf first, without what says nothing; empty where it is not
    known. `count` is the number of times, `max_ns` the longest.
    """

    stack: tuple[str, ...]
    ns: int
    count: int
    max_ns: int


@dataclass(frozen=True)
class Burnt:
    """CPU time inside a wait event, and how long that lasted in all.

    `on_cpu_ns` is exact where context switches were recorded, else None; `samples` say where in
    the code, (stack, number), the most first.
    """

    event: str
    on_cpu_ns: int | None
    total_ns: int
    samples: list[tuple[tuple[str, ...], int]]

    @property
    def sampled(self) -> int:
        """Return the number of samples."""
        return sum(count for _, count in self.samples)


def profile_events(
    capture: Capture, needed: Collection[str] = ()
) -> tuple[PerfData | Bundled, list[Event]]:
    """Return a capture's file with stacks, and the events SAMPLE and SWITCH of it, or those needed.

    Raises
    ------
    Misuse
        One that is needed was not recorded, or neither.

    """
    data = capture.files[0]
    held = data.events if isinstance(data, PerfData | Bundled) else []
    # The first of each name: the second sched_switch is who comes, and has no stacks.
    firsts = {event.name: event for event in reversed(held) if event.name in _PROFILES}
    if not isinstance(data, PerfData | Bundled) or not firsts or not firsts.keys() >= set(needed):
        with_ = ",".join(_PROFILES[name] for name in _PROFILES if name in (needed or _PROFILES))
        raise Misuse(f"{capture.path} was recorded without: waitfold record --with {with_} ...")
    return data, [firsts[name] for name in needed or firsts]


def unexplained(account: Account, traces: Traces) -> list[Unexplained]:
    """Return where processes were blocked without a wait event, the most time first.

    The postmaster is left out: it reports no wait events.
    """
    joined = account.joined
    rows = joined.segments
    blocked = np.flatnonzero((rows.run == BLOCKED) & (rows.value == 0) & (rows.sleep >= 0))
    rows = rows.take(blocked[~np.isin(rows.pid[blocked], joined.postmasters)])
    sleeps, sleep = np.unique(rows.sleep, return_inverse=True)
    ns = np.bincount(sleep, rows.dur_ns, len(sleeps)).astype(np.int64)
    trace = left(joined.sleeps.take(sleeps.astype(np.int64)), traces)
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for one, length in zip(trace.tolist(), ns.tolist(), strict=True):
        found[stack_of(traces, one)].append(length)
    all_ = [Unexplained(s, sum(each), len(each), max(each)) for s, each in found.items()]
    return sorted(all_, key=lambda one: -one.ns)


def burnt(account: Account, traces: Traces) -> list[Burnt]:
    """Return the wait events that were not slept through, the most CPU time first."""
    joined, cells = account.joined, account.cells
    scheduled = joined.scheduled
    value, trace = sampled(joined.segments, traces)
    all_ = []
    for event in np.unique(cells.value[(cells.value != 0) & (cells.value != UNSEEN)]).tolist():
        times = cells.take(cells.value == event).times()
        found: dict[tuple[str, ...], int] = defaultdict(int)
        for one in trace[value == event].tolist():
            found[stack_of(traces, one)] += 1
        ranked = sorted(found.items(), key=lambda item: -item[1])
        on_cpu = times.on_cpu if scheduled else None
        if on_cpu or ranked:
            all_.append(Burnt(account.event(event), on_cpu, times.total, ranked))
    return sorted(all_, key=lambda one: (-(one.on_cpu_ns or 0), -one.sampled))


def left(sleeps: Sleeps, traces: Traces) -> NDArray[np.int64]:
    """Return the stack with which each sleep began, -1 where it is not known."""
    rows = rows_of(traces, SWITCH)
    tid = np.concatenate([sleeps.tid, traces.tid[rows]])
    time = np.concatenate([sleeps.out_ns, traces.time_ns[rows]])
    order = np.lexsort((time, tid))
    n = len(sleeps)
    # The sort is stable: a sample stands right behind its sleep.
    pair = (tid[order][1:] == tid[order][:-1]) & (time[order][1:] == time[order][:-1])
    pair &= (order[:-1] < n) & (order[1:] >= n)
    found = np.full(n, -1, np.int64)
    found[order[:-1][pair]] = traces.trace[rows[order[1:][pair] - n]]
    return found


def sampled(segments: Segments, traces: Traces) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return of the samples on a CPU the wait event, UNSEEN where there is none, and the stack."""
    rows, at = sampled_in(segments, traces)
    value = np.full(len(rows), UNSEEN, np.uint32)
    own = np.flatnonzero(at >= 0)
    # What the two see of one moment may be off by a microsecond.
    own = own[segments.run[at[own]] != BLOCKED]
    value[own] = segments.value[at[own]]
    return value, traces.trace[rows]


def sampled_in(segments: Segments, traces: Traces) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of the samples on a CPU, and the segment that each lies in, -1 for none."""
    rows = rows_of(traces, SAMPLE)
    time = traces.time_ns[rows]
    at = segments.places.latest(traces.pid[rows], time)
    own = np.flatnonzero(at >= 0)
    at[own[time[own] >= segments.end_ns[at[own]]]] = -1
    return rows, at


def rows_of(traces: Traces, event: str) -> NDArray[np.int64]:
    """Return the rows of an event, none where it was not recorded."""
    names = [one.name for one in traces.events]
    if event not in names:
        return np.empty(0, np.int64)
    return np.flatnonzero(traces.event == names.index(event))


def stack_of(traces: Traces, trace: int, most: int | None = FRAMES) -> tuple[str, ...]:
    """Return a stack's innermost frames, without what says nothing, repetitions as one."""
    if trace < 0:
        return ()
    frames = traces.frames
    head, end = frames.starts[trace], frames.starts[trace + 1]
    names: list[str] = []
    for entry in frames.entries[head:end].tolist():
        name = frames.names[entry]
        if name not in _WAY and names[-1:] != [name]:
            names.append(name)
    return tuple(names[:most])
