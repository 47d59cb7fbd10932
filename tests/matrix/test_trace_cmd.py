"""The engine trace-cmd, where it may record: other hosts refuse it (tests/test_ftrace.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import SCRIPTS, TRACEFS, Cluster, known_sites, report, run
from test_ftrace import manifest, trace_cmd_stores

pytestmark = pytest.mark.usefixtures("nothing_left")

# trace-cmd writes a few files of function tracing, which some kernels do not let it. In a mount
# namespace of its own it may write others in their place.
LET = """
mount --bind {one} /proc/sys/kernel/ftrace_enabled
exec env PATH={path}:$PATH "$@"
"""
TRACE_CMD = """#!/bin/bash
while read -r -d '' word; do
    [[ $before != -B ]] || instance=$word
    before=$word
done < <(printf '%s\\0' "$@")
if [[ -n ${{instance-}} ]]; then
    mkdir {tracefs}/instances/$instance
    for file in {tracefs}/set_ftrace_* {tracefs}/instances/$instance/set_ftrace_*; do
        mount --bind {empty} "$file"
    done
fi
exec {real} "$@"
"""


def test_trace_cmd_records(cluster: Cluster, tmp_path: Path) -> None:
    """Where trace-cmd may, it records what the other engines record."""
    real = shutil.which("trace-cmd")
    assert real
    path = tmp_path / "path"
    path.mkdir()
    one, empty = tmp_path / "one", tmp_path / "empty"
    one.write_text("1\n")
    empty.write_text("")
    (path / "trace-cmd").write_text(TRACE_CMD.format(tracefs=TRACEFS, empty=empty, real=real))
    (path / "trace-cmd").chmod(0o755)
    capture = tmp_path / "capture"
    answer = run(
        "unshare", "--mount", "sh", "-ec", LET.format(one=one, path=path), "sh",
        SCRIPTS / "waitfold-record", "--sites", known_sites(), "--engine", "trace-cmd",
        "-D", cluster.data, "-o", capture,
        "--", *cluster.pgbench("-n", "-c", "4", "-t", "300"),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr + (capture / "trace-cmd.log").read_text()
    assert manifest(capture)["engine"] == "trace-cmd"
    result = report(capture)
    assert result["transitions"] == len(trace_cmd_stores(capture / "trace.dat")) > 5000
    assert result["lost"] == 0
    assert [path for path in capture.iterdir() if path.name.startswith("trace.dat.")] == []
