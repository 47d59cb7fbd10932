"""The reader of perf.data: against perf script's text of real files, and against damaged ones."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from waitfold import events, perfdata
from waitfold.errors import PerfDataError, WaitfoldError
from waitfold.events import EXIT, FORK, STORE, PairRule, TransitionStream, transitions
from waitfold.perfdata import PerfData, probe_fields

DATA = Path(__file__).parent / "data" / "perf"
RULE = PairRule("try_reader:w", "v", "try_reader:w", 0)
FALLBACK = {"try_reader:w": probe_fields([("v", "u32")])}
FINISHED = ("one", "chains", "several", "group", "regs", "lost", "packed", "pipe")

Row = tuple[int, int, int, int]


def rows(data: PerfData, rule: PairRule = RULE) -> tuple[list[Row], TransitionStream]:
    """Return all stores as (time_ns, pid, tid, value), in the order of the stream."""
    stream = transitions([data], rule)
    found: list[Row] = []
    for batch in stream:
        stores = batch.take(np.flatnonzero(batch.mark == STORE))
        columns = (stores.time_ns, stores.pid, stores.tid, stores.value)
        found += zip(*(column.tolist() for column in columns), strict=True)
    return found, stream


def text_rows(name: str, event: str = "w") -> list[Row]:
    """Read the same from what perf script printed."""
    found = []
    for line in (DATA / f"{name}.txt").read_text().splitlines():
        match = re.fullmatch(
            rf" *(\d+)/(\d+) +\[\d+\] +(\d+)\.(\d{{9}}): try_reader:{event}: .*=(\S+)", line
        )
        if match:
            time = int(match[3]) * 10**9 + int(match[4])
            found.append((time, int(match[1]), int(match[2]), int(match[5], 0) & 0xFFFF_FFFF))
    return found


@pytest.mark.parametrize("piece", [1 << 20, 504])
@pytest.mark.parametrize("name", FINISHED)
def test_rows_are_those_of_perf_script(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time, process, thread and value of every sample, in order, wherever a piece ends."""
    monkeypatch.setattr(perfdata, "_PIECE", piece)
    found, stream = rows(PerfData(DATA / f"{name}.data"))
    assert found == text_rows(name)
    assert stream.samples == len(found) > 20
    assert not stream.warnings


def test_start_and_end_of_two_events() -> None:
    """An event of its own ends what another began, in a file with more events still."""
    rule = PairRule("*_reader:w", "v", "try_reader:x", None)
    found, _ = rows(PerfData(DATA / "several.data"), rule)
    ends = [(*row[:3], 0) for row in text_rows("several", "x")]
    assert found == sorted(text_rows("several") + ends)


def test_a_value_can_mean_the_end() -> None:
    """The end value is given as 0."""
    found, _ = rows(PerfData(DATA / "one.data"), PairRule("*:w", "v", "*:w", 1))
    assert found == [(*row[:3], row[3] * (row[3] != 1)) for row in text_rows("one")]


def test_a_wide_field_must_fit() -> None:
    """A field of 64 bits is read; a value that no wait event can have is refused."""
    rule = PairRule("try_reader:x", "ts", "try_reader:x", 0)
    with pytest.raises(WaitfoldError, match="has 32 bits"):
        rows(PerfData(DATA / "several.data"), rule)


def test_header_facts() -> None:
    """Events, ids, fields and the facts about host and command."""
    data = PerfData(DATA / "several.data")
    assert [event.name for event in data.events] == ["try_reader:w", "try_reader:x", "offcpu"]
    assert data.events[0].fields["v"] == probe_fields([("v", "x32")])["v"]
    assert data.events[1].fields["ts"] == probe_fields([("ts", "s64")])["ts"]
    assert not data.events[2].fields
    assert len({id_ for event in data.events for id_ in event.ids}) == 36
    assert data.info["clockid"] == "CLOCK_MONOTONIC"
    assert data.info["osrelease"].startswith("6.18")
    assert data.info["version"].startswith("6.1")
    assert data.info["cmdline"].startswith("/usr/bin/perf record")
    assert (data.info["arch"], data.info["nrcpus"], data.info["hostname"]) == ("x86_64", "2", "vm")


