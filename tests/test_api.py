"""waitfold.load(): tables as documented, with the report's figures; the notebook runs."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import ROOT, report, run
from nbclient import NotebookClient

import waitfold
from waitfold.errors import WaitfoldError
from waitfold.join import ON_CPU
from waitfold.show.export import WRITERS

MIXED = ROOT / "tests/data/mixed"
TABLES = ["events", "intervals", "samples", "backends"]


@pytest.fixture(scope="module", params=["mixed", "whole"])
def path(request: pytest.FixtureRequest) -> Path:
    """A capture without profiles, and one with all that can be recorded."""
    return MIXED if request.param == "mixed" else request.getfixturevalue("whole_capture")


@pytest.fixture(scope="module")
def recording(path: Path) -> waitfold.Recording:
    """The capture, opened."""
    return waitfold.load(path)


def documented(table: str) -> dict[str, str]:
    """The columns of a table and their types, as its docstring has them."""
    text = getattr(waitfold.Recording, table).__doc__
    rows = re.findall(r"^ +(\w+(?:, \w+)*) {2,}(category|bool|\w*[iI]nt\d+) ", text, re.M)
    return {name: type_ for names, type_ in rows for name in names.split(", ")}


@pytest.mark.parametrize("table", TABLES)
def test_columns(recording: waitfold.Recording, table: str) -> None:
    """Each table has the columns and types that its docstring says, whatever was recorded."""
    frame = getattr(recording, table)
    assert {name: str(frame[name].dtype) for name in frame} == documented(table)
    assert getattr(recording, table) is frame
    if "time_ns" in frame:
        assert frame["time_ns"].is_monotonic_increasing


def test_intervals_are_the_reports(path: Path, recording: waitfold.Recording) -> None:
    """Each event's number, total and greatest length are the report's."""
    waits = recording.intervals
    whole = waits[waits["flags"] == ""].groupby(["class", "name"], observed=True)["dur_ns"]
    got = whole.agg(["count", "sum", "max"])
    told = [row for row in report(path)["waits"] if row["count"]]
    assert len(told) == len(got) > 5
    for row in told:
        want = [row["count"], row["total_ns"], row["max_ns"]]
        assert got.loc[(row["class"], row["name"])].tolist() == want


def test_events_make_the_intervals(recording: waitfold.Recording) -> None:
    """Every complete interval begins with a store of its wait event, and ends with another."""
    stores = recording.events.query("mark == 'store'")
    at = stores.set_index(["tid", "time_ns"])
    waits = recording.intervals[recording.intervals["flags"] == ""]
    begun = at.loc[list(zip(waits["tid"], waits["start_ns"], strict=True))]
    assert begun["name"].tolist() == waits["name"].tolist()
    ends = zip(waits["tid"], waits["start_ns"] + waits["dur_ns"], strict=True)
    assert set(ends) <= set(at.index)
    assert stores.loc[stores["value"] == 0, "name"].isna().all()


def test_without_profiles() -> None:
    """What was not recorded is missing, not 0."""
    recording = waitfold.load(str(MIXED))
    waits = recording.intervals
    unknown = ["query", "query_id", "blocked_ns", "run_queue_ns", "on_cpu_ns"]
    assert waits[unknown].isna().all(axis=None)
    assert recording.samples.empty
    assert recording.backends["first_ns"].min() == recording.start_ns < recording.end_ns


def test_split_and_query(whole_capture: Path) -> None:
    """A wait is split into what the scheduler did with it, and has its query."""
    recording = waitfold.load(whole_capture)
    waits = recording.intervals
    split = waits["blocked_ns"] + waits["run_queue_ns"] + waits["on_cpu_ns"]
    known = waits[split.notna()]
    assert len(known) > 10
    # Nothing was lost.
    assert (split == waits["dur_ns"])[waits["flags"] == ""].all()
    lock = waits[waits["name"] == "transactionid"].iloc[0]
    assert lock["query"] == "SELECT FROM whole FOR UPDATE;"
    assert lock["blocked_ns"] > 150_000_000 and lock["application"] == "psql"
    segments = recording.joined.segments
    waiting = (segments.value != 0) & (segments.run == ON_CPU)
    assert waits["on_cpu_ns"].sum() == segments.dur_ns[waiting].sum()


def test_samples(whole_capture: Path) -> None:
    """A computing query has samples of its stack, a sleeping one that of where it left the CPU."""
    samples = waitfold.load(whole_capture).samples
    busy = samples[samples["query"].astype(object) == BUSY]
    on_cpu = busy[busy["kind"] == "on-CPU"]
    assert len(on_cpu) > 3 and (on_cpu["run_queue_ns"] == 0).all()
    assert on_cpu["stack"].str.contains("PostgresMain;").mean() > 0.5
    lock = samples[samples["name"].astype(object) == "transactionid"]
    slept = lock[lock["kind"] == "off-CPU"].sort_values("dur_ns").iloc[-1]
    assert slept["dur_ns"] > 150_000_000
    assert re.search(r"\bWaitLatch;.*epoll_wait", slept["stack"])


BUSY = "SELECT sum(n % 7) FROM generate_series(1, 1000000) AS n;"


def test_empty_window(tmp_path: Path) -> None:
    """A recording that ended when it began gives empty tables and exports."""
    capture = tmp_path / "capture"
    shutil.copytree(MIXED, capture)
    text = (capture / "manifest").read_text()
    start = re.search(r"^start_ns\t(\d+)$", text, re.M)
    assert start
    (capture / "manifest").write_text(re.sub(r"(?m)^end_ns\t.*$", f"end_ns\t{start[1]}", text))
    recording = waitfold.load(capture)
    assert recording.intervals.empty and recording.samples.empty
    for write in WRITERS.values():
        write(recording, io.BytesIO())


def test_lazy(tmp_path: Path) -> None:
    """Import and load read next to nothing; what cannot be opened says why."""
    answer = run(sys.executable, "-c", "import sys, waitfold; print('pandas' in sys.modules)")
    assert answer.stdout == "False\n"
    assert not set(vars(waitfold.load(MIXED))) & {*TABLES, "joined"}
    with pytest.raises(WaitfoldError, match="no such file or folder"):
        waitfold.load(tmp_path / "nothing")
    with pytest.raises(AttributeError):
        waitfold.nothing  # noqa: B018


def test_notebook() -> None:
    """The notebook runs from its first cell to its last, and shows what it showed."""
    file = ROOT / "docs/notebook/waits.ipynb"
    notebook: Any = nbformat.read(file, as_version=4)
    before = [tables(cell) for cell in notebook.cells]
    where = {"metadata": {"path": str(file.parent)}}
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources=where).execute()
    assert [tables(cell) for cell in notebook.cells] == before
    assert sum(map(len, before)) > 3


def tables(cell: Any) -> list[str]:
    """What a cell shows as text."""
    found = [output.get("data", {}).get("text/plain") for output in cell.get("outputs", [])]
    return [text for text in found if text is not None]
