"""Process titles as types of pg_stat_activity, and backends.tsv."""

from pathlib import Path

import pytest

from waitfold.backends import Backend, backend_of, read_backends
from waitfold.errors import WaitfoldError

# (major, title, type, user/database): read from running servers next to what
# pg_stat_activity.backend_type said, but for those of 10, 13 and 17, which are from the source.
TITLES = [
    (14, "postgres: main: autovacuum launcher                 ", "autovacuum launcher", ""),
    (14, "postgres: main: stats collector ", "stats collector", ""),
    (14, "postgres: main: logical replication launcher  ", "logical replication launcher", ""),
    (
        14,
        "postgres: main: logical replication worker for subscription 16399  ",
        "logical replication worker",
        "",
    ),
    (
        14,
        "postgres: main: logical replication worker for subscription 16399 sync 16394  ",
        "logical replication worker",
        "",
    ),
    (14, "postgres: main: walsender postgres [local] START_REPLICATION ", "walsender", "postgres"),
    (14, "postgres: main: postgres src [local] SELECT         ", "client backend", "postgres/src"),
    (14, "postgres: main: parallel worker for PID 7591        ", "parallel worker", ""),
    (14, "postgres: main: background writer                   ", "background writer", ""),
    (14, "postgres: checkpointer ", "checkpointer", ""),
    (14, "postgres: walwriter ", "walwriter", ""),
    (
        16,
        "postgres: logical replication apply worker for subscription 16401",
        "logical replication worker",
        "",
    ),
    (
        16,
        "postgres: logical replication parallel apply worker for subscription 16401",
        "logical replication parallel worker",
        "",
    ),
    (
        18,
        "postgres: main: logical replication apply worker for subscription 16401  ",
        "logical replication apply worker",
        "",
    ),
    (
        18,
        "postgres: main: logical replication tablesync worker for subscription 16401 sync 16396  ",
        "logical replication tablesync worker",
        "",
    ),
    (18, "postgres: main: walsender postgres src [local] COPY ", "walsender", "postgres/src"),
    (18, "postgres: main: io worker 0                       ", "io worker", ""),
    (17, "postgres: slotsync worker ", "slotsync worker", ""),
    (17, "postgres: walsummarizer ", "walsummarizer", ""),
    (17, "postgres: startup recovering 000000010000000000000005", "startup", ""),
    (17, "postgres: walreceiver streaming 0/3000060", "walreceiver", ""),
    (17, "postgres: archiver last was 000000010000000000000001", "archiver", ""),
    (13, "postgres: autovacuum worker shop", "autovacuum worker", "shop"),
    (17, "postgres: app shop 10.1.2.3(50234) idle in transaction", "client backend", "app/shop"),
    (17, "postgres: app shop ::1(50234) SELECT waiting", "client backend", "app/shop"),
    (17, "postgres: app the shop [local] authentication", "client backend", "app/the shop"),
    (
        17,
        "postgres: 17/main: autovacuum worker [local] idle",
        "client backend",
        "autovacuum/worker",
    ),
    (17, "postgres: pg_cron launcher ", "background worker", ""),
    (10, "postgres: checkpointer process   ", "checkpointer", ""),
    (10, "postgres: writer process   ", "background writer", ""),
    (10, "postgres: wal writer process   ", "walwriter", ""),
    (10, "postgres: wal sender process repl 10.1.2.3(4711) streaming 0/3", "walsender", "repl"),
    (10, "postgres: autovacuum worker process   shop", "autovacuum worker", "shop"),
    (10, "postgres: bgworker: parallel worker for PID 123  ", "parallel worker", ""),
    (
        10,
        "postgres: main: bgworker: logical replication launcher",
        "logical replication launcher",
        "",
    ),
    (15, "/usr/lib/postgresql/15/bin/postgres -D /var/lib/postgresql/15/main", "unknown", ""),
    (15, "postgres: ", "unknown", ""),
    (15, "", "unknown", ""),
]


@pytest.mark.parametrize(("major", "title", "type_", "who"), TITLES)
def test_title(major: int, title: str, type_: str, who: str) -> None:
    """A title gives the type that pg_stat_activity shows, and whose session it is."""
    backend = backend_of(title, major)
    assert (backend.type, backend.who) == (type_, who)


def _write(folder: Path, *lines: str) -> Path:
    path = folder / "backends.tsv"
    path.write_text("".join(f"{line}\n" for line in ("pid\tseen_ns\twait\ttitle", *lines)))
    return path


def test_last_title_and_first_wait(tmp_path: Path) -> None:
    """Of several lines about a pid the last has the title, the first the wait."""
    path = _write(
        tmp_path,
        "7\t100\t0x6000000\t/usr/bin/postgres",
        "7\t105\t0x0\tpostgres: app shop [local] idle",
    )
    seen = read_backends(path, 15, 110)
    assert seen.backends == {7: Backend("client backend", "app", "shop")}
    assert seen.waits == {7: 0x06000000}


def test_wait_that_does_not_count(tmp_path: Path) -> None:
    """A wait that was not read, or read after the window began, is nobody's first wait."""
    path = _write(tmp_path, "7\t100\t-\tpostgres: walwriter", "8\t111\t0x1\tpostgres: checkpointer")
    assert read_backends(path, 15, 110).waits == {}
    assert read_backends(path, 15, None).waits == {}


def test_cut_short(tmp_path: Path) -> None:
    """A last line without its end is left out."""
    path = _write(tmp_path, "7\t100\t-\tpostgres: walwriter")
    path.write_text(path.read_text() + "8\t1")
    assert list(read_backends(path, 15, None).backends) == [7]


@pytest.mark.parametrize("line", ["7\t100\t-", "x\t100\t-\tt", "7\t100\tzz\tt", ""])
def test_damaged(tmp_path: Path, line: str) -> None:
    """A line that is none is an error with its number."""
    with pytest.raises(WaitfoldError, match=r"backends\.tsv:2: not 'pid seen_ns wait title'"):
        read_backends(_write(tmp_path, line), 15, 200)
