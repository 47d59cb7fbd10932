"""The site finder: complete, anchored by the rules, and refusing where it cannot be sure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from conftest import PG_BIN, ROOT, SCRIPTS, run
from sites_oracle import Oracle

SYMBOL = "my_wait_event_info"
SERVERS = [PG_BIN / "postgres"]
if "WAITFOLD_SERVERS" in os.environ:
    SERVERS += sorted(Path(os.environ["WAITFOLD_SERVERS"]).glob("*/bin/postgres"))

KEYS = ["build_id", "binary", "symbol", "field", "pointer", "pg_start_time", "pg_version"]

COMPILED = [
    "-O0",
    "-O1",
    "-O2",
    "-O3",
    "-Os",
    "-O0 -no-pie",
    "-O2 -no-pie -fno-pic -fno-omit-frame-pointer",
    "-O2 -fno-plt -fcf-protection=full",
    "-O2 -fPIC -Wl,--no-relax",
    "-O2 -fPIC -Wl,--no-relax -Wl,-z,pack-relative-relocs",
    "-O3 -fPIC -no-pie",
    "-O1 -mcmodel=medium",
]

SOURCE = (ROOT / "tests/data/sites.c").read_text()
SERVER = """#include <stdint.h>
int64_t PgStartTime;
const char version[] = "postgres (PostgreSQL) 15.0";
"""

# What goes on after the pointer leaves sight, and uses of it that no rule covers.
REFUSED = {
    "copied to memory": "uint32_t *copy; void f(void) { copy = my_wait_event_info; }",
    "passed on": "void g(uint32_t *); int f(void) { g(my_wait_event_info); return 1; }\n"
    "__attribute__((noinline)) void g(uint32_t *p) { *p = 1; }",
    "stored to by 8 bytes": "void f(long x) { *(volatile long *)my_wait_event_info = x; }",
    "moved": "void f(int x) { my_wait_event_info[x] = 1; }",
    "stored to behind the field": "void f(void) { my_wait_event_info[1] = 1; }",
}
# The same for versions 10 to 13, behind the functions of sites.c.
REFUSED_MEMBER = {
    "a wider store": "void f(long x) { *(long *)&MyProc->group_xid = x; }",
    "not a plain store": "void f(int x) { MyProc->wait_event_info |= x; }",
    "half of it": "void f(short x) { *(short *)&MyProc->wait_event_info = x; }",
    "of unknown origin": "void f(struct process *p) { p->wait_event_info = 0xa000044; }",
}


def shell(command: str, *args: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a function of the scripts."""
    text = f'set -euo pipefail; . "{SCRIPTS}/lib.bash"; {command} "$@"'
    return run("bash", "-c", text, "test", *map(str, args), **options)


def find(binary: Path, **options: object) -> tuple[list[list[str]], dict[str, str]]:
    """Run find_sites; the rows of its list, and what it says about the whole."""
    answer = shell("find_sites", binary, SYMBOL, **options)
    assert answer.returncode == 0, answer.stderr
    lines = [line.split("\t") for line in answer.stdout.splitlines()]
    assert lines[0] == ["store", "value", "place", "offset", "bytes", "kind", "after"]
    head = {line[0][2:]: line[1] for line in lines if line[0][0] == "#"}
    assert list(head) == KEYS
    return [line for line in lines[1:] if line[0][0] != "#"], head


def refusal(*args: object, command: str = "find_sites") -> str:
    """Run a function that must fail with one message; the message."""
    answer = shell(command, *args)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    return answer.stderr


@cache
def oracle(binary: Path) -> Oracle:
    """What the data flow says of a binary."""
    found = re.search(rb"postgres \(PostgreSQL\) (\d+)", binary.read_bytes())
    assert found
    if int(found[1]) >= 14:
        return Oracle(binary, SYMBOL)
    table = ROOT / f"probes/wait_events/pg{int(found[1])}.tsv"
    values = [line.split("\t")[0] for line in table.read_text().splitlines()[1:]]
    return Oracle(binary, "MyProc", frozenset(int(value, 16) for value in values))


