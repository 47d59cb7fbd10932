"""What the fuzzers (bench/fuzz.py, bench/fuzz_guided.py) broke once."""

from __future__ import annotations

import re
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from waitfold import archive, cli
from waitfold.analysis import SetNames
from waitfold.inputs import Input
from waitfold.perfdata import format_fields
from waitfold.probeset import load_sets
from waitfold.waitevents import WaitEvents

DATA = Path(__file__).resolve().parent / "data"
SAMPLE = 9


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """A capture with switches, samples, queries and stacks, cut to some records of each."""
    return shutil.copytree(DATA / "fuzz" / "all", tmp_path / "all")


def records(data: bytearray) -> Iterator[tuple[int, int]]:
    """Yield where each record of a perf.data is, and of what type."""
    at, size = struct.unpack_from("<2Q", data, 40)
    end = at + size
    while at < end:
        kind, _, step = struct.unpack_from("<IHH", data, at)
        yield at, kind
        at += step


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Return what the command says that cannot do it."""
    assert cli.main([str(word) for word in argv]) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "bug" not in said
    return said


def test_no_transition_at_all(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capture in which no wait began or ended has a report by process all the same."""
    path = everything / "perf.data"
    data = bytearray(path.read_bytes())
    for at, kind in [*records(data)]:
        if kind == SAMPLE:
            struct.pack_into("<I", data, at, 12)  # PERF_RECORD_ITRACE_START, which says nothing
    path.write_bytes(data)
    assert cli.main(["report", str(everything), "--by", "backend"]) == 0
    assert "transitions  0" in capsys.readouterr().out


def test_switch_from_a_thread_that_cannot_be(
    everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread's id in a switch's own fields is checked as that of the sample is."""
    path = everything / "perf.data"
    data = path.read_bytes()
    comm = data.index(b"postgres\0\0\0\0\0\0\0\0", 2000)  # sched_switch: prev_comm, prev_pid
    path.write_bytes(data[: comm + 16] + b"\xff\xff\xff\x6f" + data[comm + 20 :])
    assert "has a thread that cannot be" in refused(capsys, "report", everything, "--by", "backend")


def test_fork_at_a_time_that_cannot_be(everything: Path) -> None:
    """The time of a FORK record is unsigned, as that of the records that it is sorted among."""
    path = everything / "perf.data"
    data = bytearray(path.read_bytes())
    fork = next(at for at, kind in records(data) if kind == 7)
    struct.pack_into("<Q", data, fork + 24, (1 << 64) - 1)
    path.write_bytes(data)
    assert cli.main(["fold", str(everything), "--kind", "wall"]) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"event ", b"ev\xffnt "),
        (b"start ", b"names text 007=bond\nstart "),
        (b"start ", b"names text " + b"9" * 5000 + b"=x\nstart "),
        (b"versions 14-", b"versions " + b"9" * 5000 + b"-"),
    ],
)
def test_damaged_set(
    everything: Path, capsys: pytest.CaptureFixture[str], before: bytes, after: bytes
) -> None:
    """A capture's probe set that is not text, or has numbers that are none, is told by its line."""
    path = everything / "query.set"
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    assert "query.set:" in refused(capsys, "report", everything)


def test_bundle_with_a_profile(everything: Path, tmp_path: Path) -> None:
    """Columns of all kinds, unsigned ones too, are checked when a bundle is read."""
    bundle = tmp_path / "x.waitfold"
    assert cli.main(["bundle", str(everything), "-o", str(bundle)]) == 0
    assert cli.main(["report", "--audit", str(bundle)]) == 0


def test_switch_without_its_field(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A switch that the file describes otherwise than the kernel does is told by its name."""
    path = everything / "perf.data"
    path.write_bytes(path.read_bytes().replace(b"prev_state;", b"prev_stata;"))
    said = refused(capsys, "report", everything, "--by", "backend")
    assert "sched:sched_switch do not hold all of thread, time, prev_pid, prev_state" in said


@pytest.mark.parametrize(
    "cells",
    [
        "0\t1\t-",
        "4194305\t1\t-",
        "9" * 18 + "\t1\t-",
        "5\t" + "9" * 19 + "\t-",
        "5\t1\t0x1ffffffff",
    ],
)
def test_process_that_cannot_be(
    everything: Path, capsys: pytest.CaptureFixture[str], cells: str
) -> None:
    """Numbers in backends.tsv are within what the kernel has."""
    path = everything / "backends.tsv"
    with path.open("a") as file:
        file.write(f"{cells}\tpostgres: a b [local] idle\t-\tselect 1\n")
    lines = path.read_text().count("\n")
    assert f"backends.tsv:{lines}:" in refused(capsys, "report", everything, "--by", "query")


def test_an_end_whose_fields_are_not_kept() -> None:
    """Where an interval's end is one of all others, its fields are not known."""
    lock = load_sets()["lock-wait"]
    rule = lock.set_rule("g")
    names = SetNames(lock, rule, WaitEvents("15"))
    code = int(rule.both.of([np.array([2]), np.array([1])], 1)[0])
    assert names.texts(code) == ("(others)",)
    assert names.fields(code) == {}


def test_mode_mem_with_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Watchpoints see wait events alone, whatever a manifest says."""
    capture = shutil.copytree(DATA / "fuzz" / "mem", tmp_path / "mem")
    manifest = capture / "manifest"
    manifest.write_text(manifest.read_text().replace("\twait-event", "\twait-event,query"))
    assert "mode mem records wait events alone" in refused(capsys, "report", capture)


def test_long_declaration_of_a_field() -> None:
    """What a file says of a field takes time in proportion to its length."""
    begun = time.monotonic()
    assert format_fields("\tfield:" + "a" * 1_000_000) == {}
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize("verb", ["fold", "report --html /dev/null"])
def test_window_of_no_length(
    everything: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """A capture in which nobody waited has no stacks, and a page."""
    manifest = everything / "manifest"
    text = re.sub(r"(start|end)_ns\t\d+", r"\1_ns\t1", manifest.read_text())
    manifest.write_text(text)
    assert cli.main([*verb.split(), str(everything)]) == 0
    assert capsys.readouterr().out == ""


def test_bundle_with_half_a_surrogate_pair(
    everything: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text in a bundle that cannot be written is refused when it is read."""
    bundle = tmp_path / "x.waitfold"
    assert cli.main(["bundle", str(everything), "-o", str(bundle)]) == 0
    members = archive.unpack(Input(bundle), re.compile(".*"))
    changed = {name: bytes(content) for name, content in members.items()}
    about = changed["capture.json"]
    assert b'"sites"' in about
    changed["capture.json"] = about.replace(b'"sites"', rb'"\ud800"')
    bundle.write_bytes(archive.pack(changed))
    capsys.readouterr()
    assert "capture.json: it is no JSON" in refused(capsys, "report", bundle)
