"""Pieces of HTML that the page of a report is made of: texts, cells, tables, bars.

Nothing that comes from a capture gets into HTML but through escaped().
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from waitfold.show import palette, text, timeline

ROWS_MAX = 200
"""At most so many rows of a table; those of the backends, queries and sets may be far more."""

TEXT_SHOWN, TEXT_MAX, TEXTS_MAX = 160, 20_000, 400_000
"""Characters of a text that are shown at first and kept, and bytes of all that are kept longer."""


def visible(text: str) -> str:
    """Return a text with the number of each character that cannot be printed in its place.

    That is of control characters, and of what changes the direction of a text, joins or hides
    characters, or is none.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _written_out(ord(c)) for c in text)


def _written_out(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escaped(text: str) -> str:
    """Return a text as HTML that shows it."""
    return html.escape(visible(text))


class Texts:
    """Puts texts of any length into cells, until they have taken TEXTS_MAX bytes."""

    def __init__(self) -> None:
        self.cut = 0
        self._left = TEXTS_MAX

    def cell(self, text: str, shown: int = TEXT_SHOWN) -> str:
        """Return a text, the beginning of a long one with the rest to be unfolded."""
        text = re.sub(r"[ \t\r\n]+", " ", text)
        if len(text) <= shown:
            return f"<span>{escaped(text)}</span>"
        short = f"<span>{escaped(text[: shown - 20])}&hellip;</span> "
        whole = escaped(text[:TEXT_MAX])
        size = len(whole.encode())
        if size > self._left:
            self.cut += 1
            return f"{short} <i>{len(text):,} characters, of which the rest is left out</i>"
        self._left -= size
        what = f"all {len(text):,} characters"
        if len(text) > TEXT_MAX:
            self.cut += 1
            what = f"the first {TEXT_MAX:,} of {len(text):,} characters"
        return f"{short}<details><summary>{what}</summary><p>{whole}</p></details>"


def html_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[str],
    *,
    sums: Sequence[str] = (),
    note: str = "",
    sorted_by: str = "total",
    prose: str = "",
) -> list[str]:
    """Return a table of rows that are HTML already.

    Columns without a name hold bars; the first one, and that named by `prose`, hold text.
    """
    heads = []
    for i, column in enumerate(columns):
        kind = "" if i == 0 or column == prose else ' class="n"'
        if not column:
            heads.append('<td class="b"></td>')
            continue
        order = ' aria-sort="descending"' if column == sorted_by else ""
        heads.append(f'<th scope="col"{kind}{order}>{escaped(column)}</th>')
    return [
        f'<div class="table"><table><caption><span>{escaped(title)}</span></caption>',
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>",
        *(f"<tr>{row}</tr>" for row in rows),
        "</tbody>",
        *(["<tfoot>", *(f"<tr>{row}</tr>" for row in sums), "</tfoot>"] if sums else []),
        "</table></div>",
        *paragraph(note),
    ]


def paragraph(note: str) -> list[str]:
    """Return a note below a table, nothing if it is empty."""
    return [f'<p class="note">{escaped(note)}</p>'] if note else []


def head_cell(content: str) -> str:
    """Return the head of a row, of HTML."""
    return f'<th scope="row">{content}</th>'


def time_cell(ns: float | None) -> str:
    """Return a time, `-` for None; the figure that rows are sorted by is exact, as in all cells."""
    if ns is None:
        return '<td class="n" data-v="-1">-</td>'
    return f'<td class="n t" data-v="{ns:.0f}">{text.human(ns)}</td>'


def part_cell(ns: int) -> str:
    """Return a part of a time, which often is none."""
    return time_cell(ns) if ns else '<td class="n" data-v="0">-</td>'


def count_cell(n: int) -> str:
    """Return a count."""
    return f'<td class="n" data-v="{n}">{text.count(n)}</td>'


def share_cell(part: int, whole: int | None) -> str:
    """Return a share of what is the same in all rows, nothing where `whole` is None."""
    if whole is None:
        return "<td></td>"
    return f'<td class="n" data-v="{part}">{text.percent(part, whole).strip()}</td>'


def bar_cell(parts: Sequence[tuple[str, int]], whole: int) -> str:
    """Return a bar of (colour's class, time) in which `whole` is as wide as it can be."""
    x, rects = 0.0, []
    for colour, ns in parts:
        width = 100 * ns / whole if whole else 0.0
        if width >= 0.05:
            rects.append(f'<rect class="{colour}" x="{x:.2f}" width="{width:.2f}" height="8"/>')
        x += width
    return (
        '<td class="b"><svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(rects)}</svg></td>"
    )


def colour_of(state: str) -> str:
    """Return the class of a state's colour, or of that of a class of wait events."""
    if state == palette.UNSEEN:
        return "faint"
    return f"s{timeline.STATES.index(state if state in palette.COLOURS else palette.OTHER)}"


def swatch(state: str) -> str:
    """Return a square in the colour of a state or of a class of wait events."""
    return (
        '<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">'
        f'<rect class="{colour_of(state)}" width="10" height="10"/></svg>'
    )


def event_cell(name: str) -> str:
    """Return a wait event, `Class:Name`, with the colour of its class."""
    return head_cell(swatch(state_of(name)) + escaped(name).replace(":", ":<wbr>", 1))


def state_of(name: str) -> str:
    """Return what the colour of an event, or of time without one, is of."""
    for prefix, state in (
        ("(on-CPU", palette.ON_CPU),
        ("(run queue", palette.RUN_QUEUE),
        ("(blocked", palette.NO_EVENT),
        ("(no wait event", palette.NOT_WAITING),
        ("(wait event not known", palette.UNSEEN),
        ("(not known", palette.UNSEEN),
    ):
        if name.startswith(prefix):
            return state
    return name.partition(":")[0]


def rest(times: Sequence[int]) -> str:
    """Return what is said of the rows that a table has no room for."""
    more = times[ROWS_MAX:]
    return f"{len(more)} more, {text.human(sum(more))} together. " if more else ""


def fraction_cell(part: int, whole: int) -> str:
    """Return a share of what differs from row to row."""
    value = part / whole if whole else 0.0
    return f'<td class="n" data-v="{value:.6f}">{text.percent(part, whole).strip()}</td>'
