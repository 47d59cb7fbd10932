"""From transitions to intervals.  (Signatures first.)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .events import TransitionStream

START, END, LOST = 1, 2, 4


@dataclass(frozen=True)
class Intervals:
    """A batch of intervals; flags 0 is an exact one, else what it is censored by."""

    start_ns: NDArray[np.int64]
    dur_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    value: NDArray[np.uint32]
    flags: NDArray[np.uint8]


def pair(
    stream: TransitionStream,
    start_ns: int | None = None,
    end_ns: int | None = None,
    initial: Mapping[int, int] | None = None,
) -> Iterator[Intervals]:
    """Yield the intervals of a window."""
    raise NotImplementedError
