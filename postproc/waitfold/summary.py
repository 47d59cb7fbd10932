"""From intervals to numbers.  (Signatures first.)"""

from __future__ import annotations

from dataclasses import dataclass, field

from .pair import Intervals


@dataclass(frozen=True)
class ValueStats:
    """One wait event's exact intervals. histogram[i] counts 2**i <= ns < 2**(i+1), 0 ns in [0]."""

    value: int
    count: int
    total_ns: int
    mean_ns: float
    p50_ns: int
    p95_ns: int
    p99_ns: int
    max_ns: int
    histogram: list[int]


@dataclass(frozen=True)
class PidValue:
    """One backend's time in one wait event: exact intervals, and the seen part of censored ones."""

    count: int
    total_ns: int
    censored: int
    censored_ns: int


@dataclass
class Summary:
    """Add intervals batch by batch, then ask."""

    intervals: int = 0  # exact ones
    censored: dict[str, int] = field(default_factory=lambda: {"start": 0, "end": 0, "lost": 0})
    exact_percentiles: bool = True

    def add(self, batch: Intervals) -> None:
        raise NotImplementedError

    def values(self) -> list[ValueStats]:
        """Return one entry for each value, the greatest total first."""
        raise NotImplementedError

    def pid_values(self) -> dict[tuple[int, int], PidValue]:
        """Return time by (pid, value)."""
        raise NotImplementedError

    def pids(self) -> dict[int, tuple[int, int]]:
        """Return (count, total_ns) of exact intervals by pid."""
        raise NotImplementedError
