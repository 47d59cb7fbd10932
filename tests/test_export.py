"""The exports, read back by the tool that they are for, or by its schema."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, report, waitfold
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from waitfold.api import INTERVALS, Recording, load
from waitfold.cli import EXPORTS, main
from waitfold.join import BLOCKED, ON_CPU, RUN_QUEUE
from waitfold.queries import Query
from waitfold.show.export import WRITERS

MIXED = ROOT / "tests/data/mixed"
SPEEDSCOPE = ROOT / ".venv/npm/node_modules/speedscope/dist/release/file-format-schema.json"
HOSTILE = 'a"b\\c</script>&\0\x1b[31m\n\u202e' + "x" * 2000


@pytest.fixture(scope="module", params=["mixed", "whole"])
def path(request: pytest.FixtureRequest) -> Path:
    """A capture without profiles, and one with all that can be recorded."""
    return MIXED if request.param == "mixed" else request.getfixturevalue("whole_capture")


@pytest.fixture(scope="module")
def recording(path: Path) -> Recording:
    """The capture, opened; its tables are read once for all tests."""
    return load(path)


def written(recording: Recording, format_: str) -> bytes:
    """An export."""
    file = io.BytesIO()
    WRITERS[format_](recording, file)
    return file.getvalue()


class Slices:
    """What is in a Perfetto trace: (process, track, start, length, category, name, cut)."""

    def __init__(self, content: bytes) -> None:
        trace = Trace()
        trace.ParseFromString(content)
        self.processes: dict[int, tuple[int, str]] = {}
        tracks: dict[int, tuple[int, str]] = {}
        interned: dict[str, dict[int, Any]] = defaultdict(dict)
        open_: dict[int, list[tuple[int, str, str, str]]] = defaultdict(list)
        self.rows: list[tuple[int, str, int, int, str, str, str]] = []
        self.samples: list[tuple[int, int, str]] = []
        clock = 0
        for packet in trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            if packet.HasField("clock_snapshot"):
                clock = packet.clock_snapshot.primary_trace_clock
            for kind, texts in packet.interned_data.ListFields():
                interned[kind.name] |= {one.iid: one for one in texts}
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in tracks and track.uuid not in self.processes
                if track.HasField("process"):
                    self.processes[track.uuid] = track.process.pid, track.process.process_name
                else:
                    tracks[track.uuid] = self.processes[track.parent_uuid][0], track.name
            if packet.HasField("track_event"):
                self._event(packet, tracks, interned, open_)
            if packet.HasField("perf_sample"):
                sample = packet.perf_sample
                frames = interned["callstacks"][sample.callstack_iid].frame_ids
                ids = [interned["frames"][frame].function_name_id for frame in frames]
                stack = b";".join(interned["function_names"][i].str for i in ids)
                self.samples.append((packet.timestamp, sample.pid, stack.decode()))
        assert clock == 3  # BUILTIN_CLOCK_MONOTONIC
        assert not any(open_.values())

    def _event(self, packet: Any, tracks: Any, interned: Any, open_: Any) -> None:
        event, uuid = packet.track_event, packet.track_event.track_uuid
        if event.type == event.TYPE_SLICE_BEGIN:
            assert not open_[uuid], "one in another"
            cut = "".join(one.string_value for one in event.debug_annotations)
            category = interned["event_categories"][event.category_iids[0]].name
            name = interned["event_names"][event.name_iid].name
            open_[uuid].append((packet.timestamp, category, name, cut))
            return
        start, category, name, cut = open_[uuid].pop()
        length = packet.timestamp - start
        self.rows.append((*tracks[uuid], start, length, category, name, cut))


def test_perfetto_has_the_reports_waits(path: Path, recording: Recording) -> None:
    """By Perfetto's own schema, the slices are the intervals, and add up to the report."""
    slices = Slices(written(recording, "perfetto"))
    waits = [row for row in slices.rows if row[1] == "waits"]
    columns = [recording.intervals[c] for c in ("pid", "start_ns", "dur_ns", "class", "name")]
    rows = zip(*columns, recording.intervals["flags"], strict=True)
    assert sorted((p, s, n, f"{c}:{e}", f) for p, s, n, c, e, f in rows) == sorted(
        (pid, start, length, name, cut) for pid, _, start, length, _, name, cut in waits
    )
    counts, total, cut_ns = Counter[str](), Counter[str](), Counter[str]()
    for _, _, _, length, class_, name, cut in waits:
        assert name.startswith(f"{class_}:")
        (cut_ns if cut else total)[name] += length
        counts[name] += not cut
    told = report(path)
    assert len(told["waits"]) > 5
    for row in told["waits"]:
        name = f"{row['class']}:{row['name']}"
        assert (counts[name], total[name], cut_ns[name]) == (
            row["count"], row["total_ns"], row["cut_ns"],
        )  # fmt: skip
    assert {name for _, name in slices.processes.values()} >= {"checkpointer"}


