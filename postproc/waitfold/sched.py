"""From context switches to off-CPU intervals: when each thread slept, was woken, and ran again."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sleeps:
    """Off-CPU intervals, sorted by (tid, out_ns), a row each.

    The thread left the CPU at `out_ns`, blocked until `wake_ns` and waited for a CPU until `in_ns`.
    """

    tid: NDArray[np.int32]
    out_ns: NDArray[np.int64]
    wake_ns: NDArray[np.int64]
    in_ns: NDArray[np.int64]
    runnable: NDArray[np.bool_]  # it was preempted: wake_ns is out_ns
    flags: NDArray[np.uint8]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tid)

    def take(self, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Sleeps:
        """Return some of the rows."""
        return Sleeps(*(getattr(self, column.name)[which] for column in fields(self)))


NO_SLEEPS = Sleeps(*(np.empty(0, dtype) for dtype in ("i4", "i8", "i8", "i8", "?", "u1")))
