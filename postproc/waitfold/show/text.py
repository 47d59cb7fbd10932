"""The report: text of 80 columns for a terminal, or JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

from waitfold.account import IDLE, IN_TRANSACTION, Account, Cells, Row, Times
from waitfold.analysis import Analysis, Process, SetAnalysis, Wait
from waitfold.audit import Burnt, Unexplained
from waitfold.backends import CLIENT, PARALLEL, POSTMASTER, UNKNOWN
from waitfold.join import UNSEEN
from waitfold.stores import Late

FORMAT = 1
"""Format of the JSON report."""

WIDTH = 80
_BAR = 40
SET_ROWS = 20
_BY_ROWS = 40
AUDIT_ROWS, AUDIT_STACKS = 15, 3


def report_json(
    analysis: Analysis, sets: Sequence[SetAnalysis] = (), account: Account | None = None
) -> str:
    """Return the report as JSON, with those of the capture's other probe sets; times are in ns.

    `intervals` and, of each wait, all but `cut_ns` are of the complete intervals. `cut_ns` is
    what was seen of those that the window or a loss cut; `db_time_ns` counts them in. `late`, in
    mode mem, is about backends that recording began of only after the window had. `accounting` is
    None where neither context switches nor queries were recorded.
    """
    waits = sorted(analysis.waits(analysis.everything()), key=_complete_ns, reverse=True)
    report = {
        "format": FORMAT,
        "pg_version": analysis.capture.pg_version,
        "mode": analysis.capture.mode,
        "window_ns": analysis.window_ns,
        "db_time_ns": account.db_time_ns() if account else analysis.db_time_ns(),
        "transitions": analysis.stream.transitions,
        "lost": analysis.stream.lost,
        "late": asdict(analysis.capture.late) if analysis.capture.late else None,
        "intervals": analysis.intervals,
        "censored": analysis.censored,
        "waits": [_wait_json(wait) for wait in waits],
        "backends": [
            {"pid": p.pid, "type": p.type, "count": p.count, "total_ns": p.total_ns}
            for p in analysis.processes()
        ],
        "sets": {one.probe_set.name: _set_json(one) for one in sets},
        "accounting": _account_json(account) if account else None,
        "warnings": warnings(analysis, sets),
    }
    return json.dumps(report, indent=1) + "\n"


def _complete_ns(wait: Wait) -> int:
    return wait.stats.total_ns if wait.stats else 0


def _wait_json(wait: Wait) -> dict[str, Any]:
    return {"class": wait.class_, "name": wait.name, **_stats_json(wait)}


def _set_json(one: SetAnalysis) -> dict[str, Any]:
    waits = sorted(one.waits(), key=_complete_ns, reverse=True)
    return {
        "transitions": one.stream.transitions,
        "intervals": one.summary.intervals,
        "censored": one.summary.censored,
        "rows": [
            {"name": wait.name, "fields": one.names.fields(wait.value), **_stats_json(wait)}
            for wait in waits
        ],
    }


def _stats_json(wait: Wait) -> dict[str, int]:
    stats = wait.stats
    return {
        "count": stats.count if stats else 0,
        "total_ns": stats.total_ns if stats else 0,
        "mean_ns": round(stats.mean_ns) if stats else 0,
        "p50_ns": stats.p50_ns if stats else 0,
        "p95_ns": stats.p95_ns if stats else 0,
        "p99_ns": stats.p99_ns if stats else 0,
        "max_ns": stats.max_ns if stats else 0,
        "cut_ns": wait.time_ns - _complete_ns(wait),
    }


def report_text(
    analysis: Analysis,
    by: Sequence[str],
    histogram: bool,
    sets: Sequence[SetAnalysis] = (),
    account: Account | None = None,
) -> str:
    """Return the report as text: head, tables, and histograms if asked for.

    `by` are dimensions of `account`; without that, backend alone.
    """
    db_time = account.db_time_ns() if account else analysis.db_time_ns()
    said = [("WARNING", text) for text in warnings(analysis, sets)]
    lines = [f"waitfold report of {analysis.capture.path}", ""]
    for key, text in [*head(analysis, db_time).items(), *said]:
        lines += wrapped(f"{key:<13}", text)
    if by and account:
        lines += chain.from_iterable(_by_lines(table, by) for table in by_tables(account, by))
    elif by:
        lines += _process_table(analysis.processes())
    else:
        if account and account.joined.scheduled:
            lines += chain.from_iterable(map(_account_lines, account_tables(account)))
            lines += ["", *wrapped("", residual(account))]
        lines += chain.from_iterable(map(_wait_table, wait_tables(analysis, db_time, account)))
    for one in sets:
        lines += _set_table(one)
    lines += ["", *wrapped("", method(analysis, sets))]
    if histogram:
        for wait in analysis.waits(analysis.everything()):
            lines += _histogram(wait)
    return "\n".join(lines) + "\n"


def warnings(analysis: Analysis, sets: Sequence[SetAnalysis]) -> list[str]:
    """Return what the user should know before trusting the numbers."""
    # Each set is read by itself, and most of what there is to say is the same for all.
    found = [*analysis.warnings, *chain.from_iterable(one.stream.warnings for one in sets)]
    return list(dict.fromkeys(found))


def head(analysis: Analysis, db_time: int) -> dict[str, str]:
    """Return what is said of a capture as a whole, by what it is about."""
    capture, stream = analysis.capture, analysis.stream
    manifest = capture.manifest
    server = f"PostgreSQL {capture.pg_version}, mode {capture.mode}"
    if "host" in manifest:
        server += f", host {manifest['host']}"
    window = f"{seconds(analysis.window_ns)}"
    if "started" in manifest:
        window += f" from {manifest['started']}"
    if "ended_by" in manifest:
        window += f", ended by {manifest['ended_by']}"
    types = Counter(b.type for b in analysis.backends.values() if b.type != POSTMASTER)
    background = types.total() - types[CLIENT] - types[PARALLEL] - types[UNKNOWN]
    processes = [
        _plural(types[CLIENT], CLIENT),
        _plural(types[PARALLEL], PARALLEL),
        _plural(background, "background process", "es"),
    ]
    if types[UNKNOWN]:
        processes.append(f"{types[UNKNOWN]} of unknown type")
    lost = "no samples lost"
    if stream.lost:
        lost = f"LOST {stream.lost} SAMPLES in {_plural(len(stream.gaps) + stream.cuts, 'gap')}"
    cut = analysis.censored
    sessions = db_time / analysis.window_ns if analysis.window_ns else 0.0
    about = {
        "server": server,
        "window": window,
        "processes": ", ".join(processes),
        "transitions": f"{stream.transitions}, {lost}",
        "intervals": f"{analysis.intervals} complete; cut by the window's start "
        f"{cut['start']}, its end {cut['end']}, losses {cut['lost']}",
        "DB time": f"{seconds(db_time)}, {sessions:.2f} average active sessions",
    }
    if capture.late and (capture.late.count or capture.late.never):
        about["late"] = _late(capture.late)
    return about


def _late(late: Late) -> str:
    parts = []
    if late.count:
        parts.append(
            f"{_plural(late.count, 'backend')} attached late: {human(late.median_ns)} missed in "
            f"the median, {human(late.max_ns)} at most"
        )
    if late.never:
        parts.append(f"{late.never} never attached, gone before or refused (see attached.tsv)")
    return "; ".join(parts)


class WaitTable(NamedTuple):
    """Waits of some processes; `no_wait_ns` is their time in none, None where it is not told."""

    title: str
    waits: list[Wait]
    note: str
    whole_ns: int | None  # of which shares are told
    no_wait_ns: int | None = None


def wait_tables(analysis: Analysis, db_time: int, account: Account | None) -> list[WaitTable]:
    """Return the tables of waits of a report, but those that would be empty."""
    waits = {name: analysis.waits(part) for name, part in analysis.parts.items()}
    foreground, no_wait, note = waits["foreground"], None, ""
    if not (account and account.joined.scheduled):  # else the accounting says more of that
        waited = sum(wait.time_ns for wait in foreground)
        no_wait = max(0, account.no_wait_ns() if account else db_time - waited)
        note = "On a CPU, waiting for one, or in code that reports no wait event."
    tables = [
        WaitTable(
            "Waits of client backends and parallel workers", foreground, note, db_time, no_wait
        ),
        WaitTable(
            "Idle, all processes",
            waits["idle"],
            "Client:ClientRead is also that of sessions in a transaction."
            if account and account.joined.asked
            else "Client:ClientRead counts as idle inside a transaction too.",
            None,
        ),
        WaitTable("Waits of background processes (not in DB time)", waits["background"], "", None),
        WaitTable(
            "Waits of processes of unknown type (not in DB time)",
            waits["unknown"],
            "Nothing tells who they were: no title was read of them, mostly because they lived "
            "too briefly, as parallel workers do.",
            None,
        ),
    ]
    return [table for table in tables if table.waits or table.whole_ns]


def _wait_table(table: WaitTable) -> list[str]:
    whole, no_wait = table.whole_ns, table.no_wait_ns
    lines = [
        "",
        table.title,
        _columns("" if whole is None else _SHARE),
        *chain.from_iterable(_row(wait, whole) for wait in table.waits),
    ]
    if whole is not None and no_wait is not None:
        times = f"{'':8}{human(no_wait):>7}{'':35}{percent(no_wait, whole)}"
        lines.append(f"{'(no wait event)':<{_NAME}}{times}")
    return [*lines, *wrapped("", table.note)]


def _set_table(one: SetAnalysis) -> list[str]:
    waits = one.waits()
    note = f"{more([wait.time_ns for wait in waits[SET_ROWS:]])} {set_note(one)}".lstrip()
    return [
        "",
        *wrapped("", f"{one.probe_set.name}: {one.probe_set.about}"),
        _columns(name="name"),
        *chain.from_iterable(_row(wait, name=one_line(wait.name)) for wait in waits[:SET_ROWS]),
        *wrapped("", note),
    ]


def set_note(one: SetAnalysis) -> str:
    """Return how many intervals of a set were complete, and cut."""
    cut = one.summary.censored
    return (
        f"{one.summary.intervals} complete; cut by the window's start {cut['start']}, its end "
        f"{cut['end']}, losses {cut['lost']}."
    )


def one_line(text: str, width: int = WIDTH - 1) -> str:
    """Return a text of any length and shape, as that of a query, as one line of a terminal."""
    text = " ".join(text[: 4 * width].split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= width else text[: width - 3] + "..."


def method(analysis: Analysis, sets: Sequence[SetAnalysis]) -> str:
    """Return what the columns of the tables of waits are of."""
    summaries = [*analysis.parts.values(), *(one.summary for one in sets)]
    exact = all(summary.exact_percentiles for summary in summaries)
    percentiles = "exact" if exact else "off by up to 0.4 %, as there are too many waits to keep"
    return (
        "total and % DB include what was seen of cut intervals, the other columns do not. "
        f"Percentiles are {percentiles}. DB time: the time that client backends and parallel "
        "workers lived in the window, less their idle time."
    )


_SHARE = "% DB"
# A row: name, count (8), six times (7 each), share (5). Where there is no share the name has its
# room; a longer name has a line of its own.
_NAME = WIDTH - 8 - 6 * 7 - 5


def _columns(share: str = "", name: str = "wait event") -> str:
    names = "".join(f"{time:>7}" for time in ("total", "mean", "p50", "p95", "p99", "max"))
    width = _NAME if share else _NAME + 5
    return f"{name:<{width}}{'count':>8}{names}{share:>5}".rstrip()


def _row(wait: Wait, db_time: int | None = None, name: str = "") -> list[str]:
    name = name or f"{wait.class_}:{wait.name}"
    width = _NAME + 5 if db_time is None else _NAME
    share = "" if db_time is None else percent(wait.time_ns, db_time)
    s = wait.stats
    times = [s.mean_ns, s.p50_ns, s.p95_ns, s.p99_ns, s.max_ns] if s else [None] * 5
    row = f"{count(s.count if s else 0):>8}{human(wait.time_ns):>7}"
    row += "".join(f"{human(ns):>7}" for ns in times) + share
    return [f"{name:<{width}}{row}"] if len(name) <= width else [name, " " * width + row]


def percent(part_ns: int, whole_ns: int) -> str:
    """Return a share in percent, in 5 characters."""
    share = 100 * part_ns / whole_ns if whole_ns else 0.0
    return f"{share:5.1f}" if share < 99.95 else f"{share:5.0f}"


def _process_table(processes: list[Process]) -> list[str]:
    width = WIDTH - 8 - 7 - 2 - 24
    lines = [
        "",
        "Processes; idle waits left out",
        f"{'    pid type user/database':<{width}}{'count':>8}{'total':>7}  top wait",
    ]
    for p in processes:
        name = f"{p.pid:>7} {p.type.removesuffix(' backend')} {p.who}".rstrip()
        row = f"{count(p.busy_count):>8}{human(p.busy_ns):>7}  {p.top}"
        lines += [f"{name:<{width}}{row}"] if len(name) <= width else [name, " " * width + row]
    return lines


# A row of an accounting: name, total, share (6), and by what the scheduler did (8 each).
_NAMED = WIDTH - 6 - 5 * 8


class AccountTable(NamedTuple):
    """All the time of some processes, rows that add up; shares are told of `whole_ns`.

    `parts` are the first rows, the most time first; `sums` are what they and the rest add up to.
    """

    title: str
    whole_ns: int | None
    parts: list[tuple[str, Times]]
    sums: list[tuple[str, Times]]


def account_tables(account: Account) -> list[AccountTable]:
    """Return the tables of an accounting, but those that would be empty."""
    foreground, background = account.of("foreground"), account.of("background", "unknown")
    tables = []
    if len(foreground):
        of = "All the time of client backends and parallel workers"
        tables.append(_account_table(account, of, foreground, account.db_time_ns()))
    if len(background):
        of = "All the time of all other processes"
        tables.append(_account_table(account, of, background, None))
    return tables


def _account_table(account: Account, of: str, cells: Cells, db_time: int | None) -> AccountTable:
    rows: list[tuple[str, Times]] = []
    busy = cells.take((cells.kind != IDLE) & (cells.kind != IN_TRANSACTION))
    for value in sorted(set(busy.value.tolist())):
        times = busy.take(busy.value == value).times()
        if value == UNSEEN:
            rows.append(("(wait event not known)", times))
        elif value:
            rows.append((account.event(value), times))
        else:
            rows += [
                ("(on-CPU without a wait event)", Times(times.on_cpu, 0, 0, 0)),
                ("(run queue without a wait event)", Times(0, times.run_queue, 0, 0)),
                ("(blocked without a wait event)", Times(0, 0, times.blocked, 0)),
                ("(not known, without a wait event)", Times(0, 0, 0, times.unknown)),
            ]
    rows = sorted((row for row in rows if row[1].total), key=lambda row: -row[1].total)
    idle = cells.take(cells.kind == IDLE).times()
    in_transaction = cells.take(cells.kind == IN_TRANSACTION).times()
    sums = [("= not idle" if db_time is None else "= DB time", busy.times())]
    if in_transaction.total:
        sums.append(("idle in transaction", in_transaction))
    sums += [("idle", idle), ("= wall time", cells.times())]
    return AccountTable(of, db_time, rows, sums)


def _account_lines(table: AccountTable) -> list[str]:
    rows = [*table.parts, *table.sums]
    vague = any(times.unknown for _, times in rows)
    shared = len(table.parts) + 1
    share = "" if table.whole_ns is None else "% DB"
    titles = f"{'total':>8}{share:>6}{'blocked':>8}{'run q':>8}{'on-CPU':>8}"
    return [
        "",
        table.title,
        f"{'':<{_NAMED}}{titles}{'?':>8}" if vague else f"{'':<{_NAMED}}{titles}",
        *chain.from_iterable(
            _times_row(name, times, table.whole_ns if i < shared else None, vague)
            for i, (name, times) in enumerate(rows)
        ),
    ]


def _times_row(name: str, times: Times, whole: int | None, vague: bool) -> list[str]:
    share = "" if whole is None else percent(times.total, whole)
    row = f"{human(times.total):>8}{share:>6}"
    for ns in (times.blocked, times.run_queue, times.on_cpu, *[times.unknown] * vague):
        row += f"{human(ns) if ns else '-':>8}"
    return [f"{name:<{_NAMED}}{row}"] if len(name) < _NAMED else [name, " " * _NAMED + row]


def residual(account: Account) -> str:
    """Return what the accounting could not tell, and why."""
    wall, lacking = sum(account.wall.values()), sum(account.residual.values())
    text = f"Residual: {human(lacking)} of {human(wall)}"
    if lacking:
        worst = max(account.residual, key=lambda pid: account.residual[pid] / account.wall[pid])
        text += (
            f" ({percent(lacking, wall).strip()} %), at most "
            f"{percent(account.residual[worst], account.wall[worst]).strip()} % of one process "
            f"({worst}). "
        )
        reasons = []
        if account.unseen_ns:
            reasons.append(
                f"{human(account.unseen_ns)} of waits that were lost, or had begun before they "
                "could be seen"
            )
        if account.unknown_ns:
            reasons.append(
                f"{human(account.unknown_ns)} in which samples of the scheduler are missing"
            )
        text += "; ".join(reasons)
    text += "."
    if account.guessed:
        text += (
            f" There is no sample for {account.guessed} of the {len(account.joined.sleeps)} times "
            "that a process came back onto a CPU: when it was next seen to run stands instead."
        )
    return text


class ByTable(NamedTuple):
    """Time of some processes by some of DIMENSIONS.

    `rows` are names, one for each dimension, and the texts of the `columns`, the most time first.
    """

    title: str
    columns: list[str]
    rows: list[tuple[tuple[str, ...], list[str]]]
    note: str


def by_tables(account: Account, by: Sequence[str]) -> list[ByTable]:
    """Return the tables of an accounting by some of DIMENSIONS, but those that would be empty."""
    tables = []
    for title, share, kinds in (
        ("Client backends and parallel workers", "% DB", ("foreground",)),
        ("All other processes", "%", ("background", "unknown")),
    ):
        cells = account.of(*kinds)
        if len(cells):
            tables.append(_by_table(account, by, title, cells, share))
    return tables


def by_rows(account: Account, by: Sequence[str], cells: Cells) -> list[Row]:
    """Return the rows of a table by some of DIMENSIONS."""
    return [row for row in account.by(by, cells) if row.busy.total or "event" not in by]


def _by_table(account: Account, by: Sequence[str], title: str, cells: Cells, share: str) -> ByTable:
    rows = by_rows(account, by, cells)
    shown = len(rows) if list(by) == ["backend"] else _BY_ROWS
    scheduled, asked = account.joined.scheduled, account.joined.asked
    busy = sum(row.busy.total for row in rows)
    titles = ["blocked", "run q", "on-CPU"] if scheduled else []
    if scheduled and any(row.busy.unknown for row in rows):
        titles.append("?")
    titles += ["in xact"] if asked and any(row.in_transaction_ns for row in rows) else []
    titles += ["idle"] if any(row.idle_ns for row in rows) else []
    lines = []
    for row in rows[:shown]:
        columns = {
            "blocked": row.busy.blocked,
            "run q": row.busy.run_queue,
            "on-CPU": row.busy.on_cpu,
            "?": row.busy.unknown,
            "in xact": row.in_transaction_ns,
            "idle": row.idle_ns,
        }
        times = [human(row.busy.total), percent(row.busy.total, busy)]
        times += [human(columns[t]) if columns[t] else "-" for t in titles]
        lines.append((row.names, times))
    note = more([row.busy.total for row in rows[shown:]])
    if titles[-1:] == ["idle"]:
        note += " total is without idle time."
    return ByTable(title, ["total", share, *titles], lines, note.lstrip())


def _by_lines(table: ByTable, by: Sequence[str]) -> list[str]:
    widths = [8, 6, *[8] * (len(table.columns) - 2)]
    width = WIDTH - sum(widths)
    heading = ", ".join("    pid type user/database" if d == "backend" else d for d in by)
    lines = ["", table.title, f"{heading:<{width}}{_right(table.columns, widths)}"]
    for names, times in table.rows:
        name = one_line(", ".join(names)) if len(by) > 1 else one_line(names[0])
        if by[0] == "backend":
            name = names[0][:7] + name.removeprefix(names[0].split()[0])
        row = _right(times, widths)
        lines += [f"{name:<{width}}{row}"] if len(name) < width else [name, " " * width + row]
    return lines + wrapped("", table.note)


def _right(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


def audit_text(account: Account, blocked: list[Unexplained], burnt: list[Burnt]) -> str:
    """Return the audit as text: what wait events do not say."""
    joined = account.joined
    lines = [f"waitfold report --audit of {joined.capture.path}"]
    lines += [line for text in joined.warnings for line in wrapped(f"{'WARNING':<13}", text)]
    if joined.scheduled:
        total = human(sum(one.ns for one in blocked))
        lines += [
            "",
            f"Blocked without a wait event: {total}, by the stack where the CPU was left",
            f"{'total':>8}{'count':>8}{'mean':>8}{'max':>8}  stack, innermost function first",
        ]
        for one in blocked[:AUDIT_ROWS]:
            times = f"{human(one.ns):>8}{count(one.count):>8}{human(one.ns / one.count):>8}"
            lines += _stack_lines(f"{times}{human(one.max_ns):>8}  ", one.stack)
        lines += wrapped("", more([one.ns for one in blocked[AUDIT_ROWS:]]))
    lines += [
        "",
        "On a CPU inside a wait event, and where samples found it",
        f"{'on-CPU':>8}{'of':>8}{'%':>6}  wait event, samples",
    ]
    for event in burnt[:AUDIT_ROWS]:
        exact = event.on_cpu_ns
        share = percent(exact, event.total_ns) if exact is not None else "-"
        lines.append(
            f"{human(exact):>8}{human(event.total_ns):>8}{share:>6}  {event.event}, "
            f"{_plural(event.sampled, 'sample')}"
        )
        for stack, n in event.samples[:AUDIT_STACKS]:
            lines += _stack_lines(f"{n:>30}  ", stack)
    lines += wrapped("", more([event.on_cpu_ns or 0 for event in burnt[AUDIT_ROWS:]]))
    return "\n".join(lines) + "\n"


def more(rest_ns: list[int]) -> str:
    """Return what is said of the rows that a table has no room for, nothing of none."""
    if not rest_ns:
        return ""
    return f"{len(rest_ns)} more, {human(sum(rest_ns))} together (--json has all)."


def _stack_lines(label: str, stack: tuple[str, ...]) -> list[str]:
    """Return a stack behind what is said of it."""
    names = [one_line(name, WIDTH - len(label) - 1) for name in stack]
    text = " < ".join(names) or "(its beginning was not seen)"
    return textwrap.wrap(
        text, WIDTH - 1, initial_indent=label, subsequent_indent=" " * len(label),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def audit_json(blocked: list[Unexplained], burnt: list[Burnt]) -> str:
    """Return the audit as JSON: stacks innermost function first, times in ns."""
    audit = {
        "format": FORMAT,
        "blocked_without_event": [
            {"stack": one.stack, "total_ns": one.ns, "count": one.count, "max_ns": one.max_ns}
            for one in blocked
        ],
        "on_cpu_in_event": [
            {
                "event": one.event,
                "on_cpu_ns": one.on_cpu_ns,
                "total_ns": one.total_ns,
                "samples": [{"stack": stack, "count": n} for stack, n in one.samples],
            }
            for one in burnt
        ],
    }
    return json.dumps(audit, indent=1) + "\n"


def _account_json(account: Account) -> dict[str, Any]:
    """Return all of an account: rows by process, wait event, query and kind of time."""
    joined, cells = account.joined, account.cells
    kinds = ("busy", "idle", "idle in transaction")
    columns = (cells.pid, cells.value, cells.query, cells.kind, cells.ns)
    rows = []
    for pid, value, query, kind, ns in zip(*(c.tolist() for c in columns), strict=True):
        event = None if value in (0, UNSEEN) else account.event(value)
        row: dict[str, Any] = {"pid": pid, "event": event, "seen": value != UNSEEN}
        row |= {"query": query if query >= 0 else None, "kind": kinds[kind]}
        times = Times(*ns)
        if joined.scheduled:
            row |= {f"{name}_ns": n for name, n in times._asdict().items()}
        rows.append(row | {"total_ns": times.total})
    return {
        "scheduled": joined.scheduled,
        "guessed": account.guessed,
        "residual_ns": sum(account.residual.values()),
        "unseen_ns": account.unseen_ns,
        "unknown_ns": account.unknown_ns,
        "processes": [
            {
                "pid": pid,
                **vars(joined.backends[pid]),
                "wall_ns": wall,
                "residual_ns": account.residual[pid],
            }
            for pid, wall in account.wall.items()
        ],
        "queries": [
            {"text": query.text, "query_id": query.query_id} for query in joined.queries.table
        ]
        if joined.asked
        else [],
        "rows": rows,
    }


def _histogram(wait: Wait) -> list[str]:
    if wait.stats is None:
        return []
    counts = wait.stats.histogram
    filled = [i for i, n in enumerate(counts) if n]
    top = max(counts)
    lines = [
        "",
        f"{wait.class_}:{wait.name}, all processes",
        f"{'from':>9}{'below':>9}{'count':>10}",
    ]
    for i in range(filled[0], filled[-1] + 1):
        bar = "#" * -(-counts[i] * _BAR // top)
        lines.append(
            f"{human(2**i if i else 0):>9}{human(2 ** (i + 1)):>9}{counts[i]:>10}  {bar}".rstrip()
        )
    return lines


def count(n: int) -> str:
    """Return a count in at most 7 characters."""
    for size, unit in ((10**13, "T"), (10**10, "G"), (10**7, "M")):
        if n >= size:
            return f"{n / (size // 10):.4g}{unit}"
    return str(n)


def human(ns: float | None) -> str:
    """Return a time with three digits and its unit, in at most 6 characters; `-` for None."""
    if ns is None:
        return "-"
    for size, unit in ((3600e9, "h"), (1e9, "s"), (1e6, "ms"), (1e3, "us")):
        # From 10,000 seconds on, hours.
        if ns >= (10_000e9 if unit == "h" else size * 0.9995):
            x = ns / size
            return f"{x:.{2 if x < 9.995 else 1 if x < 99.95 else 0}f}{unit}"
    return f"{ns:.0f}ns"


def seconds(ns: int) -> str:
    """Return a time in seconds, to the millisecond."""
    return f"{ns / 1e9:.3f} s"


def _plural(n: int, noun: str, ending: str = "s") -> str:
    return f"{n} {noun}{'' if n == 1 else ending}"


def wrapped(label: str, text: str) -> list[str]:
    """Return a text as lines of a terminal, the first behind a label, the others below it."""
    return textwrap.wrap(text, WIDTH - 1, initial_indent=label, subsequent_indent=" " * len(label))
