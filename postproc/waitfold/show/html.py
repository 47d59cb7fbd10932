"""The report as one page of HTML that stands alone: it fetches nothing, and says so to the browser.

Tables, histograms and the timeline are in the page as it comes; page/page.js only adds to that: it
sorts and filters the tables, and draws the flame graphs. Names and texts of a capture are somebody
else's. They are escaped, and what cannot be printed is written out; should that fail, the page's
Content-Security-Policy lets nothing run but page.js, and nothing be loaded at all.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from waitfold import __version__
from waitfold.account import DIMENSIONS, Account, Cells, Times, account
from waitfold.analysis import Analysis, Progress, SetAnalysis, Wait
from waitfold.api import read_profile
from waitfold.audit import Burnt, Unexplained, burnt, unexplained
from waitfold.errors import WaitfoldError
from waitfold.join import Joined, join
from waitfold.profile import Traces
from waitfold.sched import SAMPLE, SWITCH
from waitfold.show import fold, palette, text, timeline
from waitfold.show.flames import Graphs
from waitfold.show.markup import (
    ROWS_MAX,
    Texts,
    bar_cell,
    colour_of,
    count_cell,
    escaped,
    event_cell,
    fraction_cell,
    head_cell,
    html_table,
    paragraph,
    part_cell,
    rest,
    share_cell,
    state_of,
    swatch,
    time_cell,
)

_HISTOGRAMS_MAX = 100
_STACK_SHOWN = 600
_SAMPLES = 3  # stacks of an event in the audit

# CPU in us of the process itself for each start and end of a wait, and each time that it leaves a
# CPU: what waitfold-record says when it begins. Measured in bench/RESULTS.md.
_COSTS = {"sites": (1, 3), "usdt": (1, 3), "mem": (7, 14)}
_SWITCH_COST = (2, 5)


def page(
    analysis: Analysis,
    sets: Sequence[SetAnalysis],
    accounted: Account | None,
    progress: Progress | None = None,
) -> bytes:
    """Return the page of a report, that of account.report_of(), in UTF-8."""
    capture = analysis.capture
    db_time = accounted.db_time_ns() if accounted else analysis.db_time_ns()
    whole = accounted or account(join(capture, progress))
    joined, traces = whole.joined, read_profile(capture)
    texts, graphs = Texts(), Graphs()
    sections = [
        _Section("summary", "Summary", _summary(analysis, db_time, accounted, texts)),
        _Section("accounting", "Accounting", _accounting(whole)),
        _Section("waits", "Waits", _waits(analysis, db_time, accounted)),
        _Section("breakdown", "Breakdown", _breakdown(analysis, accounted, whole, texts)),
        _Section("sets", "Other probes", _sets(sets, texts)),
        _Section("histograms", "Histograms", _histograms(analysis)),
        _Section("timeline", "Timeline", _timeline(joined, progress)),
        _Section("flame", "Flame graphs", _flame_graphs(analysis, joined, traces, graphs)),
        _Section("audit", "Audit", _audit(whole, traces, texts)),
        _Section("capture", "How it was captured", _captured(analysis, joined, db_time, texts)),
    ]
    # Last, as it also says what was cut to make the page.
    caveats = _Section("caveats", "Caveats", _caveats(analysis, sets, whole, traces, texts))
    title = f"PostgreSQL {capture.pg_version}, {capture.path.resolve().name}"
    return _document(title, [s for s in [caveats, *sections] if s.body], graphs.data()).encode()


class _Section(NamedTuple):
    id: str
    title: str
    body: list[str]


def _document(title: str, sections: Sequence[_Section], data: str) -> str:
    folder = files("waitfold.show") / "page"
    css = (folder / "page.css").read_text() + _colours()
    script = (folder / "page.js").read_text()
    policy = (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    name = escaped(title)
    links = "".join(f'<li><a href="#{s.id}">{s.title}</a></li>' for s in sections)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        f'<meta name="generator" content="waitfold {__version__}">',
        f"<title>{name}: waits</title><style>{css}</style></head><body>",
        '<a class="skip" href="#main">Skip to the report</a>',
        f"<header><h1>{name}</h1>",
        '<button type="button" id="theme" hidden>Dark</button>',
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main id="main" tabindex="-1">',
    ]
    for s in sections:
        parts.append(f'<section id="{s.id}" aria-labelledby="{s.id}-title">')
        parts += [f'<h2 id="{s.id}-title">{s.title}</h2>', *s.body, "</section>"]
    parts += [
        f"</main><footer><p>Made by waitfold {__version__}. This page holds all that it shows and "
        "asks no network for anything.</p></footer>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>{script}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _colours() -> str:
    """Return the rules of CSS for the timeline's forms, and the colours that all parts share."""
    colours = timeline.colours(lambda colour: f"light-dark({colour.light},{colour.dark})")
    return f"{colours}\n.timeline{{{timeline.FORMS}}}\n"


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _caveats(
    analysis: Analysis,
    sets: Sequence[SetAnalysis],
    account: Account,
    traces: Traces | None,
    texts: Texts,
) -> list[str]:
    stream, joined, capture = analysis.stream, account.joined, analysis.capture
    said = [*text.warnings(analysis, sets), *joined.warnings, *(traces.warnings if traces else [])]
    head = text.head(analysis, 0)
    cut = analysis.censored
    notes = []
    if not stream.lost:
        notes.append("No samples were lost.")
    if total := sum(cut.values()):
        notes.append(
            f"{total} waits were cut, by the window's start {cut['start']}, its end {cut['end']}, "
            f"losses {cut['lost']}: what was seen of them counts in totals alone."
        )
    if joined.scheduled:
        notes.append(text.residual(account))
    else:
        notes.append(
            "Context switches were not recorded (--with offcpu): a wait here may have ended long "
            "before the process got a CPU again, and time without a wait event is told no further."
        )
    if not joined.asked:
        notes.append(
            "Queries were not recorded (--with query): a client that thinks inside a transaction "
            "counts as idle."
        )
    if "pids" in capture.manifest:
        notes.append(f"Only the processes {capture.manifest['pids']} were recorded.")
    if texts.cut:
        notes.append(
            f"{texts.cut} long texts are cut in this page; waitfold report --json has them whole."
        )
    notes.append(text.method(analysis, sets))
    bad = []
    if stream.lost:
        lost = head["transitions"].partition(", ")[2]
        bad.append(("Lost", f"{lost}: what processes did then is not known."))
    if "late" in head:
        bad.append(("Late", head["late"]))
    bad += [("Warning", one) for one in dict.fromkeys(said)]
    return [
        '<ul class="caveats">',
        *(f'<li class="bad"><b>{what}:</b> {escaped(one)}</li>' for what, one in bad),
        *(f"<li>{escaped(one)}</li>" for one in notes),
        "</ul>",
    ]


