"""Mode mem: which value a store wrote, by the instruction and the registers behind it.

A watchpoint tells where the program stood after a store to wait_event_info, and what its registers
held. What was stored is known from the list of all stores in the server's code, sites.tsv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from waitfold.backends import whole_lines
from waitfold.errors import WaitfoldError
from waitfold.events import (
    ATTACH,
    CUT,
    PID_MAX,
    STORE,
    Column,
    PairRule,
    PerfSource,
    Rule,
    Transitions,
    TransitionStream,
    Use,
    in_order,
    joined,
)
from waitfold.perfdata import PerfData

_UNDECODED = 0xFFFF_FFFF
"""In the place of a value: no wait event has it, as there is no class 0xFF."""

_PROBED = 0x7FFF_FFFF_E000
"""Where the kernel executes an instruction that has a uprobe: the last pages of the memory."""

_TICK_NS = 10_000_000
"""born_ns may be so much too early: the kernel counts hundredths of a second."""

_NO_STORAGE = "no wait_event_info in shared memory"
"""Why the recorder does not attach to some processes, as the logger: they never wait visibly."""


class Stores:
    """The stores of one binary.

    `after` are the addresses behind them in the process's memory, in order; `constant` is what
    each stores, or `register`, an index into `registers`, has it. -1 is no register.
    """

    def __init__(self, sites: Path, load_base: int) -> None:
        rows: list[tuple[int, int, int]] = []
        self.registers: list[str] = []
        lines = [line for line in whole_lines(sites) if not line.startswith("#")]
        names = lines[0].split("\t") if lines else []
        try:
            value_at, after_at = names.index("value"), names.index("after")
            for line in lines[1:]:
                cells = line.split("\t")
                after, value = int(cells[after_at], 16) + load_base, cells[value_at]
                if value.startswith("%"):
                    name = value[1:]
                    if name not in self.registers:
                        self.registers.append(name)
                    rows.append((after, 0, self.registers.index(name)))
                else:
                    rows.append((after, int(value, 16), -1))
                if after >> 63 or rows[-1][1] > _UNDECODED:
                    raise ValueError
        except (ValueError, IndexError):
            raise WaitfoldError(
                f"{sites}: not a list of sites with the columns value and after: damaged"
            ) from None
        if not rows:
            raise WaitfoldError(f"{sites}: no site: cut short or damaged")
        rows.sort()
        self.after = np.array([row[0] for row in rows], np.uint64)
        self.constant = np.array([row[1] for row in rows], np.uint32)
        self.register = np.array([row[2] for row in rows], np.int64)
        self._unknown = self._unknown_at = 0

    def values(self, columns: Sequence[Column], rows: int) -> NDArray[np.uint32]:
        """Return what was stored; columns are ip and the registers. _UNDECODED: not in the list."""
        ip, *held = (np.asarray(column) for column in columns)
        place = np.searchsorted(self.after, ip)
        place[place == len(self.after)] = 0
        value = self.constant[place]
        register = self.register[place]
        for number, column in enumerate(held):
            at = np.flatnonzero(register == number)
            value[at] = column[at].astype(np.uint32)  # the lower half
        unknown = np.flatnonzero(self.after[place] != ip)
        if len(unknown):
            value[unknown] = _UNDECODED
            self._unknown += len(unknown)
            self._unknown_at = int(ip[unknown[0]])
        return value

    def warnings(self) -> list[str]:
        """Return a warning of what was not in the list, and count anew."""
        count, self._unknown = self._unknown, 0
        if not count:
            return []
        who = "such as an extension's"
        if self._unknown_at >> 13 == _PROBED >> 13:
            who = "where somebody had a uprobe on the store at the same time"
        return [
            f"{count} stores were made by code that is not in the list of sites, {who} (one before "
            f"{self._unknown_at:#x}): what these backends then waited for is not known, and "
            "the waits before count as cut by a loss."
        ]


@dataclass(frozen=True)
class StoreRule(PairRule):
    """The rule of mode mem; one event, of each perf.data another, tells starts and ends."""

    stores: Stores

    @property
    def uses(self) -> list[Use]:
        """Return what the event means."""
        return [Use(self.start_event, ("ip", *self.stores.registers), self.stores.values)]


def store_rule(stores: Stores) -> StoreRule:
    """Return the rule by which a capture of mode mem is read."""
    return StoreRule("mem:*", "ip", "mem:*", 0, stores)


@dataclass(frozen=True)
class Attachment:
    """A line of attached.tsv; times in ns, None where there is none.

    Of a backend that was attached to all is recorded from `attached_ns` on, in `file`, and
    `wait` was read from its memory between then and `read_ns`.
    """

    pid: int
    born_ns: int | None
    attached_ns: int | None
    read_ns: int | None
    wait: int
    file: str
    why: str


@dataclass(frozen=True)
class Late:
    """How many backends were attached to late, what is missing of them, and how many never."""

    count: int
    median_ns: int
    max_ns: int
    never: int


def read_attached(path: Path) -> list[Attachment]:
    """Read attached.tsv (docs/capture.md); WaitfoldError names a line that is damaged."""
    found = []
    for number, line in enumerate(whole_lines(path), 1):
        cells = line.split("\t")
        try:
            if number == 1:
                if cells != ["pid", "born_ns", "attached_ns", "read_ns", "wait", "file", "why"]:
                    raise ValueError
                continue
            pid, *times, wait, file, why = cells
            born, attached, read = (None if t == "-" else int(t) for t in times)
            value = 0 if wait == "-" else int(wait, 16)
            if attached is not None and (read is None or Path(file).name != file):
                raise ValueError
            if max(born or 0, attached or 0, read or 0) >> 62 or value > _UNDECODED:
                raise ValueError
            if not 0 < int(pid) <= PID_MAX:
                raise ValueError
        except ValueError:
            raise WaitfoldError(
                f"{path}:{number}: not a line of attached.tsv: {line[:60]!r}"
            ) from None
        found.append(Attachment(int(pid), born, attached, read, value, file, why))
    return found


def births(file: Path, parent: int) -> list[tuple[int, int]]:
    """Return pid and time in ns of a process's children that were born while perf recorded it."""
    found: list[tuple[int, int]] = []
    data = PerfData(file)
    for piece in data.pieces():
        tasks = data.tasks(piece)
        born = ~tasks.is_exit & (tasks.parent == parent) & (tasks.time_ns > 0)
        born &= tasks.pid == tasks.tid
        found += zip(tasks.pid[born].tolist(), tasks.time_ns[born].tolist(), strict=True)
    return found