def test_perfetto_has_the_rest(recording: Recording) -> None:
    """Run states and queries have the time that was joined, samples their stacks."""
    slices, segments = Slices(written(recording, "perfetto")), recording.joined.segments
    time: Counter[tuple[str, str]] = Counter()
    for _, track, _, length, _, name, _ in slices.rows:
        time[track, name] += length
    if not recording.joined.scheduled:
        assert {track for track, _ in time} == {"waits"} and not slices.samples
        return
    states = {"blocked": BLOCKED, "run queue": RUN_QUEUE, "on-CPU": ON_CPU}
    for name, state in states.items():
        assert time["run state", name] == segments.dur_ns[segments.run == state].sum() > 0
    table = recording.joined.queries.table
    for i in np.unique(segments.query[segments.query > 0]).tolist():
        assert time["query", table[i].text] == segments.dur_ns[segments.query == i].sum()
    samples = recording.samples.query("kind == 'on-CPU'")
    stacks = samples["stack"].astype(object).replace("", "[unknown]")
    assert len(samples) > 3
    rows = zip(samples["time_ns"], samples["pid"], stacks, strict=True)
    assert sorted(slices.samples) == sorted(rows)


def test_speedscope(recording: Recording) -> None:
    """It is as speedscope's schema says, well nested, and has the time of the waits."""
    file = json.loads(written(recording, "speedscope"))
    # The validator takes a second for some thousand events: what they are is the same for all.
    some = file | {
        "profiles": [
            {k: v[:100] if isinstance(v, list) else v for k, v in profile.items()}
            for profile in file["profiles"]
        ]
    }
    jsonschema.validate(some, json.loads(SPEEDSCOPE.read_text()))
    frames = [frame["name"] for frame in file["shared"]["frames"]]
    assert len(set(frames)) == len(frames)
    time: Counter[str] = Counter()
    weights = 0
    for profile in file["profiles"]:
        if profile["type"] == "sampled":
            assert sum(profile["weights"]) == profile["endValue"]
            assert len(profile["weights"]) == len(profile["samples"])
            assert max(map(max, profile["samples"])) < len(frames)
            weights += profile["endValue"]
            continue
        open_: list[tuple[int, int]] = []
        last = 0
        for event in profile["events"]:
            assert last <= event["at"] <= profile["endValue"]
            last = event["at"]
            if event["type"] == "O":
                open_.append((event["frame"], last))
            else:
                frame, start = open_.pop()
                assert frame == event["frame"]
                time[frames[frame]] += last - start
        assert not open_
    samples = recording.samples
    assert weights == samples["dur_ns"][samples["kind"] == "on-CPU"].sum()
    waits = recording.intervals
    names = waits["class"].astype(str) + ":" + waits["name"].astype(str)
    for name, ns in waits["dur_ns"].groupby(names).sum().items():
        assert time[str(name)] == ns


def columns_of(table: dict[str, Any], *names: str) -> int:
    """Check that a table of a Firefox profile has columns, all equally long; its length."""
    assert {*names, "length"} <= table.keys()
    assert all(len(table[name]) == table["length"] for name in names)
    return int(table["length"])


def test_firefox(recording: Recording) -> None:
    """Its tables are as the profiler's processed profile 55 has them, and have the waits.

    The profiler's own loader is in no registry; src/types/profile.ts describes the tables.
    """
    profile = json.loads(written(recording, "firefox"))
    meta = profile["meta"]
    assert meta["preprocessedProfileVersion"] == 55
    assert {"libs", "pages", "counters"} <= profile.keys()
    found, weights = [], 0.0
    for thread in profile["threads"]:
        strings = thread["stringArray"]
        functions = columns_of(
            thread["funcTable"], "name", "isJS", "relevantForJS", "resource", "fileName",
            "lineNumber", "columnNumber",
        )  # fmt: skip
        assert all(0 <= name < len(strings) for name in thread["funcTable"]["name"])
        frames = columns_of(
            thread["frameTable"], "address", "inlineDepth", "category", "subcategory", "func",
            "nativeSymbol", "innerWindowID", "line", "column",
        )  # fmt: skip
        assert all(0 <= function < functions for function in thread["frameTable"]["func"])
        stacks = columns_of(thread["stackTable"], "frame", "prefix")
        assert all(0 <= frame < frames for frame in thread["stackTable"]["frame"])
        for i, prefix in enumerate(thread["stackTable"]["prefix"]):
            assert prefix is None or 0 <= prefix < i
        columns_of(thread["samples"], "stack", "timeDeltas", "weight")
        assert all(0 <= stack < stacks for stack in thread["samples"]["stack"])
        assert all(delta >= 0 for delta in thread["samples"]["timeDeltas"])
        weights += sum(thread["samples"]["weight"])
        markers = thread["markers"]
        columns_of(markers, "category", "data", "startTime", "endTime", "name", "phase")
        assert all(category < len(meta["categories"]) for category in markers["category"])
        assert {data["type"] for data in markers["data"]} <= {
            schema["name"] for schema in meta["markerSchema"]
        }
        columns = (markers[name] for name in ("startTime", "endTime", "name", "data"))
        for start, end, name, data in zip(*columns, strict=True):
            if data["type"] == "wait":
                times = round(start * 1e6), round((end - start) * 1e6)
                found.append((int(thread["pid"]), *times, strings[name], data.get("cut", "")))
            assert 0 <= data.get("query", 0) < len(strings)
    waits = recording.intervals
    rows = zip(
        waits["pid"], waits["start_ns"] - recording.start_ns, waits["dur_ns"],
        waits["class"].astype(str) + ":" + waits["name"].astype(str), waits["flags"], strict=True,
    )  # fmt: skip
    assert sorted(found) == sorted(rows)
    samples = recording.samples
    whole = samples["dur_ns"][samples["kind"] == "on-CPU"].sum()
    assert weights == pytest.approx(whole / 1e6)
    assert {*meta["initialVisibleThreads"]} == {*range(len(profile["threads"]))}