def _summary(analysis: Analysis, db_time: int, account: Account | None, texts: Texts) -> list[str]:
    return [
        *_facts(text.head(analysis, db_time), texts),
        *_shares(analysis, db_time, account),
    ]


def _facts(facts: Mapping[str, str], texts: Texts) -> list[str]:
    pairs = (f"<dt>{escaped(k)}</dt><dd>{texts.cell(v)}</dd>" for k, v in facts.items())
    rows = "".join(f"<div>{pair}</div>" for pair in pairs)
    return [f'<dl class="facts">{rows}</dl>'] if rows else []


def _shares(analysis: Analysis, db_time: int, account: Account | None) -> list[str]:
    """Return a bar of DB time by class of wait event, and by what the rest was."""
    parts: list[tuple[str, int]] = []
    if account and account.joined.scheduled:
        for one in text.account_tables(account):
            if one.whole_ns is not None:
                parts += [(name, times.total) for name, times in one.parts]
    else:
        for table in text.wait_tables(analysis, db_time, account):
            if table.whole_ns is not None:
                parts += [(_name(wait), wait.time_ns) for wait in table.waits]
                parts.append(("(no wait event)", table.no_wait_ns or 0))
    # Where samples were lost.
    parts.append(("(not known)", max(0, db_time - sum(ns for _, ns in parts))))
    times: dict[str, int] = {}
    for name, ns in parts:
        key = name if name.startswith("(") else name.partition(":")[0]
        times[key] = times.get(key, 0) + ns
    shares = sorted(((k, ns) for k, ns in times.items() if ns), key=lambda item: -item[1])
    if not shares or not db_time:
        return ["<p>No client backend did anything but idle.</p>"]
    x, rects = 0.0, []
    for key, ns in shares:
        width = 1000 * ns / sum(times.values())
        about = f"{key}: {text.human(ns)}, {text.percent(ns, db_time).strip()} %"
        rects.append(
            f'<rect class="{colour_of(state_of(key))}" x="{x:.1f}" width="{width:.1f}" height="22">'
            f"<title>{escaped(about)}</title></rect>"
        )
        x += width
    legend = "".join(
        f"<li>{swatch(state_of(key))}{escaped(key)} <b>{text.human(ns)}</b> "
        f"{text.percent(ns, db_time).strip()} %</li>"
        for key, ns in shares
    )
    return [
        '<figure class="shares"><figcaption>DB time by class of wait event</figcaption>',
        '<svg viewBox="0 0 1000 22" preserveAspectRatio="none" role="img" '
        f'aria-label="DB time by class, as listed below">{"".join(rects)}</svg>',
        f"<ul>{legend}</ul></figure>",
    ]


