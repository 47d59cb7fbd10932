"""Every input: the same recording gives the same figures, however it was written down or packed."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from waitfold.analysis import analyse
from waitfold.capture import Naming, open_capture
from waitfold.cli import main
from waitfold.errors import Misuse, WaitfoldError

DATA = Path(__file__).parent / "data"
MIXED = DATA / "mixed" / "perf.data"
PG15 = Naming(pg_version="15.18")
BY_V = Naming(start="*:w", value="v", pg_version="15.18")
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}

Figures = tuple[int, int, dict[str, int], dict[str, tuple[int, int]]]


def figures(path: Path, naming: Naming = PG15) -> Figures:
    """Transitions, losses, intervals that are cut, and count and total ns of each wait event."""
    analysis = analyse(open_capture(path, naming))
    waits = {
        f"{wait.class_}:{wait.name}": (wait.stats.count, wait.stats.total_ns)
        for wait in analysis.waits(analysis.everything())
        if wait.stats is not None
    }
    return analysis.stream.transitions, analysis.stream.lost, analysis.censored, waits


def nearly(one: Figures, other: Figures) -> bool:
    """Whether figures are the same but for times, of which each wait's may be 1 us off."""
    return (
        one[:2] == other[:2]
        and {name: count for name, (count, _) in one[3].items()}
        == {name: count for name, (count, _) in other[3].items()}
        and all(abs(ns - other[3][name][1]) <= 1000 * count for name, (count, ns) in one[3].items())
    )


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What `perf script` prints of a file, by its arguments, in a file."""

    def run(data: Path, *args: str) -> Path:
        path = tmp_path_factory.mktemp("script") / f"{data.stem}.txt"
        with path.open("wb") as file:
            subprocess.run(
                ["perf", "script", "--force", "-i", data, *args],
                stdout=file,
                stderr=subprocess.DEVNULL,
                check=True,
            )
        return path

    return run


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", ["perf.data", "script"])
def test_packed(tmp_path: Path, script: Callable[..., Path], form: str, packing: str) -> None:
    """A perf.data and its text in ns, each plain, in gzip, xz and zstd."""
    source = MIXED if form == "perf.data" else script(MIXED, "--ns", "--show-lost-events")
    packed = tmp_path / f"capture{packing}"
    packed.write_bytes(PACKINGS[packing](source.read_bytes()))
    assert figures(packed) == figures(MIXED)


@pytest.mark.parametrize(
    "fields",
    [
        "comm,tid,time,event,trace",
        "tid,time,event,trace",
        "comm,pid,tid,cpu,time,event,trace",
        "comm,pid,tid,cpu,time,period,event,ip,sym,dso,trace",
    ],
)
def test_fields_of_perf_script(script: Callable[..., Path], fields: str) -> None:
    """Which fields perf script was asked for does not matter, as long as these say enough."""
    assert figures(script(MIXED, "--ns", "-F", fields)) == figures(MIXED)


def test_microseconds(script: Callable[..., Path]) -> None:
    """Without --ns the same waits, right to 1 us each, and a warning."""
    path = script(MIXED)
    assert nearly(figures(path), figures(MIXED))
    analysis = analyse(open_capture(path, PG15))
    assert any("microseconds" in warning for warning in analysis.warnings)


@pytest.mark.parametrize("name", ["packed", "pipe"])
def test_compressed_and_piped_records(script: Callable[..., Path], name: str) -> None:
    """What perf record -z and -o - wrote is what perf script says of it."""
    data = DATA / "perf" / f"{name}.data"
    assert figures(script(data, "--ns"), BY_V) == figures(data, BY_V)
    assert figures(data, BY_V)[0] == 108


def test_losses_in_text(script: Callable[..., Path]) -> None:
    """--show-lost-events prints where, so the same waits are cut."""
    data = DATA / "perf" / "lost.data"
    text = script(data, "--ns", "--show-lost-events", "-F", "comm,pid,tid,cpu,time,event,trace")
    _, lost, *others = figures(text, BY_V)
    assert others == [*figures(data, BY_V)[2:]] and lost > 0


@pytest.mark.parametrize("name", ["engine", "lost", "ring", "tracecmd"])
def test_trace_cmd_report(name: str) -> None:
    """A trace.dat and the text of trace-cmd report -t."""
    folder = DATA / "trace"
    assert figures(folder / f"{name}.txt", BY_V) == figures(folder / f"{name}.dat", BY_V)


def test_raw_ftrace() -> None:
    """The same instance as trace.dat, as trace-cmd report -t, and as its file `trace` read."""
    folder = DATA / "inputs"
    want = figures(folder / "ftrace.dat.xz")
    assert want[0] == 692
    assert figures(folder / "ftrace-report.txt.xz") == want
    assert nearly(figures(folder / "ftrace.txt.xz"), want)


@pytest.mark.parametrize("name", ["engine-v7.dat", "engine-v7-zstd.dat"])
def test_trace_dat_version_7(name: str) -> None:
    """What trace-cmd convert made of a file of version 6 holds the same."""
    assert figures(DATA / "inputs" / name, BY_V) == figures(DATA / "trace" / "engine.dat", BY_V)


def test_switch_output(tmp_path: Path) -> None:
    """The pieces of --switch-output are one recording, also when some are packed."""
    folder = DATA / "inputs" / "switched"
    whole = figures(folder)
    mixed = tmp_path / "pieces"
    mixed.mkdir()
    pieces = sorted(folder.iterdir())
    for number, piece in enumerate(pieces):
        content = lzma.decompress(piece.read_bytes())
        if number % 2:
            (mixed / piece.name).write_bytes(piece.read_bytes())
        else:
            (mixed / piece.name.removesuffix(".xz")).write_bytes(content)
    assert figures(mixed) == whole
    assert whole[0] == sum(figures(piece)[0] for piece in pieces) > 4000
    assert whole[2]["lost"] == 0
    # Each piece alone cuts the waits at its ends.
    assert sum(whole[2].values()) < sum(sum(figures(piece)[2].values()) for piece in pieces)


def waitfold(*args: str | Path, stdin: bytes | Path) -> str:
    """What the command prints, its standard input a pipe, or a file."""
    command = [sys.executable, "-m", "waitfold", *map(str, args)]
    if isinstance(stdin, Path):
        with stdin.open("rb") as file:
            return subprocess.run(
                command, stdin=file, capture_output=True, text=True, check=True
            ).stdout
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode()


def test_standard_input(script: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe or a file, packed or not, text or not; also where it is read more than once."""
    text = script(MIXED, "--ns")
    report = ("report", "--json", "--pg-version", "15.18", "-")
    assert main([*report[:-1], str(MIXED)]) == 0
    want = capsys.readouterr().out
    assert waitfold(*report, stdin=gzip.compress(MIXED.read_bytes())) == want
    assert waitfold(*report, stdin=MIXED) == want
    by = ("report", "--by", "backend", "--pg-version", "15.18")
    got = waitfold(*by, "-", stdin=text.read_bytes()).splitlines()[1:]
    assert main([*by, str(text)]) == 0
    assert got == capsys.readouterr().out.splitlines()[1:]