def check(binary: Path, rows: list[list[str]], head: dict[str, str]) -> None:
    """Compare a list of sites with the oracle's, row by row."""
    expected = oracle(binary)
    assert int(head["field"], 16) == expected.field
    assert int(head["pointer"], 16) == expected.variable
    assert int(head["pg_start_time"], 16) == expected.elf.symbol("PgStartTime")
    assert not expected.doubtful
    assert {int(row[0], 16): row[1] for row in rows} == expected.stores
    assert len({row[2] for row in rows}) == len(rows), "two stores share a place"
    for store, _, place, offset, code, kind, after in rows:
        assert int(after, 16) == expected.after(int(store, 16))
        assert (int(place, 16), kind) == expected.anchor(int(store, 16)), store
        assert int(offset, 16) == expected.elf.offset(int(place, 16))
        assert expected.elf.bytes_at(int(place, 16), len(code) // 2).hex() == code


def compile_c(folder: Path, source: str, flags: str) -> Path:
    """Compile a program the way PostgreSQL is: no strict aliasing, symbols exported, stripped."""
    (folder / "program.c").write_text(source)
    program = folder / "program"
    flags = f"-w -fno-strict-aliasing -Wl,-E -Wl,--build-id {flags}"
    subprocess.run(
        ["gcc", *flags.split(), "-o", program, folder / "program.c"], check=True, cwd=folder
    )
    subprocess.run(["strip", program], check=True)
    return program


@pytest.mark.parametrize("awk", ["mawk", "gawk"])
@pytest.mark.parametrize("server", SERVERS, ids=lambda path: path.parent.parent.name)
def test_server_as_by_data_flow(server: Path, awk: str, tmp_path: Path) -> None:
    """In a real server the list is the oracle's, with either awk, and most places are cheap."""
    (tmp_path / "awk").symlink_to(str(shutil.which(awk)))
    rows, head = find(server, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    check(server, rows, head)
    # Some builds are optimised for size: they have one copy of the inline functions for each file.
    assert len(rows) > (100 if head["symbol"] == SYMBOL else 40)
    if server == SERVERS[0]:
        assert sum(row[5] != "store" for row in rows) > 0.8 * len(rows)
    starts = {int(row[1], 16) >> 24 for row in rows if row[1].startswith("0x")}
    assert starts <= set(range(12)), "a constant that is no class of wait events"


@pytest.mark.parametrize("flags", COMPILED)
def test_compiled_as_by_data_flow(flags: str, tmp_path: Path) -> None:
    """However a program was compiled, the list is the oracle's."""
    program = compile_c(tmp_path, SOURCE, flags)
    check(program, *find(program))


@pytest.mark.parametrize("flags", [flags for flags in COMPILED if flags[:3] not in ("-O0", "-Os")])
def test_member_as_by_data_flow(flags: str, tmp_path: Path) -> None:
    """The same for a field that is reached through MyProc, where the compiler leaves constants."""
    program = compile_c(tmp_path, SOURCE, f"-DMEMBER {flags}")
    check(program, *find(program))


@pytest.mark.parametrize("flags", ["-O0", "-Os"])
def test_member_without_evidence(flags: str, tmp_path: Path) -> None:
    """Where all constants go through one function, nothing tells which member is the field."""
    program = compile_c(tmp_path, SOURCE, f"-DMEMBER {flags}")
    assert "could not be made out" in refusal(program, SYMBOL)


@pytest.mark.parametrize("case", REFUSED_MEMBER)
def test_member_refuses(case: str, tmp_path: Path) -> None:
    """A store to the field that is no plain store of a known pointer ends in a refusal."""
    message = refusal(compile_c(tmp_path, SOURCE + REFUSED_MEMBER[case], "-DMEMBER -O2"), SYMBOL)
    assert "could not be followed" in message
    assert "first is at 0x" in message


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("flags", ["-O0", "-O2"])
def test_refuses_what_cannot_be_followed(case: str, flags: str, tmp_path: Path) -> None:
    """A pointer that is lost sight of ends in a refusal that names the address."""
    source = f"{SERVER}uint32_t *my_wait_event_info;\n{REFUSED[case]}\nint main() {{}}"
    message = refusal(compile_c(tmp_path, source, flags), SYMBOL)
    assert "could not be followed" in message
    assert "first is at 0x" in message


def test_refuses_other_files(tmp_path: Path) -> None:
    """What is no x86-64 executable with the symbol is refused with the reason."""
    file = tmp_path / "a file"
    assert "cannot read" in refusal(file, SYMBOL)
    file.write_bytes(b"")
    assert "no ELF header" in refusal(file, SYMBOL)
    file.write_text("#!/bin/sh\n")
    assert "no ELF header" in refusal(file, SYMBOL)
    whole = (PG_BIN / "postgres").read_bytes()
    file.write_bytes(whole[:18] + b"\xb7\0" + whole[20:])  # e_machine of aarch64
    assert "not for x86-64" in refusal(file, SYMBOL)
    assert "no symbol my_wait_event_infos" in refusal(PG_BIN / "postgres", "my_wait_event_infos")
    for text, reason in ((b"9.6", "from version 10 on"), (b"???", "not a PostgreSQL server")):
        name = b"postgres (PostgreSQL) "
        file.write_bytes(re.sub(re.escape(name) + b"...", name + text, whole))
        assert reason in refusal(file, SYMBOL)
    for size in (40, 100, 4096, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refusal(file, SYMBOL)


def test_verify(tmp_path: Path) -> None:
    """A list holds for its binary only: not for one with other code, nor with another build-id."""
    program = compile_c(tmp_path, SOURCE, "-O2")
    sites = tmp_path / "sites.tsv"
    sites.write_text(shell("find_sites", program, SYMBOL).stdout)
    # Bash, coreutils and awk are enough for that.
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "awk", "od", "sort", "stat", "dirname", "readlink"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    answer = shell("verify_sites", sites, program, env={"PATH": str(tmp_path / "bin")})
    assert (answer.returncode, answer.stderr) == (0, "")
    rows = [line.split("\t") for line in sites.read_text().splitlines() if line[:2] == "0x"]
    code = program.read_bytes()
    for row in (rows[0], rows[-1]):
        for at in (int(row[3], 16), int(row[3], 16) + len(row[4]) // 2 - 1):
            program.write_bytes(code[:at] + bytes([code[at] ^ 1]) + code[at + 1 :])
            assert "other code" in refusal(sites, program, command="verify_sites")
    identity = bytes.fromhex(sites.read_text().splitlines()[1].split("\t")[1])
    program.write_bytes(code.replace(identity, identity[::-1]))
    assert "build-id" in refusal(sites, program, command="verify_sites")
    assert "build-id" in refusal(sites, PG_BIN / "postgres", command="verify_sites")
