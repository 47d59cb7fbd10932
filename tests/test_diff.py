"""waitfold diff: noise is not read as change, and a slower disk is found."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Recorder, known_sites, running_cluster, waitfold
from numpy.typing import NDArray

from waitfold.account import BUSY, account
from waitfold.capture import Naming, open_capture
from waitfold.cli import main
from waitfold.diff import SLICES, Row, Side, Stretches, _spread, compare, read_side
from waitfold.join import join

SAMPLE = ROOT / "samples/pgbench-cold-reads"
CAPTURE = open_capture(SAMPLE, Naming())
SYNC, LOCK, READ = ("", "IO", "WALSync"), ("", "LWLock", "WALWrite"), ("", "IO", "DataFileRead")


def slow_noise(rng: np.random.Generator, scale: float) -> NDArray[np.float64]:
    """A load that goes up and down over several slices, as of a disk that others use too."""
    level = np.empty(SLICES)
    level[0] = rng.normal()
    for i in range(1, SLICES):
        level[i] = 0.7 * level[i - 1] + rng.normal(scale=0.7)
    return np.exp(scale * level)


def side(seed: int, each: float = 1e6, often: float = 1.0, noise: float = 0.15) -> Side:
    """A capture of 10 s: transactions, the syncs of each, reads, and waits for who syncs."""
    rng = np.random.default_rng(seed)
    transactions = rng.poisson(100 / slow_noise(rng, noise)).astype(np.float64)
    syncs = rng.poisson(transactions * often).astype(np.float64)
    sync = syncs * each * slow_noise(rng, noise) * rng.normal(1, 0.02, SLICES)
    reads = rng.poisson(300 * slow_noise(rng, noise)).astype(np.float64)
    time = np.stack([sync, sync * rng.uniform(1.1, 1.3, SLICES), reads * 1e5], axis=1)
    return Side(
        CAPTURE,
        10**10,
        2,
        0,
        [],
        [SYNC, LOCK, READ],
        [True] * 3,
        time,
        time,
        np.stack([syncs, syncs, reads], axis=1),
        np.full(SLICES, 0.25),
        transactions,
    )


def significant(before: Side, after: Side, per_transaction: bool = True) -> list[Row]:
    """The rows that changed, the first first."""
    return [row for row in compare(before, after, per_transaction) if row.significant]


def test_slices_hold_all_time() -> None:
    """What crosses edges is split by time, and so is its number; nothing is lost or doubled."""
    rng = np.random.default_rng(1)
    edges = np.linspace(1000, 9000, SLICES + 1).round().astype(np.int64)
    start = rng.integers(1000, 9000, 500)
    end = np.minimum(start + rng.integers(0, 900, 500), 9000)
    key = rng.integers(0, 3, 500)
    keys = [SYNC, LOCK, READ]
    all_ = Stretches(keys, [True] * 3, start, end, key, np.ones(500, np.bool_))
    ns, number = _spread(all_, edges)
    wanted = np.zeros((2, SLICES, 3))
    for s, e, k in zip(start.tolist(), end.tolist(), key.tolist(), strict=True):
        for i in range(SLICES):
            part = min(e, edges[i + 1]) - max(s, edges[i])
            if part > 0:
                wanted[:, i, k] += part, part / (e - s)
        if s == e:
            wanted[1, min(int(np.searchsorted(edges, s, "right")) - 1, SLICES - 1), k] += 1
    assert np.allclose(ns, wanted[0])
    assert np.allclose(number, wanted[1])


def test_noise_is_not_read_as_change() -> None:
    """Of 20 pairs of one load, slow noise and all, at most 5 % have a significant row."""
    pairs = [(side(2 * i), side(2 * i + 1)) for i in range(20)]
    assert sum(bool(significant(*pair)) for pair in pairs) <= 1
    assert sum(bool(significant(*pair, False)) for pair in pairs) <= 1


def test_slower_is_told_from_more_often() -> None:
    """Syncs that take 30 % longer change each, half as many again change the number."""
    for seed in range(5):
        before = side(seed, noise=0.03)
        first = significant(before, side(seed + 100, each=1.3e6, noise=0.03))[0]
        assert first.key == SYNC
        assert first.mean.significant and not first.count.significant
        first = significant(before, side(seed + 100, often=1.5, noise=0.03))[0]
        assert first.key == SYNC
        assert first.count.significant and not first.mean.significant


def test_what_only_one_has() -> None:
    """A wait that was not there before is a change, without a ratio."""
    after = side(2)
    before = side(1)
    gone = Side(**{**vars(before), "keys": [SYNC, LOCK]}
                | {name: getattr(before, name)[:, :2] for name in ("time", "whole", "count")}
                | {"counted": [True, True]})  # fmt: skip
    row = next(row for row in compare(gone, after, True) if row.key == READ)
    assert row.time.significant and row.time.ratio is None and row.mean.before is None
    assert not any(row.judged for row in compare(gone, after, True, {READ}) if row.key == READ)


def test_same_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capture does not differ from itself; JSON holds no number that is none."""
    assert main(["diff", str(SAMPLE), str(SAMPLE), "--flamegraph", str(tmp_path / "x.svg")]) == 0
    text = capsys.readouterr().out
    assert "No significant change" in text
    assert max(map(len, text.splitlines())) <= 80
    ET.parse(tmp_path / "x.svg")
    assert main(["diff", str(SAMPLE), str(SAMPLE), "--json"]) == 0
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said["per"] == "second"
    assert not any(row["significant"] for row in said["rows"])
    assert any(row["judged"] and row["time"]["difference"] == 0 for row in said["rows"])


