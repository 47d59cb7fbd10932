#!/usr/bin/env python3
"""Time `waitfold fold` against perf script and what collapses its text.

    perf record -e task-clock -F 999 --call-graph fp -a -o perf.data -- sleep 10
    bench/fold.py --source perf.data
    waitfold record --with offcpu,oncpu -D "$PGDATA" -d 10 -o capture
    bench/fold.py --source capture

perf script alone, its text thrown away, is the least that any such pipe takes. Where
inferno-collapse-perf is on PATH, it ends one; of a plain profile its lines are compared. The
number of samples is of those with a stack.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from big_perfdata import enlarge
from speed import ROOT, Run, run

from waitfold.perfdata import PerfData


def samples(path: Path) -> tuple[int, int]:
    """Return how many samples a perf.data holds, and how many of them have a stack."""
    data = PerfData(path)
    chained = np.array([event.has_callchain for event in data.events])
    every = stacks = 0
    for piece in data.pieces():
        every += len(piece.samples)
        stacks += int(chained[data.event_of(piece, piece.samples)].sum())
    return every, stacks


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # As installed: modules are not compiled at each start.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
        source = options.source
        if source.is_dir():
            data = Path(folder, "capture", "perf.data")
            shutil.copytree(source, data.parent)
            # Without this the window ends with the last event.
            manifest = data.parent / "manifest"
            lines = manifest.read_text().splitlines(keepends=True)
            manifest.write_text("".join(x for x in lines if not x.startswith("end_ns")))
            kinds = [["--kind", kind] for kind in ("oncpu", "offcpu", "wall")]
        else:
            data, kinds = Path(folder, "perf.data"), [[]]
        every, stacks = samples(source / "perf.data" if source.is_dir() else source)
        copies = -(-options.samples // stacks)
        enlarge(source / "perf.data" if source.is_dir() else source, data, copies * every)
        fold = f"{ROOT}/.venv/bin/waitfold fold"
        print(
            f"{copies * stacks} samples with stacks of {copies * every}, "
            f"{data.stat().st_size >> 20} MiB; the best of {options.rounds}"
        )
        script = f"perf script --no-inline -i {shlex.quote(str(data))} 2>/dev/null"
        path = data.parent if source.is_dir() else data
        commands = {
            " ".join(["waitfold fold", *kind]): shlex.join([*fold.split(), *kind, str(path)])
            for kind in kinds
        } | {"perf script > /dev/null": f"{script} > /dev/null"}
        if shutil.which("inferno-collapse-perf"):
            commands["perf script | inferno-collapse-perf"] = (
                f"{script} | inferno-collapse-perf 2>/dev/null"
            )
        best: dict[str, Run] = {}
        for _ in range(options.rounds):
            for what, command in commands.items():
                result = run(["bash", "-o", "pipefail", "-c", command])
                if what not in best or result.seconds < best[what].seconds:
                    best[what] = result
    own, *others = best.values()
    for what, result in best.items():
        print(
            f"{what:36} {result.seconds:7.2f} s {result.cpu:7.2f} s CPU {result.mib:5} MiB"
            f"{result.seconds / own.seconds:6.1f} x"
        )
    if len(others) > 1 and not options.source.is_dir():
        # inferno leaves out samples without a frame.
        lines = [line for line in own.output.splitlines() if ";" in line]
        same = lines == others[1].output.splitlines()
        print(f"{len(lines)} lines, {'equal' if same else 'NOT EQUAL'}")
        sys.exit(not same)


if __name__ == "__main__":
    main()
