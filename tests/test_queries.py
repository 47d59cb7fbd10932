"""Which query a backend was in: against pg_stat_activity, asked at the same time."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PG_BIN, Cluster, Recorder, running_cluster, waits

from waitfold.backends import SeenBackends
from waitfold.capture import Capture, Naming, open_capture
from waitfold.events import CUT, EXIT, FORK, STORE, Transitions, TransitionStream, joined
from waitfold.probeset import load_sets
from waitfold.queries import IDLE_IN_TRANSACTION, NONE, UNKNOWN, Queries, Query, read_queries
from waitfold.waitevents import WaitEvents

SERVERS = [PG_BIN]
if "WAITFOLD_SERVERS" in os.environ:
    SERVERS += sorted(Path(os.environ["WAITFOLD_SERVERS"]).glob("*/bin"))

NESTED = """
CREATE FUNCTION nested() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(0.1);
    PERFORM count(*) FROM pg_class;
    PERFORM pg_sleep(0.1);
END $$
"""
# No two of them have one id: to that constants and names of columns do not matter.
SLEEP, LOCK, READ = "SELECT pg_sleep(0.3)", "UPDATE one SET i = 2 * i", "SELECT sum(i) FROM many"
FIRST, SECOND = "SELECT 1, pg_sleep(0.15)", "SELECT 1, 2, pg_sleep(0.2)"
TIMEOUT, SENDER = "SELECT pg_sleep(5), 1", "SELECT pg_sleep(0.1), 1, 2"
PREPARED = "SELECT pg_sleep($1)"
BEFORE = "SELECT pg_advisory_lock(1)"
RELATION = "SELECT count(*) FROM one"
PARALLEL = "SELECT count(*) FROM many WHERE md5(repeat(filler, 9)) <> 'x'"


class Connection:
    """A session that speaks the protocol itself; every answer ends with ReadyForQuery."""

    def __init__(self, cluster: Cluster, **options: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(cluster.folder / ".s.PGSQL.5432"))
        self.file = self.socket.makefile("rb")
        words = {"user": "postgres", "database": "postgres"} | options
        content = b"".join(f"{k}\0{v}\0".encode() for k, v in words.items()) + b"\0"
        self.socket.sendall(struct.pack("!ii", len(content) + 8, 3 << 16) + content)
        self.pid = 0
        self.wait()

    def send(self, *messages: tuple[bytes, bytes]) -> None:
        """Send messages: type and content."""
        self.socket.sendall(b"".join(t + struct.pack("!i", len(c) + 4) + c for t, c in messages))

    def wait(self) -> list[bytes]:
        """Return the first column of the rows that the server sends, once it is ready again."""
        rows = []
        while True:
            kind, size = struct.unpack("!ci", self.file.read(5))
            content = self.file.read(size - 4)
            if kind == b"K":
                (self.pid,) = struct.unpack_from("!i", content)
            elif kind == b"D":
                (length,) = struct.unpack_from("!i", content, 2)
                rows.append(content[6 : 6 + max(length, 0)])
            elif kind == b"Z":
                return rows

    def query(self, text: str) -> list[bytes]:
        """Run a string by the simple protocol."""
        self.send((b"Q", text.encode() + b"\0"))
        return self.wait()

    def parse(self, name: str, text: str) -> None:
        """Prepare a statement."""
        self.send((b"P", f"{name}\0{text}\0".encode() + b"\0\0"), (b"S", b""))
        self.wait()

    def execute(self, name: str, value: str) -> None:
        """Run a prepared statement with one parameter."""
        given = struct.pack("!hhi", 0, 1, len(value)) + value.encode() + struct.pack("!h", 0)
        bind = b"\0" + name.encode() + b"\0" + given
        self.send((b"B", bind), (b"E", b"\0" + struct.pack("!i", 0)), (b"S", b""))
        self.wait()

    def call(self, function: int, value: str) -> None:
        """Call a function of one argument by the fast path."""
        given = struct.pack("!ihhi", function, 0, 1, len(value)) + value.encode()
        self.send((b"F", given + struct.pack("!h", 0)))
        self.wait()

    def close(self) -> None:
        """End the session."""
        self.file.close()
        self.socket.close()


@dataclass
class Poll:
    """What pg_stat_activity showed between two moments: state, text and id by pid."""

    since_ns: int
    until_ns: int
    rows: dict[int, tuple[str, str, int]]


@dataclass
class Recorded:
    """Queries and waits of a known workload, what was polled, and which backend did what."""

    major: int
    queries: Queries
    waits: Any
    polls: list[Poll]
    pids: dict[str, int]

    def codes(self, who: str) -> list[int]:
        """The codes of one backend's queries, in the order of time."""
        codes: list[int] = self.queries.code[self.queries.pid == self.pids[who]].tolist()
        return codes

    def shown(self, who: str) -> list[str]:
        """The texts of one backend's queries, in the order of time."""
        return [self.queries.table[code].text for code in self.codes(who) if code > NONE]


