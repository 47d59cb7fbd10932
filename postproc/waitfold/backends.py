"""Who the processes were: backends.tsv, and what a process title says."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from waitfold.errors import WaitfoldError
from waitfold.events import PID_MAX

CLIENT, PARALLEL, UNKNOWN, POSTMASTER = "client backend", "parallel worker", "unknown", "postmaster"

KINDS = ("foreground", "background", "unknown")
"""Foreground processes' time is DB time: client backends, parallel workers for their leaders."""


@dataclass(frozen=True)
class Backend:
    """A process of the server: its type as pg_stat_activity.backend_type has it.

    `user` and `database` are empty where the title does not tell, and so is `application`, its
    application_name, where it has none or the capture does not know. `leader` is the pid of the
    client backend that a parallel worker works for, 0 if not known.
    """

    type: str
    user: str = ""
    database: str = ""
    application: str = ""
    leader: int = 0

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.type in (CLIENT, PARALLEL):
            return "foreground"
        return "unknown" if self.type == UNKNOWN else "background"

    @property
    def who(self) -> str:
        """`user/database`, or as much of it as is known."""
        return "/".join(filter(None, (self.user, self.database)))


@dataclass(frozen=True)
class SeenBackends:
    """What a capture's backends.tsv tells: per pid who it was, and its wait when first seen."""

    backends: dict[int, Backend]
    waits: dict[int, int]


# A client's title ends in where it comes from, [local] or host(port), and what it does:
# BackendInitialize() and InitPostgres() in 10 to 18. An address may be of IPv6.
_CLIENT = re.compile(
    r"(?P<walsender>(?:walsender|wal sender process) )?"
    r"(?P<names>.+?) (?:\[local\]|\S+\(\d+\))(?: .*)?"
)

# Fixed part of any other title -> backend_type. Sources: the init_ps_display() calls,
# bgw_name and bgw_type of 10 to 18; 10 ends most of them in "process".
_TITLES = [
    (re.compile(pattern), type_)
    for pattern, type_ in (
        (r"(autovacuum launcher|checkpointer|stats collector)( process)?", r"\1"),
        (r"(background writer|slotsync worker|walsummarizer|walwriter)", r"\1"),
        (r"autovacuum worker(?: process)?(?: +(?P<database>.+))?", "autovacuum worker"),
        (r"(archiver|io worker|logger|startup|walreceiver|walsender)( .*)?", r"\1"),
        (r"writer process", "background writer"),
        (r"wal (receiver|sender|writer) process( .*)?", r"wal\1"),
        (r"parallel worker for PID (?P<leader>\d{1,9})", PARALLEL),
        (r"logical replication launcher", r"\g<0>"),
        (r"logical replication parallel apply worker .*", "logical replication parallel worker"),
    )
]
_CELLS = {"pid": r"[0-9]{1,7}", "seen_ns": r"[0-9]{1,18}", "wait": r"-|(?:0x)?[0-9a-fA-F]{1,8}"}
"""What numbers look like in backends.tsv."""
_LOGICAL_WORKER = re.compile(r"logical replication (apply |tablesync |)worker for subscription .*")


def backend_of(title: str, major: int) -> Backend:
    """Return who a process is by its title, as of a server of this major version.

    A process of the server whose title is not known to belong to another type is a
    `background worker` of an extension. A title that does not begin with `postgres: ` (the
    postmaster's, which a process has until it sets its own) makes it `unknown`.
    """
    if not title.startswith("postgres: "):
        return Backend(UNKNOWN)
    # cluster_name, and before 11 "bgworker", stand before the last colon.
    body = title.removeprefix("postgres: ").rpartition(": ")[2].strip()
    if match := _CLIENT.fullmatch(body):
        user, _, database = match["names"].partition(" ")
        return Backend("walsender" if match["walsender"] else CLIENT, user, database)
    if match := _LOGICAL_WORKER.fullmatch(body):
        # Until 16 one type covers apply and table synchronisation.
        kind = match[1] if major >= 17 else ""
        return Backend(f"logical replication {kind}worker")
    for pattern, type_ in _TITLES:
        if match := pattern.fullmatch(body):
            more = match.groupdict()
            leader = int(more.get("leader") or 0)
            return Backend(match.expand(type_), "", more.get("database") or "", leader=leader)
    return Backend("background worker" if body else UNKNOWN)


def read_backends(path: Path, major: int, start_ns: int | None) -> SeenBackends:
    """Read backends.tsv (docs/capture.md).

    The last line about a pid holds for its title and application. A wait counts only if it was
    seen by `start_ns`: what a process did later is in the events.

    Raises
    ------
    WaitfoldError
        The file is not as docs/capture.md says; the message names the line.

    """
    backends: dict[int, Backend] = {}
    waits: dict[int, int] = {}
    columns: list[str] = []
    for number, line in enumerate(whole_lines(path), 1):
        if number == 1:
            columns = line.split("\t")
            # Those of the first recorders; later ones added some.
            if columns[:4] != ["pid", "seen_ns", "wait", "title"]:
                raise WaitfoldError(f"{path}:1: not the columns of a backends.tsv: {line[:60]!r}")
            continue
        try:
            row = dict(zip(columns, line.split("\t"), strict=True))
            if not all(re.fullmatch(_CELLS[name], row[name]) for name in _CELLS):
                raise ValueError
            pid, seen_ns, wait = int(row["pid"]), int(row["seen_ns"]), row["wait"]
            if not 0 < pid <= PID_MAX:
                raise ValueError
            if wait != "-" and start_ns is not None and seen_ns <= start_ns:
                waits.setdefault(pid, int(wait, 16))
        except ValueError:
            raise WaitfoldError(
                f"{path}:{number}: not 'pid seen_ns wait title': {line[:60]!r}"
            ) from None
        application = row.get("application", "-")
        backends[pid] = replace(
            backend_of(row["title"], major), application="" if application == "-" else application
        )
    return SeenBackends(backends, waits)


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a capture's text file but one that a crash cut short."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].split("\n")[:-1]
