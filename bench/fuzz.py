#!/usr/bin/env python3
"""Give waitfold damaged files of every kind that it reads: a result or a clear error each.

Each case runs in a worker that may use 1 GiB, and 10 s; one that dies or hangs costs its worker
only. The same seed gives the same cases; --only repeats one of them, with its traceback.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import random
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import fuzz_cases

PATIENCE = 3 * fuzz_cases.SECONDS
"""A worker of which nothing is heard for so long hangs where Python's signals do not reach it."""


def work(seed: int, cases: range, readers: list[fuzz_cases.Reader], pipe: int) -> None:
    """Run cases and write a line about each: number, reader, kinds, outcome, seconds, complaint."""
    scratch = Path(tempfile.mkdtemp(prefix="waitfold-fuzz."))
    runner = fuzz_cases.Runner(scratch)
    with os.fdopen(pipe, "w") as lines:
        for number in cases:
            reader = readers[number % len(readers)]
            data, use, kinds = fuzz_cases.mutate(random.Random(f"{seed}/{number}"), reader)
            about = f"{number}\t{reader.name}\t{kinds}"
            print(about, "begun", 0, "", sep="\t", file=lines, flush=True)
            begun = time.monotonic()
            outcome, wrong = runner.run(data, reader.uses[use])
            seconds = time.monotonic() - begun
            if not wrong and not fuzz_cases.tells_of_cut(reader, reader.uses[use], kinds, outcome):
                wrong = "a truncated file is reported without a word"
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            if most > fuzz_cases.BYTES:
                wrong = wrong or f"{most >> 20} MiB, here or before"
            print(about, outcome, seconds, repr(wrong), sep="\t", file=lines, flush=True)
    shutil.rmtree(scratch)


@dataclass
class Worker:
    """A process that runs cases; `done` are through, `at` is what it said of the next one."""

    pid: int
    lines: IO[str]
    cases: range
    done: int = 0
    at: str = ""
    heard: float = field(default_factory=time.monotonic)


def start(seed: int, cases: range, readers: list[fuzz_cases.Reader]) -> Worker:
    """Fork a worker for some cases."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        try:
            work(seed, cases, readers, writer)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    return Worker(pid, os.fdopen(reader), cases)


class Tally:
    """What became of the cases, by reader."""

    def __init__(self) -> None:
        self.outcomes: dict[str, collections.Counter[str]] = {}
        self.slowest: dict[str, float] = {}
        self.bad = 0

    def add(self, reader: str, outcome: str, seconds: float) -> None:
        """Count a case."""
        self.outcomes.setdefault(reader, collections.Counter())[outcome] += 1
        self.slowest[reader] = max(self.slowest.get(reader, 0), seconds)

    def complain(self, case: str, text: str) -> None:
        """Count a case that is wrong, and tell it."""
        self.bad += 1
        print(f"case {case}: {text}", flush=True)


def take(worker: Worker, line: str, tally: Tally, whole: bool) -> None:
    """Take down what a worker says of a case."""
    number, reader, kinds, outcome, seconds, wrong = line.rstrip("\n").split("\t")
    worker.heard = time.monotonic()
    if outcome == "begun":
        worker.at = f"{number} ({reader}: {kinds})"
        return
    tally.add(reader, outcome, float(seconds))
    worker.done += 1
    if wrong != "''":
        text = wrong.encode().decode("unicode_escape").strip("'\n")
        text = text if whole else text.splitlines()[-1]
        tally.complain(worker.at, f"{outcome}: {text}")


def run(seed: int, shares: list[range], readers: list[fuzz_cases.Reader], whole: bool) -> Tally:
    """Run all cases, a worker for each share of them."""
    tally = Tally()
    ready = selectors.DefaultSelector()

    def begin(cases: range) -> None:
        worker = start(seed, cases, readers)
        ready.register(worker.lines, selectors.EVENT_READ, worker)

    for share in shares:
        begin(share)
    while ready.get_map():
        for key, _ in ready.select(1):
            worker: Worker = key.data
            if line := worker.lines.readline():
                take(worker, line, tally, whole)
                continue
            _end(worker, ready)
            left = worker.cases[worker.done :]
            if left:
                tally.complain(worker.at, "the worker died or hung")
                tally.add(readers[left[0] % len(readers)].name, "died", 0)
            if len(left) > 1:
                begin(left[1:])
        for worker in [key.data for key in ready.get_map().values()]:
            if time.monotonic() - worker.heard > PATIENCE:
                os.kill(worker.pid, signal.SIGKILL)  # the end of its pipe tells the rest
    return tally


def _end(worker: Worker, ready: selectors.BaseSelector) -> None:
    ready.unregister(worker.lines)
    worker.lines.close()
    os.waitpid(worker.pid, 0)


def main() -> None:
    """Run all cases in two workers and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--only", type=int, help="run this case alone")
    parser.add_argument("--reader", choices=fuzz_cases.READERS, help="damage its files alone")
    options = parser.parse_args()
    names = [options.reader] if options.reader else fuzz_cases.READERS
    readers = [fuzz_cases.READERS[name]() for name in names]
    shares = [range(w, options.count, 2) for w in range(2)]
    if options.only is not None:
        shares = [range(options.only, options.only + 1)]
    begun = time.monotonic()
    tally = run(options.seed, shares, readers, options.only is not None)
    for reader, outcomes in tally.outcomes.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        print(f"{reader}: {counts}; slowest {tally.slowest[reader]:.2f} s")
    total = sum(itertools.chain(*(c.values() for c in tally.outcomes.values())))
    print(f"{total} cases, seed {options.seed}: {tally.bad} bad, {time.monotonic() - begun:.0f} s")
    sys.exit(tally.bad > 0)


if __name__ == "__main__":
    main()
