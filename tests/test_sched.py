"""Off-CPU intervals from switches made by hand; real ones are in test_account.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from waitfold.pair import END, LOST, START, merged
from waitfold.sched import (
    _IN,
    _OUT,
    _WOKEN,
    _YIELD,
    GUESSED,
    Lives,
    Switches,
    off_cpu,
)

OUT, YIELD, WOKEN, IN = _OUT, _YIELD, _WOKEN, _IN
NEVER = (1 << 63) - 1
A, B = 7919, 104729  # pids


def run(
    rows: Sequence[tuple[int, int, int]],
    lives: Sequence[tuple[int, int, int, bool, bool]] = ((A, 100, 1000, False, False),),
    gaps: Sequence[tuple[int, int]] = (),
    sampled: Sequence[tuple[int, int]] | None = (),
    waiting: Sequence[int] = (),
    stored: Sequence[int] = (),
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Sleeps as (tid, out, wake, in, flags), and unknown as (tid, start, end, lost).

    `rows` are (tid, time, kind), `lives` (tid, since, until, born, died).
    """
    tid, time, kind = (list(column) for column in zip(*rows, strict=True)) if rows else ([],) * 3
    seen = None
    if sampled is not None:
        seen = (
            np.array([tid for tid, _ in sampled], np.int32),
            np.array([time for _, time in sampled], np.int64),
        )
    switches = Switches(
        np.array(tid, np.int32), np.array(time, np.int64), np.array(kind, np.uint8), seen, {}
    )
    columns = zip(*lives, strict=True)
    born = Lives(
        *(np.array(c, k) for c, k in zip(columns, ("i4", "i8", "i8", "?", "?"), strict=True))
    )
    sleeps, unknown = off_cpu(
        switches,
        born,
        merged(gaps),
        np.array(waiting, np.int32),
        lambda _, since: min((t for t in stored if t > since), default=NEVER),
    )
    off = zip(sleeps.tid, sleeps.out_ns, sleeps.wake_ns, sleeps.in_ns, sleeps.flags, strict=True)
    vague = zip(unknown.tid, unknown.start_ns, unknown.end_ns, unknown.lost, strict=True)
    return [tuple(map(int, row)) for row in off], [tuple(map(int, row)) for row in vague]


def test_sleep_in_three_parts() -> None:
    """A thread blocks, is woken, and runs again; further wakeups in between mean nothing."""
    rows = [(A, 211, OUT), (A, 307, WOKEN), (A, 311, WOKEN), (A, 331, IN), (A, 337, WOKEN)]
    assert run(rows) == ([(A, 211, 307, 331, 0)], [])


def test_preempted_waits_for_the_cpu_alone() -> None:
    """Who was preempted was ready all the time; a wakeup then is none."""
    assert run([(A, 211, YIELD), (A, 223, WOKEN), (A, 331, IN)]) == ([(A, 211, 211, 331, 0)], [])


def test_blocked_without_wakeup() -> None:
    """Where no wakeup was seen it was blocked until it came."""
    assert run([(A, 211, OUT), (A, 331, IN)]) == ([(A, 211, 331, 331, 0)], [])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(A, 211, OUT), (A, 331, IN)], []),
        ([(A, 331, IN), (A, 401, OUT), (A, 503, IN)], [(A, 100, 100, 331, START)]),
        (
            [(A, 307, WOKEN), (A, 331, IN), (A, 401, OUT), (A, 503, IN)],
            [(A, 100, 307, 331, START)],
        ),
        ([(A, 109, WOKEN), (A, 401, OUT), (A, 503, IN)], []),
    ],
)
def test_before_the_first(
    rows: list[tuple[int, int, int]], expected: list[tuple[int, ...]]
) -> None:
    """Who leaves first ran since the window's start; who comes first, or is woken, did not."""
    sleeps, unknown = run(rows)
    assert sleeps[: len(expected)] == expected
    assert len(sleeps) == len(expected) + 1
    assert not unknown


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        ([(A, 53, OUT)], (A, 100, 331, 331, START)),
        ([(A, 53, OUT), (A, 59, WOKEN)], (A, 100, 100, 331, START)),
        ([(A, 53, YIELD)], (A, 100, 100, 331, START)),
    ],
)
def test_before_the_window(earlier: list[tuple[int, int, int]], expected: tuple[int, ...]) -> None:
    """What was seen last before the window holds at its start."""
    assert run([*earlier, (A, 331, IN)]) == ([expected], [])
    # Who came then ran; a loss in between leaves nothing to go by.
    assert run([*earlier, (A, 61, IN), (A, 401, OUT)])[0] == [(A, 401, 1000, 1000, END)]
    assert run([*earlier, (A, 401, OUT)], gaps=[(61, 67)])[0] == [(A, 401, 1000, 1000, END)]