def poll(cluster: Cluster, polls: list[Poll], stop: threading.Event, with_id: bool) -> None:
    """Ask pg_stat_activity, again and again."""
    connection = Connection(cluster)
    id_ = "query_id" if with_id else "0"
    text = (
        "SELECT json_agg(json_build_array(pid, coalesce(state, ''), query, "
        f"coalesce({id_}, 0))) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    )
    while not stop.is_set():
        since = time.monotonic_ns()
        (row,) = connection.query(text)
        rows = {pid: (state, query, id_) for pid, state, query, id_ in json.loads(row)}
        polls.append(Poll(since, time.monotonic_ns(), rows))
        time.sleep(0.002)
    connection.close()


def later(seconds: float, connection: Connection, text: str) -> threading.Timer:
    """Run a string after a while."""
    timer = threading.Timer(seconds, connection.query, [text])
    timer.start()
    return timer


def work(connections: dict[str, Connection]) -> None:
    """Do what the tests look for: everything lasts long enough to be polled."""
    one, other = connections["one"], connections["other"]
    one.query(SLEEP)
    one.query("BEGIN")
    one.query("UPDATE one SET i = i + 1")
    timer = later(0.2, one, "COMMIT")
    other.query(LOCK)
    timer.join()
    for _ in range(3):
        other.query(READ)
    connections["prepared"].parse("p", PREPARED)
    for _ in range(3):
        connections["prepared"].execute("p", "0.1")
    connections["nested"].query("SELECT nested()")
    connections["string"].query(f"{FIRST}; {SECOND}")
    connections["aborted"].query("BEGIN")
    connections["aborted"].query("SELECT 1/0")
    time.sleep(0.1)
    connections["aborted"].query("ROLLBACK")
    connections["fastpath"].call(2626, "0.2")  # pg_sleep
    one.query("BEGIN")
    one.query("LOCK TABLE one")
    timer = later(0.2, one, "COMMIT")
    connections["relation"].query(RELATION)
    timer.join()
    connections["timeout"].query("SET statement_timeout = 100")
    connections["timeout"].query(TIMEOUT)
    leader = connections["leader"]
    for setting in (
        "parallel_setup_cost = 0",
        "parallel_tuple_cost = 0",
        "min_parallel_table_scan_size = 0",
        "max_parallel_workers_per_gather = 2",
    ):
        leader.query(f"SET {setting}")
    for _ in range(3):
        leader.query(PARALLEL)
    connections["long"].query(f"SELECT '{'x' * 5000}', pg_sleep(0.1)")
    connections["sender"].query("IDENTIFY_SYSTEM")
    connections["sender"].query(SENDER)
    time.sleep(0.1)


@pytest.fixture(scope="module", params=SERVERS, ids=lambda path: path.parent.name)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The workload, recorded and polled at the same time."""
    capture = tmp_path_factory.mktemp("queries") / "capture"
    with running_cluster(binaries=request.param) as cluster:
        major = int((cluster.data / "PG_VERSION").read_text())
        options = {"options": "-c compute_query_id=on"} if major >= 14 else {}
        connections = {"setup": Connection(cluster)}
        for text in (
            "CREATE TABLE one AS SELECT 1 AS i",
            "CREATE TABLE many AS SELECT i, repeat('x', 500) AS filler "
            "FROM generate_series(1, 60000) i",
            "VACUUM ANALYZE many",
            NESTED,
        ):
            connections["setup"].query(text)
        for name in (
            *("one", "other", "prepared", "nested", "string", "aborted", "fastpath"),
            *("relation", "timeout", "leader", "long", "before", "within"),
        ):
            connections[name] = Connection(cluster, **options)
        connections["within"].query("BEGIN")
        connections["setup"].query("SELECT pg_advisory_lock(1)")
        before = threading.Thread(target=connections["before"].query, args=[BEFORE])
        before.start()
        time.sleep(0.2)
        recorder = Recorder(
            *("--engine", "perf", "-D", cluster.data, "--with", "query", "-o", capture),
            sites=request.param == PG_BIN,
        )
        polls: list[Poll] = []
        stop = threading.Event()
        poller = threading.Thread(target=poll, args=[cluster, polls, stop, major >= 14])
        poller.start()
        connections["sender"] = Connection(cluster, replication="database", **options)
        work(connections)
        connections["setup"].query("SELECT pg_advisory_unlock(1)")
        before.join()
        connections["within"].query("COMMIT")
        stop.set()
        poller.join()
        assert recorder.end() == 0, recorder.said
        pids = {name: connection.pid for name, connection in connections.items()}
        for connection in connections.values():
            connection.close()
    found = read_queries(open_capture(capture, Naming()))
    return Recorded(major, found, waits(capture), polls, pids)


STATES = {
    "idle": NONE,
    "": NONE,
    "starting": NONE,
    "idle in transaction": IDLE_IN_TRANSACTION,
    "idle in transaction (aborted)": IDLE_IN_TRANSACTION,
}


def test_as_polled(recorded: Recorded) -> None:
    """All that pg_stat_activity shows, it shows while the capture has it; an id maybe later."""
    found, seen, without_id = recorded.queries, 0, 0
    for poll in recorded.polls:
        pids = np.array([*poll.rows], np.int32)
        before = found.at(pids, np.full(len(pids), poll.since_ns))
        after = found.at(pids, np.full(len(pids), poll.until_ns))
        # The probe comes before the store, by as long as the backend is off its CPU in between.
        since = poll.since_ns - 50_000_000
        changed = (found.time_ns >= since) & (found.time_ns <= poll.until_ns)
        sure = (before == after) & (before != UNKNOWN) & ~np.isin(pids, found.pid[changed])
        for pid, code in zip(pids[sure].tolist(), before[sure].tolist(), strict=True):
            state, text, query_id = poll.rows[pid]
            if state in STATES:
                assert code == STATES[state], (state, text, found.table[code])
            elif state == "fastpath function call":
                assert found.table[code] == Query("(fastpath function call)", 0)
            else:
                assert state == "active"
                query = found.table[code]
                assert query.text in (text, "?" if len(text) == 1023 else text)
                assert query_id in (0, query.query_id) or pid == recorded.pids["before"], text
                without_id += query_id == 0 != query.query_id
            seen += 1
    assert seen > 1000
    assert without_id < seen / 100


@pytest.mark.parametrize(
    ("who", "texts"),
    [
        ("prepared", [PREPARED]),
        ("nested", ["SELECT nested()"]),
        ("string", [f"{FIRST}; {SECOND}"]),
        ("aborted", ["BEGIN", "SELECT 1/0", "ROLLBACK"]),
        ("fastpath", ["(fastpath function call)"]),
        ("relation", [RELATION]),
        ("timeout", ["SET statement_timeout = 100", TIMEOUT]),
        ("long", ["?"]),
        ("sender", ["IDENTIFY_SYSTEM", SENDER]),
    ],
)
def test_texts(recorded: Recorded, who: str, texts: list[str]) -> None:
    """What each session ran, in this order, whatever the protocol and however it ended."""
    shown = [text for text in recorded.shown(who) if not text.startswith("(idle")]
    assert list(dict.fromkeys(shown)) == texts


def test_ids(recorded: Recorded) -> None:
    """From 14 on each statement of a string has an id of its own, a function's have none."""
    table = recorded.queries.table
    ids = {who: [table[c].query_id for c in recorded.codes(who) if c > 1] for who in recorded.pids}
    if recorded.major < 14:
        assert not any(any(given) for given in ids.values())
        return
    first, second = ids["string"]
    assert 0 not in (first, second)
    assert first != second
    assert len(set(ids["nested"])) == len(set(ids["prepared"])) == 1
    assert 0 not in (*ids["nested"], *ids["prepared"], *ids["relation"], *ids["long"])


@pytest.mark.parametrize(
    ("who", "text", "name", "seconds"),
    [
        ("one", SLEEP, "PgSleep", 0.3),
        ("other", LOCK, "transactionid", 0.2),
        ("relation", RELATION, "relation", 0.2),
        ("prepared", PREPARED, "PgSleep", 0.3),
        ("nested", "SELECT nested()", "PgSleep", 0.2),
        ("fastpath", "(fastpath function call)", "PgSleep", 0.2),
    ],
)
def test_waits(recorded: Recorded, who: str, text: str, name: str, seconds: float) -> None:
    """The waits of known length are those of the query that waited, and no other's."""
    of_query = waits_of(recorded, who, name)
    assert of_query.keys() == {text}
    assert seconds * 0.9 < of_query[text] < seconds * 1.5 + 0.05


def waits_of(recorded: Recorded, who: str, name: str) -> dict[str, float]:
    """Seconds of a backend's waits of a name by the text of the query that they began in."""
    rows = recorded.waits.query(f"pid == {recorded.pids[who]} and name == '{name}'")
    codes = recorded.queries.at(rows["pid"].to_numpy("i4"), rows["start_ns"].to_numpy("i8"))
    texts = [recorded.queries.table[code].text if code >= 0 else "unknown" for code in codes]
    sums: dict[str, float] = rows["dur_ns"].div(1e9).groupby(texts).sum().to_dict()
    return sums


def test_cold_read(recorded: Recorded) -> None:
    """The reads of a table that has no room in the buffer pool are those of its scans."""
    of_query = waits_of(recorded, "other", "DataFileRead")
    assert of_query.pop(READ) > 20 * sum(of_query.values())


def test_idle_in_transaction(recorded: Recorded) -> None:
    """Reading from the client within a transaction is idle in transaction."""
    of_query = waits_of(recorded, "aborted", "ClientRead")
    assert 0.1 < of_query["(idle in transaction)"] < 0.3
    assert waits_of(recorded, "within", "ClientRead").keys() <= {"(idle in transaction)", "(none)"}


def test_parallel_workers(recorded: Recorded) -> None:
    """A worker is in the query of its leader, and in that alone."""
    table, codes = recorded.queries.table, recorded.queries.code
    (code,) = [i for i, query in enumerate(table) if query.text == PARALLEL]
    pids = set(recorded.queries.pid[codes == code].tolist())
    workers = pids - {recorded.pids["leader"]}
    assert len(workers) >= 2
    of_workers = codes[np.isin(recorded.queries.pid, [*workers])]
    assert set(of_workers.tolist()) == {NONE, code}


def test_before(recorded: Recorded) -> None:
    """What a backend was in when the recording began is read from its memory and its title."""
    assert recorded.codes("within")[0] == IDLE_IN_TRANSACTION
    assert recorded.queries.table[recorded.codes("before")[0]] == Query(BEFORE, 0)


RUNNING, IDLE, IN_TRANSACTION = 2, 1, 3


class Stream:
    """What a server could have reported, for read_queries; times are as they are given."""

    def __init__(self, folder: Path, version: str = "15.18", backends: str = "") -> None:
        header = "pid\tseen_ns\twait\ttitle\tapplication\tquery\n"
        (folder / "backends.tsv").write_text(header + backends)
        self.capture = Capture(
            *(folder, [], load_sets()["wait-event"].rule(), version, WaitEvents(version), "sites"),
            *(SeenBackends({}, {}), 100, 1000, {"query": load_sets()["query"]}),
        )
        self.said: list[tuple[int, int, int, tuple[Any, ...]]] = []
        self.gaps: list[tuple[int, int]] = []

    def mark(self, time_ns: int, mark: int, pid: int = 7) -> None:
        """Add the birth or death of a process, or a cut."""
        self.said.append((time_ns, pid, mark, ()))

    def activity(self, time_ns: int, state: int, text: str | None = None, pid: int = 7) -> None:
        """Add a call of pgstat_report_activity."""
        given = (state, int(text is not None), (text or "").encode())
        self.said.append((time_ns, pid, STORE, given))

    def id(self, time_ns: int, query_id: int, force: int = 0, pid: int = 7) -> None:
        """Add a call of pgstat_report_query_id."""
        self.said.append((time_ns, pid, STORE, (query_id, force)))

    def read(self, monkeypatch: pytest.MonkeyPatch) -> Queries:
        """What read_queries makes of it, in two batches."""

        def transitions(files: Any, rule: Any, progress: Any) -> TransitionStream:
            parts = []
            for time_ns, pid, mark, given in sorted(self.said, key=lambda said: said[0]):
                value = np.zeros(1, np.uint32)
                if given:
                    use = next(use for use in rule.uses if len(use.fields) == len(given))
                    columns = [[v] if isinstance(v, bytes) else np.array([v]) for v in given]
                    value = use.values(columns, 1)
                thread = np.array([pid << 32 | pid], np.uint64)
                parts.append(
                    Transitions(np.array([time_ns]), thread, value, np.array([mark], np.uint8))
                )
            half = len(parts) // 2
            batches = [joined(part) for part in (parts[:half], parts[half:]) if part]
            return TransitionStream(iter(batches), gaps=self.gaps)

        monkeypatch.setattr("waitfold.queries.transitions", transitions)
        return read_queries(self.capture)


def rows(queries: Queries, pid: int = 7) -> list[tuple[int, Query | None]]:
    """One process's rows: time and query, None where it is not known."""
    mine = queries.pid == pid
    pairs = zip(queries.time_ns[mine].tolist(), queries.code[mine].tolist(), strict=True)
    return [(time_ns, queries.table[code] if code >= 0 else None) for time_ns, code in pairs]


NO_QUERY, WITHIN = Query("(none)", 0), Query("(idle in transaction)", 0)


def test_ids_of_a_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first id since the report or since it was forgotten; a function's does not override."""
    stream = Stream(tmp_path)
    stream.activity(10, RUNNING, "a; b")
    stream.id(11, 0, 1)
    stream.id(12, 5)
    stream.id(13, 5)
    stream.id(14, 77)
    stream.id(20, 0, 1)
    stream.id(21, -6)
    stream.id(30, 0, 1)
    stream.id(31, 0)
    stream.activity(40, RUNNING, "c")
    stream.id(41, 5)
    stream.activity(50, IDLE)
    found = stream.read(monkeypatch)
    assert rows(found) == [
        (10, Query("c", 5)),
        (20, Query("a; b", -6)),
        (30, Query("a; b", 0)),
        (40, Query("c", 5)),
        (50, NO_QUERY),
    ]
    asked = np.array([9, 10, 29, 31, 99], np.int64)
    codes = found.at(np.full(5, 7, np.int32), asked)
    assert [c if c < 0 else found.table[c].query_id for c in codes] == [UNKNOWN, 5, -6, 0, 0]
    assert found.at(np.array([6, 8], np.int32), np.array([50, 50])).tolist() == [UNKNOWN] * 2


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the states are one more from 18 on; a run without a text is no query."""
    for version, more in (("17.2", 0), ("18.1", 1)):
        stream = Stream(tmp_path, version)
        stream.activity(10, 2 + more, "a")
        stream.activity(20, 3 + more)
        stream.activity(30, 4 + more)
        stream.activity(40, 5 + more)
        stream.activity(50, 2 + more)
        stream.activity(60, 1 + more)
        fastpath = Query("(fastpath function call)", 0)
        assert rows(stream.read(monkeypatch)) == [
            *((10, Query("a", 0)), (20, WITHIN), (30, fastpath), (40, WITHIN), (50, NO_QUERY)),
        ]


def test_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss nothing is known until the next report, but for an id after one forgotten."""
    stream = Stream(tmp_path)
    stream.activity(10, RUNNING, "a")
    stream.activity(10, RUNNING, "b", pid=8)
    stream.activity(90, IDLE, pid=8)
    stream.activity(25, RUNNING, "c", pid=9)
    stream.activity(40, IDLE, pid=9)
    stream.id(50, 3)
    stream.id(60, 0, 1)
    stream.id(61, 4)
    stream.activity(70, IDLE)
    stream.mark(80, CUT)
    stream.gaps = [(20, 30), (28, 35)]
    found = stream.read(monkeypatch)
    assert rows(found) == [
        *((10, Query("a", 0)), (20, None), (60, Query("?", 4)), (70, NO_QUERY), (80, None)),
    ]
    assert rows(found, 8) == [(10, Query("b", 0)), (20, None), (90, NO_QUERY)]
    assert rows(found, 9) == [(25, None), (40, NO_QUERY)]


def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start by memory and title, from its birth on none."""
    title = "postgres: app shop [local] "
    lines = [
        f"1\t50\t0x0\t{title}SELECT\t-\tselect 'a  b'",
        f"2\t50\t0x0\t{title}idle in transaction\tpsql\t-",
        f"3\t50\t0x0\t{title}idle\tpsql\t-",
        f"4\t50\t0x0\t{title}UPDATE\tpsql\t-",
        "5\t50\t0x0\tpostgres: checkpointer\t-\t-",
        f"6\t500\t-\t{title}idle\tpsql\t-",
    ]
    stream = Stream(tmp_path, backends="\n".join(lines) + "\n")
    stream.activity(200, RUNNING, "select 'a\n\tb'", pid=1)
    stream.id(201, 9, pid=1)
    stream.activity(300, RUNNING, "select 'a\n\tb'", pid=1)
    stream.mark(400, FORK, pid=6)
    stream.activity(450, IDLE, pid=6)
    stream.activity(460, IN_TRANSACTION, pid=6)
    stream.mark(470, EXIT, pid=6)
    stream.mark(480, FORK, pid=6)
    found = stream.read(monkeypatch)
    text = "select 'a\n\tb'"
    assert rows(found, 1) == [(50, Query(text, 0)), (200, Query(text, 9)), (300, Query(text, 0))]
    assert rows(found, 2) == [(50, WITHIN)]
    assert rows(found, 3) == rows(found, 5) == [(50, NO_QUERY)]
    assert rows(found, 4) == []
    assert rows(found, 6) == [(400, NO_QUERY), (460, WITHIN), (480, NO_QUERY)]


def test_flight_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend was in when a flight recorder began tells nothing of what it still holds."""
    stream = Stream(tmp_path, backends="1\t50\t0x0\tpostgres: app shop [local] SELECT\t-\told\n")
    stream.capture.manifest["ring"] = "1048576"
    stream.activity(300, RUNNING, "new", pid=1)
    assert rows(stream.read(monkeypatch), 1) == [(300, Query("new", 0))]


def test_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture without the set has no queries, and nothing is known of any process."""
    stream = Stream(tmp_path)
    stream.capture.sets.clear()
    found = stream.read(monkeypatch)
    assert len(found.table) == 2
    assert found.at(np.array([7], np.int32), np.array([50])).tolist() == [UNKNOWN]
    assert found.table[NONE] == NO_QUERY
    assert found.table[IDLE_IN_TRANSACTION] == WITHIN
