"""Reading ELF without binutils: as readelf reads it, and never fooled by a damaged file."""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PG_BIN, SCRIPTS, run

SERVER = PG_BIN / "postgres"
FILES = [SERVER, Path("/bin/bash"), Path("/bin/ls")]
if "WAITFOLD_SERVERS" in os.environ:
    FILES += sorted(Path(os.environ["WAITFOLD_SERVERS"]).glob("*/bin/postgres"))

PROBES = r"""
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>
#define SEMAPHORE(name) __extension__ unsigned short demo_##name##_semaphore \
    __attribute__((unused, section(".probes")));
SEMAPHORE(constant) SEMAPHORE(reg) SEMAPHORE(memory) SEMAPHORE(symbol) SEMAPHORE(none)
struct { int first, second; } variable = { 11, -12 };
__attribute__((noinline)) int probes(int a, long b, unsigned char c)
{
    volatile int on_stack = a - 3;
    DTRACE_PROBE2(demo, constant, 0xa000021u, -7);
    DTRACE_PROBE3(demo, reg, a, b, c);
    DTRACE_PROBE1(demo, memory, on_stack);
    __asm__ volatile ("" ::: "memory");
    DTRACE_PROBE1(demo, symbol, variable.second);
    DTRACE_PROBE(demo, none);
    return on_stack;
}
int main(int argc, char **argv) { (void)argv; return probes(argc, -5, 200) + 2; }
"""
BUILDS = ["-O0", "-O2", "-O2 -no-pie", "-O2 -fno-plt -fomit-frame-pointer", "-O2 -static"]


