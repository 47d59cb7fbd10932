"""What README, man pages, examples and samples say is so."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, run, waitfold

from waitfold import cli

WAITFOLD = ROOT / ".venv/bin/waitfold"
SCRIPT_NAMES = sorted(path.name for path in SCRIPTS.glob("waitfold-*"))
VERBS = [*cli.EXAMPLES]
EXAMPLES = [p for p in sorted((ROOT / "docs/examples").iterdir()) if p.suffix in (".txt", ".md")]
README = (ROOT / "README.md").read_text()
SAMPLE = ROOT / "samples/pgbench-cold-reads"


def options(usage: str) -> set[str]:
    """The options that a usage text names, as -D or --json."""
    return set(re.findall(r"(?<![\w-])(--?[A-Za-z](?:[a-z-]*[a-z])?)(?![\w-])", usage))


@functools.cache
def rendered(page: str) -> str:
    """A man page as a terminal of 80 columns shows it; nothing to complain about in it."""
    source = ROOT / "docs/man" / f"{page}.1"
    lint = subprocess.run(
        ["groff", "-mandoc", "-z", "-ww", source], capture_output=True, text=True, check=True
    )
    assert not lint.stderr
    answer = subprocess.run(
        ["man", "--warnings", "-l", source],
        env=os.environ | {"MANWIDTH": "80", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not answer.stderr
    return answer.stdout


def usage_lines(help_text: str) -> str:
    """The part of a script's help that names its options: usage and the list below it."""
    return "\n".join(help_text.partition("usage:")[2].split("\n\n")[:2])


@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_man_page_of_script(name: str) -> None:
    """A script's man page has every option of its help, and no other."""
    page = rendered(name)
    synopsis_and_options = page.partition("SYNOPSIS")[2].partition("EXIT STATUS")[0]
    named = options(usage_lines(run(SCRIPTS / name, "--help").stdout))
    described = set(re.findall(r"^ {5}(--?[A-Za-z][a-z-]*)(?= |$)", synopsis_and_options, re.M))
    assert named == described
    assert {"--help", "--version"} <= named


@pytest.mark.parametrize("verb", VERBS)
def test_man_page_of_verb(verb: str) -> None:
    """waitfold(1) has every option of each verb's help."""
    usage = waitfold(verb, "--help").stdout.partition("\n\n")[0]
    page = rendered("waitfold")
    assert re.search(rf"^ {{5}}{verb}\b", page, re.M)
    assert options(usage) <= options(page)


@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_head_of_script(name: str) -> None:
    """A script's help says what it is for, how it is called, what it costs and needs."""
    text = run(SCRIPTS / name, "--help").stdout
    assert text.startswith(f"{name} - ")
    for part in ("\nusage: ", "\ncost: ", "\nneeds: ", "\nSee also: "):
        assert part in text


@pytest.mark.parametrize("tool", SCRIPT_NAMES + [f"waitfold {verb}" for verb in VERBS])
def test_example_page(tool: str) -> None:
    """There is a page of output for each tool and verb, in which it is run more than once."""
    page = (ROOT / "docs/examples" / f"{tool.replace(' ', '-')}_example.txt").read_text()
    assert page.startswith(f"Demonstrations of {tool}, ")
    assert len(re.findall(rf"^[#$] (?:.*\| *)?{tool}\b", page, re.M)) > 1


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_called_as_they_can_be(page: Path) -> None:
    """What the example pages type are commands that exist, with options that they have."""
    text = page.read_text().replace("\\\n", " ")
    typed = re.findall(r"^(?:[#$]|   ) .*$", text, re.M)
    called = re.compile(r"(?:[|(;] *|^[#$ ]+ )(waitfold(?:-| )\w+)([^|;]*)")
    found = [match for line in typed for match in called.findall(line.partition(" -- ")[0])]
    assert found
    for command, words in found:
        verb = command[len("waitfold") + 1 :]
        assert verb in VERBS or f"waitfold-{verb}" in SCRIPT_NAMES, command
        known = (
            waitfold(verb, "--help")
            if verb in VERBS
            else run(SCRIPTS / f"waitfold-{verb}", "--help")
        )
        assert set(re.findall(r"(?<= )--?[a-z][a-z-]*", words)) <= options(known.stdout), command


def test_version() -> None:
    """Every part says the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = project["project"]["version"]
    for program in [*(SCRIPTS / name for name in SCRIPT_NAMES), WAITFOLD]:
        assert run(program, "--version").stdout == f"waitfold {version}\n"
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def readme_commands() -> list[str]:
    """The command lines of README's indented blocks."""
    return re.findall(r"^ {4}((?:make|waitfold|python3|\.venv)\S*.*)$", README, re.M)