SAMPLE = "{who} 12.000000{n}: {event}: (55ddb49) v={v}\n"


def text_of(path: Path, who: str, event: str = "waitfold_x:w") -> Path:
    """A wait of 5 us by somebody."""
    path.write_text(
        SAMPLE.format(who=who, n="001", event=event, v="0xa000023")
        + SAMPLE.format(who=who, n="006", event=event, v="0x0").replace(
            "12.000000006", "12.000005001"
        )
    )
    return path


@pytest.mark.parametrize(
    "who",
    [
        "postgres 77 [001]",
        "postgres 77/77 [001]",
        "  postgres: a b 77 [000]",
        "my [comm] 1 77/77 [013]",
        "a/b 2/3 77 ",
        "77",
        "77/77",
        ":77 77",
        "postgres-77 [001]",
        "post gres-1-77 [001] d..2.",
        "<...>-77 (   77) [001] ....",
        "postgres-77 (-------) [001] .....",
        "  inst:  postgres-77   [001] ",
        "postgres-77    0dNHff",
    ],
)
def test_who_stands_before_the_time(tmp_path: Path, who: str) -> None:
    """Names with blanks, brackets, slashes and digits; with and without CPU, pid, tgid, flags."""
    event = "w" if "-77" in who else "waitfold_x:w"
    analysis = analyse(open_capture(text_of(tmp_path / "text", who, event), PG15))
    assert [(row.pid, row.total_ns) for row in analysis.rows] == [(77, 5000)]


def test_sdt_probes_in_text(tmp_path: Path) -> None:
    """A server's own wait__event probes, as perf names them, need no options."""
    path = tmp_path / "text"
    path.write_text(
        "postgres 7 [000] 1.000000000: sdt_postgresql:wait__event__start: (55) arg1=167772195\n"
        "postgres 7 [000] 1.000000700: sdt_postgresql:wait__event__end: (55)\n"
    )
    assert figures(path)[3] == {"IO:WALWrite": (1, 700)} or figures(path)[0] == 2


