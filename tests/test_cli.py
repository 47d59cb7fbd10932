"""The command: exit status, messages, files written, bad captures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from waitfold import cli

MIXED = Path(__file__).parent / "data" / "mixed"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs the command: exit status, stdout, stderr; the message is one line."""

    def run_(*args: object) -> tuple[int, str, str]:
        try:
            status = cli.main([str(arg) for arg in args])
        except SystemExit as exit_:  # argparse
            status = exit_.code if isinstance(exit_.code, int) else 1
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        if err.startswith("waitfold: "):
            assert status == 0 or err.count("\n") == 1
        return status, out, err

    return run_


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Return a capture that may be damaged."""
    return Path(shutil.copytree(MIXED, tmp_path / "capture"))


def _edit(path: Path, old: str, new: str) -> None:
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))


def _command(*args: object) -> list[str]:
    return [sys.executable, "-m", "waitfold", *map(str, args)]


def test_version(run: Run) -> None:
    """The version is shown, and no verb is a misuse."""
    assert run("--version") == (0, f"waitfold {cli.__version__}\n", "")
    assert run()[0] == 2
    assert run("repotr", MIXED)[0] == 2


@pytest.mark.parametrize("verb", ["report", "waits", "fold", "flamegraph"])
def test_help(run: Run, verb: str) -> None:
    """The help of every verb ends with worked examples."""
    status, out, _ = run(verb, "--help")
    assert status == 0
    assert f"waitfold {verb} " in out.rpartition("\nexamples:\n")[2]
    assert max(map(len, out.splitlines())) <= 80


def test_report(run: Run) -> None:
    """The report of a sound capture goes to stdout alone."""
    status, out, err = run("report", MIXED)
    assert (status, err) == (0, "")
    assert "DB time " in out
    status, out, err = run("report", MIXED, "--json")
    assert (status, err) == (0, "")
    assert list(json.loads(out)["waits"][0])[:9] == [
        "class",
        "name",
        "count",
        "total_ns",
        "mean_ns",
        "p50_ns",
        "p95_ns",
        "p99_ns",
        "max_ns",
    ]
    assert run("report", MIXED, "--json", "--histogram")[0] == 2


def test_bare_file(run: Run) -> None:
    """A perf.data alone gives the same transitions, once the version is named."""
    data = MIXED / "perf.data"
    assert run("report", data)[::2] == (
        2,
        f"waitfold: {data} does not say which PostgreSQL it is of: add --pg-version, as in "
        "--pg-version 15.18\n",
    )
    status, out, _ = run("report", data, "--pg-version", "15.18", "--json")
    bare = json.loads(out)
    whole = json.loads(run("report", MIXED, "--json")[1])
    assert status == 0
    assert bare["transitions"] == whole["transitions"]
    count = {w["name"]: w["count"] for w in bare["waits"]}
    assert count["PgSleep"] == next(w["count"] for w in whole["waits"] if w["name"] == "PgSleep")
    named = run(
        "report", data, "--start", "waitfold_*:w", "--value", "v", "--pg-version", "15.18", "--json"
    )
    assert json.loads(named[1]) == bare


@pytest.mark.parametrize(
    "named",
    [
        [],
        ["--start", "sdt_postgresql:*start", "--value", "arg1", "--end", "sdt_postgresql:*end"],
    ],
)
def test_start_and_end(run: Run, named: list[str]) -> None:
    """Compiled-in probes, known or named by hand, pair a start event with an end event."""
    data = MIXED.parent / "usdt.data"
    report = json.loads(run("report", data, "--pg-version", "15.18", "--json", *named)[1])
    (wait,) = report["waits"]
    assert (wait["class"], wait["name"]) == ("IO", "WALWrite")
    assert (wait["count"], wait["total_ns"], wait["max_ns"]) == (6, 203_399, 56_397)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pg-version", "fifteen"], "not a PostgreSQL version"),
        (["--pg-version", "15", "--value", "v"], "--value without --start EVENT"),
        (["--pg-version", "15", "--start", "waitfold_*:w"], "--start EVENT wants --value FIELD"),
        (["--pg-version", "15", "--start", "a:b", "--value", "v"], "no event 'a:b' in"),
        (
            ["--pg-version", "15", "--start", "waitfold_*:w", "--value", "v", "--end", "a:b"],
            "no event 'a:b' in",
        ),
    ],
)
def test_bare_file_misnamed(run: Run, options: list[str], message: str) -> None:
    """Naming options that do not fit are a misuse."""
    status, _, err = run("report", MIXED / "perf.data", *options)
    assert status == 2
    assert message in err


def test_capture_names_itself(run: Run) -> None:
    """A capture needs no naming options and takes none."""
    status, _, err = run("report", MIXED, "--pg-version", "15")
    assert status == 2
    assert "leave out --pg-version" in err


def test_no_such_value_field(run: Run) -> None:
    """A field that the event has not is an error."""
    status, _, err = run(
        "report",
        MIXED / "perf.data",
        "--pg-version",
        "15",
        "--start",
        "waitfold_*:w",
        "--value",
        "wait",
    )
    assert status in (1, 2)
    assert "wait" in err


def test_killed_recorder(run: Run, capture: Path) -> None:
    """A capture whose recorder was killed is read to its last event, and says so."""
    lines = (capture / "manifest").read_text().splitlines(keepends=True)
    stop = next(i for i, line in enumerate(lines) if line.startswith("end_ns"))
    (capture / "manifest").write_text("".join(lines[:stop]) + "end_n")
    status, out, _ = run("report", capture)
    assert status == 0
    assert "WARNING      the recorder was killed" in out
    status, out, err = run("fold", capture)
    assert (status, "the recorder was killed" in err, "PgSleep" in out) == (0, True, True)


def test_killed_perf(run: Run, capture: Path) -> None:
    """A perf.data without its end is read up to where it breaks off."""
    data = (capture / "perf.data").read_bytes()
    (capture / "perf.data").write_bytes(data[: len(data) // 2])
    status, out, _ = run("report", capture)
    assert status == 0
    assert "WARNING" in out


def test_killed_bare_file(run: Run) -> None:
    """A bare perf.data without its events' names cannot be read, and the message says why."""
    data = MIXED.parent / "perf" / "killed.data"
    status, _, err = run("report", data, "--pg-version", "15")
    assert status == 1
    assert "perf was killed" in err
    assert "only a capture folder" in err


