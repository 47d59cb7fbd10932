"""What changed between two captures: text of 80 columns, JSON, and folded stacks of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from waitfold.backends import CLIENT
from waitfold.diff import FOREGROUND, LEVEL, MARGIN, SHARE, SLICES, Change, Key, Row, Side
from waitfold.show.text import WIDTH, human, one_line, seconds, wrapped

FORMAT = 1
"""Format of the JSON."""

_ROWS = 20  # of those that did not change
_NAME = 20  # then three times (7, 7, 8), ratio (7), interval (8, 8), number (7), each (8)


def diff_text(
    before: Side, after: Side, rows: Sequence[Row], differs: Sequence[str], by: str, unit: str
) -> str:
    """Return the rows as text; `unit` is what times are by, `second` or `transaction`."""
    lines = _head(before, after, differs)
    changed = [row for row in rows if row.significant]
    same = [row for row in rows if row.judged and not row.significant]
    rest = len(rows) - len(changed) - len(same)
    lines.append("")
    if changed:
        lines += wrapped("", f"Changed by more than noise; time per {unit}")
        lines += [_columns(by), *(line for row in changed for line in _row(row))]
    else:
        lines += wrapped("", "No significant change: nothing differs by more than noise.")
    if same:
        lines += ["", f"Not changed by more than noise; time per {unit}", _columns(by)]
        lines += [line for row in same[:_ROWS] for line in _row(row)]
        if len(same) > _ROWS:
            lines.append(f"{len(same) - _ROWS} more.")
    if rest:
        more = "row is" if rest == 1 else "rows are"
        lines += wrapped(
            "",
            f"{rest} more {more} not judged: less than {SHARE:.0%} of the time, or in too few of "
            "the slices (--json has all).",
        )
    method = (
        f"* changed: more than {MARGIN:.0%} is certain. number: after / before, by {unit}; each: "
        f"the same of the mean time. Intervals: a bootstrap over {SLICES} slices of each window, "
        f"all processes together, and hold for all rows at once with {LEVEL:.0%}. What is constant "
        "within a window is no noise to it: other work on the host, a cold cache."
    )
    return "".join(f"{line.rstrip()}\n" for line in [*lines, "", *wrapped("", method)])


def _head(before: Side, after: Side, differs: Sequence[str]) -> list[str]:
    lines = [f"{'':14}{'before':<32} {'after':<32}".rstrip()]
    facts = {
        "capture": [_end(str(side.capture.path), 32) for side in (before, after)],
        "server": [f"PostgreSQL {side.capture.pg_version}" for side in (before, after)],
        "window": [seconds(side.window_ns) for side in (before, after)],
        "clients": [str(side.clients) for side in (before, after)],
    }
    if before.transactions is not None or after.transactions is not None:
        facts["transactions"] = [_rate(side.rate) for side in (before, after)]
    if before.lost or after.lost or min(before.known, after.known) < 0.9995:
        facts["LOST"] = [f"{side.lost} samples" for side in (before, after)]
        facts["known"] = [f"{side.known:.1%} of the time" for side in (before, after)]
    for name, (one, other) in facts.items():
        lines.append(f"{name:<14}{one:<32} {other:<32}".rstrip())
    for text in differs:
        lines += wrapped(f"{'DIFFERS':<14}", text)
    for name, side in (("before", before), ("after", after)):
        for text in side.warnings:
            lines += wrapped(f"{'WARNING':<14}", f"{name}: {text}")
    return lines


def _rate(rate: float | None) -> str:
    return "not known" if rate is None else f"{rate:.4g} a second"


def _columns(by: str) -> str:
    return (
        f"{by:<{_NAME}}{'before':>7}{'after':>7}{'change':>8}{'ratio':>7}{'from':>8}{'to':>8}"
        f"{'number':>7}{'each':>8}"
    )


def _row(row: Row) -> list[str]:
    name = label(row.key)
    time = row.time
    line = f"{human(time.before):>7}{human(time.after):>7}{_signed(time.difference):>8}"
    line += f"{_times(time):>7}{_signed(time.low):>8}{_signed(time.high):>8}"
    line += f"{_times(row.count):>7}{_times(row.mean):>8}"
    head = [f"{name:<{_NAME}}{line}"] if len(name) < _NAME else [name, " " * _NAME + line]
    cut = max(row.cut)
    if row.judged and cut >= 0.1 and row.mean.before is not None:
        head.append(
            f"  {cut:.0%} of it in waits that were not seen whole, which number and each leave out"
        )
    return head


def label(key: Key) -> str:
    """Return what a row is called in one line."""
    type_, *parts = key
    if len(parts) > 2:  # a stack, of which the end tells most
        return _end(one_line(";".join([type_ or CLIENT, *parts]), 10**6), WIDTH - 1)
    name = one_line(":".join(parts))
    return name if type_ == FOREGROUND else f"{type_} {name}"


def _signed(ns: float | None) -> str:
    return "-" if ns is None else f"{'-' if ns < 0 else '+'}{human(abs(ns))}"


def _times(change: Change) -> str:
    ratio, star = change.ratio, "*" if change.significant else " "
    if ratio is None:
        return f"new{star}" if change.after and change.before == 0 else "- "
    digits = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:.{digits}f}{star}" if ratio < 99_999 else f"huge{star}"


def _end(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]


def diff_json(
    before: Side, after: Side, rows: Sequence[Row], differs: Sequence[str], by: str, unit: str
) -> str:
    """Return all rows as JSON.

    Of each row `time` is in ns by the unit, `number` by the unit, `each` the mean in ns. They have
    `before`, `after`, `difference`, `ratio`, and `low` and `high`, the ends of the interval; null
    where there is none. `unseen` is the share of `time` that is of waits which were not seen
    whole; they do not count in `number` and `each`.
    """
    result = {
        "format": FORMAT,
        "by": by,
        "per": unit,
        "level": LEVEL,
        "slices": SLICES,
        "before": _side_json(before),
        "after": _side_json(after),
        "differs": list(differs),
        "rows": [
            {
                "backend": row.key[0] or CLIENT,
                "name": ":".join(row.key[1:]),
                "significant": row.significant,
                "judged": row.judged,
                "time": _change_json(row.time),
                "number": _change_json(row.count),
                "each": _change_json(row.mean),
                "unseen": {"before": row.cut[0], "after": row.cut[1]},
            }
            for row in rows
        ],
    }
    return json.dumps(result, indent=1) + "\n"


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "capture": str(side.capture.path),
        "pg_version": side.capture.pg_version,
        "mode": side.capture.mode,
        "window_ns": side.window_ns,
        "clients": side.clients,
        "lost": side.lost,
        "known": side.known,
        "transactions": None if side.transactions is None else int(side.transactions.sum()),
        "warnings": side.warnings,
    }


def _change_json(change: Change) -> dict[str, Any]:
    return asdict(change) | {
        "difference": change.difference,
        "ratio": change.ratio,
        "significant": change.significant,
    }


def folded(before: Side, after: Side, per_transaction: bool) -> str:
    """Return the stacks of both, `backend;frame;... BEFORE AFTER`, as FlameGraph's difffolded.pl.

    What was before is scaled to as many transactions, or seconds, as there were after.
    """
    units = [side.unit(per_transaction).sum() for side in (before, after)]
    sums: dict[Key, list[float]] = {}
    for i, (side, scale) in enumerate(((before, units[1] / units[0]), (after, 1.0))):
        for key, ns in zip(side.keys, side.time.sum(axis=0).tolist(), strict=True):
            sums.setdefault(key, [0.0, 0.0])[i] += ns * scale
    lines = []
    for key, (one, other) in sorted(sums.items()):
        frames = (one_line(frame, 100).replace(";", ",") for frame in (key[0] or CLIENT, *key[1:]))
        if round(one) or round(other):
            lines.append(f"{';'.join(frames)} {round(one)} {round(other)}\n")
    return "".join(lines)