def _accounting(account: Account) -> list[str]:
    if not account.joined.scheduled:
        return [
            "<p>What the scheduler did with each process was not recorded: "
            "<code>waitfold record --with offcpu</code> does that.</p>"
        ]
    body = []
    for table in text.account_tables(account):
        shared = table.whole_ns is not None
        vague = any(times.unknown for _, times in [*table.parts, *table.sums])
        widest = max((times.total for _, times in table.parts), default=0)
        columns = ["wait event", "total", *["% DB"] * shared, "blocked", "run queue", "on-CPU"]
        columns += [*["not known"] * vague, ""]
        rows = [
            event_cell(name)
            + _account_cells(times, [table.whole_ns] * shared, vague)
            + _times_bar(times, colour_of(state_of(name)), widest)
            for name, times in table.parts
        ]
        sums = [
            head_cell(escaped(name))
            + _account_cells(times, [None if i else table.whole_ns] * shared, vague)
            + "<td></td>"
            for i, (name, times) in enumerate(table.sums)
        ]
        body += html_table(table.title, columns, rows, sums=sums)
    return [
        *body,
        *paragraph(text.residual(account)),
        _run_legend("blocked in the colour of its class"),
    ]


def _account_cells(times: Times, whole: Sequence[int | None], vague: bool) -> str:
    shares = "".join(share_cell(times.total, one) for one in whole)
    parts = (times.blocked, times.run_queue, times.on_cpu, *[times.unknown] * vague)
    return time_cell(times.total) + shares + "".join(map(part_cell, parts))


def _times_bar(times: Times, blocked: str, widest: int) -> str:
    parts = [
        (blocked, times.blocked),
        (colour_of(palette.RUN_QUEUE), times.run_queue),
        (colour_of(palette.ON_CPU), times.on_cpu),
        ("faint", times.unknown),
    ]
    return bar_cell(parts, widest)


def _run_legend(blocked: str) -> str:
    return (
        f'<p class="note">Bars: {blocked}, {swatch(palette.RUN_QUEUE)} run queue, '
        f"{swatch(palette.ON_CPU)} on-CPU.</p>"
    )


def _round(ns: int) -> str:
    """Return a power of ten ns."""
    for size, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "us")):
        if ns >= size:
            return f"{ns // size}{unit}"
    return f"{ns}ns"


_STATISTICS = ("count", "total", "mean", "p50", "p95", "p99", "max")


def _name(wait: Wait) -> str:
    return f"{wait.class_}:{wait.name}"


def _statistics(wait: Wait) -> str:
    s = wait.stats
    times = [s.mean_ns, s.p50_ns, s.p95_ns, s.p99_ns, s.max_ns] if s else [None] * 5
    return (
        count_cell(s.count if s else 0) + time_cell(wait.time_ns) + "".join(map(time_cell, times))
    )


def _waits(analysis: Analysis, db_time: int, account: Account | None) -> list[str]:
    body = []
    for table in text.wait_tables(analysis, db_time, account):
        whole = table.whole_ns
        shared = whole is not None
        widest = max((wait.time_ns for wait in table.waits), default=0)
        rows = [
            event_cell(_name(wait))
            + _statistics(wait)
            + (share_cell(wait.time_ns, whole) if shared else "")
            + bar_cell([(colour_of(wait.class_), wait.time_ns)], widest)
            for wait in table.waits
        ]
        sums = []
        if table.no_wait_ns is not None:
            no_wait = time_cell(table.no_wait_ns) + "<td></td>" * 5
            no_wait += share_cell(table.no_wait_ns, whole)
            sums.append(f"{event_cell('(no wait event)')}<td></td>{no_wait}<td></td>")
        columns = ["wait event", *_STATISTICS, *["% DB"] * shared, ""]
        body += html_table(table.title, columns, rows, sums=sums, note=table.note)
    return body or ["<p>No process waited for anything.</p>"]


