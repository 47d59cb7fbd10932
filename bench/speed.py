"""Time `waitfold report` against perf script, or trace-cmd report, and mawk; see speed.sh."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import big_perfdata
import big_tracedat

from waitfold.events import PairRule, transitions
from waitfold.pair import pair
from waitfold.perfdata import PerfData
from waitfold.summary import Summary
from waitfold.tracedat import TraceDat

ROOT = Path(__file__).resolve().parent.parent
EVENT = "waitfold_*:w"


@dataclass(frozen=True)
class Run:
    """What a command printed, its seconds, those of all its processes, and its peak memory."""

    output: str
    seconds: float
    cpu: float
    mib: int


def run(command: list[str]) -> Run:
    """Run a command to its end."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begun
    if status:
        sys.exit(f"speed: {shlex.join(command)} failed")
    return Run(output, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10)


def by_text(path: Path) -> Run:
    """Pair by the text that the file's own tool prints.

    Of perf with forks and exits, because a process id comes again.
    """
    file = shlex.quote(str(path))
    if path.suffix == ".dat":
        script, awk = f"trace-cmd report -t -i {file} 2>/dev/null", "pair_trace.awk"
    else:
        fields = "pid,tid,time,event,trace"
        script = f"perf script --ns --show-task-events -F {fields} -i {file} 2>/dev/null"
        awk = "pair.awk"
    awk = shlex.quote(str(ROOT / "bench" / awk))
    return run(["bash", "-o", "pipefail", "-c", f"{script} | mawk -f {awk}"])


def by_waitfold(path: Path) -> Run:
    """Report as a user does."""
    naming = ["--start", EVENT, "--value", "v", "--pg-version", "15.18"]
    return run([str(ROOT / ".venv/bin/waitfold"), "report", str(path), "--json", *naming])


def sums(path: Path) -> list[tuple[str, ...]]:
    """Return (value, count, total_ns) of all values, as bench/pair.awk prints them."""
    summary = Summary()
    data = TraceDat(path) if path.suffix == ".dat" else PerfData(path)
    for batch in pair(transitions([data], PairRule(EVENT, "v", EVENT, 0))):
        summary.add(batch)
    return sorted((f"{s.value:#x}", str(s.count), str(s.total_ns)) for s in summary.values())


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = (Path(folder) / "big").with_suffix(options.source.suffix)
        is_trace = path.suffix == ".dat"
        enlarge = big_tracedat.enlarge if is_trace else big_perfdata.enlarge
        tool = "trace-cmd" if is_trace else "perf"
        count = enlarge(options.source, path, options.samples)
        print(f"{count} samples, {path.stat().st_size >> 20} MiB, repeated from {options.source}")

        text, report = by_text(path), by_waitfold(path)
        want = sorted(tuple(line.split()) for line in text.output.splitlines())
        if want != sums(path):
            sys.exit(f"speed: {tool} and waitfold do not find the same counts and totals")
        waits = json.loads(report.output)["waits"]
        total = sum(int(total) for _, _, total in want)
        if sum(wait["total_ns"] for wait in waits) != total:
            sys.exit(f"speed: the report's totals are not those of {tool}")
        print(f"the same {len(want)} counts and totals, {total} ns in all")

        ratios = []
        for number in range(options.rounds):
            text, report = by_text(path), by_waitfold(path)
            ratios.append(text.seconds / report.seconds)
            print(
                f"round {number + 1}: {tool} | mawk {text.seconds:.2f} s ({text.cpu:.2f} CPU), "
                f"waitfold report {report.seconds:.2f} s ({report.cpu:.2f} CPU): "
                f"{ratios[-1]:.1f} times faster, {text.cpu / report.cpu:.1f} times less CPU"
            )
        print(
            f"median {statistics.median(ratios):.1f} times faster "
            f"({min(ratios):.1f} to {max(ratios):.1f})"
        )
        for factor in (0.25, 0.5, 1, 2, 4):
            count = enlarge(options.source, path, int(options.samples * factor))
            report = by_waitfold(path)
            print(
                f"{count} samples, {path.stat().st_size >> 20} MiB: {report.seconds:.2f} s, "
                f"{report.seconds / count * 1e9:.0f} ns a sample, peak {report.mib} MiB"
            )


if __name__ == "__main__":
    main()
