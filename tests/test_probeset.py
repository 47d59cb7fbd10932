"""The parser of probe sets."""

from pathlib import Path

import pytest

from waitfold.errors import WaitfoldError
from waitfold.events import PairRule, SetRule
from waitfold.probeset import load_set, load_sets, probes_dir

GOOD = """\
set    mine
about  what it is for  # and why
event  w v:x32
place  w stores my_wait_event_info
start  w
end    w v=0
key    tid
label  wait-event v
"""

OTHER = """\
set    mine
about  what it is for
event  a x:u32 y:string
event  b z:u8
event  c
place  a probe a__start x=arg1 y=string(arg2)
place  b probe a__done z=arg-1
place  c probe oh__no
start  a
end    b
reset  c
key    tid nested
label  y x z
names  x 0=none 1=some
names  z wait-event 0x03000000
"""


def _load(folder: Path, text: str) -> None:
    path = folder / "mine.set"
    path.write_text(text)
    load_set(path)


def test_wait_event() -> None:
    """The recorder's set pairs one event by its value, in the group of the run."""
    wait_event = load_sets()["wait-event"]
    assert wait_event.rule() == PairRule("waitfold_*:w", "v", "waitfold_*:w", 0)
    assert wait_event.rule("waitfold_77") == PairRule("waitfold_77:w", "v", "waitfold_77:w", 0)
    assert wait_event.fields == {"w": {"v": "x32"}}


def test_wait_event_usdt() -> None:
    """The set of compiled-in probes pairs two events of perf probe's group."""
    rule = load_sets()["wait-event-usdt"].rule()
    assert rule == PairRule(
        "sdt_postgresql:wait__event__start", "arg1", "sdt_postgresql:wait__event__end", None
    )


def test_every_set_is_read() -> None:
    """Every file in probes/ is a probe set with the file's name."""
    assert set(load_sets()) == {path.stem for path in probes_dir().glob("*.set")}


def test_label() -> None:
    """Fields of start and end become texts; what is not known is `?`."""
    lock = load_sets()["lock-wait"]
    names = {0x03000003: "page"}
    assert lock.texts({"type": 3, "mode": 8, "object": 0}, lambda v: names[v]) == (
        "page",
        "AccessExclusive",
        "-",
    )
    sort = load_sets()["sort"]
    assert sort.texts({"kind": 9, "disk": None}, str) == ("9", "?")
    checkpoint = load_sets()["checkpoint"]
    assert checkpoint.texts({"flags": 0x20C}, str) == ("immediate+force+bit9",)
    assert checkpoint.texts({"flags": 0}, str) == ("none",)
    assert load_sets()["query"].texts({"text": b"select 'b\xe9'"}, str) == ("select 'b\\xe9'",)