@pytest.fixture(params=["mawk", "gawk"])
def awk(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """An environment whose awk is one or the other, and that has no binutils."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in (
        "bash",
        "od",
        "stat",
        "cat",
        "sh",
        "readlink",
        "dirname",
        "uname",
        "id",
        "head",
        "tail",
        "tr",
    ):
        (folder / name).symlink_to(str(shutil.which(name)))
    (folder / "awk").symlink_to(str(shutil.which(request.param)))
    return {"PATH": str(folder)}


def shell(
    command: str, *args: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a function of the scripts."""
    text = f'set -euo pipefail; . "{SCRIPTS}/lib.bash"; {command}'
    return run("bash", "-c", text, "test", *map(str, args), env=env)


def compiled(folder: Path, source: str, flags: str = "-O2") -> Path:
    """A program of some lines of C."""
    (folder / "program.c").write_text(source)
    program = folder / "program"
    subprocess.run(["gcc", *flags.split(), "-o", program, folder / "program.c"], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small program with probes, as most tests take it."""
    return compiled(tmp_path_factory.mktemp("elf"), PROBES)


def segments(path: Path) -> list[tuple[int, int, int]]:
    """Address, offset and size of the parts that are loaded, by readelf."""
    text = run("readelf", "-lW", path).stdout
    rows = re.findall(r"^ +LOAD +(\w+) (\w+) \w+ (\w+)", text, re.M)
    return [(int(address, 16), int(offset, 16), int(size, 16)) for offset, address, size in rows]


def offset_in(path: Path, address: int) -> int:
    """File offset of an address, by readelf."""
    (found,) = [
        address - start + offset
        for start, offset, size in segments(path)
        if start <= address < start + size
    ]
    return found


def notes_by_readelf(path: Path) -> list[list[str]]:
    """The SDT probes of a file as find_notes should print them."""
    sections = run("readelf", "-SW", path).stdout
    base = re.search(r"\.stapsdt\.base +PROGBITS +(\w+)", sections)
    rows = []
    for provider, name, place, linked, semaphore, arguments in re.findall(
        r"Provider: (.*)\n +Name: (.*)\n +Location: (\w+), Base: (\w+), Semaphore: (\w+)\n"
        r" +Arguments: (.*)\n",
        run("readelf", "-nW", path).stdout,
    ):
        moved = int(base[1], 16) - int(linked, 16) if base else 0
        address = int(place, 16) + moved
        offset = offset_in(path, address)
        counter = int(semaphore, 16) and offset_in(path, int(semaphore, 16) + moved)
        bytes_there = path.read_bytes()[offset : offset + 5]
        nop = "90" if bytes_there[:1] == b"\x90" else bytes_there.hex()
        rows.append(
            [provider, name, hex(address), hex(offset), hex(counter), nop, arguments.rstrip()]
        )
    return rows


def find_notes(path: Path, env: dict[str, str] | None = None) -> list[list[str]]:
    """What find_notes prints."""
    answer = shell('find_notes "$1"', path, env=env)
    assert answer.returncode == 0, answer.stderr
    return [
        [*row[:6], row[6].rstrip()]
        for row in (line.split("\t") for line in answer.stdout.splitlines())
    ]


def argument(text: str, *where: object) -> str:
    """What note_argument makes of an argument; or, after "no: ", why it cannot."""
    command = 'if note_argument "$@"; then echo "$REPLY"; else echo "no: $FOUND"; fi'
    return shell(command, text, *where).stdout.strip()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_notes(path: Path, awk: dict[str, str]) -> None:
    """The probes of a file are those that readelf lists, with offsets in the file."""
    assert find_notes(path, awk) == notes_by_readelf(path)


def test_notes_of_debian() -> None:
    """Debian's server has more than 70 probes, and they are read in half a second."""
    assert len(find_notes(SERVER)) > 70
    command = 'TIMEFORMAT=%U; time find_notes "$1" >/dev/null'
    assert float(shell(command, SERVER).stderr) < 0.5


@pytest.mark.parametrize("flags", BUILDS)
def test_notes_of_program(flags: str, awk: dict[str, str], tmp_path: Path) -> None:
    """Constants, registers, memory, variables and semaphores; position-independent or not."""
    path = compiled(tmp_path, PROBES, flags)
    found = find_notes(path, awk)
    assert found == notes_by_readelf(path)
    mine = {row[1]: row for row in found if row[0] == "demo"}
    assert list(mine) == ["constant", "reg", "memory", "symbol", "none"]
    assert len({row[4] for row in mine.values()} - {"0x0"}) == 5
    assert mine["constant"][6] == "4@$167772193 -4@$-7"
    assert mine["none"][6] == ""


@pytest.mark.parametrize("path", FILES, ids=str)
def test_build_id(path: Path, awk: dict[str, str]) -> None:
    """The build-id is the one that readelf reads."""
    wanted = re.search(r"Build ID: (\w+)", run("readelf", "-n", path).stdout)
    assert wanted
    assert shell('build_id_of "$1"', path, env=awk).stdout == wanted[1]


def test_no_build_id(tmp_path: Path) -> None:
    """Nothing is printed for a file without a build-id, and for one that is no ELF file."""
    path = compiled(tmp_path, "int main(void) { return 0; }", "-Wl,--build-id=none")
    for file in (path, tmp_path / "program.c", tmp_path / "nothing"):
        answer = shell('build_id_of "$1"', file)
        assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_symbols(path: Path, awk: dict[str, str]) -> None:
    """Exported variables and functions have readelf's addresses, and those imported have none."""
    text = run("readelf", "--dyn-syms", "-W", path).stdout
    defined = dict(
        reversed(row)
        for row in re.findall(
            r"^ +\d+: (\w+) .* (?:GLOBAL|WEAK) +DEFAULT +\d+ ([^@\n]+)", text, re.M
        )
    )
    names = random.Random(1).sample(sorted(defined), min(len(defined), 5))
    for name in [*names, *({"MyProc", "PgStartTime"} & set(defined))]:
        answer = shell('symbol_address "$@"', path, name, env=awk)
        assert int(answer.stdout) == int(defined[name], 16)
    for name in ("malloc", "no_such_symbol"):
        answer = shell('symbol_address "$@" || echo none', path, name, env=awk)
        assert (answer.stdout, answer.stderr) == ("none\n", "")


def test_functions(awk: dict[str, str]) -> None:
    """All functions of a stripped server begin where those who unwind its stacks are told."""
    awk |= {"ELF": str(SERVER), "DEBUG": ""}
    words = ("-v", "verb=symbols", "-v", f"word={64 << 20}", "-f", SCRIPTS / "elf.awk")
    listed = run("awk", *words, env=awk)
    assert listed.returncode == 0, listed.stdout
    starts = re.findall(r"^(\w+)\t\w+\t00\t\+0x", listed.stdout, re.M)
    frames = run("readelf", "--debug-dump=frames", SERVER).stdout
    told = {int(start, 16) for start in re.findall(r" FDE .* pc=(\w+)\.\.", frames)}
    assert {int(start, 16) for start in starts} == told > set()


def test_local_symbol(awk: dict[str, str], tmp_path: Path) -> None:
    """A symbol that is not exported is found where the file is not stripped, by its whole name."""
    path = compiled(tmp_path, "int x_hidden = 1, hidden = 2; int main(void) { return hidden; }")
    address = int(shell('symbol_address "$@"', path, "hidden", env=awk).stdout)
    offset = offset_in(path, address)
    assert path.read_bytes()[offset : offset + 4] == struct.pack("<I", 2)
    subprocess.run(["strip", path], check=True)
    assert shell('symbol_address "$@" || echo none', path, "hidden", env=awk).stdout == "none\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4@$167772193", r"\167772193:u32"),
        ("-4@$-7", r"\-7:s32"),
        ("8@$0", r"\0:u64"),
        ("-4@%eax", "%ax:s32"),
        ("1@%dil", "%di:u8"),
        ("1@%bl", "%bx:u8"),
        ("2@%r9w", "%r9:u16"),
        ("-1@%r13b", "%r13:s8"),
        ("8@%r15", "%r15:u64"),
        ("4@%ebp", "%bp:u32"),
        ("-4@-20(%rbp)", "-20(%bp):s32"),
        ("4@(%r12)", "+0(%r12):u32"),
        ("2@12(%rsp)", "+12(%sp):u16"),
        ("4@8(%rax,%rbx,4)", "no"),
        ("4@%fs:16", "no"),
        ("1@%ah", "no"),
        ("8f@%xmm0", "no"),
        ("4@16(%rip)", "no"),
        ("%eax", "no"),
        ("4@", "no"),
        ("", "no"),
        ("4@$(id)", "no"),
        ("4@variable(%rip)", "no"),
    ],
)
def test_argument(text: str, wanted: str) -> None:
    """Arguments become fetch arguments of the kernel, or are refused with the reason."""
    found = argument(text)
    assert found == wanted or wanted == "no" and re.match(r'no: .*"?.*[a-z]{3}', found), found


