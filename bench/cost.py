#!/usr/bin/env python3
"""Count the transitions that a tracer saw; show what tracing cost from bench/cost.sh's table."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from waitfold.capture import Naming, open_capture
from waitfold.events import STORE, transitions

# Without transitions of its own: those of this way in the same round stand for them.
COUNTED = {"usdt-untraced": "usdt-usdt-ftrace", "nop5-untraced": "nop5-usdt-ftrace"}

RATIOS = [
    ("plain-sites-ftrace", "usdt-bpftrace"),
    ("usdt-usdt-ftrace", "usdt-bpftrace"),
    ("plain-sites-perf", "usdt-bpftrace"),
    ("usdt-usdt-perf", "usdt-bpftrace"),
    ("nop5-usdt-ftrace", "usdt-usdt-ftrace"),
    ("nop5-usdt-perf", "usdt-usdt-perf"),
    ("plain-mem-perf", "plain-bpftrace"),
    ("plain-sites-ftrace", "plain-mem-perf"),
]


def count(way: str, folder: Path, pids: list[int]) -> int:
    """Return how many transitions of the sessions the tracer saw, those included that it lost."""
    if way == "untraced":
        return 0
    if way == "bpftrace":
        texts = [path.read_text() for path in folder.glob("bpftrace.*")]
        # Sums so far, one each second: the last one counts.
        return sum(int(re.findall(r"^@: (\d+)", text, re.MULTILINE)[-1]) for text in texts)
    capture = open_capture(folder / "capture", Naming())
    stream = transitions(capture.files, capture.rule)
    seen = sum(int((np.isin(batch.tid, pids) & (batch.mark == STORE)).sum()) for batch in stream)
    return seen + stream.lost


def spread(values: pd.Series[float], digits: int) -> str:
    """Return median and quartiles."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def table(path: Path) -> pd.DataFrame:
    """Return the runs, each compared with the untraced one on the same server in its round."""
    runs = pd.read_csv(path, sep="\t")
    runs["cpu_us"] = runs.cpu_ns / runs.transactions / 1000
    runs["tps"] = runs.transactions / runs.took_ns * 1e9
    by = runs.set_index(["workload", "round", "variant"])
    keys = [(w, r, v) for w, r, v in zip(runs.workload, runs["round"], runs.variant, strict=True)]
    base = [(w, r, base_of(v)) for w, r, v in keys]
    counted = [(w, r, COUNTED.get(v, v)) for w, r, v in keys]
    runs["cpu_base"] = by.cpu_us.loc[base].to_numpy()
    runs["tps_base"] = by.tps.loc[base].to_numpy()
    runs["per_transaction"] = (by.transitions / by.transactions).loc[counted].to_numpy()
    runs["added_us"] = (runs.cpu_us - runs.cpu_base) / runs.per_transaction
    runs["ratio"] = runs.cpu_us / runs.cpu_base
    runs["own_us"] = runs.own_ns / runs.transitions.where(runs.transitions > 0) / 1000
    runs["slower"] = 100 * (1 - runs.tps / runs.tps_base)
    return runs


def show_bare(path: Path) -> None:
    """Print what bench/flood.c used itself, and the ratios of what is added."""
    runs = pd.read_csv(path, sep="\t")
    runs["us"] = runs.cpu_ns / runs.transitions / 1000
    cost = runs.pivot(index="round", columns="variant", values="us")
    made = runs.transitions.iloc[0]
    print(f"\nBare: {len(cost)} rounds of {made} transitions; median (quartiles)\n")
    print("| program, tracer | CPU a transition, us | **added a transition, us** |")
    print("| --- | --- | --- |")
    added = cost.copy()
    for variant in cost.columns:
        added[variant] -= cost[base_of(variant)]
    for variant in in_order(cost.columns):
        name = variant.replace("-", ", ", 1)
        print(f"| {name} | {spread(cost[variant], 3)} | **{spread(added[variant], 3)}** |")
    show_ratios(added)


def base_of(variant: str) -> str:
    """Return what a variant is compared with."""
    server, _, way = variant.partition("-")
    return "plain-untraced" if way == "untraced" else f"{server}-untraced"


def in_order(variants: Iterable[str]) -> list[str]:
    """Return the variants as tables have them."""
    servers = ["plain", "usdt", "nop5"]

    def rank(variant: str) -> tuple[int, bool, str]:
        server, _, way = variant.partition("-")
        return servers.index(server), way != "untraced", way

    return sorted(variants, key=rank)


def show_ratios(added: pd.DataFrame) -> None:
    """Print ratios of what is added; a row each round."""
    print()
    for one, other in RATIOS:
        ratio = spread(added[one] / added[other], 2)
        print(f"added by {one} to that by {other}, of the same round: {ratio}")


def show(path: Path) -> None:
    """Print a table for each workload, and the ratios of what is added."""
    runs = table(path)
    print(
        "Median (quartiles) of the rounds; CPU of the two backends, of the tracer where it says so."
    )
    for workload, of in runs.groupby("workload", sort=False):
        print(
            f"\n{workload}: {of['round'].nunique()} rounds of {of.transactions.iloc[0]} "
            "transactions\n"
        )
        print(
            "| server, tracer | CPU a transaction, us | **added a transition, us** "
            "| ratio to untraced | tracer's own, us a transition | transitions a transaction "
            "| fewer a second, % |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for variant in in_order(of.variant.unique()):
            some = of[of.variant == variant]
            cells = [variant.replace("-", ", ", 1), spread(some.cpu_us, 1)]
            if variant == "plain-untraced":
                cells += [""] * 5
            else:
                cells += [f"**{spread(some.added_us, 2)}**", spread(some.ratio, 2)]
                own = some.own_us.dropna()
                cells.append(spread(own, 2) if len(own) else "")
                cells.append(spread(some.per_transaction, 2) if variant not in COUNTED else "")
                cells.append(spread(some.slower, 0))
            print(f"| {' | '.join(cells)} |")
        show_ratios(of.pivot(index="round", columns="variant", values="added_us"))


def main() -> None:
    """Do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    counting = verbs.add_parser("count")
    counting.add_argument("way")
    counting.add_argument("folder", type=Path)
    counting.add_argument("pids", type=int, nargs="+")
    for verb in ("bare", "show"):
        verbs.add_parser(verb).add_argument("table", type=Path)
    options = parser.parse_args()
    if options.verb == "count":
        print(f"\t{count(options.way, options.folder, options.pids)}")
    elif options.verb == "bare":
        show_bare(options.table)
    else:
        show(options.table)


if __name__ == "__main__":
    main()
