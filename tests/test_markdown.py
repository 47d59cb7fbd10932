"""The report as Markdown, read back by a library that renders it."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cmarkgfm
import pytest
from conftest import ROOT, report, waitfold
from markdown_it import MarkdownIt
from markdown_it.token import Token

from waitfold.analysis import analyse
from waitfold.capture import Naming, open_capture
from waitfold.show.markdown import MAX, _fitted, cell, code, report_markdown
from waitfold.show.text import count, human, one_line

MIXED = ROOT / "tests/data/mixed"
SAMPLE = ROOT / "samples/cold-reads/cold-reads.waitfold"
HOSTILE = (
    "</code><img src=x onerror=alert(1)>|a``` |@all\x1b[31m\u202e[x](http://x.test)#1 \\| \\\\|`"
)


class Table(NamedTuple):
    """A table under its title, as a reader sees it."""

    columns: list[str]
    rows: list[list[str]]


def parsed(markdown: str) -> list[Token]:
    """What a text is to CommonMark with GitHub's tables."""
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def shown(token: Token) -> str:
    """What is seen of a line; no other HTML in it than <code>."""
    parts = []
    for child in token.children or []:
        assert child.type in ("text", "code_inline", "html_inline", "strong_open", "strong_close")
        if child.type == "html_inline":
            assert child.content in ("<code>", "</code>")
        else:
            parts.append(child.content)
    return "".join(parts)


def tables(markdown: str) -> dict[str, Table]:
    """All tables, by their titles."""
    found: dict[str, Table] = {}
    title, rows = "", []
    tokens = parsed(markdown)
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            title, rows = shown(token), []
        elif token.type == "tr_open":
            rows.append([])
        elif before.type in ("th_open", "td_open"):
            rows[-1].append(shown(token))
        elif token.type == "table_close":
            found[title] = Table(rows[0], rows[1:])
    return found


def markdown(capture: Path, *args: str) -> str:
    """The report of a capture as Markdown."""
    answer = waitfold("report", capture, "--markdown", *args)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout) <= MAX
    return str(answer.stdout)


def wait_cells(wait: dict[str, Any]) -> list[str]:
    """What a table says of one wait of the JSON report."""
    total = human(wait["total_ns"] + wait["cut_ns"])
    if not wait["count"]:
        return ["0", total, *["-"] * 5]
    keys = ("p50_ns", "p95_ns", "p99_ns", "max_ns")
    times = [wait["total_ns"] / wait["count"], *(wait[key] for key in keys)]
    return [count(wait["count"]), total, *map(human, times)]


@pytest.mark.parametrize("capture", [MIXED, SAMPLE], ids=lambda path: path.name)
def test_waits_as_in_json(capture: Path) -> None:
    """Each wait event of one kind of process, and each name of a set, has the JSON's figures."""
    truth = report(capture)
    found = tables(markdown(capture))
    seen = {
        row[0]: row[1:8]
        for title, table in found.items()
        if title.startswith(("Waits of client", "Idle", "Waits of back", "Waits of proc"))
        for row in table.rows
        if not row[0].startswith("(")
    }
    alone = 0
    for wait in truth["waits"]:
        name = f"{wait['class']}:{wait['name']}"
        titles = [t for t, table in found.items() if any(r[0] == name for r in table.rows)]
        if len([t for t in titles if t.startswith(("Waits", "Idle"))]) == 1:
            assert seen[name] == wait_cells(wait)
            alone += 1
    assert alone > 2
    for name, one in truth["sets"].items():
        (table,) = (table for title, table in found.items() if title.startswith(f"{name}: "))
        rows = sorted(one["rows"], key=lambda row: -row["total_ns"] - row["cut_ns"])[:20]
        assert [row[1:] for row in table.rows] == [wait_cells(row) for row in rows]
        assert [row[0] for row in table.rows] == [one_line(row["name"], 160) for row in rows]


def test_accounting_as_in_text() -> None:
    """The tables of an accounting, and those by dimension, say what the text says."""
    said = waitfold("report", SAMPLE).stdout
    found = tables(markdown(SAMPLE))
    for title in (
        "All the time of client backends and parallel workers",
        "All the time of all other processes",
    ):
        part = said.partition(f"{title}\n")[2].partition("\n\n")[0]
        rows = [re.split(r"  +", line.strip()) for line in part.splitlines()[1:]]
        assert [[c for c in row if c] for row in found[title].rows] == rows
    by = tables(markdown(SAMPLE, "--by", "event"))["Client backends and parallel workers"]
    said = waitfold("report", SAMPLE, "--by", "event").stdout
    part = said.partition("\nClient backends and parallel workers\n")[2].partition("\n\n")[0]
    rows = [re.split(r"  +", line.strip()) for line in part.splitlines()[1:]]
    assert by.rows == [row for row in rows if len(row) > 1]  # but the note


