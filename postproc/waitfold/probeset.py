"""Reads probe sets: which events a capture holds and how they pair (docs/probe-sets.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from waitfold.errors import WaitfoldError
from waitfold.events import PairRule

OWN_GROUP = "waitfold_*"
"""Group of a set's own events: the recorder makes up a new one in each run."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_EVENT = re.compile(r"([A-Za-z_]\w*:)?[A-Za-z_]\w*")
_FIELD = re.compile(r"([A-Za-z_]\w*):([usx](?:8|16|32|64))")


@dataclass(frozen=True)
class ProbeSet:
    """One probe set.

    `fields` is, per event of the set's own, field name -> the kernel's type; `places` is, per
    event, the global whose stores it stands at. `start` and `end` are events as the set names
    them; `end_value` is the value of `start_field` that ends an interval, None where the end is
    an event of its own.
    """

    name: str
    about: str
    fields: dict[str, dict[str, str]]
    places: dict[str, str]
    start: str
    start_field: str
    end: str
    end_value: int | None
    key: str
    label: str

    def rule(self, group: str = OWN_GROUP) -> PairRule:
        """Return how the set's events pair, its own events being in `group` (may be a pattern)."""

        def full(event: str) -> str:
            return event if ":" in event else f"{group}:{event}"

        return PairRule(full(self.start), self.start_field, full(self.end), self.end_value)


def probes_dir() -> Path:
    """Return the folder of the probe sets: the installed package's own, else the checkout's."""
    here = Path(__file__).resolve().parent
    installed = here / "probes"
    return installed if installed.is_dir() else here.parents[1] / "probes"


def load_sets() -> dict[str, ProbeSet]:
    """Return every probe set that this waitfold has, by name."""
    return {s.name: s for s in map(load_set, sorted(probes_dir().glob("*.set")))}


def load_set(path: Path) -> ProbeSet:
    """Read one probe set.

    Raises
    ------
    WaitfoldError
        The file is not as docs/probe-sets.md says; the message names the line.

    """
    parser = _Parser(path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            parser.line(number, words[0], words[1:])
    return parser.finish()


class _Parser:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.once: dict[str, tuple[int, list[str]]] = {}
        self.fields: dict[str, dict[str, str]] = {}
        self.places: dict[str, tuple[int, str]] = {}

    def fail(self, why: str, number: int | None = None) -> WaitfoldError:
        at = self.number if number is None else number
        return WaitfoldError(f"{self.path}:{at}: {why}" if at else f"{self.path}: {why}")

    def line(self, number: int, keyword: str, args: list[str]) -> None:
        self.number = number
        if keyword == "event":
            self.event(args)
        elif keyword == "place":
            self.place(args)
        elif keyword not in _ONCE:
            raise self.fail(f"unknown keyword '{keyword}'")
        elif keyword in self.once:
            raise self.fail(f"'{keyword}' a second time, first in line {self.once[keyword][0]}")
        elif not _ONCE[keyword](args):
            raise self.fail(f"'{keyword}' wants {_WANTS[keyword]}")
        else:
            self.once[keyword] = (number, args)

    def event(self, args: list[str]) -> None:
        matches = [_FIELD.fullmatch(a) for a in args[1:]]
        if len(args) < 2 or not _NAME.fullmatch(args[0]) or None in matches:
            raise self.fail("'event' wants NAME FIELD:TYPE..., TYPE as in u32, x32, s64")
        if args[0] in self.fields:
            raise self.fail(f"event '{args[0]}' a second time")
        self.fields[args[0]] = {m[1]: m[2] for m in matches if m}

    def place(self, args: list[str]) -> None:
        if len(args) != 3 or args[1] != "stores":
            raise self.fail("'place' wants NAME stores SYMBOL")
        self.places[args[0]] = (self.number, args[2])

    def finish(self) -> ProbeSet:
        self.number = 0
        for keyword in _ONCE:
            if keyword not in self.once:
                raise self.fail(f"no '{keyword}' line")
        args = {k: v[1] for k, v in self.once.items()}
        if args["set"][0] != self.path.stem:
            raise self.fail(
                f"the set's name must be the file's, '{self.path.stem}'", self.at("set")
            )
        for name, (number, _) in self.places.items():
            if name not in self.fields:
                raise self.fail(f"no event '{name}' in this set", number)
        start, field = args["start"]
        end, *value = args["end"]
        for keyword, event in (("start", start), ("end", end)):
            if ":" not in event and event not in self.fields:
                raise self.fail(f"no event '{event}' in this set", self.at(keyword))
        if start in self.fields and field not in self.fields[start]:
            raise self.fail(f"event '{start}' has no field '{field}'", self.at("start"))
        end_value = None
        if value:
            end_field, _, text = value[0].partition("=")
            end_value = int(text, 0)
            if (end, end_field) != (start, field):
                raise self.fail(f"an end by value must be of '{start} {field}'", self.at("end"))
        elif end == start:
            raise self.fail(
                "start and end are the same event: say which FIELD=VALUE ends", self.at("end")
            )
        return ProbeSet(
            name=args["set"][0],
            about=" ".join(args["about"]),
            fields=self.fields,
            places={name: symbol for name, (_, symbol) in self.places.items()},
            start=start,
            start_field=field,
            end=end,
            end_value=end_value,
            key=args["key"][0],
            label=args["label"][0],
        )

    def at(self, keyword: str) -> int:
        return self.once[keyword][0]


def _is_end(args: list[str]) -> bool:
    by_value = len(args) == 2 and re.fullmatch(r"[A-Za-z_]\w*=(0x[0-9a-fA-F]+|\d+)", args[1])
    return bool(args and _EVENT.fullmatch(args[0]) and (len(args) == 1 or by_value))


# Keywords that every set has once: is the argument list right, and what would be.
_ONCE: dict[str, Callable[[list[str]], bool]] = {
    "set": lambda a: len(a) == 1 and bool(_NAME.fullmatch(a[0])),
    "about": lambda a: len(a) > 0,
    "start": lambda a: len(a) == 2 and bool(_EVENT.fullmatch(a[0])),
    "end": _is_end,
    "key": lambda a: a == ["tid"],
    "label": lambda a: a == ["wait-event"],
}
_WANTS = {
    "set": "NAME",
    "about": "TEXT",
    "start": "EVENT FIELD",
    "end": "EVENT or EVENT FIELD=VALUE",
    "key": "tid: intervals are paired by thread",
    "label": "wait-event",
}