def unchanged(capture: Path, by: str, capsys: pytest.CaptureFixture[str]) -> Side:
    """A capture in slices, by what it does not differ from itself."""
    assert main(["diff", str(capture), str(capture), "--by", by, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows and not any(row["significant"] for row in rows)
    one = read_side(open_capture(capture, Naming()), by)
    assert len(set(one.keys)) == len(one.keys)
    assert (one.time >= 0).all()
    return one


def test_same_queries(whole_capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By query a capture does not differ from itself, and the times are those of the report."""
    one = unchanged(whole_capture, "query", capsys)
    accounted = account(join(one.capture))
    wanted = {
        row.names[0]: row.busy.total + row.idle_ns + row.in_transaction_ns
        for row in accounted.by(["query"], accounted.of("foreground"))
    }
    found = dict(zip((key[1] for key in one.keys), one.time.sum(axis=0).tolist(), strict=True))
    assert found.keys() >= {"SELECT pg_sleep(?);", "(idle in transaction)"}
    assert wanted.keys() - found.keys() <= {"(none)", "(not known)"}
    assert found == pytest.approx({name: wanted[name] for name in found})


def test_same_stacks(whole_capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By stack a capture does not differ from itself; times are those of the report, and fold."""
    one = unchanged(whole_capture, "stack", capsys)
    on = np.array([key[-1] == "[on-CPU]" for key in one.keys])
    time = one.time.sum(axis=0)
    accounted = account(join(one.capture))
    busy = accounted.cells.take(accounted.cells.kind == BUSY).times()
    # A few have no stack: those that began before the window did.
    assert time[~on].sum() == pytest.approx(busy.blocked + busy.run_queue, rel=0.02)
    assert main(["fold", str(whole_capture), "--kind", "oncpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sampled = sum(int(line.rpartition(" ")[2]) for line in lines)
    # What the first samples stand for began before the window did.
    assert time[on].sum() == pytest.approx(sampled, abs=3e7)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--per", "transaction"], "--with transaction"),
        (["--by", "query"], "--with query"),
        (["--by", "stack"], "--with offcpu,oncpu"),
    ],
)
def test_what_was_not_recorded(
    options: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a capture does not hold is refused, and it is said what to record."""
    assert main(["diff", str(SAMPLE), str(SAMPLE), *options]) == 2
    assert wanted in capsys.readouterr().err


@contextlib.contextmanager
def slow_disk() -> Iterator[Any]:
    """A server whose disk takes as long as the file `disk` in its folder says."""
    os.environ["SLOW_FSYNC"] = "/dev/null"
    try:
        with running_cluster() as cluster:
            cluster.stop("fast")
            library, disk = cluster.folder / "slow_fsync.so", cluster.folder / "disk"
            source = ROOT / "bench/slow_fsync.c"
            subprocess.run(
                ["gcc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
            )
            disk.write_bytes(bytes(4096))
            os.environ |= {"LD_PRELOAD": str(library), "SLOW_FSYNC": str(disk)}
            cluster.start()
            del os.environ["LD_PRELOAD"]
            subprocess.run(cluster.pgbench("-i", "-q", "-s", "5"), check=True, capture_output=True)
            yield cluster
    finally:
        os.environ.pop("LD_PRELOAD", None)
        del os.environ["SLOW_FSYNC"]


def test_slower_disk(tmp_path: Path) -> None:
    """A disk three times as slow shows as longer syncs, not as more of them."""
    known_sites()
    with slow_disk() as cluster:
        for name, percent in (("a", 0), ("b", 200)):
            with (cluster.folder / "disk").open("r+b") as disk:
                disk.write(struct.pack("II", 2000, percent))
            load = subprocess.Popen(
                cluster.pgbench("-n", "-c", "2", "-T", "200"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(0.3)
            recorder = Recorder(
                "-D", cluster.data, "--with", "transaction", "-d", "3", "-o", tmp_path / name
            )
            assert recorder.wait() == 0, recorder.said
            load.kill()
            load.wait()
    said = json.loads(waitfold("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert said["per"] == "transaction"
    sync = next(row for row in said["rows"] if row["name"] == "IO:WALSync")
    # In three seconds of a busy host noise may be as large: no word on significance.
    assert sync["each"]["ratio"] > 2
    assert 0.8 < sync["number"]["ratio"] < 1.25