def test_audit_as_in_json() -> None:
    """The audit's tables have the JSON's figures."""
    truth = json.loads(waitfold("report", SAMPLE, "--audit", "--json").stdout)
    _, burnt = tables(markdown(SAMPLE, "--audit")).values()
    events = [row for row in burnt.rows if row[0]]
    assert len(events) > 3
    for row, one in zip(events, truth["on_cpu_in_event"], strict=False):
        assert row[:3] == [one["event"], human(one["on_cpu_ns"]), human(one["total_ns"])]


def test_summary_comes_first() -> None:
    """The first line says where the time went, the next whether samples were lost."""
    first, _, second, *_ = markdown(SAMPLE).splitlines()
    assert re.fullmatch(
        r"### [\d.]+ s of DB time in 5[\d.]+ s: `IO:DataFileRead` [\d.]+ %.*", first
    )
    assert second == "- No samples were lost."


def test_losses_and_warnings_come_first() -> None:
    """Before any figure stands what makes figures doubtful."""
    analysis = analyse(open_capture(MIXED, Naming()))
    analysis.stream.lost += 12
    analysis.stream.warnings.append("cut at @byte 5|6")
    lines = report_markdown(analysis, ()).splitlines()
    assert lines[2:4] == ["- **12 samples were lost.**", "- **Warning:** `cut at @byte 5|6`"]


def strange_texts(number: int) -> list[str]:
    """Texts of what means something in Markdown, and of what cannot be printed."""
    rng = random.Random(5)
    letters = "|`\\ \n<>&@#[]()*_~a\x00\u202e\u00e9"
    texts = [HOSTILE, "`", "``|``", "\\", "a\\|", "\\\\|", " ", "", "@all", "x" * 10_000]
    return texts + ["".join(rng.choices(letters, k=rng.randrange(1, 30))) for _ in range(number)]


def test_any_text_is_one_cell() -> None:
    """No text ends a cell or its row, or is anything but text."""
    texts = strange_texts(500)
    rows = "".join(f"| {cell(text)} | end |\n" for text in texts)
    table = tables(f"# all\n\n| a | b |\n| --- | --- |\n{rows}")["all"]
    assert table.rows == [[one_line(text, 160), "end"] for text in texts]
    for text in texts:
        if one_line(text):
            inline = parsed(f"{code(text)} end")[1]
            assert [child.type for child in inline.children or []] == ["code_inline", "text"]
            assert shown(inline) == f"{one_line(text, 160)} end"


def test_any_text_is_one_cell_to_github() -> None:
    """So says GitHub's own parser, which differs where a backslash stands before a bar."""
    texts = strange_texts(3000)
    rows = "".join(f"| {cell(text)} | end |\n" for text in texts)
    page = cmarkgfm.github_flavored_markdown_to_html(
        f"| a | b |\n| --- | --- |\n{rows}", cmarkgfm.Options.CMARK_OPT_UNSAFE
    )
    seen = re.findall(r"<tr>\n<td>(?:<code>)?(.*?)(?:</code>)?</td>\n<td>end</td>\n</tr>", page)
    assert [html.unescape(text) for text in seen] == [one_line(text, 160) for text in texts]
    assert "<a " not in page
    assert "<img" not in page


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Names of users, applications and the host in a capture are code wherever they stand."""
    capture = tmp_path / "capture"
    shutil.copytree(MIXED, capture)
    name = HOSTILE.replace("\x1b", "").replace(" ", "")
    lines = (capture / "backends.tsv").read_text().splitlines()
    head, rows = lines[0], [line.split("\t") for line in lines[1:]]
    for row in rows:
        row[3] = re.sub(
            r"^postgres: (\w+) (\w+) \[local\]", rf"postgres: {re.escape(name)} \2 [local]", row[3]
        )
    text = "\n".join([head, *("\t".join(row) for row in rows)])
    (capture / "backends.tsv").write_text(f"{text}\n")
    with (capture / "manifest").open("a") as file:
        file.write(f"host\t{name}\ncommand\t```\n")
    for args in ((), ("--by", "backend"), ("--by", "user,event")):
        said = markdown(capture, *args)
        for token in parsed(said):
            if token.type == "inline":
                shown(token)
                for child in token.children or []:
                    assert child.type == "code_inline" or "onerror" not in child.content
            else:
                assert token.type != "html_block"
        assert said.endswith("0.1.0.\n")
    assert "onerror" in said


def test_too_long_is_cut() -> None:
    """What does not fit loses its last tables, and says so."""
    table = ["x" * 20_000]
    said = _fitted(["head"], [table] * 5, ["tail"])
    assert len(said) <= MAX
    assert said.endswith("Left out for want of room: 2 tables.\n\ntail\n")


def test_one_form_at_a_time() -> None:
    """--markdown goes without the other forms, and says so."""
    for other in (["--json"], ["--html", "x.html"], ["--histogram"]):
        answer = waitfold("report", MIXED, "--markdown", *other)
        assert answer.returncode == 2
        assert other[0] in answer.stderr
