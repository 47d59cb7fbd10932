#!/usr/bin/env python3
"""Count the transitions that a tracer saw; show what tracing cost from bench/cost.sh's table."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import pandas as pd

from waitfold.capture import Naming, open_capture
from waitfold.events import STORE, transitions
from waitfold.perfdata import LOST, PerfData


def count(variant: str, folder: Path, pids: list[int]) -> int:
    """Return how many transitions of the sessions the tracer saw, those included that it lost."""
    if variant == "sites":
        capture = open_capture(folder / "sites", Naming())
        stream = transitions(capture.files, capture.rule)
        seen = sum(
            int((np.isin(batch.tid, pids) & (batch.mark == STORE)).sum()) for batch in stream
        )
        return seen + stream.lost
    if variant == "mem":
        pieces = PerfData(folder / "mem").pieces()
        return sum(
            len(piece.samples)
            + sum(int(piece.words[at + 2]) for at in piece.others if piece.words[at] & 0xFF == LOST)
            for piece in pieces
        )
    if variant == "bpftrace":
        texts = [(folder / f"bpftrace.{pid}").read_text() for pid in pids]
        return sum(int(number) for text in texts for number in re.findall(r"^@: (\d+)", text, re.M))
    return 0


def spread(values: pd.Series[float], digits: int, unit: str = "") -> str:
    """Return median and quartiles."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.{digits}f}{unit} ({low:.{digits}f} .. {high:.{digits}f})"


def show(path: Path) -> None:
    """Print a line for each workload and variant; a round is compared with its own untraced run."""
    runs = pd.read_csv(path, sep="\t")
    runs["cpu_us"] = runs.cpu_ns / runs.transactions / 1000
    runs["tps"] = runs.transactions / runs.took_ns * 1e9
    untraced = runs[runs.variant == "untraced"].set_index(["workload", "round"])
    runs = runs.join(untraced[["cpu_us", "tps"]].add_suffix("_untraced"), on=["workload", "round"])
    runs["per_transaction"] = runs.transitions / runs.transactions
    runs["added_us"] = (runs.cpu_us - runs.cpu_us_untraced) / runs.per_transaction
    runs["ratio"] = runs.cpu_us / runs.cpu_us_untraced
    runs["own_us"] = runs.own_ns / runs.transitions / 1000
    runs["slower"] = 100 * (runs.tps / runs.tps_untraced - 1)
    print("median (quartiles) of the rounds; CPU of the two backends unless said otherwise")
    for (workload, variant), some in runs.groupby(["workload", "variant"], sort=False):
        print(
            f"{workload}, {variant}: {len(some)} rounds of {some.transactions.iloc[0]} transactions"
        )
        print(f"    CPU per transaction, us       {spread(some.cpu_us, 1)}")
        print(f"    transactions per second       {spread(some.tps, 0)}")
        if variant == "untraced":
            continue
        print(f"    transitions per transaction   {spread(some.per_transaction, 2)}")
        print(f"    CPU added per transition, us  {spread(some.added_us, 2)}")
        print(f"    CPU, ratio to untraced        {spread(some.ratio, 2)}")
        print(f"    the same, less than untraced  {spread(-some.slower, 1, ' %')}")
        if not some.own_us.isna().any():
            print(f"    tracer's own CPU, us a transition {spread(some.own_us, 2)}")


def main() -> None:
    """Do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    counting = verbs.add_parser("count")
    counting.add_argument("variant")
    counting.add_argument("folder", type=Path)
    counting.add_argument("pids", type=int, nargs="+")
    verbs.add_parser("show").add_argument("table", type=Path)
    options = parser.parse_args()
    if options.verb == "count":
        print(f"\t{count(options.variant, options.folder, options.pids)}")
    else:
        show(options.table)


if __name__ == "__main__":
    main()