@pytest.mark.parametrize("flags", ["-O2", "-O2 -no-pie"])
def test_variable_as_argument(flags: str, tmp_path: Path) -> None:
    """A variable is read at the file offset as the kernel counts it from the probe."""
    path = compiled(tmp_path, PROBES, flags)
    (row,) = [row for row in find_notes(path) if row[1] == "symbol"]
    place, offset = int(row[2], 16), int(row[3], 16)
    variable = int(shell('symbol_address "$@"', path, "variable").stdout)
    assert row[6] == "-4@4+variable(%rip)"
    wanted = f"@+{variable + 4 - (place - offset)}:s32"
    assert argument(row[6], path, row[2], row[3]) == wanted
    assert argument("-4@variable+4(%rip)", path, row[2], row[3]) == wanted
    assert argument("-4@8+variable-4(%rip)", path, row[2], row[3]) == wanted
    assert "nowhere" in argument("4@nowhere(%rip)", path, row[2], row[3])


def section_header(data: bytes, path: Path, name: str) -> int:
    """Where the header of a section is in the file."""
    (number,) = re.findall(rf"\[ *(\d+)\] {re.escape(name)} ", run("readelf", "-SW", path).stdout)
    return int(struct.unpack_from("<Q", data, 40)[0]) + 64 * int(number)