def test_losses(run: Run) -> None:
    """Losses are in plain sight, in the report and beside rows and stacks."""
    data = MIXED.parent / "perf" / "lost.data"
    named = ("--start", "try_reader:w", "--value", "v", "--pg-version", "15")
    assert "transitions  336, LOST 715 SAMPLES in 3 gaps\n" in run("report", data, *named)[1]
    assert json.loads(run("report", data, "--json", *named)[1])["lost"] == 715
    assert run("fold", data, *named)[2] == "waitfold: warning: 715 samples were lost\n"
    assert ",lost\n" in run("waits", data, "-o", "-", *named)[1]


def _damage_format(capture: Path) -> None:
    _edit(capture / "manifest", "format\t2", "format\t3")


def _damage_set(capture: Path) -> None:
    _edit(capture / "manifest", "sets\twait-event", "sets\twait-event,block-io")


def _damage_line(capture: Path) -> None:
    _edit(capture / "manifest", "clock\t", "clock ")


def _damage_time(capture: Path) -> None:
    _edit(capture / "manifest", "start_ns\t", "start_ns\t-")


def _damage_window(capture: Path) -> None:
    _edit(capture / "manifest", "end_ns\t2", "end_ns\t")


def _huge_time(capture: Path) -> None:
    _edit(capture / "manifest", "end_ns\t", "end_ns\t" + "9" * 5000)


def _damage_version(capture: Path) -> None:
    _edit(capture / "manifest", "pg_version\t15.18", "pg_version\tPostgres")


def _damage_backends(capture: Path) -> None:
    _edit(capture / "backends.tsv", "14276\t", "pid\t")


