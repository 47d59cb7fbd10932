"""A server with the wait__event probes: all of them found and traced, and extensions still load.

Needs WAITFOLD_USDT, the prefix of such a server, as `make usdt-postgres` builds it. What traces
here is perf and ftrace by hand, not waitfold: the counts are those of the probes themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT, Cluster, Psql, run, running_cluster
from test_elf import find_notes
from test_usdt import instance, probe_lines, registered, traced

PREFIX = Path(os.environ.get("WAITFOLD_USDT", "/nowhere")).resolve()
PREFIXES = [PREFIX, PREFIX.with_name(f"{PREFIX.name}-nop5")]
START, END = "wait__event__start", "wait__event__end"
SLEEPS, LOCKS = 23, 7

# Calls the inline functions, and so has copies of their probes.
EXTENSION = r"""
#include "postgres.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/latch.h"
PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(wait_twice);
Datum wait_twice(PG_FUNCTION_ARGS)
{
    pgstat_report_wait_start(PG_WAIT_EXTENSION);
    pg_usleep(1000);
    pgstat_report_wait_end();
    (void) WaitLatch(MyLatch, WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 1, PG_WAIT_EXTENSION);
    PG_RETURN_VOID();
}
"""

Waits = list[tuple[float, int]]


@pytest.fixture(scope="module", params=PREFIXES, ids=lambda path: path.name)
def server(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A patched server that runs, by each of the builds that are there."""
    prefix = request.param
    if not (prefix / "bin/postgres").exists():
        pytest.skip(
            f"no server in {prefix}: make usdt-postgres builds one; name it by WAITFOLD_USDT"
        )
    with running_cluster(binaries=prefix / "bin") as cluster:
        yield cluster


@pytest.fixture
def group() -> str:
    """A group name of this run's own."""
    return f"try_usdt_{os.getpid()}"


def code_of(server: Cluster, name: str) -> int:
    """wait_event_info of a wait event of this version."""
    major = server.sql("SHOW server_version_num")[:-4]
    table = (ROOT / f"probes/wait_events/pg{major}.tsv").read_text()
    (code,) = re.findall(rf"^(\w+)\t\w+\t{name}$", table, re.M)
    return int(code, 16)


def config(server: Cluster, what: str) -> str:
    """What the server's pg_config says."""
    return run(server.binaries / "pg_config", f"--{what}").stdout.strip()