def test_moved_base(program: Path, awk: dict[str, str], tmp_path: Path) -> None:
    """Notes that were linked for other addresses are moved as .stapsdt.base was."""
    data = bytearray(program.read_bytes())
    at, size = struct.unpack_from("<QQ", data, section_header(data, program, ".note.stapsdt") + 24)
    end = at + size
    while at < end:
        name_size, size, _ = struct.unpack_from("<III", data, at)
        description = at + 12 + (name_size + 3) // 4 * 4
        numbers = struct.unpack_from("<QQQ", data, description)
        struct.pack_into("<QQQ", data, description, *(number + 0x5000 for number in numbers))
        at = description + (size + 3) // 4 * 4
    (tmp_path / "moved").write_bytes(data)
    assert find_notes(tmp_path / "moved", awk) == find_notes(program, awk)


def test_changed_code(tmp_path: Path) -> None:
    """A note that points to anything but a nop is refused; the nops of five bytes are nops."""
    source = "#include <sys/sdt.h>\nint main(void) { DTRACE_PROBE(demo, only); return 123456; }"
    program, changed = compiled(tmp_path, source, "-O0"), tmp_path / "changed"
    (row,) = [row for row in find_notes(program) if row[0] == "demo"]
    at = int(row[3], 16)
    nops = ["90", "0f1f440000", "660f1f440000"]
    for code in [*nops, "0f1f440001", "6690", "cc", "c3"]:
        data = bytearray(program.read_bytes())
        data[at : at + len(code) // 2] = bytes.fromhex(code)
        changed.write_bytes(data)
        answer = shell('find_notes "$1"', changed)
        if code in nops:
            assert code in [line.split("\t")[5] for line in answer.stdout.splitlines()]
        else:
            assert (answer.returncode, answer.stdout) == (1, "")
            assert f"has no nop at {row[2]}, where its probe only should be" in answer.stderr


def test_no_section_headers(program: Path, awk: dict[str, str], tmp_path: Path) -> None:
    """Without section headers there are no notes and symbols; build-id and offsets there are."""
    data = bytearray(program.read_bytes())
    struct.pack_into("<Q", data, 40, 0)
    struct.pack_into("<HH", data, 60, 0, 0)
    bare = tmp_path / "bare"
    bare.write_bytes(data)
    for command in ('find_notes "$1"', 'symbol_address "$1" main'):
        answer = shell(command, bare, env=awk)
        assert answer.returncode == 1
        assert f'"{bare}" has no section headers: install the packaged file' in answer.stderr
    assert shell('build_id_of "$1"', bare).stdout == shell('build_id_of "$1"', program).stdout


def test_not_elf(awk: dict[str, str], tmp_path: Path) -> None:
    """Other files, empty ones and such as are not there are refused with their name."""
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("#!/bin/sh\n" * 50)
    for name in ("empty", "text", "missing"):
        path = tmp_path / name
        answer = shell('if elf "$1"; then echo yes; fi; find_notes "$1"', path, env=awk)
        assert (answer.returncode, answer.stdout) == (1, "")
        assert answer.stderr == f'test: "{path}" is not a 64-bit little-endian ELF file\n'


def damaged(data: bytes) -> Iterator[bytes]:
    """The file cut short, and with bytes changed where its tables are."""
    for size in (16, 63, 64, 200, len(data) // 2, len(data) - 1):
        yield data[:size]
    chance = random.Random(3)
    sections = struct.unpack_from("<Q", data, 40)[0]
    for _ in range(35):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 6)):
            at = chance.choice(
                [chance.randrange(16, 900), chance.randrange(sections, len(data)),
                 chance.randrange(len(data))]
            )  # fmt: skip
            changed[at] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        yield bytes(changed)


def test_damaged(program: Path, awk: dict[str, str], tmp_path: Path) -> None:
    """Whatever is wrong with a file, the answer is an answer or a sentence with its name."""
    path = tmp_path / "damaged"
    command = (
        'for verb in "notes" "build-id" "symbol main" "offset 4096" links "symbols 99999"; do\n'
        'if ask_elf "$1" $verb; then echo "ok"; else echo "no ${REPLY##*$\'\\n\'}"; fi; done'
    )
    for data in damaged(program.read_bytes()):
        path.write_bytes(data)
        answer = shell(command, path, env=awk)
        assert answer.returncode == 0
        assert not answer.stderr
        assert re.fullmatch(r"((ok|no|no (is|has|cannot) .*) ?\n){6}", answer.stdout), answer.stdout