def _cut_manifest(capture: Path) -> None:
    (capture / "manifest").write_text("format\t2\nsets\twait-event\n")


def _empty_manifest(capture: Path) -> None:
    (capture / "manifest").write_text("")


def _no_manifest(capture: Path) -> None:
    (capture / "manifest").unlink()


def _binary_manifest(capture: Path) -> None:
    (capture / "manifest").write_bytes(bytes(range(256)) * 4)


def _no_data(capture: Path) -> None:
    (capture / "perf.data").unlink()


def _empty_data(capture: Path) -> None:
    (capture / "perf.data").write_bytes(b"")


def _text_data(capture: Path) -> None:
    (capture / "perf.data").write_text("not perf's\n" * 100)


def _folder_data(capture: Path) -> None:
    (capture / "perf.data").unlink()
    (capture / "perf.data").mkdir()


def _other_event(capture: Path) -> None:
    _edit(capture / "manifest", "group\twaitfold_", "group\tother_")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_damage_format, "a capture of format 3, and this waitfold reads format 2"),
        (_damage_set, "the probe set 'block-io', which this waitfold does not know"),
        (_damage_line, "manifest:13: not 'key<TAB>value'"),
        (_damage_time, "start_ns or end_ns is not a time in ns"),
        (_damage_window, "the window ends before it begins"),
        (_huge_time, "start_ns or end_ns is not a time in ns"),
        (_damage_version, "'Postgres' is not a PostgreSQL version"),
        (_damage_backends, "backends.tsv:3: not 'pid seen_ns wait title'"),
        (_cut_manifest, "no 'mode': cut short or damaged"),
        (_empty_manifest, "no format"),
        (_no_manifest, "is not a capture: it has no manifest. To read its perf.data alone"),
        (_binary_manifest, "not 'key<TAB>value'"),
        (_no_data, "perf.data cannot be read: No such file"),
        (_empty_data, "perf.data"),
        (_text_data, "perf.data"),
        (_folder_data, "perf.data"),
        (_other_event, "other_"),
    ],
)
def test_damaged(run: Run, capture: Path, damage: Callable[[Path], None], message: str) -> None:
    """A capture that cannot be read is one clear message and status 1."""
    damage(capture)
    status, out, err = run("report", capture)
    assert (status, out) == (1, "")
    assert message in err


def test_no_such_capture(run: Run, tmp_path: Path) -> None:
    """What does not exist, or is an empty folder, is no capture."""
    assert run("report", tmp_path / "x")[::2] == (
        1,
        f"waitfold: {tmp_path / 'x'}: no such file or folder\n",
    )
    assert "is not a capture" in run("report", tmp_path)[2]


def test_no_backends(run: Run, capture: Path) -> None:
    """Without backends.tsv a warning says that processes are told apart by their waits."""
    (capture / "backends.tsv").unlink()
    status, out, _ = run("report", capture)
    assert status == 0
    assert "backends.tsv is missing" in out
    assert "of unknown type" in out


def test_no_escape_sequences(run: Run, capture: Path) -> None:
    """A capture cannot send escape sequences to the terminal."""
    _edit(capture / "manifest", "host\t", "host\t\x1b[31m")
    _edit(capture / "backends.tsv", "postgres shop", "p\x1b[2Jg shop")
    for options in ([], ["--by", "backend"]):
        assert "\x1b" not in run("report", capture, *options)[1]


@pytest.mark.parametrize("name", ["w.csv", "w.parquet"])
def test_waits_file(run: Run, tmp_path: Path, name: str) -> None:
    """A file of rows replaces an older one and leaves nothing else behind."""
    (tmp_path / name).write_text("old")
    assert run("waits", MIXED, "-o", tmp_path / name) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 10_000


def test_waits_bad_names(run: Run, tmp_path: Path) -> None:
    """An unknown ending is a misuse; a folder that is not there, an error."""
    assert run("waits", MIXED, "-o", tmp_path / "w.xlsx")[0] == 2
    status, _, err = run("waits", MIXED, "-o", tmp_path / "no" / "w.csv")
    assert (status, "cannot be written" in err) == (1, True)


