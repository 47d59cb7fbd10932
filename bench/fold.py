#!/usr/bin/env python3
"""Time `waitfold fold` of a plain profile against perf script and what collapses its text.

    perf record -e task-clock -F 999 --call-graph fp -a -o perf.data -- sleep 10
    bench/fold.py --source perf.data

perf script alone, its text thrown away, is the least that any such pipe takes. Where
inferno-collapse-perf is on PATH, it ends one, and its lines are compared.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from big_perfdata import enlarge
from speed import ROOT, Run, run


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
        path = Path(folder, "perf.data")
        samples = enlarge(options.source, path, options.samples)
        print(f"{samples} samples, {path.stat().st_size >> 20} MiB; the best of {options.rounds}")
        script = f"perf script --no-inline -i {shlex.quote(str(path))} 2>/dev/null"
        commands = {
            "waitfold fold": f"{ROOT}/.venv/bin/waitfold fold {shlex.quote(str(path))}",
            "perf script > /dev/null": f"{script} > /dev/null",
        }
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
    if len(others) > 1:
        # inferno leaves out samples without a frame.
        lines = [line for line in own.output.splitlines() if ";" in line]
        same = lines == others[1].output.splitlines()
        print(f"{len(lines)} lines, {'equal' if same else 'NOT EQUAL'}")
        sys.exit(not same)


if __name__ == "__main__":
    main()
