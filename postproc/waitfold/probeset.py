"""Reads probe sets: which events a capture holds and how they pair (docs/probe-sets.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from waitfold.errors import WaitfoldError
from waitfold.events import PairRule, Rule, SetRule

OWN_GROUP = "waitfold_*"
"""Group of a set's own events: the recorder makes up a new one in each run."""

UNKNOWN = "?"
"""What a field is called that nothing is known of."""


@dataclass(frozen=True)
class ProbeSet:
    """One probe set; events are named as the set names them.

    `fields` is, per event of the set's own, field name -> the kernel's type or `string`. `only`
    has the first and the last major of the server that an event is for, where it is not for all.
    Of a set of wait events `wait_field` holds the wait_event_info; it is None of others, whose
    intervals are called by the fields `label`. `names` and `bits` are, per field, what its values
    and its bits are called; `wait_names` the wait event that stands for a field's value 0.
    """

    name: str
    about: str
    fields: dict[str, dict[str, str]]
    only: dict[str, tuple[int, int]]
    start: str
    ends: tuple[str, ...]
    end_value: tuple[str, int] | None
    resets: tuple[str, ...]
    nested: bool
    continued: bool
    wait_field: str | None
    label: tuple[str, ...]
    names: dict[str, dict[int, str]]
    wait_names: dict[str, int]
    bits: dict[str, dict[int, str]]

    def rule(self, group: str = OWN_GROUP) -> Rule:
        """Return how the set's events pair, its own events being in `group` (may be a pattern)."""
        if self.wait_field is None:
            return self.set_rule(group)
        value = None if self.end_value is None else self.end_value[1]
        start, end = _full(self.start, group), _full(self.ends[0], group)
        return PairRule(start, self.wait_field, end, value)

    def set_rule(self, group: str) -> SetRule:
        """Return the same of a set that is not of wait events."""
        carried = self.fields[self.start]
        return SetRule(
            _full(self.start, group),
            tuple(f for f in self.label if f in carried),
            () if self.end_value else tuple(_full(end, group) for end in self.ends),
            tuple(f for f in self.label if f not in carried),
            self.end_value,
            tuple(_full(reset, group) for reset in self.resets),
            self.nested,
            self.continued,
        )

    def texts(
        self, known: Mapping[str, int | bytes | None], wait_name: Callable[[int], str]
    ) -> tuple[str, ...]:
        """Return what the fields of the label are called; `wait_name` names a wait event."""
        return tuple(self._text(name, known.get(name), wait_name) for name in self.label)

    def _text(self, name: str, value: int | bytes | None, wait_name: Callable[[int], str]) -> str:
        if value is None:
            return UNKNOWN
        if isinstance(value, bytes):
            return value.decode(errors="backslashreplace")
        if name in self.wait_names:
            return wait_name(self.wait_names[name] + value)
        if name in self.bits:
            bits = self.bits[name]
            on = [bit for bit in range(value.bit_length()) if value >> bit & 1]
            return "+".join(bits.get(bit, f"bit{bit}") for bit in on) or "none"
        return self.names.get(name, {}).get(value, str(value))


def _full(event: str, group: str) -> str:
    return event if ":" in event else f"{group}:{event}"


def probes_dir() -> Path:
    """Return the folder of the probe sets: the installed package's own, else the checkout's."""
    here = Path(__file__).resolve().parent
    installed = here / "probes"
    return installed if installed.is_dir() else here.parents[1] / "probes"


def load_sets() -> dict[str, ProbeSet]:
    """Return every probe set that this waitfold has, by name.

    Raises
    ------
    WaitfoldError
        One is not as docs/probe-sets.md says, or two have an event of the same name.

    """
    sets = {s.name: s for s in map(load_set, sorted(probes_dir().glob("*.set")))}
    of_event: dict[str, str] = {}
    for probe_set in sets.values():
        for event in probe_set.fields:
            other = of_event.setdefault(event, probe_set.name)
            if other != probe_set.name:
                raise WaitfoldError(f"the sets {other} and {probe_set.name} both have '{event}'")
    return sets


def load_set(path: Path) -> ProbeSet:
    """Read one probe set.

    Raises
    ------
    WaitfoldError
        The file is not as docs/probe-sets.md says; the message names the line.

    """
    return parse_set(path, path.read_text(encoding="utf-8", errors="replace"))


def parse_set(path: Path, text: str) -> ProbeSet:
    """Return the same of a text that stands for such a file, `path` in messages."""
    parser = _Parser(path)
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            parser.line(number, words[0], words[1:])
    return parser.finish()