def test_failure_keeps_the_old_file(run: Run, capture: Path, tmp_path: Path) -> None:
    """Where the capture cannot be read, the file that was there stays as it was."""
    (tmp_path / "w.csv").write_text("old")
    _empty_data(capture)
    assert run("waits", capture, "-o", tmp_path / "w.csv")[0] == 1
    assert (tmp_path / "w.csv").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capture", "w.csv"]


def test_disk_full(tmp_path: Path) -> None:
    """A full disk is one message; no half-written file stays."""
    # Python does not notice that it could write a compiled module in part only, and reads it later.
    ulimit = 'ulimit -f 8; trap "" XFSZ; PYTHONDONTWRITEBYTECODE=1 exec "$@"'
    limit = ["sh", "-c", ulimit, "sh"]
    result = subprocess.run(
        [*limit, *_command("waits", MIXED, "-o", tmp_path / "w.csv")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "cannot be written: File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_flamegraph(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flame graph is what the renderer makes of the folded stacks."""
    script = tmp_path / "flamegraph.pl"
    script.write_text('#!/bin/sh\necho "<svg> $*"; cat; echo "</svg>"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    svg = tmp_path / "w.svg"
    assert run("flamegraph", MIXED, "-o", svg) == (0, "", "")
    first, *stacks, last = svg.read_text().splitlines(keepends=True)
    assert first == ("<svg> --countname ns --colors io --title Waits of PostgreSQL 15.18, mixed\n")
    assert last == "</svg>\n"
    assert "".join(stacks) == run("fold", MIXED)[1]
    run("flamegraph", MIXED, "-o", svg, "--title", "slow checkout", "--idle")
    assert "--title slow checkout\n" in svg.read_text()
    assert run("fold", MIXED, "--idle")[1] in svg.read_text()


def test_reader_goes_away() -> None:
    """A reader that has had enough ends the command without a word."""
    process = subprocess.Popen(
        _command("waits", MIXED, "-o", "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_output_that_fails() -> None:
    """A full disk behind stdout is one message; a closed stdout is status 1."""
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            _command("report", MIXED), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (result.returncode, result.stderr) == (1, "waitfold: stdout: No space left on device\n")
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *_command("report", MIXED)]
    result = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "")


def test_ctrl_c() -> None:
    """Ctrl-C ends the command without a word."""
    interrupted = (
        "import os, signal, sys; from waitfold import __main__, cli; "
        "cli.analyse = lambda *_: os.kill(os.getpid(), signal.SIGINT); "
        "sys.exit(__main__.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", interrupted, "fold", MIXED], capture_output=True, check=False
    )
    assert (result.returncode, result.stderr) == (130, b"")


def test_device(run: Run, tmp_path: Path) -> None:
    """A device or pipe is written to, a symbolic link followed; neither is replaced."""
    (tmp_path / "null.csv").symlink_to(os.devnull)
    (tmp_path / "link.csv").symlink_to("w.csv")
    assert run("waits", MIXED, "-o", tmp_path / "null.csv") == (0, "", "")
    assert run("waits", MIXED, "-o", tmp_path / "link.csv") == (0, "", "")
    assert Path(os.devnull).is_char_device()
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "w.csv").stat().st_size > 10_000


def test_scripts_are_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verbs of the traced host run the scripts; where there are none, the error says so."""
    result = subprocess.run(
        _command("record", "--help"), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    assert "waitfold-record" in result.stdout
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "a" / "b" / "cli.py"))
    status, _, err = run("doctor")
    assert status == 1
    assert "waitfold-doctor is not installed" in err


def test_internal_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of waitfold is one line, and a traceback for who asks for it."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli, "report_of", fails)
    status, _, err = run("report", MIXED)
    assert status == 1
    assert "internal error: ZeroDivisionError: oops" in err
    monkeypatch.setenv("WAITFOLD_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["report", str(MIXED)])