def test_processes() -> None:
    """Each backend is born before its first store and dies after its last."""
    batch = events.joined(list(transitions([PerfData(DATA / "one.data")], RULE)))
    pids = {row[1] for row in text_rows("one")}
    for pid in pids:
        marks = batch.mark[(batch.tid == pid) & (batch.pid == pid)].tolist()
        assert marks == [FORK, *[STORE] * (len(marks) - 2), EXIT]
    assert len(pids) == 12


def test_losses() -> None:
    """Lost records are counted once and lie in gaps that begin with the buffer's last record."""
    found, stream = rows(PerfData(DATA / "lost.data"))
    assert stream.lost == 212 + 503
    times = [row[0] for row in found]
    assert [end for _, end in stream.gaps][:2] == [2377618392987, 2378228675729]
    assert stream.gaps[2][1] > max(times)
    assert all(start in times for start, _ in stream.gaps)


def test_killed_writer() -> None:
    """What a killed perf had written is read, by the names that the caller knows."""
    data = PerfData(DATA / "killed.data", FALLBACK)
    found, stream = rows(data)
    assert len(found) == 285
    assert {row[3] for row in found} == {1, 2}
    assert data.cut and "was not finished" in data.cut
    assert stream.warnings == [data.cut]
    with pytest.raises(WaitfoldError, match="had not yet written their names"):
        rows(PerfData(DATA / "killed.data"))


def test_killed_is_as_good_as_finished(tmp_path: Path) -> None:
    """A finished file made into one of a killed writer gives the same rows."""
    content = bytearray((DATA / "one.data").read_bytes())
    start, size = struct.unpack_from("<2Q", content, 40)
    struct.pack_into("<Q", content, 48, 0)
    path = tmp_path / "perf.data"
    path.write_bytes(content[: start + size])
    assert rows(PerfData(path, FALLBACK))[0] == text_rows("one")