def test_lines_that_are_none(tmp_path: Path) -> None:
    """They are left out and told of by the first; comments, stacks and blanks are not."""
    path = text_of(tmp_path / "text", "postgres 7 [000]")
    path.write_text("# captured on\n" + path.read_text() + "\tabc main (x)\n\nnonsense\nmore\n")
    warnings = analyse(open_capture(path, PG15)).warnings
    assert len(warnings) == 1 and "2 lines" in warnings[0] and "line 6: 'nonsense'" in warnings[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"some words\nand more\n", "no line of it is an event"),
        (b'{"traceEvents": []}', "is JSON"),
        (b"a;b;c 12\na;b 3\n", "folded stacks"),
        (b"sh 12 cycles:\n\t40 main (/bin/sh)\n\n", "no line of it has a time"),
        (b"# tracer: nop\n  sh-12 0d..2 12us : w: (0) v=1\n", "latency-format"),
        (b"\x7fELF\0\0\0" + bytes(5000), "neither text nor"),
        (gzip.compress(b"sh 1 2.000000: x: y\n" * 99)[:10], "is empty"),
        (b"\x1f\x8b" + b"nonsense" * 9, "gzip is damaged"),
        (b"\x28\xb5\x2f\xfd" + b"nonsense" * 9, "zstd is damaged"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """By what it seems to be, and what is read."""
    path = tmp_path / "input"
    path.write_bytes(content)
    with pytest.raises(WaitfoldError, match=message):
        figures(path)


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_bombs(tmp_path: Path, packing: str) -> None:
    """What unpacks to far more than its size is refused before it fills memory or disk."""
    path = tmp_path / f"bomb{packing}"
    size = 90 << 20 if packing == ".gz" else 70 << 20
    path.write_bytes(PACKINGS[packing](b"PERFILE2" + bytes(size)))
    with pytest.raises(WaitfoldError, match="more than 200 times its size"):
        figures(path)


def test_long_lines(tmp_path: Path) -> None:
    """A line of a MiB is read, one of 16 is refused."""
    path = text_of(tmp_path / "text", "postgres 7 [000]")
    begin = path.read_text()
    line = f'postgres 7 [000] 13.000000001: waitfold_x:q: (55) text="{"x" * (1 << 20)}"\n'
    path.write_text(begin + line)
    assert figures(path)[0] == 2
    path.write_text(begin + line * 3 + "x" * (16 << 20))
    with pytest.raises(WaitfoldError, match="longer than 8 MiB"):
        figures(path)


PROFILE = """\
# captured on: a day
some comm 12/13 [001] 5.000001:    1001001 task-clock:ppp:
\tffffffff81 do_it+0x1f ([kernel.kallsyms])
\t    5571 std::map<int, long (*)(int)>::at(int const&)+0x2 (/usr/lib/a b.so)
\t    5572 [unknown] (/usr/lib/a b.so)

some comm 12/13 [001] 5.001001:    1001001 task-clock:ppp:
\tffffffff81 do_it+0x2f ([kernel.kallsyms])

swapper 0 [000] 5.002001: 7 task-clock:ppp: ffffffff81 idle ([kernel.kallsyms])
"""


def test_fold_of_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Callable[..., Path]
) -> None:
    """The text of a profile is folded as its perf.data is."""
    path = tmp_path / "profile.txt.zst"
    path.write_bytes(PACKINGS[".zst"](PROFILE.encode()))
    assert main(["fold", str(path)]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "some_comm;[a b.so];std::map<int, long ;do_it 1001001",
        "some_comm;do_it 1001001",
    ]
    chains = DATA / "perf" / "chains.data"
    assert main(["fold", str(chains)]) == 0
    want = capsys.readouterr().out.splitlines()
    assert main(["fold", str(script(chains, "--no-inline"))]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(want)


def test_report_of_a_profile(tmp_path: Path) -> None:
    """It says which events there are, and that the stacks can be folded."""
    path = tmp_path / "profile.txt"
    path.write_text(PROFILE)
    with pytest.raises(Misuse, match=r"which has: task-clock:ppp.*waitfold fold"):
        open_capture(path, PG15)


def test_threads_folder_that_is_not_whole(tmp_path: Path) -> None:
    """The folder of perf record --threads without its records."""
    shutil.copy(DATA / "perf" / "one.data", tmp_path / "data")
    with pytest.raises(WaitfoldError, match=r"no data\.0"):
        open_capture(tmp_path, BY_V)