def test_in_a_wait_at_the_start() -> None:
    """Who was in a wait and then leaves the CPU had left it before; he came when he next stored."""
    assert run([(A, 331, OUT)], waiting=[A], stored=[307])[0] == [
        (A, 100, 307, 307, START | GUESSED),
        (A, 331, 1000, 1000, END),
    ]


def test_open_at_the_end() -> None:
    """Who is off the CPU at the window's end is so until then."""
    assert run([(A, 211, OUT)]) == ([(A, 211, 1000, 1000, END)], [])
    assert run([(A, 211, OUT), (A, 307, WOKEN)]) == ([(A, 211, 307, 1000, END)], [])


def test_born_and_died() -> None:
    """A new process waits for its first CPU; what comes after its exit is nobody's."""
    rows = [(A, 211, IN), (A, 307, OUT), (A, 331, IN), (A, 503, OUT)]
    assert run(rows, [(A, 199, 499, True, True)]) == (
        [(A, 199, 199, 211, START), (A, 307, 331, 331, 0)],
        [],
    )


def test_pid_of_two() -> None:
    """A pid that is given out again is another process, which ran or slept anew."""
    rows = [(A, 211, OUT), (A, 307, WOKEN), (A, 311, IN), (A, 601, IN), (A, 701, OUT)]
    lives = [(A, 100, 401, False, True), (A, 599, 1000, True, False)]
    assert run(rows, lives)[0] == [
        (A, 211, 307, 311, 0),
        (A, 599, 599, 601, START),
        (A, 701, 1000, 1000, END),
    ]


@pytest.mark.parametrize(
    ("sampled", "waiting", "expected"),
    [
        ([], [], ([(A, 100, 1000, 1000, START | END)], [])),
        ([(A, 499)], [A], ([], [])),
        (None, [A], ([(A, 100, 1000, 1000, START | END)], [])),
        (None, [], ([], [(A, 100, 1000, 0)])),
    ],
)
def test_nothing_seen(
    sampled: list[tuple[int, int]] | None,
    waiting: list[int],
    expected: tuple[list[tuple[int, ...]], list[tuple[int, ...]]],
) -> None:
    """Who was never seen slept, unless samples saw it run; without samples its wait tells."""
    assert run([], sampled=sampled, waiting=waiting) == expected


def test_loss() -> None:
    """Within a loss nothing is known; behind it what is seen first tells what was before."""
    rows = [(A, 211, OUT), (A, 307, IN), (A, 331, OUT), (A, 503, IN), (A, 601, OUT), (A, 607, IN)]
    # Of the second sleep only its ends are known, of the third nothing is lost.
    assert run(rows, gaps=[(401, 421), (419, 443)]) == (
        [
            (A, 211, 307, 307, 0),
            (A, 331, 401, 401, LOST),
            (A, 443, 443, 503, LOST),
            (A, 601, 607, 607, 0),
        ],
        [(A, 401, 443, 1)],
    )


def test_coming_without_a_sample() -> None:
    """It ran again when it next stored something, was seen by a sample, or left."""
    rows = [(A, 211, OUT), (A, 401, OUT), (A, 503, IN)]
    assert run(rows, stored=[199, 307, 311])[0][0] == (A, 211, 307, 307, GUESSED)
    assert run(rows, stored=[409], sampled=[(A, 199), (A, 331)])[0][0] == (
        A,
        211,
        331,
        331,
        GUESSED,
    )
    assert run(rows)[0][0] == (A, 211, 401, 401, GUESSED)


def test_coming_twice() -> None:
    """When it left in between is not known."""
    assert run([(A, 211, OUT), (A, 307, IN), (A, 401, IN), (A, 503, OUT)]) == (
        [(A, 211, 307, 307, 0), (A, 503, 1000, 1000, END)],
        [(A, 307, 401, 0)],
    )


def test_written_twice_and_out_of_order() -> None:
    """Rows come in no order, and perf writes some of them twice."""
    rows = [(B, 331, IN), (A, 307, IN), (A, 211, OUT), (A, 307, IN), (B, 223, OUT), (A, 211, OUT)]
    lives = [(A, 100, 1000, False, False), (B, 100, 1000, False, False)]
    assert run(rows, lives) == ([(A, 211, 307, 307, 0), (B, 223, 331, 331, 0)], [])


def test_others_are_left_out() -> None:
    """Threads of other servers, which have the same name, are nobody's."""
    assert run([(B, 211, OUT), (B, 307, IN), (A, 401, OUT), (A, 503, IN)])[0] == [
        (A, 401, 503, 503, 0)
    ]