def lateness(
    attached: Sequence[Attachment], born: Sequence[tuple[int, int]], start_ns: int
) -> Late:
    """Return how late backends were attached to that were not yet when the window began.

    `born` are pids and times of birth, as far as they are known better than from `attached`.
    """
    missed = []
    never = 0
    seen = Counter[int]()
    for pid, lines in groupby(sorted(attached, key=lambda a: a.pid), lambda a: a.pid):
        # A backend whose perf was killed has several lines.
        for birth, again in groupby(lines, lambda a: a.born_ns or 0):
            first = next(again)
            seen[pid] += birth > start_ns - _TICK_NS
            if first.attached_ns is None:
                never += first.why != _NO_STORAGE
            elif first.attached_ns > start_ns:
                exact = [time for p, time in born if p == pid and time <= first.attached_ns]
                missed.append(first.attached_ns - max(*exact[-1:], birth, start_ns))
    unseen = Counter(pid for pid, time in born if time > start_ns) - seen
    return Late(
        len(missed),
        int(median(missed or [0])),
        max(missed, default=0),
        never + unseen.total(),
    )


class WatchFile:
    """The perf.data of one backend."""

    def __init__(self, folder: Path, attached: Attachment) -> None:
        self._data = PerfData(folder / attached.file)
        self._attached = attached
        self.events = self._data.events
        self.cut = self._data.cut

    def sources(self, rule: Rule, stream: TransitionStream) -> list[WatchSource]:
        """Return what reads it."""
        assert isinstance(rule, StoreRule)
        return [WatchSource(self._data, self._attached, rule, stream)]


