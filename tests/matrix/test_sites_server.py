"""The list of sites of every server in WAITFOLD_SERVERS, against the server while it runs.

That the list is what the code says is for tests/test_sites.py; here a watchpoint of the processor
counts what is stored, and pg_stat_activity says what it means.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PG_BIN, SCRIPTS, Cluster, Psql, run, running_cluster

from waitfold.waitevents import WaitEvents

pytestmark = pytest.mark.usefixtures("nothing_left")

SERVERS = [PG_BIN]
if "WAITFOLD_SERVERS" in os.environ:
    SERVERS += sorted(Path(os.environ["WAITFOLD_SERVERS"]).glob("*/bin"))

HEAD = f"""
set -euo pipefail
. "{SCRIPTS}/lib.bash"
require root uprobes
find_server "$1"
inspect_server "$POSTMASTER"
read_sites "$2"
"""

# The wait of each process named, as WAIT_POINTER and WAIT_FIELD find it.
WAITS = HEAD + 'for pid in "${@:3}"; do current_wait "$pid" && echo "$pid $REPLY"; done'

# Counts the stores to a process's wait_event_info by a watchpoint, and the hits of the sites'
# probes in it, from when this echoes a line until its input ends.
COUNT = (
    HEAD
    + """
verify_sites "$2" "$EXE"
read_set wait-event
group_of_this_run
group=$REPLY probes=$(mktemp)
leave() {
    trap - ERR
    rm -f -- "$probes"
    for _ in {1..20}; do
        [[ -n $(registered "$group") ]] || break
        unregister "$group" || sleep 0.3
    done
}
trap leave EXIT
define_sites "$group" "$2" >"$probes"
register_probes "$probes"
peek "$3" $((LOAD_BASE + WAIT_POINTER)) 8
printf -v address 0x%x $((REPLY + WAIT_FIELD))
perf stat -x, -o "$4" -p "$3" -e "mem:$address/4:w:u" -e "$group:$SET_EVENT" -- cat
"""
)

# All that makes a backend of its own wait, in one way or another.
WORK = [
    "CREATE TABLE numbers AS SELECT n, repeat('x', 500) AS text FROM generate_series(1, 20000) n",
    "CHECKPOINT",
    "CREATE INDEX ON numbers (n)",
    "DO $$ BEGIN FOR i IN 1..300 LOOP UPDATE numbers SET text = 'y' WHERE n = i; END LOOP; END $$",
    *["INSERT INTO numbers VALUES (1, 'z')"] * 100,
    "SET work_mem = '64kB'",
    "SELECT count(*) FROM (SELECT * FROM numbers ORDER BY text, n OFFSET 0) s",
    "SET max_parallel_workers_per_gather = 2",
    "SET parallel_setup_cost = 0",
    "SET min_parallel_table_scan_size = 0",
    "SELECT count(*) FROM numbers WHERE text LIKE '%z%'",
    "VACUUM numbers",
    *["SELECT pg_sleep(0.01)"] * 23,
    "SELECT pg_advisory_lock(1)",
    "CREATE DATABASE other TEMPLATE template0",
    "DROP DATABASE other",
    "SELECT count(*) FROM pg_ls_dir('base')",
    "SELECT pg_switch_wal()",
    "DROP TABLE numbers",
]


@pytest.fixture(scope="module", params=SERVERS, ids=lambda path: path.parent.name)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Path]]:
    """A server that runs, and the list of its sites."""
    sites = tmp_path_factory.mktemp("sites") / "sites.tsv"
    answer = run(SCRIPTS / "waitfold-probes", "sites", request.param / "postgres")
    assert answer.returncode == 0, answer.stderr
    sites.write_text(answer.stdout)
    with running_cluster(binaries=request.param) as cluster:
        yield cluster, sites


def test_where_the_wait_is(server: tuple[Cluster, Path]) -> None:
    """The wait of each process is where the list says: it has pg_stat_activity's name."""
    cluster, sites = server
    names = WaitEvents(cluster.sql("SHOW server_version").split()[0])
    query = (
        "SELECT pid, wait_event_type || ':' || wait_event FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND wait_event IS NOT NULL"
    )
    with cluster.session(), cluster.session() as sleeper, cluster.session() as asking:
        sleeper.send("SELECT pg_sleep(3600)")
        seen = set()
        for _ in range(3):
            before = asking.run(query)
            pids = [line.split("|")[0] for line in before]
            answer = run("bash", "-c", WAITS, "test", cluster.data, sites, *pids)
            assert answer.returncode == 0, answer.stderr
            after = set(asking.run(query))
            read = dict(line.split() for line in answer.stdout.splitlines())
            for line in after & set(before):
                pid, name = line.split("|")
                assert ":".join(names.label(int(read[pid], 16))) == name
                seen.add(name)
        cluster.sql(f"SELECT pg_cancel_backend({sleeper.pid})")
        sleeper.wait()
    assert {"Client:ClientRead", "Timeout:PgSleep"} < seen
    assert len(seen) > 4


def hits(cluster: Cluster, sites: Path, session: Psql, file: Path) -> dict[str, int]:
    """What was counted in a session at work: stores by the watchpoint, and hits of sites."""
    with cluster.session() as other:
        other.run("SELECT pg_advisory_lock(1)")
        counting = subprocess.Popen(
            ["bash", "-c", COUNT, "test", cluster.data, sites, str(session.pid), file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert counting.stdin
        assert counting.stdout
        counting.stdin.write("begin\n")
        counting.stdin.flush()
        assert counting.stdout.readline() == "begin\n"
        for statement in WORK:
            if "advisory" in statement:
                session.send(statement)
                other.run("SELECT pg_sleep(0.1)")
                other.run("SELECT pg_advisory_unlock(1)")
                session.wait()
            else:
                session.run(statement)
        counting.communicate()
        assert counting.returncode == 0
    rows = [line.split(",") for line in file.read_text().splitlines() if line[:1].isdigit()]
    return {row[2].partition(":")[0].partition("_")[0]: int(row[0]) for row in rows}


def test_no_store_is_missed(server: tuple[Cluster, Path], tmp_path: Path) -> None:
    """What a watchpoint on wait_event_info counts is what the sites' probes count."""
    cluster, sites = server
    with cluster.session() as session:
        found = hits(cluster, sites, session, tmp_path / "counts")
    assert found["mem"] == found["waitfold"] > 1000