def test_rule() -> None:
    """A label's fields are looked for in the start event first, then in those that end."""
    assert load_sets()["sort"].rule("g") == SetRule(
        "g:sort_start", ("kind",), ("g:sort_done",), ("disk",), None, ("g:sort_abort",), True
    )
    assert load_sets()["query"].rule("g") == SetRule(
        "g:query_activity", ("text",), (), (), ("pointer", 0), continued=True
    )
    assert load_sets()["query"].only == {"query_id": (14, 999)}
    assert load_sets()["transaction"].rule("g") == SetRule(
        "g:transaction_start", (), ("g:transaction_commit", "g:transaction_abort"), ("outcome",)
    )


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("key    tid", "lock   tid", "7: unknown keyword 'lock'"),
        ("key    tid", "key    cpu", "7: 'key' wants tid"),
        ("key    tid", "key    tid nested", "7: wait events have one end, and 'key tid' alone"),
        ("key    tid", "", ": no 'key' line"),
        ("key    tid", "set mine", "7: 'set' a second time, first in line 1"),
        ("label  wait-event v", "label  wait-event", "8: 'label' wants wait-event FIELD"),
        ("label  wait-event v", "label  wait-event x", "8: event 'w' has no field 'x'"),
        ("label  wait-event v", "label  x", "8: neither 'w' nor every end has a field 'x'"),
        ("set    mine", "set    yours", "1: the set's name must be the file's, 'mine'"),
        ("about  what it is for  # and why", "about  # why", "2: 'about' wants TEXT"),
        ("event  w v:x32", "event  w v", "3: 'event' wants NAME FIELD:TYPE"),
        ("event  w v:x32", "event  w v:x33", "3: 'event' wants NAME FIELD:TYPE"),
        ("event  w v:x32", "event  x v:x32", "4: no event 'w' in this set"),
        ("key    tid", "key tid\nevent w v:x32", "8: event 'w' a second time"),
        ("place  w stores my_wait_event_info", "place  w", "4: 'place' wants NAME stores SYMBOL"),
        ("place  w stores my_wait_event_info", "", ": event 'w' has no place"),
        ("start  w", "start  w v", "5: 'start' wants EVENT"),
        ("start  w", "start  b", "5: no event 'b' in this set"),
        ("end    w v=0", "end    w v=x", "6: 'end' wants EVENT or EVENT FIELD=VALUE"),
        (
            "end    w v=0",
            "end    a:b v=0",
            "6: an end by value must be of a number that 'w' carries",
        ),
        ("end    w v=0", "end    w x=0", "6: an end by value must be of a number that 'w' carries"),
        ("end    w v=0", "end    w", "6: start and end are the same event"),
        ("end    w v=0", "", ": no 'end' line"),
    ],
)
def test_wrong(tmp_path: Path, line: str, instead: str, message: str) -> None:
    """A line that is wrong is an error with its number."""
    _load(tmp_path, GOOD)
    with pytest.raises(WaitfoldError) as error:
        _load(tmp_path, GOOD.replace(line, instead))
    assert f"mine.set:{message}".replace("::", ":") in str(error.value)


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("x=arg1 y=string(arg2)", "x=arg1", "6: a place of 'a' must give each of its fields"),
        ("z=arg-1", "z=arg-1 x=1", "7: a place of 'b' must give each of its fields"),
        ("z=arg-1", "z=string(4)", "7: 'place' wants"),
        ("start  a", "start  p:a", "13: 'p:a' is not an event of this set"),
        ("end    b", "end    d", "10: no event 'd' in this set"),
        ("end    b", "end    a y=0", "10: an end by value must be of a number that 'a' carries"),
        ("end    b", "end    b\nend a x=0", "11: an end by value must be the only one"),
        ("reset  c", "reset  d", "11: no event 'd' in this set"),
        (
            "c probe oh__no",
            "c function oh_no x=1",
            "8: a place of 'c' must give each of its fields",
        ),
        ("reset  c", "reset  c\nversions 14- c", "12: intervals need 'c' in all versions"),
        ("label  y x z", "label  y x w", "13: neither 'a' nor every end has a field 'w'"),
        ("label  y x z", "label  wait-event x", "13: 'label wait-event' goes without 'reset'"),
        ("names  x 0=none", "names  x none", "14: 'names' wants"),
    ],
)
def test_wrong_static_probes(tmp_path: Path, line: str, instead: str, message: str) -> None:
    """The same of a set of static probes with a label."""
    _load(tmp_path, OTHER)
    with pytest.raises(WaitfoldError) as error:
        _load(tmp_path, OTHER.replace(line, instead))
    assert f"mine.set:{message}" in str(error.value)


def test_events_are_of_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sets of a recording share a group, so two with the same event are refused."""
    monkeypatch.setattr("waitfold.probeset.probes_dir", lambda: tmp_path)
    (tmp_path / "mine.set").write_text(GOOD)
    (tmp_path / "yours.set").write_text(GOOD.replace("mine", "yours"))
    with pytest.raises(WaitfoldError, match="mine and yours both have 'w'"):
        load_sets()