@pytest.mark.parametrize("name", ["one", "several", "packed", "pipe"])
def test_truncated_at_any_byte(tmp_path: Path, name: str) -> None:
    """A truncated file is an error or a report that says so, and has no rows but true ones."""
    content = (DATA / f"{name}.data").read_bytes()
    want = set(text_rows(name))
    path = tmp_path / "perf.data"
    read = 0
    for size in sorted({*range(700), *range(700, len(content), 331), len(content) - 1}):
        path.write_bytes(content[:size])
        try:
            data = PerfData(path, FALLBACK)
            found, stream = rows(data)
        except PerfDataError as error:
            assert str(path) in str(error)
            continue
        # What was written to a pipe does not say how long it is: it may end behind any record.
        assert data.cut in stream.warnings if data.cut else name == "pipe"
        assert found == sorted(found) and set(found) <= want
        read += 1
    assert read > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PERFILE2", "cut short"),
        (bytes(4096), "not a perf.data file"),
        (np.random.default_rng(1).bytes(4096), "not a perf.data file"),
        (b"2ELIFREP" + bytes(4096), "big-endian"),
        ((DATA / "pipe.data").read_bytes()[:16], "to a pipe"),
        (b"PERFILE2" + b"\xff" * 4096, "damaged"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Each kind by its name, with the path."""
    path = tmp_path / "perf.data"
    path.write_bytes(content)
    with pytest.raises(PerfDataError, match=message) as error:
        PerfData(path)
    assert str(path) in str(error.value)


def test_other_things_that_are_refused(tmp_path: Path) -> None:
    """A folder, a device, nothing at all."""
    with pytest.raises(PerfDataError, match="cannot be read: Is a directory"):
        PerfData(tmp_path)
    with pytest.raises(PerfDataError, match="not a regular file"):
        PerfData("/dev/null")
    with pytest.raises(PerfDataError, match="No such file"):
        PerfData(tmp_path / "none")


def test_names_that_the_file_does_not_have() -> None:
    """The message lists what there is."""
    data = PerfData(DATA / "several.data")
    with pytest.raises(WaitfoldError, match="try_reader:w, try_reader:x, offcpu"):
        transitions([data], PairRule("no:w", "v", "no:w", 0))
    with pytest.raises(WaitfoldError, match="It has: __probe_ip, v"):
        transitions([data], PairRule("try_reader:w", "value", "try_reader:w", 0))
    with pytest.raises(WaitfoldError, match="offcpu has no field v"):
        transitions([data], PairRule("offcpu", "v", "offcpu", 0))


# Files made here, to have what no real one has.

W_TYPE = perfdata._IP | perfdata._TID | perfdata._TIME | perfdata._CPU | perfdata._RAW


def record(kind: int, *words: int) -> bytes:
    """Make a record of 64-bit words behind its header."""
    return struct.pack("<IHH", kind, 2, 8 + 8 * len(words)) + struct.pack(f"<{len(words)}Q", *words)


def sample(time: int, tid: int, value: int, cpu: int = 0) -> bytes:
    """Make a sample of one probe: common fields, __probe_ip, v."""
    raw = struct.unpack("<3Q", struct.pack("<I8xQI", 20, 0, value))
    return record(perfdata.SAMPLE, 0, tid << 32 | tid, time, cpu, *raw)


def trailed(kind: int, *words: int, time: int, tid: int = 1, cpu: int = 0) -> bytes:
    """Make a record with the trailer that W_TYPE gives it."""
    return record(kind, *words, tid << 32 | tid, time, cpu)


ROUND = record(perfdata.FINISHED_ROUND)


def made(tmp_path: Path, parts: Sequence[bytes], sample_type: int = W_TYPE) -> PerfData:
    """Make a file as a killed perf leaves it."""
    attr = struct.pack("<2I5Q", 2, 128, 77, 1, sample_type, 4, 1 << 18 | 1 << 25)
    attr += bytes(92 - len(attr)) + struct.pack("<i", 1) + bytes(128 - 96)
    attr += struct.pack("<2Q", 0, 0)
    header = struct.pack(
        "<8s8Q", b"PERFILE2", 104, len(attr), 104, len(attr), 104 + len(attr), 0, 0, 0
    )
    path = tmp_path / "made.data"
    path.write_bytes(header + bytes(32) + attr + b"".join(parts))
    return PerfData(path, FALLBACK)


def test_order_over_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that overlap between rounds come out in the order of time, a few at a time."""
    monkeypatch.setattr(events, "_BATCH", 8)
    monkeypatch.setattr(perfdata, "_PIECE", 1024)
    rng = np.random.default_rng(2)
    times = np.sort(rng.choice(10**6, 3000, replace=False)) + 10**6
    cpus = rng.integers(0, 4, len(times))
    parts = []
    done = dict.fromkeys(range(4), 0)
    for until in range(300, 3001, 300):
        for cpu in range(4):
            # A buffer is read a little later than the one before, so it has newer records.
            end = min(until + 20 * cpu, 3000)
            some = [i for i in range(done[cpu], end) if cpus[i] == cpu]
            parts += [sample(int(times[i]), 7, i, cpu) for i in some]
            done[cpu] = end
        parts.append(ROUND)
    found, stream = rows(made(tmp_path, parts))
    assert [row[3] for row in found] == list(range(3000))
    assert [row[0] for row in found] == times.tolist()
    assert len(stream.warnings) == 1  # that it is cut


def test_order_without_rounds(tmp_path: Path) -> None:
    """A file without marks of rounds is put in order whole."""
    content = (DATA / "one.data").read_bytes()
    start, size = struct.unpack_from("<2Q", content, 40)
    parts = [content[start : start + size].replace(ROUND, record(200))]
    path = tmp_path / "perf.data"
    path.write_bytes(content[:start] + parts[0] + content[start + size :])
    assert rows(PerfData(path))[0] == text_rows("one")


def test_late_samples_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after later ones were handed on is left out, counted, and a gap."""
    monkeypatch.setattr(events, "_BATCH", 8)
    monkeypatch.setattr(perfdata, "_PIECE", 1024)
    parts = []
    for time in range(1000, 1100):
        parts += [sample(time, 7, time), ROUND]
    parts += [sample(1010, 7, 1), ROUND, sample(2000, 7, 2), ROUND]
    found, stream = rows(made(tmp_path, parts))
    assert [row[0] for row in found] == [*range(1000, 1100), 2000]
    assert any(start == 1010 for start, _ in stream.gaps)
    assert any("1 of 102 samples came too late" in warning for warning in stream.warnings)


def test_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one capture come out in one order of time; losses and samples add up."""
    monkeypatch.setattr(events, "_BATCH", 8)
    monkeypatch.setattr(perfdata, "_PIECE", 1024)
    files = []
    for odd in (0, 1):
        folder = tmp_path / str(odd)
        folder.mkdir()
        parts = [p for t in range(10 + odd, 400, 2 + odd) for p in (sample(t, 7 + odd, t), ROUND)]
        parts += [record(perfdata.LOST_SAMPLES, 5), ROUND]
        files.append(made(folder, parts))
    stream = transitions(files, RULE)
    times = np.concatenate([batch.time_ns for batch in stream]).tolist()
    assert times == sorted([*range(10, 400, 2), *range(11, 400, 3)])
    assert (stream.samples, stream.lost) == (len(times), 10)


def test_unknown_records_are_skipped(tmp_path: Path) -> None:
    """Records of kinds that came later than this reader do no harm."""
    parts = [record(99, 1, 2), sample(5, 7, 3), record(250), sample(6, 7, 0), record(84, 9)]
    assert rows(made(tmp_path, parts))[0] == [(5, 7, 7, 3), (6, 7, 7, 0)]


def test_marks(tmp_path: Path) -> None:
    """FORK and EXIT are transitions too, but not those that perf made up at time 0."""
    parts = [
        record(perfdata.FORK, 1 << 32 | 9, 1 << 32 | 9, 0, 0, 0, 0),
        trailed(perfdata.FORK, 1 << 32 | 8, 1 << 32 | 8, 40, time=40),
        sample(50, 8, 3),
        trailed(perfdata.EXIT, 1 << 32 | 8, 1 << 32 | 8, 60, time=60),
    ]
    batches = list(transitions([made(tmp_path, parts)], RULE))
    assert [batch.mark.tolist() for batch in batches] == [[FORK, STORE, EXIT]]
    assert batches[0].tid.tolist() == [8, 8, 8]


def test_gap_of_an_idle_cpu(tmp_path: Path) -> None:
    """A loss goes back to the last record of the same CPU, not of the file."""
    parts = [sample(100, 7, 1, cpu=3), sample(110, 8, 1, cpu=0), ROUND]
    parts += [sample(120, 8, 0, cpu=0), ROUND]
    parts += [trailed(perfdata.LOST, 5, 12, time=200, cpu=3), sample(200, 7, 0, cpu=3), ROUND]
    _, stream = rows(made(tmp_path, parts))
    assert (stream.lost, stream.gaps) == (12, [(100, 200)])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (40, 8, "too short for its field v"),
        (20, 0x7FFF_FFFF, "a thread or a time"),
        (28, 0xFFFF_FFFF, "a thread or a time"),
    ],
)
def test_damaged_samples(tmp_path: Path, place: int, value: int, message: str) -> None:
    """The offset in the file is named."""
    bad = bytearray(sample(5, 7, 3))
    struct.pack_into("<I", bad, place, value)
    data = made(tmp_path, [sample(4, 7, 3), bytes(bad)])
    at = data.data_offset + len(bad)
    with pytest.raises(PerfDataError, match=f"at byte {at} .*{message}"):
        rows(data)