class WatchSource:
    """A backend's transitions from when it was attached to."""

    def __init__(
        self, data: PerfData, attached: Attachment, rule: StoreRule, stream: TransitionStream
    ) -> None:
        assert attached.attached_ns is not None and attached.read_ns is not None
        self._own = TransitionStream()  # its gaps concern this backend alone
        self._source = PerfSource(data, rule, self._own)
        self.data_size = data.data_size
        self.done = 0
        # So that files are opened one after the other, as their backends were born.
        self.complete = attached.attached_ns - 1
        self._attached = attached
        self._since, self._read_ns = attached.attached_ns, attached.read_ns
        self._last = self._since
        self._stores = rule.stores
        self._stream = stream
        self._begun = False

    def read(self) -> Transitions | None:
        """Return the transitions of the file's next piece, None at its end."""
        batch = self._source.read()
        self.done = self._source.done
        self.complete = max(self._source.complete, self._since)
        if batch is not None:
            batch = self._with_cuts(self._checked(batch))
            self._count()
        if self._begun:
            return batch
        self._begun = True
        began = self._beginning(batch)
        return began if batch is None else joined([began, batch])

    def close(self) -> None:
        """Add up what was lost and what could not be decoded, once all is read."""
        self._source.close()
        self._stream.lost += self._own.lost
        # Which are known only now: lost behind the last record.
        self._stream.gaps += self._own.gaps
        self._stream.warnings += self._stores.warnings()

    def _count(self) -> None:
        own, stream = self._own, self._stream
        stream.samples += own.samples
        own.samples = 0
        if own.first_ns is not None and own.last_ns is not None:
            stream.first_ns = min(own.first_ns, stream.first_ns or own.first_ns)
            stream.last_ns = max(own.last_ns, stream.last_ns or 0)

    def _with_cuts(self, batch: Transitions) -> Transitions:
        """Return a batch with a row marked CUT where records were lost.

        The file is of one buffer, so that is right behind the record before.
        """
        cuts = []
        for _, until in self._own.gaps:
            row = int(np.searchsorted(batch.time_ns, until, "left"))
            cuts.append(int(batch.time_ns[row - 1]) if row else self._last)
        self._stream.cuts += len(cuts)
        self._own.gaps.clear()
        if len(batch):
            self._last = int(batch.time_ns[-1])
        if not cuts:
            return batch
        rows = [self._row(time, 0, CUT) for time in cuts]
        return in_order(joined([batch, *rows]))

    def _checked(self, batch: Transitions) -> Transitions:
        """Return the rows since it was attached to; marked CUT where nothing is decoded."""
        batch = in_order(batch.take(np.flatnonzero(batch.time_ns > self._since)))
        unknown = (batch.value == _UNDECODED) & (batch.mark == STORE)
        if unknown.any():
            batch.value[unknown] = 0
            batch.mark[unknown] = CUT
        return batch

    def _beginning(self, batch: Transitions | None) -> Transitions:
        """Return the first row: what it waited for when it was attached to, 0 if not known."""
        wait = self._attached.wait
        if batch is not None and len(batch) and int(batch.time_ns[0]) <= self._read_ns:
            wait = 0  # it was read before or after that
        return self._row(self._since, wait, ATTACH)

    def _row(self, time_ns: int, value: int, mark: int) -> Transitions:
        pid = self._attached.pid
        return Transitions(
            np.array([time_ns], np.int64),
            np.array([pid << 32 | pid], np.uint64),
            np.array([value], np.uint32),
            np.array([mark], np.uint8),
        )