def _breakdown(
    analysis: Analysis, accounted: Account | None, whole: Account, texts: Texts
) -> list[str]:
    body = []
    for dimension in DIMENSIONS:
        if dimension == "event" or (dimension == "query" and not whole.joined.asked):
            continue
        if dimension == "backend" and not accounted:
            body += _processes(analysis, texts)
            continue
        for who, cells in (
            ("client backends and parallel workers", whole.of("foreground")),
            ("all other processes", whole.of("background", "unknown")),
        ):
            if len(cells):
                body += _by_table(whole, dimension, who, cells, texts)
    if body and whole.joined.scheduled:
        body.append(
            _run_legend(
                '<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">'
                '<rect class="blocked" width="10" height="10"/></svg> blocked'
            )
        )
    return body


def _processes(analysis: Analysis, texts: Texts) -> list[str]:
    processes = analysis.processes()
    widest = max((p.busy_ns for p in processes), default=0)
    rows = [
        head_cell(texts.cell(f"{p.pid} {p.type.removesuffix(' backend')} {p.who}".rstrip()))
        + count_cell(p.busy_count)
        + time_cell(p.busy_ns)
        + f"<td>{swatch(state_of(p.top)) if ':' in p.top else ''}{escaped(p.top)}</td>"
        + bar_cell([(colour_of(state_of(p.top)), p.busy_ns)], widest)
        for p in processes[:ROWS_MAX]
    ]
    note = rest([p.busy_ns for p in processes]) + "Idle waits are left out."
    columns = ["backend", "count", "total", "top wait", ""]
    return html_table("By backend", columns, rows, note=note, prose="top wait")


def _by_table(account: Account, dimension: str, who: str, cells: Cells, texts: Texts) -> list[str]:
    all_ = text.by_rows(account, [dimension], cells)
    scheduled, asked = account.joined.scheduled, account.joined.asked
    whole = sum(row.busy.total for row in all_)
    widest = max(row.busy.total for row in all_)
    vague = scheduled and any(row.busy.unknown for row in all_)
    asked = asked and any(row.in_transaction_ns for row in all_)
    columns = [dimension, "total", "% DB" if who.startswith("client") else "%"]
    columns += [*["blocked", "run queue", "on-CPU"] * scheduled, *["not known"] * vague]
    columns += [*["in transaction"] * asked, "idle", ""]
    rows = []
    for row in all_[:ROWS_MAX]:
        busy = row.busy
        parts = [busy.blocked, busy.run_queue, busy.on_cpu] if scheduled else []
        parts += [busy.unknown] * vague + [row.in_transaction_ns] * asked + [row.idle_ns]
        bar = (
            _times_bar(busy, "blocked", widest)
            if scheduled
            else bar_cell([("blocked", busy.total)], widest)
        )
        times = (
            time_cell(busy.total) + share_cell(busy.total, whole) + "".join(map(part_cell, parts))
        )
        rows.append(head_cell(texts.cell(row.names[0].strip())) + times + bar)
    note = rest([row.busy.total for row in all_])
    note += "total is without idle time" + (" and time idle in a transaction." if asked else ".")
    return html_table(f"By {dimension}: {who}", columns, rows, note=note)


def _sets(sets: Sequence[SetAnalysis], texts: Texts) -> list[str]:
    body = []
    for one in sets:
        waits = one.waits()
        rows = [head_cell(texts.cell(wait.name)) + _statistics(wait) for wait in waits[:ROWS_MAX]]
        note = rest([wait.time_ns for wait in waits]) + text.set_note(one)
        title = f"{one.probe_set.name}: {one.probe_set.about}"
        body += html_table(title, ["name", *_STATISTICS], rows, note=note)
    return body


_BIN, _HIGH = 10, 64  # of a histogram, in pixels


