"""Names of addresses: readelf and /proc/kallsyms as witnesses; from a capture as from the files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import PG_BIN, ROOT, SCRIPTS, Cluster, Recorder, run, waitfold

from waitfold import symbols
from waitfold.errors import WaitfoldError
from waitfold.perfdata import PerfData
from waitfold.profile import read_traces
from waitfold.symbols import (
    CapturedSymbols,
    Symbols,
    captured_symbols,
    file_symbols,
    kernel_symbols,
    vdso_symbols,
)

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


# A process that stands for a server: it runs code of libraries, and such as has no file.

HOST = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static void run(const char *path)
{
    void (*work)(void) = (void (*)(void))dlsym(dlopen(path, RTLD_NOW), "work");
    work();
}
int main(int argc, char **argv)
{
    char code[] = "\x89\xf9\xff\xc9\x75\xfc\xc3", name[64];
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FILE *map;
    memcpy(page + 64, code, sizeof code);
    snprintf(name, sizeof name, "/tmp/perf-%d.map", getpid());
    map = fopen(name, "w");
    fprintf(map, "%lx 7 jitted code\n", (long)page + 64);
    fclose(map);
    getchar();
    for (int i = 1; i < argc - 1; i++)
        run(argv[i]);
    ((void (*)(int))(page + 64))(100000000);
    if (fork() == 0) {
        run(argv[argc - 1]);
        return 0;
    }
    wait(NULL);
    puts("done");
    fflush(stdout);
    getchar();
    return unlink(name);
}
"""
LIBRARY = r"""
#include <time.h>
volatile unsigned long sink;
__attribute__((noinline)) static void inner_NAME(void)
{
    struct timespec now;
    clock_t end = clock() + CLOCKS_PER_SEC / 20;
    while (clock() < end)
        for (int i = 0; i < 30000; i++)
            if (sink++ % 100 == 0) clock_gettime(CLOCK_MONOTONIC, &now);
}
void work(void) { inner_NAME(); sink++; }
"""
KINDS = ("plain", "separate", "unnumbered", "deleted", "hidden", "gone")


@dataclass(frozen=True)
class Recorded:
    """A capture of such a process, which still runs, and names by this host's files."""

    capture: Path
    process: subprocess.Popen[str]
    by_files: set[str]


def write_symbols(capture: Path, pid: int, awk: str = "awk") -> subprocess.CompletedProcess[str]:
    """Write a capture's symbols by the scripts."""
    shutil.rmtree(capture / "symbols", ignore_errors=True)
    folder = capture.parent / awk
    folder.mkdir(exist_ok=True)
    (folder / "awk").unlink(missing_ok=True)
    (folder / "awk").symlink_to(str(shutil.which(awk)))
    command = f'. {SCRIPTS}/lib.bash; . {SCRIPTS}/symbols.bash; POSTMASTER=$1; write_symbols "$2"'
    script = f"PATH={folder}:$PATH; set -euo pipefail; {command}"
    answer = run("bash", "-c", script, "test", str(pid), capture)
    assert answer.returncode == 0, answer.stderr
    return answer