def test_readme_make_targets() -> None:
    """What README says to make can be made."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    made = {line.split()[1] for line in readme_commands() if line.startswith("make ")}
    assert {"demo", "test", "install-host"} <= made <= targets


def test_readme_scripts() -> None:
    """README calls scripts by names and options that they have."""
    for line in readme_commands():
        if line.startswith("waitfold-"):
            name, *words = line.split()
            assert name in SCRIPT_NAMES
            help_text = run(SCRIPTS / name, "--help").stdout
            assert {word for word in words if word.startswith("-")} <= options(help_text)


def test_readme_reading(tmp_path: Path) -> None:
    """README's commands on the sample work as they stand."""
    for name in ("samples", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = [line for line in readme_commands() if line.startswith(".venv/bin/waitfold ")]
    assert len(commands) >= 3
    for command in commands:
        answer = run(*command.split(), cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
    ET.parse(tmp_path / "waits.svg")


def test_readme_files() -> None:
    """The files that README names are there, and the picture is one."""
    for name in re.findall(r"\]\(([^)]+)\)", README) + re.findall(
        r"^\| `([^|]+)` \|", README, re.M
    ):
        for part in re.split(r"`, `", name):
            if "/" in part:
                assert (ROOT / part).exists(), part
    ET.parse(ROOT / "docs/flamegraph.svg")


def test_readme_names_the_docs() -> None:
    """README says of each page and folder of docs/ what it is."""
    for path in (ROOT / "docs").iterdir():
        if path.is_dir() or path.suffix == ".md":
            assert f"`docs/{path.name}{'/' if path.is_dir() else ''}`" in README


def test_probe_set_keywords() -> None:
    """Every keyword of the probe sets stands in docs/probe-sets.md, and in the same shape."""
    text = (ROOT / "docs/probe-sets.md").read_text()
    documented = {line.split()[0] for line in re.findall(r"^\| `([a-z][^`]*)` \|", text, re.M)}
    used = set()
    for path in (ROOT / "probes").glob("*.set"):
        lines = [line.split() for line in path.read_text().splitlines()]
        used |= {words[0] for words in lines if words and not words[0].startswith("#")}
    assert used == documented


def test_sample_is_as_documented() -> None:
    """The sample has the files, keys and columns of docs/capture.md, and is small."""
    text = (ROOT / "docs/capture.md").read_text()
    names = set(re.findall(r"`([a-z._]+)`", text))
    assert {path.name for path in SAMPLE.iterdir()} <= names
    assert {line.split("\t")[0] for line in (SAMPLE / "manifest").open()} <= names
    for table in ("sites.tsv", "backends.tsv"):
        head = (SAMPLE / table).open().readline().rstrip("\n").split("\t")
        assert set(head) <= names
        for line in (SAMPLE / table).open():
            assert line.startswith("# ") or line.count("\t") == len(head) - 1
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) < 300_000


def test_no_registry_hosts() -> None:
    """No file names a package registry's host: what to install from is the user's own choice."""
    hosts = (
        "py" + "pi.org",
        "python" + "hosted.org",
        "crates" + ".io",
        "npm" + "js.",
        "rubygems" + ".org",
    )
    files = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert files
    for name in files:
        if (ROOT / name).is_file():
            content = (ROOT / name).read_bytes()
            assert not [host for host in hosts if host.encode() in content], name


def demo(folder: Path, **environment: str) -> str:
    """Run the demo in a folder; what it said. It leaves report, graph and capture, no more."""
    with tempfile.TemporaryDirectory(prefix="waitfold-test-") as temporary:
        Path(temporary).chmod(0o755)
        environment |= {"TMPDIR": temporary}
        answer = run(ROOT / "samples/demo.sh", cwd=folder, env=os.environ | environment)
        assert answer.returncode == 0, answer.stderr
        assert not list(Path(temporary).iterdir())
    (out,) = folder.glob("waitfold-demo-*")
    assert (out / "report.txt").read_text() in answer.stdout
    assert (out / "capture/manifest").exists()
    ET.parse(out / "waits.svg")
    return answer.stdout


def test_demo(tmp_path: Path) -> None:
    """The demo records a server of its own, and the disk and the log show in it."""
    said = demo(tmp_path)
    assert "pgbench made" in said
    assert "made elsewhere" not in said
    assert re.search(r"^IO:DataFileRead +\d{3,} ", said, re.M)
    assert re.search(r"^(LWLock:WALWrite|IO:WALSync) +\d{3,} ", said, re.M)


def test_demo_without_binutils(tmp_path: Path) -> None:
    """Where nothing can be recorded, the demo says why and shows the sample."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for program in Path(folder).glob("*"):
            if program.name != "objdump" and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    said = demo(tmp_path, PATH=str(programs))
    assert re.search(r"^no +binutils +no objdump\n +mend: ", said, re.M)
    assert "made elsewhere, samples/pgbench-cold-reads" in said
