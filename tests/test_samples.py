"""The samples show what they are of; their pages and the docs quote what waitfold prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, report, waitfold

SAMPLES = ROOT / "samples"
CLIENTS = "Waits of client backends and parallel workers"

# Of each sample, the table of its report that shows it, and that table's first event.
TOP = {
    "idle-server": ("Idle, all processes", "Client:ClientRead"),
    "lock-contention": (CLIENTS, "Lock:transactionid"),
    "cold-reads": (CLIENTS, "IO:DataFileRead"),
    "wal-bound": (CLIENTS, "LWLock:WALWrite"),
    "checkpoint-spike": (CLIENTS, "LWLock:WALWrite"),
    "lwlock-contention": (CLIENTS, "LWLock:SubtransSLRU"),
}
PAGES = [
    *(SAMPLES / name / "README.md" for name in TOP),
    *(ROOT / f"docs/{name}.md" for name in ("reading", "cannot-see", "bug-report")),
]


def bundle(name: str) -> Path:
    """The bundle of a sample."""
    return SAMPLES / name / f"{name}.waitfold"


def printed(command: str) -> list[str]:
    """What a command of waitfold prints."""
    answer = waitfold(*shlex.split(command)[1:])
    assert answer.returncode == 0, answer.stderr
    return [line.rstrip() for line in answer.stdout.splitlines()]


def blocks(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of waitfold that a page shows with their output."""
    found = []
    for block in re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.M | re.S):
        first, *rest = block.splitlines()
        if first.startswith("$ waitfold "):
            found.append((first.removeprefix("$ "), rest))
    return found


def parts(quote: list[str]) -> list[list[str]]:
    """What stands between the lines [...] of a quote."""
    found: list[list[str]] = [[]]
    for line in quote:
        if line == "[...]":
            found.append([])
        else:
            found[-1].append(line)
    return found


def test_every_sample_is_here() -> None:
    """Each folder is a sample or the older capture, together they are small, each is explained."""
    folders = {path.name for path in SAMPLES.iterdir() if path.is_dir()}
    assert folders == {*TOP, "pgbench-cold-reads"}
    assert sum(bundle(name).stat().st_size for name in TOP) < 1_000_000
    made = (SAMPLES / "record.sh").read_text()
    for name in TOP:
        assert f"\n{name}() {{\n" in made
        assert f"samples/record.sh {name}\n" in (SAMPLES / name / "README.md").read_text()


@pytest.mark.parametrize("name", TOP)
def test_top_event(name: str) -> None:
    """The report's first event is what the sample is of, and nothing was lost."""
    title, event = TOP[name]
    lines = printed(f"waitfold report {bundle(name)}")
    assert lines[lines.index(title) + 2].split()[0] == event
    figures = report(bundle(name))
    assert figures["lost"] == 0
    assert figures["warnings"] == []
    assert figures["accounting"]["residual_ns"] == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_quotes(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page quotes of waitfold's output is what it prints now, in 80 columns."""
    monkeypatch.chdir(page.parent if page.parent.parent == SAMPLES else ROOT)
    quoted = blocks(page)
    assert quoted
    output = {command: printed(command) for command in dict(quoted)}
    for command, quote in quoted:
        lines = output[command]
        at = 0
        for part in parts(quote):
            places = range(at, len(lines) - len(part) + 1)
            found = next((i for i in places if lines[i : i + len(part)] == part), None)
            assert found is not None, f"{command} does not print\n" + "\n".join(part)
            at = found + len(part)
        assert max(map(len, quote)) <= 80