def _histograms(analysis: Analysis) -> list[str]:
    found = [wait for wait in analysis.waits(analysis.everything()) if wait.stats]
    if not found:
        return ["<p>No wait was seen from its start to its end.</p>"]
    shown = found[:_HISTOGRAMS_MAX]
    filled = [i for wait in shown if wait.stats for i, n in enumerate(wait.stats.histogram) if n]
    low, high = min(filled), max(filled)
    body = [
        '<p class="note">How many waits of all processes were how long, each bar twice as long as '
        "the one before it; all have the same axis. Idle waits too.</p>",
        '<div class="histograms">',
        *(_histogram(wait, low, high) for wait in shown),
        "</div>",
    ]
    if more := len(found) - len(shown):
        body += paragraph(f"{more} more events: waitfold report --histogram.")
    return body


def _histogram(wait: Wait, low: int, high: int) -> str:
    assert wait.stats is not None
    stats, width = wait.stats, (high + 1 - low) * _BIN
    top = max(stats.histogram)
    bars, rows = [], []
    for i in range(low, high + 1):
        if n := stats.histogram[i]:
            size = max(1.5, _HIGH * n / top)
            ends = text.human(2**i if i else 0), text.human(2 ** (i + 1))
            bars.append(
                f'<rect class="{colour_of(wait.class_)}" x="{(i - low) * _BIN}" width="{_BIN - 1}" '
                f'y="{_HIGH - size:.1f}" height="{size:.1f}">'
                f"<title>{ends[0]} to {ends[1]}: {n}</title></rect>"
            )
            rows.append(f"<tr><td>{ends[0]}</td><td>{ends[1]}</td><td>{n}</td></tr>")
    ticks = []
    for power in range(10):
        x = (math.log2(10**power) - low) * _BIN
        if 0 <= x <= width - 2 * _BIN:
            ticks.append(
                f'<path class="tick" d="M{x:.1f} 0v{_HIGH + 4}"/>'
                f'<text x="{x + 2:.1f}" y="{_HIGH + 11}">{_round(10**power)}</text>'
            )
    name = escaped(_name(wait))
    about = f"{stats.count} waits, half up to {text.human(stats.p50_ns)}"
    return (
        f"<figure><figcaption>{swatch(wait.class_)}{name}<span>{about}</span></figcaption>"
        f'<svg viewBox="0 0 {width} {_HIGH + 18}" role="img" aria-label="{name}: {about}">'
        f'{"".join(ticks)}{"".join(bars)}<path class="axis" d="M0 {_HIGH}h{width}"/></svg>'
        "<details><summary>Figures</summary><table><thead><tr><th>from</th><th>below</th>"
        f"<th>count</th></tr></thead><tbody>{''.join(rows)}</tbody></table></details></figure>"
    )


def _timeline(joined: Joined, progress: Progress | None) -> list[str]:
    try:
        svg, _ = timeline.picture(joined, "Waits over time", progress=progress, styled=False)
    except WaitfoldError as error:
        return paragraph(f"{error}.")
    return [
        f'<div class="timeline" tabindex="0" role="region" aria-label="Timeline">{svg}</div>',
        '<p class="note">The mouse shows the figures behind each cell and each part of a lane. '
        "waitfold timeline --from --to draws a part of it.</p>",
    ]


def _flame_graphs(
    analysis: Analysis, joined: Joined, traces: Traces | None, graphs: Graphs
) -> list[str]:
    body = [
        "<noscript><p>The flame graphs are drawn by this page's script, which does not run. "
        "waitfold flamegraph draws them as SVG.</p></noscript>"
    ]
    stacks = fold.folded(analysis, with_idle=False)
    about = "By type of process, class and event. Idle waits are left out."
    paint = fold.class_colours(stacks)
    body += _flame_graph(graphs, "waits", "Waits", about, stacks, paint, False)
    held = {event.name for event in traces.events} if traces else set()
    for key, event, about in (
        ("oncpu", False, "Samples on a CPU, by stack."),
        (
            "offcpu",
            True,
            "Time off the CPU, blocked or in the run queue, by the stack that it was left with; "
            "the wait event stands over it. Idle waits are left out.",
        ),
        (
            "wall",
            True,
            "Both in one, the wait event and what the scheduler did over the stack; red is on-CPU, "
            "blue off it, yellow the run queue. Idle waits are left out.",
        ),
    ):
        kind = fold.KINDS[key]
        if traces is None or not held >= set(kind.events):
            continue
        shown = fold.Shown(event, False, False)
        stacks = fold.folded_times(joined, traces, kind, shown)
        look = fold.look(stacks, kind, shown, "")
        title = kind.about.partition(" (")[0]
        body += _flame_graph(graphs, key, title, about, stacks, dict(look.paint), key == "oncpu")
    missing = [name for name, event in (("oncpu", SAMPLE), ("offcpu", SWITCH)) if event not in held]
    if missing:
        body += paragraph(
            f"Stacks were not recorded of {' and '.join(missing)}: waitfold record --with "
            f"{','.join(missing)}."
        )
    return body


