"""Names of addresses: readelf and /proc/kallsyms as witnesses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import PG_BIN, run

from waitfold import symbols
from waitfold.symbols import Symbols, file_symbols, kernel_symbols, vdso_symbols

SOURCE = r"""
#include <stdio.h>
int data_of_it = 4;
static int hidden(int n) { return n * 3; }
int visible(int n) { printf("%d\n", n); return hidden(n) + data_of_it; }
int other_name(int n) __attribute__((weak, alias("visible")));
int _under(int n) __attribute__((alias("visible")));
__asm__(".text\n.globl bare\nbare:\n nop\n nop\n.type after, @function\nafter:\n ret\n");
int main(void) { return visible(2); }
"""
FLAGS = ("-O0", "-Wl,--build-id")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with program.c, and of it pie, fixed and library.so."""
    folder = tmp_path_factory.mktemp("symbols")
    (folder / "program.c").write_text(SOURCE)
    for name, flags in (
        ("pie", ["-pie", "-fPIE"]), ("fixed", ["-no-pie"]), ("library.so", ["-shared", "-fPIC"]),
    ):  # fmt: skip
        command = ["gcc", *FLAGS, *flags, "-o", folder / name, folder / "program.c"]
        subprocess.run(command, check=True)
    return folder


def build_id(path: Path) -> str:
    """Return what readelf says."""
    found = re.search(r"Build ID: (\w+)", run("readelf", "-nW", path).stdout)
    assert found
    return found[1]


def functions(path: Path) -> dict[int, set[str]]:
    """Return the functions that readelf lists, by their places in the file."""
    loads = [
        [int(word, 16) for word in match.groups()]
        for match in re.finditer(
            r"LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+) ", run("readelf", "-lW", path).stdout
        )
    ]
    found = defaultdict(set)
    for line in run("readelf", "-sW", path).stdout.splitlines():
        words = line.split()
        if len(words) < 8 or words[3] not in ("FUNC", "IFUNC") or words[6] == "UND":
            continue
        address = int(words[1], 16)
        offset = next(o for o, start, size in loads if start <= address < start + size)
        start = next(start for o, start, size in loads if o == offset)
        found[address - start + offset].add(words[7].split("@")[0])
    return found


@pytest.mark.parametrize(
    "name",
    ["pie", "fixed", "library.so", "/usr/lib/x86_64-linux-gnu/libm.so.6", PG_BIN / "postgres"],
)
def test_functions_are_those_of_readelf(
    folder: Path, name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start each function has its name, or one of those that it has there."""
    monkeypatch.setattr(symbols, "_DEBUG", tmp_path)  # these would have more names
    path = folder / name
    want = functions(path)
    places = np.array(sorted(want), np.uint64)
    names = file_symbols(str(path), build_id(path)).names(places)
    assert len(want) > 3
    for place, found in zip(places.tolist(), names, strict=True):
        assert found and found.split("@")[0] in want[place], hex(place)


def test_which_of_several_names(folder: Path) -> None:
    """A strong and global one without underscores; one without a size goes on to the next."""
    found = {name: (start, end) for start, end, name in file_symbols(str(folder / "pie"), "")}
    assert "visible" in found and not {"other_name", "_under"} & found.keys()
    assert {"hidden", "main", "data_of_it", "printf@plt"} <= found.keys()
    assert found["bare"][1] == found["after"][0] == found["bare"][0] + 2


def test_stripped_and_separate(folder: Path, tmp_path: Path) -> None:
    """The debug file that .gnu_debuglink names gives the names, if it is of the same build."""
    bare, debug = tmp_path / "bare", tmp_path / ".debug" / "bare.debug"
    debug.parent.mkdir()
    shutil.copy(folder / "pie", bare)
    subprocess.run(["objcopy", "--only-keep-debug", bare, debug], check=True)
    subprocess.run(["strip", bare], check=True)
    before = {name for _, _, name in file_symbols(str(bare), "")}
    assert "hidden" not in before
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", bare], check=True)
    found = [row for row in file_symbols(str(bare), "") if "@plt" not in row[2]]
    assert found == [row for row in file_symbols(str(folder / "pie"), "") if "@plt" not in row[2]]
    subprocess.run(["gcc", *FLAGS, "-g", "-o", debug, folder / "program.c"], check=True)
    assert {name for _, _, name in file_symbols(str(bare), "")} == before


def test_by_build_id(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug file in the host's folder of them, which is by build-id."""
    monkeypatch.setattr(symbols, "_DEBUG", tmp_path)
    bare, id_ = tmp_path / "bare", build_id(folder / "fixed")
    debug = tmp_path / ".build-id" / id_[:2] / f"{id_[2:]}.debug"
    debug.parent.mkdir(parents=True)
    shutil.copy(folder / "fixed", bare)
    subprocess.run(["objcopy", "--only-keep-debug", bare, debug], check=True)
    subprocess.run(["strip", bare], check=True)
    assert "hidden" in {name for _, _, name in file_symbols(str(bare), id_)}


def test_another_build_is_not_read(folder: Path) -> None:
    """A file that was replaced since gives no names, and nothing gives none either."""
    assert len(file_symbols(str(folder / "pie"), build_id(folder / "pie"))) > 5
    assert len(file_symbols(str(folder / "pie"), build_id(folder / "fixed"))) == 0
    for path in ("/nowhere", "/dev/zero", str(folder), str(folder / "program.c"), "[heap]", ""):
        assert len(file_symbols(path, "")) == 0
        assert file_symbols(path, "").names(np.array([1], np.uint64)) == [None]


def test_damaged_files(folder: Path, tmp_path: Path) -> None:
    """Whatever stands in a file, there are names or none."""
    content = (folder / "pie").read_bytes()
    path = tmp_path / "bad"
    rng = np.random.default_rng(5)
    for size in rng.integers(0, len(content), 100).tolist():
        path.write_bytes(content[:size])
        file_symbols(str(path), "")
    headers = np.frombuffer(content[40:48], np.uint64)[0]  # where the sections' headers are
    for _ in range(300):
        bad = bytearray(content)
        for _ in range(4):
            where = rng.choice([rng.integers(64), rng.integers(headers, len(bad))])
            bad[where] = rng.integers(256)
        path.write_bytes(bad)
        list(file_symbols(str(path), ""))


def test_kernel() -> None:
    """Functions of /proc/kallsyms at their addresses; moved as far as the kernel was."""
    lines = [line.split() for line in Path("/proc/kallsyms").read_text().splitlines()]
    at = defaultdict(set)
    for address, _, name, *_ in lines:
        at[int(address, 16)].add(name)
    text = next((int(a, 16) for a, _, name, *_ in lines if name == "_text"), 0)
    if not text:
        pytest.skip("kernel addresses are hidden here")
    places = [a for a, names in at.items() if any(n.startswith("__x64_sys_") for n in names)]
    found = kernel_symbols("", text).names(np.array(places, np.uint64))
    assert len(places) > 100
    assert all(name in at[place] for place, name in zip(places, found, strict=True))
    inside = np.array(places, np.uint64) + np.uint64(0x200001)
    assert kernel_symbols("", text + 0x200000).names(inside) == found
    assert len(kernel_symbols("00" * 20, text)) == 0


def test_vdso() -> None:
    """The running kernel's."""
    names = {name for _, _, name in vdso_symbols()}
    assert "__vdso_clock_gettime" in names


def test_nothing() -> None:
    """No symbols name nothing."""
    assert Symbols().names(np.array([0, 5], np.uint64)) == [None, None]
    assert list(Symbols()) == []