_NEWEST = 999
_NAME = r"[A-Za-z_]\w*"
_EVENT = rf"(?:{_NAME}:)?{_NAME}"
_NUMBER = r"(?:0x[0-9a-fA-F]{1,16}|0|[1-9][0-9]{0,18})"
_MAJOR = r"[0-9]{1,3}"
_ARGUMENT = rf"(?:arg-?\d+|string\(arg-?\d+\)|{_NUMBER})"

# Keyword: what its arguments match, joined by blanks; what it wants; whether it may come once,
# must come once, or comes any number of times.
_MAY, _MUST, _ANY = "may", "must", "any"
_KEYWORDS: dict[str, tuple[str, str, str]] = {
    "set": (r"[A-Za-z_][\w-]*", "NAME", _MUST),
    "about": (r".+", "TEXT", _MUST),
    "versions": (
        rf"({_MAJOR}-({_MAJOR})?|-{_MAJOR})( {_NAME})?",
        "FIRST-LAST or FIRST-LAST EVENT",
        _ANY,
    ),
    "event": (
        rf"{_NAME}( {_NAME}:([usx](8|16|32|64)|string))*",
        "NAME FIELD:TYPE..., TYPE as in u32, x32, s64, string",
        _ANY,
    ),
    "place": (
        rf"{_NAME} (stores {_NAME}|(probe|function) {_NAME}( {_NAME}={_ARGUMENT})*)",
        "NAME stores SYMBOL, or NAME probe PROBE FIELD=argN..., or NAME function SYMBOL "
        "FIELD=argN...",
        _ANY,
    ),
    "start": (_EVENT, "EVENT", _MUST),
    "end": (rf"{_EVENT}( {_NAME}={_NUMBER})?", "EVENT or EVENT FIELD=VALUE", _ANY),
    "reset": (_EVENT, "EVENT", _ANY),
    "key": (
        r"tid( nested| continued)?",
        "tid, tid nested or tid continued: intervals are paired by thread",
        _MUST,
    ),
    "label": (
        rf"wait-event {_NAME}|{_NAME}( {_NAME})*",
        "wait-event FIELD, or FIELD...",
        _MUST,
    ),
    "names": (
        rf"{_NAME} (wait-event {_NUMBER}|{_NUMBER}=\S+( {_NUMBER}=\S+)*)",
        "FIELD VALUE=TEXT..., or FIELD wait-event BASE",
        _ANY,
    ),
    "bits": (rf"{_NAME} [0-9]{{1,2}}=\S+( [0-9]{{1,2}}=\S+)*", "FIELD BIT=TEXT...", _ANY),
}


