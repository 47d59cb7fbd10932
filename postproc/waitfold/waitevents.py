"""wait_event_info as class and name, by the tables in probes/wait_events."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from waitfold.errors import WaitfoldError
from waitfold.probeset import probes_dir

CLIENT_READ = 0x06000000
"""Client:ClientRead, the first of its class and so the same in every version from 10 on."""

_LWLOCK, _ACTIVITY, _EXTENSION, _INJECTION_POINT = 0x01, 0x05, 0x07, 0x0B
_VERSION = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,4})|(beta|rc)[0-9]{1,4}|(devel))?")


@dataclass(frozen=True)
class Version:
    """A server version: `minor` None where only the major is known, `stage` as in 19beta1."""

    major: int
    minor: int | None
    stage: str

    @staticmethod
    def parse(text: str) -> Version:
        """Read `15.18`, `15`, `19beta1`, `19rc1` or `20devel`.

        Raises
        ------
        WaitfoldError
            It is none of these.

        """
        match = _VERSION.fullmatch(text.strip())
        if match is None:
            raise WaitfoldError(f"'{text}' is not a PostgreSQL version such as 15.18 or 17")
        major, minor, pre, devel = match.groups()
        return Version(int(major), None if minor is None else int(minor), pre or devel or "")


class WaitEvents:
    """Names of one server version's wait events.

    A name that cannot be known is given as the value in hexadecimal, never guessed: the custom
    events of 17 and later (numbered at run time), a beta's (numbered differently from the
    release), and what the tables do not hold, whose class is `?`, as that of 0 is, a wait that
    was seen only when it ended. `warnings` says what to tell the user about that.
    """

    def __init__(self, pg_version: str) -> None:
        version = Version.parse(pg_version)
        folder = probes_dir() / "wait_events"
        table = folder / f"pg{version.major}.tsv"
        self.warnings: list[str] = []
        self._names: dict[int, tuple[str, str]] = {}
        self._classes: dict[int, str] = {}
        self._first_user_tranche: int | None = None
        if not table.is_file():
            self.warnings.append(
                f"wait events of PostgreSQL {pg_version} are not known: shown as numbers"
            )
            return
        for row in _rows(table):
            self._set(int(row["wait_event_info"], 16), row["class"], row["name"])
        for row in _rows(folder / "minor_variants.tsv"):
            if int(row["major"]) == version.major and _covers(row, version.minor):
                self._set(int(row["wait_event_info"], 16), row["class"], row["name"])
        self._classes = {value >> 24: name for value, (name, _) in self._names.items()}
        if version.major >= 17:
            self._classes[_INJECTION_POINT] = "InjectionPoint"
        for row in _rows(folder / "first_user_tranche.tsv"):
            if int(row["major"]) == version.major:
                self._first_user_tranche = int(row["first_user_tranche"])
        self._custom = version.major >= 17
        self._beta = version.stage == "beta"
        if self._beta:
            self.warnings.append(
                f"a beta numbers its wait events differently: those of {pg_version} are shown "
                "as numbers"
            )
        elif version.stage == "devel":
            self.warnings.append(
                f"PostgreSQL {pg_version} is in development: names hold for the day the tables "
                "were made"
            )

    def _set(self, value: int, class_: str, name: str) -> None:
        if name:
            self._names[value] = (class_, name)
        else:
            self._names.pop(value, None)

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """All that label() may return by the tables."""
        return frozenset(self._names.values())

    def label(self, value: int) -> tuple[str, str]:
        """Return class and name of a value, as pg_stat_activity shows them."""
        if value == 0:
            return "?", "began unseen"
        unknown = f"0x{value:08x}"
        class_ = self._classes.get(value >> 24, "?")
        if class_ == "?" or self._beta:
            return class_, unknown
        if value in self._names:
            return self._names[value]
        if self._is_user_tranche(value):
            return class_, "extension"
        if self._custom and value >> 24 in (_EXTENSION, _INJECTION_POINT):
            return class_, unknown
        return "?", unknown

    def _is_user_tranche(self, value: int) -> bool:
        first = self._first_user_tranche
        return first is not None and value >> 24 == _LWLOCK and value & 0xFFFF >= first

    def merged(self, values: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the values with all that share one name made one value.

        Only the LWLock tranches of extensions do: each has its number, all are `extension`.
        """
        first = self._first_user_tranche
        if first is None or self._beta:
            return values
        user = ((values >> 24) == _LWLOCK) & ((values & 0xFFFF) >= first)
        return np.where(user, np.uint32(_LWLOCK << 24 | first), values).astype(np.uint32)


@overload
def is_idle(value: int) -> bool: ...
@overload
def is_idle(value: NDArray[np.uint32]) -> NDArray[np.bool_]: ...
def is_idle(value: int | NDArray[np.uint32]) -> bool | NDArray[np.bool_]:
    """Whether a process in this wait is not known to have work: ClientRead, the Activity class, 0.

    0 is the wait of which only the end was seen (pair.Intervals).
    """
    return (value == 0) | is_idle_wait(value)


@overload
def is_idle_wait(value: int) -> bool: ...
@overload
def is_idle_wait(value: NDArray[np.uint32]) -> NDArray[np.bool_]: ...
def is_idle_wait(value: int | NDArray[np.uint32]) -> bool | NDArray[np.bool_]:
    """Whether this is ClientRead or of the Activity class; of segments, where 0 is no wait."""
    return (value == CLIENT_READ) | (value >> 24 == _ACTIVITY)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _covers(row: dict[str, str], minor: int | None) -> bool:
    """Whether a row of minor_variants.tsv holds for this minor; an unknown one is the newest."""
    first, last = (int(row[k].partition(".")[2]) for k in ("first_minor", "last_minor"))
    return minor is not None and first <= minor <= last