def _flame_graph(
    graphs: Graphs,
    key: str,
    title: str,
    about: str,
    stacks: str,
    paint: dict[str, str],
    warm: bool,
) -> list[str]:
    head = [f'<h3 id="flame-{key}">{title}</h3>', f'<p class="note">{about}</p>']
    if not stacks:
        return [*head, "<p>There is nothing to draw.</p>"]
    left_out = graphs.add(key, stacks, paint, warm)
    return [*head, f'<div class="flame" data-graph="{key}" data-title="{title}"></div>', *left_out]


def _audit(account: Account, traces: Traces | None, texts: Texts) -> list[str]:
    if traces is None:
        return []
    body = []
    if account.joined.scheduled:
        body += _unexplained(unexplained(account, traces), texts)
    return body + _burnt(burnt(account, traces), texts)


def _unexplained(found: list[Unexplained], texts: Texts) -> list[str]:
    rows = [
        head_cell(texts.cell(_stack(one.stack), _STACK_SHOWN))
        + time_cell(one.ns)
        + count_cell(one.count)
        + time_cell(one.ns / one.count)
        + time_cell(one.max_ns)
        for one in found[:ROWS_MAX]
    ]
    title = f"Blocked without a wait event: {text.human(sum(one.ns for one in found))}"
    columns = ["stack, innermost function first", "total", "count", "mean", "max"]
    return html_table(title, columns, rows, note=rest([one.ns for one in found]))


def _burnt(found: list[Burnt], texts: Texts) -> list[str]:
    rows = []
    for one in found[:ROWS_MAX]:
        stacks = "".join(
            f"<li>{n} {texts.cell(_stack(stack), _STACK_SHOWN)}</li>"
            for stack, n in one.samples[:_SAMPLES]
        )
        share = '<td class="n" data-v="-1">-</td>'
        if one.on_cpu_ns is not None:
            share = fraction_cell(one.on_cpu_ns, one.total_ns)
        rows.append(
            f"{event_cell(one.event)}{time_cell(one.on_cpu_ns)}{time_cell(one.total_ns)}{share}"
            f'{count_cell(one.sampled)}<td class="stacks"><ul>{stacks}</ul></td>'
        )
    columns = ["wait event", "on-CPU", "of", "%", "samples", "where samples found it"]
    title = "On a CPU inside a wait event, and where samples found it"
    return html_table(title, columns, rows, sorted_by="on-CPU", prose=columns[-1])


def _stack(stack: Sequence[str]) -> str:
    return " < ".join(stack) or "(its beginning was not seen)"


def _captured(analysis: Analysis, joined: Joined, db_time: int, texts: Texts) -> list[str]:
    manifest = analysis.capture.manifest
    body = []
    if command := manifest.get("command"):
        body.append(f"<pre><code>{texts.cell(command, 2000)}</code></pre>")
    if not manifest:
        body += paragraph(
            f"{analysis.capture.path.name} was recorded by hand: nothing in it says how."
        )
    body += _cost(analysis, joined, db_time)
    return body + _facts({k: v for k, v in manifest.items() if k != "command"}, texts)


def _cost(analysis: Analysis, joined: Joined, db_time: int) -> list[str]:
    """Return what the recording took of the server's CPU, as far as that can be told."""
    n, each = analysis.stream.transitions, _COSTS.get(analysis.capture.mode)
    if each is None:
        return paragraph("What it cost the server is not known, as its mode is not.")
    low, high = (1000 * us * n for us in each)
    switches = len(joined.sleeps)
    said = f"{n} starts and ends of waits at {each[0]} to {each[1]} us"
    if switches:
        least, most = _SWITCH_COST
        low, high = low + 1000 * least * switches, high + 1000 * most * switches
        said += f", {switches} context switches at {least} to {most} us"
    share = ""
    if db_time:
        share = f", {100 * low / db_time:.2g} to {100 * high / db_time:.2g} % of DB time"
    return paragraph(
        f"Cost: some {text.human(low)} to {text.human(high)} of the server's CPU{share} ({said}, "
        "as measured elsewhere: bench/RESULTS.md)."
    )
