"""make install and uninstall: what they put where works there; completion in bash."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, run, waitfold
from test_house import SCRIPT_NAMES, VERBS, usage_lines

from waitfold.account import DIMENSIONS
from waitfold.redact import KINDS

PREFIX = "opt/waitfold"
COMPLETION = ROOT / "completion/waitfold.bash"


def make(target: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run a target of the Makefile for a DESTDIR."""
    return run("make", "-s", target, f"DESTDIR={folder}", f"PREFIX=/{PREFIX}", *settings, cwd=ROOT)


def files(folder: Path) -> set[str]:
    """All that is in a folder but folders."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink() or p.is_file()}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `make install` put everything but the packages that waitfold needs: they are here."""
    folder = tmp_path_factory.mktemp("installed")
    answer = make(
        "install", folder, f"PYTHON={sys.executable}", "PIPFLAGS=--no-deps --no-build-isolation"
    )
    assert answer.returncode == 0, answer.stderr
    return folder


def test_commands(installed: Path, tmp_path: Path) -> None:
    """Each command runs from where it was installed, with what it needs from there."""
    commands = installed / PREFIX / "bin"
    assert {path.name for path in commands.iterdir()} == {"waitfold", *SCRIPT_NAMES}
    for command in commands.iterdir():
        answer = run(command, "--version", cwd=tmp_path)
        assert answer.stdout.startswith("waitfold "), answer.stderr
    by_verb = run(commands / "waitfold", "probes", "list", cwd=tmp_path)
    assert by_verb.stdout == run(commands / "waitfold-probes", "list").stdout
    assert "\nlock-wait\n" in by_verb.stdout
    report = run(commands / "waitfold", "report", ROOT / "tests/data/mixed", cwd=tmp_path)
    assert report.stdout == waitfold("report", ROOT / "tests/data/mixed").stdout
    loaded = run(sys.executable, "-v", commands / "waitfold", "--version").stderr
    assert f"{installed}/{PREFIX}/lib/waitfold/python/waitfold/cli.py" in loaded
    assert f"{ROOT}/postproc/waitfold/" not in loaded


def test_package(installed: Path) -> None:
    """The package holds every file of the source's, and the probe sets."""
    package = installed / PREFIX / "lib/waitfold/python/waitfold"
    listed = run(
        "git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard",
        "postproc/waitfold", "probes", cwd=ROOT,
    ).stdout.splitlines()  # fmt: skip
    expected = {
        name.removeprefix("postproc/waitfold/") for name in listed if (ROOT / name).exists()
    }
    assert {"cli.py", "probes/query.set", "probes/wait_events/pg15.tsv"} <= expected
    assert {name for name in files(package) if "__pycache__" not in name} == expected


def test_man_pages(installed: Path) -> None:
    """Man finds the page of each installed command, and has nothing to complain about."""
    share = installed / PREFIX / "share/man"
    for command in (installed / PREFIX / "bin").iterdir():
        page = run("man", "--warnings", "-M", share, command.name, env=os.environ | {"LC_ALL": "C"})
        assert page.stderr == ""
        assert page.stdout.startswith(f"{command.name.upper()}(1)")


def test_uninstall(installed: Path, tmp_path: Path) -> None:
    """Uninstall removes what install put there, and nothing else."""
    folder = tmp_path / "installed"
    shutil.copytree(installed, folder, symlinks=True)
    others = {f"{PREFIX}/bin/psql", f"{PREFIX}/share/man/man1/psql.1", f"{PREFIX}/lib/other"}
    for name in others:
        (folder / name).write_text("another's")
    answer = make("uninstall", folder)
    assert answer.returncode == 0, answer.stderr
    assert files(folder) == others


def test_without_python(installed: Path, tmp_path: Path) -> None:
    """Where there is no Python the host's side is installed, and a line says what is left out."""
    answer = make("install", tmp_path, "PYTHON=no-such-python")
    assert answer.returncode == 0
    assert re.fullmatch(r"waitfold, the analysis, is left out: .*PYTHON=.*\n", answer.stderr)
    analysis = re.compile(rf"{PREFIX}/(bin/waitfold|lib/waitfold/(waitfold|python/.*))")
    assert files(tmp_path) == {name for name in files(installed) if not analysis.fullmatch(name)}


def test_without_pip(tmp_path: Path) -> None:
    """Where pip cannot install, make says that the host's side is there all the same."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ]\n')
    python.chmod(0o755)
    answer = make("install", tmp_path / "to", f"PYTHON={python}")
    assert answer.returncode != 0
    assert "make install-host" in answer.stderr
    assert {path.name for path in (tmp_path / "to" / PREFIX / "bin").iterdir()} == {*SCRIPT_NAMES}


## Completion


def offered(*commands: str) -> dict[str, dict[str, str]]:
    """What the completion knows of each command: kinds of value by option, " " without one."""
    script = '. "$0"; for c; do _waitfold_takes "$c"; printf "%s\\n" "$REPLY"; done'
    lines = run("bash", "--norc", "-c", script, COMPLETION, *commands).stdout.splitlines()
    found = [(word.partition("=") for word in line.split()) for line in lines]
    return {
        command: {option: kind if given else " " for option, given, kind in words}
        for command, words in zip(commands, found, strict=True)
    }


SETS = "|".join(
    sorted(p.stem for p in (ROOT / "probes").glob("*.set") if not p.stem.startswith("wait-event"))
)


def listed(help_text: str, option: str) -> list[str]:
    """The values that a script's help lists below an option, a line each."""
    below = re.split(rf"^  {option} ", help_text, flags=re.M)[1]
    return re.findall(r"^ {21}(\w+)  ", re.split(r"^  -", below, flags=re.M)[0], re.M)


