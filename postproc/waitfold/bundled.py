"""What a bundle holds, in the place of the files of a capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from waitfold.events import Rule, SetRule, Source, Transitions, TransitionStream
from waitfold.perfdata import Event
from waitfold.profile import Traces
from waitfold.sched import Switches

if TYPE_CHECKING:
    from waitfold.queries import Queries

_BATCH = 1 << 18

Row = tuple[int | bytes | None, ...]


@dataclass(frozen=True)
class Held:
    """All that transitions() gives of one probe set.

    `rows` are in the order of time; `stream` has what else it says, without batches. Of a set
    other than wait events `started` and `ended` are what the codes in `rows` stand for.
    """

    rows: Transitions
    stream: TransitionStream
    started: list[Row] = field(default_factory=list)
    ended: list[Row] = field(default_factory=list)


@dataclass
class Bundled:
    """A bundle's columns: transitions by probe set, and what was read by their help.

    `waits` are those of the wait events, `sets` the others by the rule that they were read by.
    Absent is what the capture did not hold, or was left out of the bundle.
    """

    waits: Held
    sets: dict[SetRule, Held]
    queries: Queries | None
    switches: Switches | None
    traces: Traces | None
    cut: str | None = None

    @property
    def events(self) -> list[Event]:
        """The events that have stacks."""
        return self.traces.events if self.traces else []

    def sources(self, rule: Rule, stream: TransitionStream) -> Sequence[Source]:
        """Return what reads the transitions of a rule's probe set."""
        if isinstance(rule, SetRule):
            held = self.sets[rule]
            rule.started.rows[:] = held.started
            rule.ended.rows[:] = held.ended
        else:
            held = self.waits
        known = held.stream
        stream.samples += known.samples
        stream.lost += known.lost
        stream.cuts += known.cuts
        stream.gaps += known.gaps
        stream.warnings += known.warnings
        stream.first_ns, stream.last_ns = known.first_ns, known.last_ns
        return [_Source(held.rows)]

    def traces_of(self, events: Sequence[Event]) -> Traces:
        """Return the samples of some of `events`."""
        assert self.traces is not None
        traces = self.traces
        place = np.full(len(traces.events), -1, np.int64)
        for i, event in enumerate(events):
            place[event.index] = i
        rows = np.flatnonzero(place[traces.event] >= 0)
        return replace(
            traces,
            events=list(events),
            time_ns=traces.time_ns[rows],
            pid=traces.pid[rows],
            tid=traces.tid[rows],
            event=place[traces.event[rows]].astype(np.uint8),
            weight=traces.weight[rows],
            comm=traces.comm[rows],
            trace=traces.trace[rows],
        )


class _Source:
    """Gives transitions that are in order already, piece by piece."""

    def __init__(self, rows: Transitions) -> None:
        self._rows = rows
        self.data_size = len(rows)
        self.done = 0
        self.complete = -1

    def read(self) -> Transitions | None:
        """Return the next piece, None at the end."""
        if self.done == self.data_size:
            return None
        until = min(self.done + _BATCH, self.data_size)
        piece = self._rows.take(slice(self.done, until))
        self.done = until
        self.complete = int(piece.time_ns[-1]) - 1  # the next piece may have the same time
        return piece

    def close(self) -> None:
        """Nothing is left to be added up."""