def test_hostile_counts(tmp_path: Path) -> None:
    """A call chain that claims to be longer than its sample is an error."""
    bad = record(perfdata.SAMPLE, 0, 7 << 32 | 7, 5, 0, (1 << 64) - 1, 0, 0, 0, 0)
    with pytest.raises(PerfDataError, match="too short for its field v"):
        rows(made(tmp_path, [bad], W_TYPE | perfdata._CALLCHAIN))


def test_end_inside_a_record(tmp_path: Path) -> None:
    """A killed writer's last record is left out, and zeros behind it."""
    assert len(rows(made(tmp_path, [sample(5, 7, 3), sample(6, 7, 0)[:-9]]))[0]) == 1
    assert len(rows(made(tmp_path, [sample(5, 7, 3), bytes(4096)]))[0]) == 1
    assert len(rows(made(tmp_path, [sample(5, 7, 3), bytes(300_000)]))[0]) == 1


def test_probe_fields() -> None:
    """Arguments are packed behind 16 bytes; an unknown type is refused."""
    fields = probe_fields([("a", "u8"), ("b", "x64"), ("c", "s16")])
    assert [(f.offset, f.size, f.signed) for f in fields.values()] == [
        (16, 1, False),
        (17, 8, False),
        (25, 2, True),
    ]
    with pytest.raises(PerfDataError, match="float is not a type"):
        probe_fields([("a", "float")])