def kinds(usage: str, **known: str) -> dict[str, str]:
    """The kinds of value by option, as the usage text says."""
    known |= {"PGDATA": "FOLDER", "FILE": "FILE", "FILE.svg": "FILE", "CAPTURE": "FILE"}
    found = re.findall(r"(?<![\w-])(--?[A-Za-z][a-z-]*)(?: (\{[^}]*\}|[A-Z][^] ]*(?:]?)))?", usage)
    return {
        option: value.strip("{}").replace(",", "|") if value[:1] == "{"
        else known.get(re.sub(r"[^\w.|].*", "", value), "") if value else " "
        for option, value in reversed(found)
        if option != "-h"
    }  # fmt: skip


def of_scripts() -> dict[str, dict[str, str]]:
    """The options of each script by its own help, and what values they take."""
    expected = {}
    for name in SCRIPT_NAMES:
        text = run(SCRIPTS / name, "--help").stdout
        expected[name] = kinds(usage_lines(text))
        if name == "waitfold-probes":
            expected[f"{name} show"] = {"-D": expected[name].pop("-D")}
        if name == "waitfold-record":
            engines = re.search(r"what records: (\S+), (\S+) or (\S+)", text)
            assert engines
            expected[name] |= {
                "-m": "|".join(listed(text, "-m")),
                "--engine": "|".join(engines.groups()),
                "--call-graph": "|".join(listed(text, "--call-graph")),
                "--with": ",{}|{}".format("|".join(listed(text, "--with")), SETS),
            }
    return expected


def of_verbs() -> dict[str, dict[str, str]]:
    """The options of each verb by its own help, and what values they take."""
    found = {}
    for verb in VERBS:
        usage = waitfold(verb, "--help").stdout.partition("\n\n")[0]
        names = "|".join(KINDS) if verb == "bundle" else SETS
        values = kinds(" ".join(usage.split()), NAME=names, DIM=",{}".format("|".join(DIMENSIONS)))
        found[f"waitfold {verb}"] = {"--help": " "} | values
    return found


def test_completion_is_complete() -> None:
    """Completion knows the options of every command, and which values they take: no other."""
    expected = of_scripts() | of_verbs()
    known = offered(*expected)
    for command, options in expected.items():
        of_it = {
            option: kind for option, kind in known[command].items() if option not in ("", "--")
        }
        assert of_it == options, command
    words = offered("waitfold", "waitfold-probes", "waitfold-probes show")
    scripts = [name.removeprefix("waitfold-") for name in SCRIPT_NAMES]
    assert set(words["waitfold"][""].split("|")) == {*VERBS, *scripts}
    usage = run(SCRIPTS / "waitfold-probes", "--help").stdout
    assert set(re.findall(r"^  ([a-z]+)  ", usage, re.M)) == set(
        words["waitfold-probes"][""].split("|")
    )
    assert words["waitfold-probes show"][""] == f"wait-event|wait-event-usdt|{SETS}"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A bash on a terminal, in a folder with a capture and a file, with the completion loaded."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "waits db1").mkdir()
    (folder / "waits.svg").touch()
    process, terminal = pty.fork()
    if not process:
        os.chdir(folder)
        os.execvpe(
            "bash", ["bash", "--norc", "--noprofile"], os.environ | {"PS1": "", "TERM": "dumb"}
        )
    os.write(
        terminal, f". {COMPLETION}; bind 'set bell-style none'; stty -echo; echo rea''dy\n".encode()
    )
    until(terminal, "ready")
    yield terminal
    os.close(terminal)
    os.waitpid(process, 0)


def until(terminal: int, text: str) -> str:
    """What a terminal shows until a text is in it."""
    shown = ""
    deadline = time.monotonic() + 10
    while text not in shown:
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], shown
        shown += os.read(terminal, 4096).decode()
    return shown


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("waitfold rep", "waitfold report "),
        ("waitfold report --by que", "waitfold report --by query"),
        ("waitfold report --by query,ev", "waitfold report --by query,event"),
        ("waitfold report --by=da", "waitfold report --by=database"),
        ("waitfold report waits\\ ", r"waitfold report waits\ db1/"),
        ("waitfold report --au", "waitfold report --audit "),
        ("waitfold flamegraph c -o waits.", "waitfold flamegraph c -o waits.svg "),
        ("waitfold record -m me", "waitfold record -m mem "),
        ("waitfold-record -D waits", r"waitfold-record -D waits\ db1/"),
        ("waitfold-record --with query,lwl", "waitfold-record --with query,lwlock-wait"),
        ("waitfold-record -d 5 -- whoam", "waitfold-record -d 5 -- whoami "),
        ("waitfold-record -d wai", "waitfold-record -d wai"),
        ("waitfold probes sho", "waitfold probes show "),
        ("waitfold probes show que", "waitfold probes show query "),
        ("waitfold-watch --ea", "waitfold-watch --each "),
        ("./waitfold-doctor --js", "./waitfold-doctor --json "),
    ],
)
def test_completion(shell: int, typed: str, completed: str) -> None:
    """Tab completes a word, and nothing where nothing fits."""
    # What is typed is quoted by bash itself once it is a comment.
    os.write(shell, f"{typed}\t\x01echo '<\x05>'\n".encode())
    assert f"<{completed}>" in until(shell, ">\r\n").replace("\r\n", "\n")