@contextlib.contextmanager
def perf_recording(event: str, data: Path) -> Iterator[None]:
    """A perf that records an event on all processes for the length of a with block."""
    # perf starts its command once it records, so what cat gives back says that it does.
    command = ["perf", "record", "-q", "-a", "-k", "CLOCK_MONOTONIC", "-e", event.replace("/", ":")]
    with subprocess.Popen(
        [*command, "-o", data, "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as perf:
        assert perf.stdin is not None
        assert perf.stdout is not None
        perf.stdin.write(b"ready\n")
        perf.stdin.flush()
        assert perf.stdout.readline() == b"ready\n"
        yield
        perf.stdin.close()


def by_perf(data: Path, pid: int) -> Waits:
    """Time in seconds and value of what perf recorded of a process."""
    text = run("perf", "script", "-i", data, "--ns", "-F", "pid,time,trace").stdout
    rows = re.findall(rf"^ *{pid} +(\d+\.\d+): +\(\w+\) v=(\w+)$", text, re.M)
    return [(float(when), int(value, 16)) for when, value in rows]


def long_waits(waits: Waits, value: int) -> int:
    """How many waits for an event were longer than 40 ms."""
    return sum(start[1] == value and end[0] - start[0] > 0.04 for start, end in pairwise(waits))


def lock_wait(holder: Psql, waiter: Psql) -> None:
    """One wait of 60 ms for a lock on a table."""
    holder.run("BEGIN; LOCK TABLE held")
    thread = threading.Thread(target=waiter.run, args=["BEGIN; LOCK TABLE held; COMMIT"])
    thread.start()
    while holder.run(f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {waiter.pid}") != [
        "Lock"
    ]:
        time.sleep(0.001)
    time.sleep(0.06)
    holder.run("COMMIT")
    thread.join()


def test_probes(server: Cluster) -> None:
    """There are as many probes as wait events need, each kind with its one semaphore."""
    notes = find_notes(server.binaries / "postgres")
    starts = [row for row in notes if row[1] == START]
    ends = [row for row in notes if row[1] == END]
    assert len(starts) > 60
    assert len(ends) > 60
    assert len({row[4] for row in starts}) == len({row[4] for row in ends}) == 1
    assert starts[0][4] != ends[0][4]
    nop = "0f1f440000" if "-nop5" in str(server.binaries) else "90"
    assert {row[5] for row in notes} == {nop}


def test_counts(server: Cluster, group: str, tmp_path: Path) -> None:
    """perf and ftrace, at the same time, both see the waits that were made, and the same ones."""
    binary = server.binaries / "postgres"
    events = [f"{group}_perf/w", f"{group}_ftrace/w"]
    lines = {event: probe_lines(event, binary, "postgresql", START, END) for event in events}
    server.sql("CREATE TABLE held ()")
    with (
        server.session() as waiter,
        server.session() as holder,
        registered(events[0], lines[events[0]]),
        registered(events[1], lines[events[1]]),
        instance(events[1]) as trace,
    ):
        with perf_recording(events[0], tmp_path / "perf.data"):
            for _ in range(SLEEPS):
                waiter.run("SELECT pg_sleep(0.053)")
            for _ in range(LOCKS):
                lock_wait(holder, waiter)
            end = time.monotonic()
        recorded = by_perf(tmp_path / "perf.data", waiter.pid)
        # An idle backend wakes up to report its statistics.
        also = [row for row in traced(trace, waiter.pid) if row[0] < end]
    for waits in (recorded, also):
        assert long_waits(waits, code_of(server, "PgSleep")) == SLEEPS
        assert long_waits(waits, code_of(server, "relation")) == LOCKS
    assert [value for _, value in recorded][: len(also)] == [value for _, value in also]


def test_extensions(server: Cluster) -> None:
    """Every extension of the source can be created, and every module be loaded."""
    available = server.sql("SELECT name FROM pg_available_extensions ORDER BY name").split()
    assert len(available) > 40
    server.sql("CREATE DATABASE extensions")
    script = "".join(f'CREATE EXTENSION IF NOT EXISTS "{name}" CASCADE;\n' for name in available)
    libraries = sorted(Path(config(server, "pkglibdir")).glob("*.so"))
    modules = [path for path in libraries if b"Pg_magic_func" in path.read_bytes()]
    assert len(modules) > 60
    script += "".join(f"LOAD '{module}';\n" for module in modules)
    answer = subprocess.run(
        [*server.psql_command[:-1], "extensions", "-qAt", "-v", "ON_ERROR_STOP=1"],
        input=script, capture_output=True, text=True,
    )  # fmt: skip
    assert not answer.returncode, answer.stderr


def test_own_extension(server: Cluster, group: str, tmp_path: Path) -> None:
    """An extension that calls the inline functions loads, and has probes that can be traced."""
    (tmp_path / "own.c").write_text(EXTENSION)
    library = server.folder / "own.so"
    flags = f"{config(server, 'cflags')} {config(server, 'cflags_sl')}".split()
    subprocess.run(
        ["gcc", *flags, "-shared", "-I", config(server, "includedir-server"), "-o", library,
         tmp_path / "own.c"],
        check=True,
    )  # fmt: skip
    server.sql(f"CREATE FUNCTION wait_twice() RETURNS void LANGUAGE C AS '{library}'")
    mine = [row for row in find_notes(library) if row[1] in (START, END)]
    assert sorted(row[1] for row in mine) == [END, START]
    event = f"{group}/w"
    lines = probe_lines(event, library, "postgresql", START, END)
    lines += probe_lines(event, server.binaries / "postgres", "postgresql", START, END)
    with (
        server.session() as session,
        registered(event, lines),
        instance(event) as trace,
    ):
        session.run("SELECT wait_twice()")
        values = [value for _, value in traced(trace, session.pid)]
    extension = 0x07000000
    assert re.search(f"{extension}, 0, {extension}, 0", str(values)), values


def test_installcheck(server: Cluster) -> None:
    """PostgreSQL's own regression tests pass on the server."""
    # They count on the settings that initdb makes.
    server.sql("ALTER SYSTEM SET autovacuum = on")
    server.sql("ALTER SYSTEM SET shared_buffers = '128MB'")
    server.stop("fast")
    server.start()
    source = server.binaries.parent.with_name(f"{server.binaries.parent.name}.src")
    out = server.folder / "regress"
    out.mkdir()
    shutil.chown(out, "postgres")
    # Not by the make that runs this test: PostgreSQL's would leave things out.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    answer = subprocess.run(
        ["runuser", "-u", "postgres", "--", "make", "-C", source / "src/test/regress",
         "installcheck", f"EXTRA_REGRESS_OPTS=--outputdir={out}"],
        env=environment | {"PGHOST": str(server.folder), "PGUSER": "postgres"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"All \d{3} tests passed", answer.stdout), answer.stdout[-2000:]