def names_of(capture: Path, captured: CapturedSymbols | None) -> set[str]:
    """Return the names of all frames of its profile."""
    data = PerfData(capture / "perf.data")
    return set(read_traces(data, data.events, captured).frames.names)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Return such a capture; what was recorded is removed from this host but for the process."""
    folder = tmp_path_factory.mktemp("recorded")
    capture, files = folder / "capture", folder / "files"
    (files / "hidden").mkdir(parents=True)
    capture.mkdir()
    (folder / "host.c").write_text(HOST)
    flags = ["gcc", "-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
    subprocess.run([*flags, "-o", files / "host", folder / "host.c", "-ldl"], check=True)
    for kind in KINDS:
        (folder / "library.c").write_text(LIBRARY.replace("NAME", kind))
        build_id = "none" if kind == "unnumbered" else "sha1"
        path = files / f"{kind}.so"
        subprocess.run(
            [*flags, "-shared", "-fPIC", f"-Wl,--build-id={build_id}", "-o", path,
             folder / "library.c"], check=True,
        )  # fmt: skip
    debug = files / ".debug" / "separate.debug"
    debug.parent.mkdir()
    subprocess.run(["objcopy", "--only-keep-debug", files / "separate.so", debug], check=True)
    subprocess.run(["strip", files / "separate.so"], check=True)
    link = f"--add-gnu-debuglink={debug}"
    subprocess.run(["objcopy", link, files / "separate.so"], check=True)
    # What it has below `hidden` nobody else sees there.
    enter = 'mount -t tmpfs none "$1/hidden"; mv "$1/hidden.so" "$1/hidden"; cd "$1"; exec "${@:2}"'
    libraries = [files / ("hidden/hidden.so" if k == "hidden" else f"{k}.so") for k in KINDS]
    process = subprocess.Popen(
        ["unshare", "-m", "bash", "-c", enter, "bash", files, files / "host", *libraries],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        while (files / "hidden.so").exists() or b"host" not in Path(
            f"/proc/{process.pid}/comm"
        ).read_bytes():
            time.sleep(0.01)
        perf = subprocess.Popen(
            ["perf", "record", "-q", "-o", capture / "perf.data", "-BN", "-k", "CLOCK_MONOTONIC",
             "-e", "task-clock", "-F", "499", "--call-graph", "fp", "-p", str(process.pid),
             "--", "sh", "-c", "echo recording; exec sleep 60"], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert perf.stdout is not None and perf.stdout.readline() == "recording\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        perf.terminate()
        perf.communicate()
        shutil.copy(files / "plain.so", files / "new")
        (files / "new").rename(files / "deleted.so")
        yield Recorded(capture, process, names_of(capture, None))
    finally:
        if process.poll() is None:
            process.communicate("\n")


@pytest.mark.parametrize("awk", ["mawk", "gawk"])
def test_a_capture_names_what_the_files_name(recorded: Recorded, awk: str) -> None:
    """Of files stripped, deleted, without build-id, in a container, mapped by the dead, of none."""
    assert write_symbols(recorded.capture, recorded.process.pid, awk).stderr == ""
    names = names_of(recorded.capture, captured_symbols(recorded.capture))
    assert {f"inner_{kind}" for kind in KINDS} <= names
    assert {"work", "main", "jitted code", "__vdso_clock_gettime"} <= names
    named = {name for name in recorded.by_files if not name.startswith("[")}
    assert "inner_plain" in named and "inner_hidden" not in named
    # A file that took another's place misleads the host alone.
    assert named - {"inner_plain"} <= names


def test_files_are_told_apart(tmp_path: Path) -> None:
    """By build-id, or inode and name, or path: and where several may be it, none is taken."""
    lines = [
        "file\tinode\tpath",
        "aa\t5\t/lib/x.so (deleted)",
        "bb\t6\t/lib/x.so",
        "bb\t7\t/in/x.so",
    ]
    (tmp_path / "index.tsv").write_text("\n".join([*lines, ""]))
    for name in ("aa", "bb"):
        (tmp_path / name).write_text(f"# load\t0x1000 0x401000 0x100\n401010\t4\t12\t{name}\n")
    captured = CapturedSymbols(tmp_path)
    for path, inode, build_id, want in (
        ("/lib/x.so", 0, "aa", "aa"), ("/else", 0, "bb", "bb"), ("/lib/x.so", 6, "cc", None),
        ("/lib/x.so", 5, "", "aa"), ("/root/in/x.so (deleted)", 6, "", "bb"),
        ("/y.so", 6, "", None), ("/in/x.so", 0, "", "bb"), ("/lib/x.so", 0, "", None),
        ("/nowhere", 0, "", None),
    ):  # fmt: skip
        found = captured.symbols(path, inode, build_id).names(np.array([0x1012], np.uint64))
        assert found == [want], (path, inode, build_id)


def test_captured_symbols_that_are_damaged(recorded: Recorded, tmp_path: Path) -> None:
    """Each file is read whole or refused by its name and line; cut short it is refused."""
    write_symbols(recorded.capture, recorded.process.pid)
    rng = np.random.default_rng(6)
    index = (recorded.capture / "symbols" / "index.tsv").read_text()
    for row in index.splitlines()[1:]:
        name, inode, path = row.split("\t")
        content = (recorded.capture / "symbols" / name).read_bytes()
        bad = [content[:-1]]
        for _ in range(8):
            changed = bytearray(content)
            for _ in range(3):
                changed[rng.integers(len(content))] = rng.choice([9, 10, 35, rng.integers(256)])
            bad.append(bytes(changed))
        (tmp_path / "index.tsv").write_text(index)
        for i, data in enumerate(bad):
            (tmp_path / name).write_bytes(data)
            try:
                list(CapturedSymbols(tmp_path).symbols(path, int(inode), ""))
                assert i > 0
            except WaitfoldError as error:
                assert re.match(f"{tmp_path / name}: line [0-9]+ is damaged or cut", str(error))
    for bad_index in ("", index[:-1], index.replace("kernel", "../kernel"), "file\n"):
        (tmp_path / "index.tsv").write_text(bad_index)
        with pytest.raises(WaitfoldError, match=r"index\.tsv: line [0-9]+ is damaged"):
            CapturedSymbols(tmp_path)
    (tmp_path / "index.tsv").unlink()
    with pytest.raises(WaitfoldError, match=r"index\.tsv: No such file"):
        CapturedSymbols(tmp_path)


def test_the_server_has_ended(recorded: Recorded) -> None:
    """What it had mapped is known from perf.data, and found where it is the same file still."""
    recorded.process.communicate("\n")
    assert write_symbols(recorded.capture, recorded.process.pid).stderr == ""
    names = names_of(recorded.capture, captured_symbols(recorded.capture))
    assert {"inner_plain", "inner_separate", "inner_gone", "__vdso_clock_gettime"} <= names
    assert not {"inner_deleted", "inner_hidden"} & names


def test_a_server_in_a_clean_folder(cluster: Cluster, tmp_path: Path) -> None:
    """Where there is neither PostgreSQL nor perf a capture folds to the same, all but its paths."""
    capture = tmp_path / "capture"
    recorder = Recorder("--with", "oncpu,offcpu", "-D", cluster.data, "-o", capture)
    subprocess.run(cluster.pgbench("-T", "1", "-c", "2", "-C"), check=True, capture_output=True)
    assert recorder.end() == 0, recorder.said
    here = waitfold("fold", capture, "--kind", "wall")
    assert here.returncode == 0, here.stderr
    assert "ServerLoop" in here.stdout or "PostgresMain" in here.stdout
    hide = [*Path("/usr/lib").glob("postgresql"), Path("/usr/lib/debug"), capture]
    script = """
        copy=$1; shift
        mkdir -p "$copy/empty"; cp -r "$1" "$copy/clean"
        mount --bind /dev/null /proc/kallsyms; mount --bind /dev/null "$(type -P perf)"
        for folder; do [ ! -d "$folder" ] || mount --bind "$copy/empty" "$folder"; done
        exec "$WAITFOLD" fold "$copy/clean" --kind wall
    """
    environment = {**os.environ, "WAITFOLD": str(ROOT / ".venv/bin/waitfold")}
    there = run("unshare", "-m", "bash", "-ec", script, "x", tmp_path, *hide[::-1], env=environment)
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout
    # By this host's files the same functions have the same names.
    shutil.rmtree(capture / "symbols")
    files = waitfold("fold", capture, "--kind", "wall").stdout
    frames = [set(re.split("[;\n]", text)) for text in (here.stdout, files)]
    mine, theirs = ({f for f in each if not re.match(r"\[| ", f)} for each in frames)
    assert mine == theirs
