"""Folded stacks, `backend type;class;event N` with N in ns, and the flame graph of them."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from waitfold.analysis import Analysis, SetAnalysis
from waitfold.errors import WaitfoldError
from waitfold.profile import Profile, name_frames
from waitfold.show.text import one_line

# Where Debian's libdevel-nytprof-perl keeps FlameGraph's script.
DEBIAN_FLAMEGRAPH = Path("/usr/share/perl5/Devel/NYTProf/flamegraph.pl")

_GO_METHOD = re.compile(r"\.\(.*\)\.")  # net/http.(*Client).Do
_ARGUMENTS = re.compile(r"\((?!anonymous namespace\)).*")


def folded(analysis: Analysis, with_idle: bool) -> str:
    """Return the folded stacks, one a line, sorted; idle waits only if asked for.

    N is the sum of the complete intervals and of what was seen of those that were cut.
    """
    times = analysis.times()
    if not with_idle:
        times = times[~times["idle"]]
    stacks = times["type"] + ";" + times["class"] + ";" + times["name"]
    sums = times["time_ns"].groupby(stacks).sum()
    return "".join(f"{stack} {ns}\n" for stack, ns in sums.items() if ns > 0)


def folded_set(one: SetAnalysis) -> str:
    """Return the same of a probe set, `backend type;set;field;... N`."""
    sums: Counter[str] = Counter()
    for type_, texts, ns in one.times():
        frames = (one_line(text, 100).replace(";", ",") or "-" for text in texts)
        sums[";".join([type_, one.probe_set.name, *frames])] += ns
    return "".join(f"{stack} {ns}\n" for stack, ns in sorted(sums.items()) if ns > 0)


def folded_profile(profile: Profile, event: int) -> str:
    """Return the folded stacks of a profile's event, `comm;frame;... N`, leaf last, sorted.

    N is the sum of the samples' weights. The lines are those of FlameGraph's
    stackcollapse-perf.pl, which also says what a frame without a name is called, and what of a name
    does not fit.
    """
    rows = np.flatnonzero(profile.event == event)
    stacks = len(profile.stacks.starts) - 1
    key = profile.comm[rows].astype(np.int64) * len(profile.spaces) + profile.space[rows]
    keys, row = np.unique(key * stacks + profile.stack[rows], return_inverse=True)
    sums = np.zeros(len(keys), np.uint64)
    np.add.at(sums, row, profile.weight[rows])
    comm, pair = np.divmod(keys, len(profile.spaces) * stacks)
    pairs, pair = np.unique(pair, return_inverse=True)
    frames = name_frames(profile, pairs % stacks, pairs // stacks)
    names = [_frame(name) for name in frames.names]
    entries, starts = frames.entries.tolist(), frames.starts.tolist()
    lines = [
        "".join([f";{names[j]}" for j in reversed(entries[start:end])])
        for start, end in pairwise(starts)
    ]
    roots = [comm.replace(" ", "_").replace(";", ":") for comm in profile.comms]
    total: Counter[str] = Counter()
    for root, line, n in zip(comm.tolist(), pair.tolist(), sums.tolist(), strict=True):
        total[roots[root] + lines[line]] += n
    return "".join(f"{stack} {n}\n" for stack, n in sorted(total.items()))


def _frame(name: str) -> str:
    """Return a function's name without what would not fit: arguments, quotes, a semicolon."""
    name = name.replace(";", ":")
    if "(" in name and not _GO_METHOD.search(name):
        name = _ARGUMENTS.sub("", name)
    return name.replace('"', "").replace("'", "")


def flamegraph(stacks: str, title: str) -> bytes:
    """Return the SVG of folded stacks, drawn by flamegraph.pl or inferno-flamegraph.

    Raises
    ------
    WaitfoldError
        There is nothing to draw, neither program is there, or it failed.

    """
    if not stacks:
        raise WaitfoldError("no waits to draw; --idle adds the idle ones")
    # The palette of FlameGraph's off-CPU graphs.
    command = [*_renderer(), "--countname", "ns", "--colors", "io", "--title", title]
    if command[0] != "inferno-flamegraph":
        command[-1] = html.escape(title)  # flamegraph.pl writes it as it is
    result = subprocess.run(command, input=stacks.encode(), capture_output=True, check=False)
    if result.returncode != 0 or not result.stdout.rstrip().endswith(b"</svg>"):
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise WaitfoldError(f"{command[0]} failed: {said[-1] if said else 'it said nothing'}")
    return result.stdout


def _renderer() -> list[str]:
    if found := shutil.which("flamegraph.pl"):
        return [found]
    if DEBIAN_FLAMEGRAPH.exists() and shutil.which("perl"):
        return ["perl", str(DEBIAN_FLAMEGRAPH)]
    if shutil.which("inferno-flamegraph"):
        return ["inferno-flamegraph"]
    raise WaitfoldError(
        "flamegraph.pl and inferno-flamegraph are both missing: "
        "apt-get install libdevel-nytprof-perl, or put one of them on PATH"
    )
