"""From samples to transitions: who stored which value when.  (Signatures first.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .perfdata import PerfData


@dataclass(frozen=True)
class PairRule:
    """Which events begin and end an interval; event names are glob patterns (`waitfold_*:w`).

    `end_value` is the start field's value that ends one where start and end are one event,
    None where the end is an event of its own (its value becomes 0).
    """

    start_event: str
    start_field: str
    end_event: str
    end_value: int | None


@dataclass(frozen=True)
class Transitions:
    """A batch of transitions, in time order."""

    time_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    value: NDArray[np.uint32]
    mark: NDArray[np.uint8]  # STORE, FORK (the thread begins, not waiting), EXIT (it ends)


@dataclass
class TransitionStream:
    """Iterate once over batches; the rest is complete when the iteration has ended."""

    batches: Iterator[Transitions]
    samples: int = 0
    lost: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    forks: dict[int, tuple[int, int]] = field(default_factory=dict)  # pid: (ppid, time_ns)
    exits: dict[int, int] = field(default_factory=dict)  # tid: time_ns
    comms: dict[int, str] = field(default_factory=dict)  # tid: comm
    first_ns: int | None = None
    last_ns: int | None = None
    warnings: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Transitions]:
        return self.batches


def transitions(
    files: Sequence[PerfData],
    rule: PairRule,
    progress: Callable[[int, int], None] | None = None,
) -> TransitionStream:
    """Return the transitions of `files`; `progress` is called with (bytes read, bytes in all)."""
    raise NotImplementedError