def test_csv_and_parquet(recording: Recording) -> None:
    """Both have the rows of Recording.intervals, and Parquet also its types."""
    parquet = pq.read_table(io.BytesIO(written(recording, "parquet")))
    assert parquet.schema.equals(INTERVALS)
    by = ["start_ns", "pid"]
    want = recording.intervals.sort_values(by, ignore_index=True)
    csv = pd.read_csv(io.BytesIO(written(recording, "csv")), keep_default_na=False)
    for table in (parquet.to_pandas(), csv):
        got = table.sort_values(by, ignore_index=True)
        assert [*got] == INTERVALS.names
        for column in got:
            as_text = int if want[column].dtype == "Int64" else str
            texts = [
                ["" if pd.isna(v) or v == "" else str(as_text(v)) for v in rows[column].tolist()]
                for rows in (got, want)
            ]
            assert texts[0] == texts[1], column


@pytest.mark.parametrize(
    "names",
    [
        lambda content: {row[5] for row in Slices(content).rows if row[1] == "query"},
        lambda content: {f["name"] for f in json.loads(content)["shared"]["frames"]},
        lambda content: {s for t in json.loads(content)["threads"] for s in t["stringArray"]},
    ],
    ids=["perfetto", "speedscope", "firefox"],
)
def test_hostile_query(
    names: Callable[[bytes], set[str]], request: pytest.FixtureRequest, whole_capture: Path
) -> None:
    """A query of any characters and length is one short printable line, where names stand."""
    recording = load(whole_capture)
    queries = recording.joined.queries
    table = [*queries.table[:2], *(Query(HOSTILE, 1) for _ in queries.table[2:])]
    recording.__dict__["joined"] = replace(recording.joined, queries=replace(queries, table=table))
    found = names(written(recording, request.node.callspec.id))
    (name,) = {name for name in found if name.startswith('a"b')}
    assert len(name) == 500 and name.isprintable()


def test_command(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """The command writes what the writers do, to a file or stdout; binaries to files alone."""
    assert tuple(WRITERS) == EXPORTS
    file = tmp_path / "waits.json"
    assert main(["export", str(MIXED), "--format", "firefox", "-o", str(file)]) == 0
    assert file.read_bytes() == written(load(MIXED), "firefox")
    assert [*tmp_path.iterdir()] == [file]
    capfdbinary.readouterr()
    assert main(["export", str(MIXED), "--format", "csv", "-o", "-"]) == 0
    assert capfdbinary.readouterr().out == written(load(MIXED), "csv")
    assert main(["export", str(MIXED), "--format", "parquet", "-o", "-"]) == 2
    assert b"name a file with -o" in capfdbinary.readouterr().err


def test_damaged_leaves_the_old_file(tmp_path: Path) -> None:
    """A capture that cannot be read ends with a word, and what was there stays."""
    capture = tmp_path / "capture"
    capture.mkdir()
    for name in ("manifest", "backends.tsv"):
        (capture / name).write_bytes((MIXED / name).read_bytes())
    data = bytearray((MIXED / "perf.data").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = b"\0" * 64
    (capture / "perf.data").write_bytes(data)
    old = tmp_path / "waits.pftrace"
    old.write_text("old")
    answer = waitfold("export", capture, "--format", "perfetto", "-o", old)
    assert answer.returncode == 1
    assert answer.stderr.startswith("waitfold: ") and "Traceback" not in answer.stderr
    assert old.read_text() == "old" and len([*tmp_path.iterdir()]) == 2
