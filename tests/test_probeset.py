"""The parser of probe sets."""

from pathlib import Path

import pytest

from waitfold.errors import WaitfoldError
from waitfold.events import PairRule
from waitfold.probeset import load_set, load_sets, probes_dir

GOOD = """\
set    mine
about  what it is for  # and why
event  w v:x32
place  w stores my_wait_event_info
start  w v
end    w v=0
key    tid
label  wait-event
"""


def _load(folder: Path, text: str) -> None:
    path = folder / "mine.set"
    path.write_text(text)
    load_set(path)


def test_wait_event() -> None:
    """The recorder's set pairs one event by its value, in the group of the run."""
    wait_event = load_sets()["wait-event"]
    assert wait_event.rule() == PairRule("waitfold_*:w", "v", "waitfold_*:w", 0)
    assert wait_event.rule("waitfold_77").start_event == "waitfold_77:w"
    assert wait_event.fields == {"w": {"v": "x32"}}
    assert wait_event.places == {"w": "my_wait_event_info"}


def test_wait_event_usdt() -> None:
    """The set of compiled-in probes pairs two events of perf probe's group."""
    rule = load_sets()["wait-event-usdt"].rule()
    assert rule == PairRule(
        "sdt_postgresql:wait__event__start", "arg1", "sdt_postgresql:wait__event__end", None
    )


def test_every_set_is_read() -> None:
    """Every file in probes/ is a probe set with the file's name."""
    assert set(load_sets()) == {path.stem for path in probes_dir().glob("*.set")}


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("key    tid", "lock   tid", "7: unknown keyword 'lock'"),
        ("key    tid", "key    cpu", "7: 'key' wants tid"),
        ("key    tid", "", ": no 'key' line"),
        ("key    tid", "set mine", "7: 'set' a second time, first in line 1"),
        ("label  wait-event", "label  lock", "8: 'label' wants wait-event"),
        ("set    mine", "set    yours", "1: the set's name must be the file's, 'mine'"),
        ("about  what it is for  # and why", "about  # why", "2: 'about' wants TEXT"),
        ("event  w v:x32", "event  w v", "3: 'event' wants NAME FIELD:TYPE"),
        ("event  w v:x32", "event  w v:x33", "3: 'event' wants NAME FIELD:TYPE"),
        ("event  w v:x32", "event  x v:x32", "4: no event 'w' in this set"),
        ("key    tid", "event w v:x32", "7: event 'w' a second time"),
        ("place  w stores my_wait_event_info", "place  w", "4: 'place' wants NAME stores SYMBOL"),
        ("start  w v", "start  w", "5: 'start' wants EVENT FIELD"),
        ("start  w v", "start  w x", "5: event 'w' has no field 'x'"),
        ("start  w v", "start  b v", "5: no event 'b' in this set"),
        ("end    w v=0", "end    w v=x", "6: 'end' wants EVENT or EVENT FIELD=VALUE"),
        ("end    w v=0", "end    a:b v=0", "6: an end by value must be of 'w v'"),
        ("end    w v=0", "end    w", "6: start and end are the same event"),
    ],
)
def test_wrong(tmp_path: Path, line: str, instead: str, message: str) -> None:
    """A line that is wrong is an error with its number."""
    _load(tmp_path, GOOD)
    with pytest.raises(WaitfoldError) as error:
        _load(tmp_path, GOOD.replace(line, instead))
    assert f"mine.set:{message}".replace("::", ":") in str(error.value)
