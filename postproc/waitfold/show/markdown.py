"""The report as Markdown, to be pasted into an issue or an e-mail: GitHub's, for its tables.

Texts of a capture are somebody else's. They stand in code alone, inline or in blocks, where nothing
is a link, a mention or HTML; and in one line each, so that they cannot end the table either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from waitfold import __version__
from waitfold.account import Account
from waitfold.analysis import Analysis, SetAnalysis, Wait
from waitfold.audit import Burnt, Unexplained
from waitfold.show import text
from waitfold.show.text import AccountTable, ByTable, WaitTable, human, percent

MAX = 65_000
"""Characters of a report; a comment on GitHub has at most 65,536."""

_ROWS = 30  # wait events of a table
_NAME = 160  # characters of a name
_STACK = 600  # characters of a stack or a warning
_WARNINGS = 20

# What of a manifest says how a capture was made; the head says the rest.
_HOW = (
    "command", "waitfold", "engine", "perf", "sets", "profiles", "call_graph", "pids", "ring",
    "kernel", "cpus", "probes",
)  # fmt: skip

_TIMES = ["total", "mean", "p50", "p95", "p99", "max"]


def report_markdown(
    analysis: Analysis,
    by: Sequence[str],
    sets: Sequence[SetAnalysis] = (),
    account: Account | None = None,
) -> str:
    """Return the report of text.report_text() as Markdown of at most MAX characters.

    What is longer lacks its last tables, and says so.
    """
    db_time = account.db_time_ns() if account else analysis.db_time_ns()
    accounted = text.account_tables(account) if account and account.joined.scheduled else []
    waits = text.wait_tables(analysis, db_time, account)
    tables: list[list[str]] = []
    if by and account:
        tables += [_by_table(table, by) for table in text.by_tables(account, by)]
    elif by:
        tables.append(_process_table(analysis))
    else:
        tables += [_account_table(table) for table in accounted]
        tables += [_wait_table(table) for table in waits]
    tables += [_set_table(one) for one in sets]
    manifest = analysis.capture.manifest
    how = [(key, manifest[key]) for key in _HOW if key in manifest]
    head = [
        f"### {_summary(db_time, analysis.window_ns, accounted, waits)}",
        "",
        *_caveats(analysis, sets, account if accounted else None),
        "",
        *_block(text.head(analysis, db_time).items()),
    ]
    tail = [text.method(analysis, sets), ""]
    if how:
        tail += ["How it was captured:", "", *_block(how), ""]
    tail.append(f"Made by `waitfold report --markdown` {__version__}.")
    return _fitted(head, tables, tail)


def audit_markdown(account: Account, blocked: list[Unexplained], burnt: list[Burnt]) -> str:
    """Return the audit of text.audit_text() as Markdown of at most MAX characters."""
    joined = account.joined
    head = ["### What wait events do not say"]
    if joined.warnings:
        head += ["", *(f"- {warning}" for warning in _warned(joined.warnings))]
    tables = []
    if joined.scheduled:
        total = human(sum(one.ns for one in blocked))
        rows = [
            [
                *map(human, (one.ns, one.ns / one.count, one.max_ns)),
                text.count(one.count),
                _stack(one.stack),
            ]
            for one in blocked[: text.AUDIT_ROWS]
        ]
        title = f"Blocked without a wait event: {total}, by the stack where the CPU was left"
        columns = ["total", "mean", "max", "count", "<stack, innermost function first"]
        rest = [one.ns for one in blocked[text.AUDIT_ROWS :]]
        tables.append(_table(title, columns, rows, text.more(rest)))
    rows = []
    for event in burnt[: text.AUDIT_ROWS]:
        exact = event.on_cpu_ns
        share = "-" if exact is None else percent(exact, event.total_ns).strip()
        times = [human(exact), human(event.total_ns), share]
        rows.append([cell(event.event), *times, str(event.sampled), ""])
        rows += [
            ["", "", "", "", str(n), _stack(stack)]
            for stack, n in event.samples[: text.AUDIT_STACKS]
        ]
    title = "On a CPU inside a wait event, and where samples found it"
    columns = ["<wait event", "on-CPU", "of", "%", "samples", "<stack, innermost function first"]
    rest = [event.on_cpu_ns or 0 for event in burnt[text.AUDIT_ROWS :]]
    tables.append(_table(title, columns, rows, text.more(rest)))
    return _fitted(head, tables, [f"Made by `waitfold report --audit --markdown` {__version__}."])


def _fitted(head: list[str], tables: list[list[str]], tail: list[str]) -> str:
    """Join the parts, but the last tables where all of them are too much."""
    kept = len(tables)
    while True:
        lines = [*head, *(line for table in tables[:kept] for line in ["", *table])]
        if kept < len(tables):
            lines += ["", f"Left out for want of room: {len(tables) - kept} tables."]
        markdown = "\n".join([*lines, "", *tail]) + "\n"
        if len(markdown) <= MAX or not kept:
            return markdown
        kept -= 1


def _summary(
    db_time: int, window_ns: int, accounted: list[AccountTable], waits: list[WaitTable]
) -> str:
    """Return in one line where most of the DB time went."""
    parts = [
        (name, times.total)
        for table in accounted
        for name, times in table.parts
        if table.whole_ns is not None
    ]
    if not accounted:
        for table in waits:
            if table.whole_ns is not None:
                parts = [(_event(wait), wait.time_ns) for wait in table.waits]
                parts.append(("(no wait event)", table.no_wait_ns or 0))
    parts.sort(key=lambda part: -part[1])
    shares = ", ".join(
        f"{_own_or_code(name)} {percent(ns, db_time).strip()} %" for name, ns in parts[:3] if ns
    )
    return f"{text.seconds(db_time)} of DB time in {text.seconds(window_ns)}: {shares or 'idle'}"


def _caveats(analysis: Analysis, sets: Sequence[SetAnalysis], account: Account | None) -> list[str]:
    """Return what to know before one looks at the figures, as a list."""
    lost, cut = analysis.stream.lost, analysis.censored
    said = [f"**{lost} samples were lost.**" if lost else "No samples were lost."]
    said += _warned(text.warnings(analysis, sets))
    if total := sum(cut.values()):
        said.append(
            f"Of {total} waits only a part was seen: {cut['start']} were cut by the window's "
            f"start, {cut['end']} by its end, {cut['lost']} by losses."
        )
    if account:
        said.append(text.residual(account))
    return [f"- {line}" for line in said]


def _warned(warnings: Sequence[str]) -> list[str]:
    said = [f"**Warning:** {code(warning, _STACK)}" for warning in warnings[:_WARNINGS]]
    more = len(warnings) - len(said)
    return [*said, f"{more} more warnings"] if more else said


def _account_table(table: AccountTable) -> list[str]:
    rows = [*table.parts, *table.sums]
    vague = any(times.unknown for _, times in rows)
    columns = ["<", "total", *["% DB"] * (table.whole_ns is not None)]
    columns += ["blocked", "run queue", "on-CPU", *["?"] * vague]
    lines = []
    for i, (name, times) in enumerate(rows):
        share = []
        if table.whole_ns is not None:
            shared = i <= len(table.parts)
            share = [percent(times.total, table.whole_ns).strip() if shared else ""]
        states = [times.blocked, times.run_queue, times.on_cpu, *[times.unknown] * vague]
        lines.append(
            [_own_or_cell(name), human(times.total), *share]
            + [human(ns) if ns else "-" for ns in states]
        )
    return _table(table.title, columns, lines)


def _wait_table(table: WaitTable) -> list[str]:
    whole, no_wait = table.whole_ns, table.no_wait_ns
    rows = [_wait_row(cell(_event(wait)), wait, whole) for wait in table.waits[:_ROWS]]
    note = text.more([wait.time_ns for wait in table.waits[_ROWS:]])
    if whole is not None and no_wait is not None:
        share = percent(no_wait, whole).strip()
        rows.append(["(no wait event)", "", human(no_wait), *[""] * 5, share])
    columns = ["<wait event", "count", *_TIMES, *["% DB"] * (whole is not None)]
    return _table(table.title, columns, rows, f"{note} {table.note}".strip())


def _set_table(one: SetAnalysis) -> list[str]:
    waits = one.waits()
    rows = [_wait_row(cell(wait.name), wait) for wait in waits[: text.SET_ROWS]]
    note = text.more([wait.time_ns for wait in waits[text.SET_ROWS :]])
    title = f"{code(one.probe_set.name)}: {code(one.probe_set.about)}"
    columns = ["<name", "count", *_TIMES]
    return _table(title, columns, rows, f"{note} {text.set_note(one)}".strip())


def _wait_row(name: str, wait: Wait, whole: int | None = None) -> list[str]:
    s = wait.stats
    times = [s.mean_ns, s.p50_ns, s.p95_ns, s.p99_ns, s.max_ns] if s else [None] * 5
    row = [name, text.count(s.count if s else 0), human(wait.time_ns), *map(human, times)]
    return row if whole is None else [*row, percent(wait.time_ns, whole).strip()]


def _by_table(table: ByTable, by: Sequence[str]) -> list[str]:
    columns = [f"<{dimension}" for dimension in by] + table.columns
    rows = [
        [*map(_own_or_cell, names), *(time.strip() for time in times)]
        for names, times in table.rows
    ]
    return _table(table.title, columns, rows, table.note)


def _process_table(analysis: Analysis) -> list[str]:
    rows = [
        [
            str(p.pid),
            cell(f"{p.type} {p.who}"),
            text.count(p.busy_count),
            human(p.busy_ns),
            "-" if p.top == "-" else cell(p.top),
        ]
        for p in analysis.processes()
    ]
    columns = ["pid", "<type, user and database", "count", "total", "<top wait"]
    return _table("Processes; idle waits left out", columns, rows)


def _table(
    title: str, columns: Sequence[str], rows: Iterable[list[str]], note: str = ""
) -> list[str]:
    """Return a table under its title; names of columns that begin with `<` are aligned left."""
    lines = [
        f"#### {title}",
        "",
        _line(column.removeprefix("<") for column in columns),
        _line("---" if column.startswith("<") else "---:" for column in columns),
        *map(_line, rows),
    ]
    return [*lines, "", note] if note else lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _event(wait: Wait) -> str:
    return f"{wait.class_}:{wait.name}"


_OWN = re.compile(r"\([a-zA-Z ,-]+\)|= [a-zA-Z ]+|idle|idle in transaction|-")
"""What the report itself calls a row, and no capture can make anything of but text."""


def _own_or_code(name: str) -> str:
    return name if _OWN.fullmatch(name) else code(name)


def _own_or_cell(name: str) -> str:
    return name if _OWN.fullmatch(name) else cell(name)


def _stack(stack: tuple[str, ...]) -> str:
    return cell(" < ".join(stack), _STACK) if stack else "(its beginning was not seen)"


def code(name: str, width: int = _NAME) -> str:
    """Return a text of any length and shape as inline code."""
    name = text.one_line(name, width)
    if not name:
        return ""
    # It ends at as many backticks as it began with.
    ticks = "`" * (max(map(len, re.findall("`+", name)), default=0) + 1)
    pad = " " if name.startswith("`") or name.endswith("`") else ""
    return f"{ticks}{pad}{name}{pad}{ticks}"


def cell(name: str, width: int = _NAME) -> str:
    r"""Return a text of any length and shape as inline code in a cell of a table.

    A `|` is written `\|` there; but what `\\|` is, readers of tables do not agree on.
    """
    name = text.one_line(name, width)
    if "\\|" not in name:
        return code(name, width).replace("|", "\\|")
    spelt = "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in name)
    return f"<code>{spelt}</code>"


def _block(items: Iterable[tuple[str, str]]) -> list[str]:
    """Return keys and values as a block of code."""
    lines = []
    for key, value in items:
        lines += text.wrapped(f"{key:<13}", text.one_line(value, _STACK))
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", "\n".join(lines))), default=0))
    return [f"{ticks}text", *lines, ticks]