@dataclass
class _Parser:
    path: Path
    number: int = 0
    lines: dict[str, list[tuple[int, list[str]]]] = field(default_factory=dict)

    def fail(self, why: str, number: int | None = None) -> WaitfoldError:
        at = self.number if number is None else number
        return WaitfoldError(f"{self.path}:{at}: {why}" if at else f"{self.path}: {why}")

    def line(self, number: int, keyword: str, args: list[str]) -> None:
        self.number = number
        if keyword not in _KEYWORDS:
            raise self.fail(f"unknown keyword '{keyword}'")
        pattern, wants, often = _KEYWORDS[keyword]
        if not re.fullmatch(pattern, " ".join(args)):
            raise self.fail(f"'{keyword}' wants {wants}")
        before = self.lines.setdefault(keyword, [])
        if before and often != _ANY:
            raise self.fail(f"'{keyword}' a second time, first in line {before[0][0]}")
        before.append((number, args))

    def each(self, keyword: str) -> Iterator[list[str]]:
        """Yield the arguments of each line of a keyword; what fails then is of that line."""
        for number, args in self.lines.get(keyword, []):
            self.number = number
            yield args

    def one(self, keyword: str) -> list[str]:
        self.number, args = self.lines[keyword][0]
        return args

    def finish(self) -> ProbeSet:
        self.number = 0
        for keyword, (_, _, often) in _KEYWORDS.items():
            if keyword not in self.lines and (often == _MUST or keyword == "end"):
                raise self.fail(f"no '{keyword}' line")
        name = self.one("set")[0]
        if name != self.path.stem:
            raise self.fail(f"the set's name must be the file's, '{self.path.stem}'")
        fields = self.events()
        self.check_places(fields)
        start = self.event(fields, self.one("start")[0])
        ends, end_value = self.ends(fields, start)
        resets = tuple(self.event(fields, reset) for (reset,) in self.each("reset"))
        wait_field, label = self.label(fields, start, ends)
        names, wait_names = self.names()
        return ProbeSet(
            name=name,
            about=" ".join(self.one("about")),
            fields=fields,
            only=self.only(fields, {start, *ends, *resets}),
            start=start,
            ends=ends,
            end_value=end_value,
            resets=resets,
            nested="nested" in self.one("key"),
            continued="continued" in self.one("key"),
            wait_field=wait_field,
            label=label,
            names=names,
            wait_names=wait_names,
            bits={of: _named(pairs) for of, *pairs in self.each("bits")},
        )

    def events(self) -> dict[str, dict[str, str]]:
        fields: dict[str, dict[str, str]] = {}
        for name, *typed in self.each("event"):
            if name in fields:
                raise self.fail(f"event '{name}' a second time")
            fields[name] = dict(word.split(":") for word in typed)
        return fields

    def only(
        self, fields: dict[str, dict[str, str]], needed: set[str]
    ) -> dict[str, tuple[int, int]]:
        only: dict[str, tuple[int, int]] = {}
        of_set = False
        for versions, *event in self.each("versions"):
            first, _, last = versions.partition("-")
            if not event:
                if of_set:
                    raise self.fail("'versions' of the set a second time")
                of_set = True
            elif event[0] in only:
                raise self.fail(f"'versions' of '{event[0]}' a second time")
            elif self.event(fields, event[0]) in needed:
                raise self.fail(f"intervals need '{event[0]}' in all versions")
            else:
                only[event[0]] = int(first or 0), int(last or _NEWEST)
        return only

    def check_places(self, fields: dict[str, dict[str, str]]) -> None:
        placed = set()
        for event, how, _, *given in self.each("place"):
            self.event(fields, event)
            if how != "stores" and {g.partition("=")[0] for g in given} != set(
                fields.get(event, ())
            ):
                raise self.fail(f"a place of '{event}' must give each of its fields")
            placed.add(event)
        self.number = 0
        for event in fields:
            if event not in placed:
                raise self.fail(f"event '{event}' has no place")

    def event(self, fields: dict[str, dict[str, str]], event: str) -> str:
        if ":" not in event and event not in fields:
            raise self.fail(f"no event '{event}' in this set")
        return event

    def ends(
        self, fields: dict[str, dict[str, str]], start: str
    ) -> tuple[tuple[str, ...], tuple[str, int] | None]:
        ends, end_value = [], None
        for end, *value in self.each("end"):
            ends.append(self.event(fields, end))
            if value:
                name, _, number = value[0].partition("=")
                if end != start or fields.get(start, {name: ""}).get(name, "string") == "string":
                    raise self.fail(f"an end by value must be of a number that '{start}' carries")
                end_value = name, int(number, 0)
            elif end == start:
                raise self.fail("start and end are the same event: say which FIELD=VALUE ends")
        if end_value is not None and len(ends) > 1:
            raise self.fail("an end by value must be the only one")
        return tuple(ends), end_value

    def label(
        self, fields: dict[str, dict[str, str]], start: str, ends: tuple[str, ...]
    ) -> tuple[str | None, tuple[str, ...]]:
        label = self.one("label")
        if label[0] == "wait-event":
            if start in fields and label[1] not in fields[start]:
                raise self.fail(f"event '{start}' has no field '{label[1]}'")
            for keyword in ("reset", "names", "bits"):
                if keyword in self.lines:
                    raise self.fail(f"'label wait-event' goes without '{keyword}'")
            if len(ends) > 1 or len(self.one("key")) > 1:
                raise self.fail("wait events have one end, and 'key tid' alone")
            return label[1], ()
        self.one("label")
        if start not in fields:
            raise self.fail(f"'{start}' is not an event of this set, so its fields are not known")
        for name in label:
            if name not in fields[start] and any(name not in fields.get(end, ()) for end in ends):
                raise self.fail(f"neither '{start}' nor every end has a field '{name}'")
        return None, tuple(label)

    def names(self) -> tuple[dict[str, dict[int, str]], dict[str, int]]:
        names: dict[str, dict[int, str]] = {}
        wait_names = {}
        for of, *pairs in self.each("names"):
            if pairs[0] == "wait-event":
                wait_names[of] = int(pairs[1], 0)
            else:
                names.setdefault(of, {}).update(_named(pairs))
        return names, wait_names


def _named(pairs: list[str]) -> dict[int, str]:
    split = (pair.partition("=") for pair in pairs)
    return {int(value, 0): text for value, _, text in split}
