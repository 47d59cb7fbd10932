"""waitfold-doctor: every line in both of its states, made for real wherever that can be done."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import SCRIPTS, TRACEFS, Cluster, known_sites, run

pytestmark = pytest.mark.usefixtures("nothing_left")
DOCTOR = SCRIPTS / "waitfold-doctor"
NOBODY = ["setpriv", "--reuid", "65534", "--clear-groups"]
# What the tests have seen of each line, for the last of them.
SEEN: dict[str, set[bool]] = {}
# What a state is made with, inside a mount namespace of the run's own.
TOOLS = r"""
set -e
fake() { f=$(mktemp -p "$W"); echo "$2" >"$f"; chmod "${3-644}" "$f"; mount --bind "$f" "$1"; }
folder() { mount -t tmpfs none "$1"; mkdir -p "$1/$2"; }
cpu() {
    cd /sys/devices/system/cpu
    [ -n "$mounted" ] || mount -t tmpfs none . && cd . && mounted=yes
    cd /sys/devices/system/cpu; mkdir -p "$(dirname "$1")"; echo "$2" >"$1"; cd /
}
idle() { for f in latency:$1 disable:$2; do cpu "cpu0/cpuidle/state1/${f%:*}" "${f#*:}"; done; }
lockdown() { folder /sys/kernel/security; echo "$1" >/sys/kernel/security/lockdown; }
"""


def where(setup: str, folder: Path, *command: str | Path) -> list[str | Path]:
    """The command line that runs a command where `setup` has been done."""
    if not setup:
        return list(command)
    return [
        "unshare",
        "--mount",
        "bash",
        "-c",
        f'W="{folder}"\n{TOOLS}{setup}\nexec "$@"',
        "-",
        *command,
    ]


def ask(
    folder: Path,
    *args: str | Path,
    setup: str = "",
    prefix: Sequence[str | Path] = (),
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run the doctor where `setup` has been done, behind the commands in `prefix`."""
    answer = run(*where(setup, folder, *prefix, DOCTOR, *args), cwd="/", **options)
    assert answer.stderr == ""
    assert answer.returncode in (0, 1)
    return answer


def diagnose(folder: Path, *args: str | Path, **options: Any) -> dict[str, Any]:
    """The doctor's JSON, its checks by name; without arguments of no server, which is fast."""
    answer = ask(folder, "--json", *(args or ("-D", "/nonexistent")), **options)
    result: dict[str, Any] = json.loads(answer.stdout)
    assert (answer.returncode == 0) == (result["auto"] is not None)
    result["checks"] = {check["name"]: check for check in result["checks"]}
    return result


def check(result: dict[str, Any], name: str, ok: bool, words: str) -> None:
    """Assert what the doctor says of one thing."""
    said = result["checks"][name]
    assert said["ok"] is ok, said
    assert (said["mend"] is None) is ok
    SEEN.setdefault(name, set()).add(ok)
    text = f"{said['found']} {said['mend']}"
    assert all(word in text for word in words.split()), text


def path_without(folder: Path, *missing: str) -> dict[str, str]:
    """An environment without some tools."""
    path = folder / "bin"
    path.mkdir()
    for place in ("/bin", "/usr/bin", "/usr/sbin", "/sbin"):
        for program in Path(place).iterdir():
            if program.name not in missing and not (path / program.name).is_symlink():
                (path / program.name).symlink_to(program)
    return {"PATH": str(path)}


## The host

# How a state is made, what the doctor runs behind, and of each line its verdict and words of it.
Lines = dict[str, tuple[bool, str]]
HOSTS: dict[str, tuple[str, Sequence[str], Lines]] = {
    "good": (
        """
        lockdown '[none] integrity confidentiality'
        fake /proc/sys/kernel/ftrace_enabled 1
        folder /sys/bus/event_source/devices cpu
        fake /sys/devices/system/clocksource/clocksource0/current_clocksource tsc
        fake /sys/kernel/mm/transparent_hugepage/enabled 'always [madvise] never'
        cpu cpufreq/boost 0
        idle 133 1
        """,
        [],
        {
            "machine": (True, "x86_64"),
            "kernel": (True, f"Linux {platform.release()}"),
            "lockdown": (True, "[none]"),
            "rights": (True, "user root with CAP_PERFMON"),
            "paranoid": (True, "does not bind us"),
            "tracefs": (True, str(TRACEFS)),
            "uprobes": (True, "uprobe_events"),
            "instances": (True, "instances"),
            "pids": (True, "host's"),
            "perf": (True, "perf version --control"),
            "slots": (True, "of 4 breakpoint"),
            "trace-cmd": (True, "trace-cmd version"),
            "binutils": (True, "objdump and readelf"),
            "disk": (True, "are free in /"),
            "counters": (True, "by the CPU"),
            "sched": (True, "tracepoints --with offcpu"),
            "clock": (True, "tsc"),
            "turbo": (True, "is off"),
            "idle": (True, "no idle states"),
            "thp": (True, "madvise"),
            "timer-list": (True, "CLOCK_MONOTONIC"),
        },
    ),
    "bad": (
        """
        lockdown 'none integrity [confidentiality]'
        fake /proc/sys/kernel/ftrace_enabled 1
        mount -o remount,bind,ro /proc/sys/kernel/ftrace_enabled
        mount -o remount,bind,ro /sys/kernel/tracing
        folder /sys/bus/event_source/devices
        fake /sys/devices/system/clocksource/clocksource0/current_clocksource hpet
        fake /sys/kernel/mm/transparent_hugepage/enabled '[always] madvise never'
        cpu cpufreq/boost 1
        idle 133 0
        mount -t tmpfs -o size=1m none /mnt; cd /mnt
        """,
        [],
        {
            "lockdown": (False, "[confidentiality] boot without"),
            "uprobes": (False, "cannot be written"),
            "instances": (False, "remount,rw"),
            "trace-cmd": (False, "may not write --engine ftrace"),
            "disk": (False, "1 MiB -o"),
            "counters": (False, "no hardware counters task-clock"),
            "clock": (False, "hpet echo tsc"),
            "turbo": (False, "turbo is on echo 0"),
            "idle": (False, "133 us cpupower"),
            "thp": (False, "echo madvise"),
        },
    ),
    "hybrid CPU": (
        """
        folder /sys/bus/event_source/devices cpu_core
        cpu intel_pstate/no_turbo 1
        mount --bind /tmp /mnt; mount -o remount,bind,ro /mnt; cd /mnt
        """,
        [],
        {
            "counters": (True, "by the CPU"),
            "turbo": (True, "turbo is off"),
            "idle": (True, "no idle states"),
            "disk": (False, "nothing can be written"),
        },
    ),
    "pstate": ("cpu intel_pstate/no_turbo 0", [], {"turbo": (False, "turbo is on echo 1")}),
    "nothing told": (
        "umount /sys/kernel/tracing; umount -R /sys/kernel/debug 2>&1 || :\n"
        "folder /sys/devices/system; folder /proc/sys/kernel; folder /sys/kernel/mm",
        [],
        {
            "tracefs": (False, "not mounted mount -t tracefs"),
            "paranoid": (False, "CONFIG_PERF_EVENTS"),
            "clock": (False, "not told"),
            "turbo": (False, "not told"),
            "thp": (True, "none"),
        },
    ),
    "empty tracefs": (
        "folder /sys/kernel/tracing README",
        [],
        {
            "uprobes": (False, "no /sys/kernel/tracing/uprobe_events CONFIG_UPROBE_EVENTS"),
            "instances": (False, "no instance"),
            "sched": (False, "no tracepoint sched:sched_switch CONFIG_EVENT_TRACING"),
        },
    ),
    "i686": ("", ["setarch", "i686"], {"machine": (False, "i686 use an x86-64")}),
    "old kernel": (
        "",
        ["setarch", "--uname-2.6"],
        {
            "kernel": (False, "Linux 2.6 5.4 or later"),
            "optimised": (False, "Linux 6.18 or later"),
        },
    ),
    "user namespace": (
        "",
        ["unshare", "--user", "--map-root-user"],
        {"rights": (False, "user namespace root of the host")},
    ),
    "without capabilities": (
        "",
        ["setpriv", "--bounding-set", "-perfmon,-sys_admin"],
        {"rights": (False, "without CAP_PERFMON the capabilities PERFMON")},
    ),
    "pid namespace": (
        "",
        ["unshare", "--pid", "--fork", "--mount-proc"],
        {"pids": (False, "--engine perf")},
    ),
    "nobody": (
        "fake /proc/sys/kernel/perf_event_paranoid 2",
        NOBODY,
        {
            "rights": (False, "user nobody sudo"),
            "paranoid": (True, "-m mem"),
            "tracefs": (False, "may not be looked at by user nobody as root"),
            "uprobes": (False, "may not be looked at by user nobody as root"),
            "slots": (True, "of 4 breakpoint"),
            "timer-list": (False, "not told as root"),
        },
    ),
    "nobody on Debian": (
        "fake /proc/sys/kernel/perf_event_paranoid 3",
        NOBODY,
        {"paranoid": (False, "is 3 sysctl")},
    ),
}


@pytest.mark.parametrize("host", HOSTS)
def test_host(host: str, tmp_path: Path) -> None:
    """The lines about a host in one of its states, with what mends it."""
    setup, prefix, lines = HOSTS[host]
    result = diagnose(tmp_path, setup=setup, prefix=prefix)
    for name, (ok, words) in lines.items():
        check(result, name, ok, words)


def fake_tools(folder: Path, **programs: str) -> dict[str, str]:
    """An environment with shell scripts in place of some tools."""
    environment = path_without(folder, *programs)
    for name, text in programs.items():
        script = folder / "bin" / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    return environment


@pytest.mark.parametrize("release", ["6.17.9-generic", "6.18.0-rc1", "7.0.0"])
def test_kernels(release: str, tmp_path: Path) -> None:
    """From Linux 6.18 on a probe on a 5-byte nop is a call."""
    env = fake_tools(tmp_path, uname=f'[ "$1" = -r ] && echo {release} || exec /bin/uname "$@"')
    check(diagnose(tmp_path, env=env), "optimised", release[:4] != "6.17", release)


@pytest.mark.parametrize(
    ("tool", "name", "words"),
    [
        ("perf", "perf", "no perf linux-perf"),
        ("perf", "slots", "no perf linux-perf"),
        ("trace-cmd", "trace-cmd", "no trace-cmd --engine ftrace"),
        ("objdump", "binutils", "no objdump install --sites"),
        ("readelf", "binutils", "no readelf install --sites"),
    ],
)
def test_without_a_tool(tool: str, name: str, words: str, tmp_path: Path) -> None:
    """A tool that is not there is named, and what installs it."""
    check(diagnose(tmp_path, env=path_without(tmp_path, tool)), name, False, words)


def test_perfs_that_will_not_do(tmp_path: Path) -> None:
    """A perf that does not run, an old one, and a kernel that gives no breakpoints."""
    for text, name, words in (
        ("echo WARNING: perf not found for kernel 9; exit 2", "perf", "not run: for kernel 9"),
        ("echo perf version 5.4", "perf", "5.4 has no record --control 5.15"),
        (
            "case $1 in stat) echo Error: >&2; echo syscall returned with 13 >&2; exit 1;; esac;"
            'exec /usr/bin/perf "$@"',
            "slots",
            "no breakpoint: 13 debug registers",
        ),
    ):
        shutil.rmtree(tmp_path / "bin", ignore_errors=True)
        check(diagnose(tmp_path, env=fake_tools(tmp_path, perf=text)), name, False, words)


@contextlib.contextmanager
def watchpoint(address: str) -> Iterator[bool]:
    """A breakpoint slot of every CPU that somebody else has taken; whether there was one."""
    command = ["perf", "stat", "-a", "-e", f"mem:{address}/4:w:u", "--", "sh", "-c", "echo; read _"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as holder:
        assert holder.stdout
        try:
            yield holder.stdout.readline() == b"\n"
        finally:
            holder.communicate(b"\n")


def test_slots_that_are_taken(tmp_path: Path) -> None:
    """Breakpoints are opened, so what others hold is not promised."""
    with contextlib.ExitStack() as held:
        addresses = iter(("0x1000", "0x2000", "0x3000", "0x4000", "0x5000"))
        assert held.enter_context(watchpoint(next(addresses)))
        found = diagnose(tmp_path)["checks"]["slots"]["found"]
        assert "1" <= found[0] <= "3"
        while held.enter_context(watchpoint(next(addresses))):
            pass
        result = diagnose(tmp_path)
        check(result, "slots", False, "0 of 4 breakpoint slots gdb,perf")


## The server

PROGRAM = """
#include <stdint.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/sdt.h>
#ifdef NOP5
#undef _SDT_NOP
#define _SDT_NOP .nops 5
#endif
static uint32_t local;
uint32_t *my_wait_event_info = &local;
int64_t PgStartTime;
const char version[] = "postgres (PostgreSQL) 15.0";
#define F(n) __attribute__((noinline)) int f##n(int x) { volatile int y = x; return y + n; }
F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9)
#ifdef NOTES
void note(int x) { DTRACE_PROBE(postgresql, query__start); }
#endif
#ifdef WAIT_NOTES
void start(int x) { DTRACE_PROBE1(postgresql, wait__event__start, x); }
void end(void) { DTRACE_PROBE(postgresql, wait__event__end); }
#endif
#ifdef LOST
uint32_t *copy;
void lose(void) { copy = my_wait_event_info; }
#endif
int main(void) {
#ifdef HUGE
    mmap(0, 1 << 21, PROT_READ, MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
#endif
    *(volatile uint32_t *)my_wait_event_info = 0x9000001;
    pause();
    *(volatile uint32_t *)my_wait_event_info = 0;
}
"""


class Model:
    """A process that has all that the doctor looks at in a server, and starts at once."""

    def __init__(self, folder: Path, *flags: str, data: str | bytes = "data") -> None:
        folder.chmod(0o755)
        self.binary = folder / "postgres"
        (folder / "program.c").write_text(PROGRAM)
        flags = ("-w", "-Wl,-E", "-Wl,--build-id", *flags)
        subprocess.run(["gcc", *flags, "-o", self.binary, folder / "program.c"], check=True)
        self.data = Path(os.fsdecode(os.path.join(os.fsencode(folder), os.fsencode(data))))  # noqa: PTH118
        self.data.mkdir()
        self.data.chmod(0o755)
        self.flags = flags

    def __enter__(self) -> Model:
        """Start it."""
        self.process = subprocess.Popen(
            [*NOBODY, self.binary], cwd=self.data, stdin=subprocess.DEVNULL
        )
        (self.data / "postmaster.pid").write_text(f"{self.process.pid}\n")
        while Path(f"/proc/{self.process.pid}/comm").read_text() != "postgres\n":
            assert self.process.poll() is None
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


# Flags of the compiler, what is done first ($EXE is the binary), and what of each line is said.
SERVERS: dict[str, tuple[str, str, Lines]] = {
    "good": (
        "",
        "",
        {
            "server": (True, "PostgreSQL 15.0 build-id"),
            "memory": (True, "may be read"),
            "usdt": (False, "0 SDT notes make usdt-postgres"),
            "red-zone": (True, "no static probe"),
            "dtrace": (False, "0 SDT notes --enable-dtrace"),
            "sites": (True, "2 stores"),
            "upgraded": (True, "that is there now"),
            "namespaces": (True, "are ours"),
            "frames": (True, "functions keep"),
            "symbols": (True, ".symtab"),
            "huge-pages": (False, "4 KiB vm.nr_hugepages"),
        },
    ),
    "as packaged": (
        "-DNOTES -O2 -fomit-frame-pointer -s",
        ":",
        {
            "usdt": (False, "1 SDT notes, 0 of them make usdt-postgres"),
            "dtrace": (True, "1 SDT notes"),
            "namespaces": (False, "mnt namespace of its own"),
            "frames": (False, "functions keep -fno-omit-frame-pointer"),
            "symbols": (False, ".dynsym only debug file -dbgsym"),
        },
    ),
    "removed": (
        "-DWAIT_NOTES",
        'rm "$EXE"',
        {
            "usdt": (True, "2 SDT notes, 2 of them"),
            "upgraded": (False, "replaced or removed restart"),
        },
    ),
    "replaced": (
        "-DLOST -O2",
        'cp "$EXE" "$EXE.new"; mv "$EXE.new" "$EXE"',
        {
            "sites": (False, "could not be followed report"),
            "upgraded": (False, "replaced or removed restart"),
        },
    ),
    "probes that this kernel makes calls of": (
        "-DWAIT_NOTES -DNOP5",
        "",
        {"usdt": (True, "2 of them"), "red-zone": (False, "5-byte nops -mno-red-zone")},
    ),
    "without a build-id": ("-Wl,--build-id=none", "", {"server": (False, "no build-id")}),
}


@pytest.mark.parametrize("server", SERVERS)
def test_server(server: str, tmp_path: Path) -> None:
    """The lines about a server in one of its states, with what mends it."""
    flags, setup, lines = SERVERS[server]
    with Model(tmp_path, *flags.split()) as model:
        setup = f"EXE={model.binary}; {setup}" if setup else ""
        result = diagnose(tmp_path, "-p", str(model.process.pid), setup=setup)
        for name, (ok, words) in lines.items():
            check(result, name, ok, words)


def test_container(tmp_path: Path) -> None:
    """A server with its own processes and files is looked at from outside."""
    with Model(tmp_path) as model:
        inside = f"mount --bind {tmp_path} /mnt; cd /mnt/data; exec /mnt/postgres"
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", inside]
        with subprocess.Popen(command) as container:
            children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
            while not (pid := children.read_text().strip()) or (
                Path(f"/proc/{pid}/comm").read_text() != "postgres\n"
            ):
                assert container.poll() is None
            (model.data / "postmaster.pid").write_text("1\n")
            result = diagnose(tmp_path, "-p", pid)
            container.kill()
    check(result, "server", True, f"process {pid}, /mnt/postgres")
    check(result, "namespaces", False, "a pid and mnt namespace")
    check(result, "upgraded", True, "that is there now")
    check(result, "sites", True, "2 stores")
    assert result["auto"] == "sites ftrace"


def test_memory_that_may_not_be_read(tmp_path: Path) -> None:
    """The memory is asked for, and nothing is assumed."""
    with Model(tmp_path) as model:
        pid = str(model.process.pid)
        setup = f"fake /proc/{pid}/mem '' 600"
        result = diagnose(tmp_path, "-p", pid, setup=setup, prefix=NOBODY)
        check(result, "memory", False, "may not be read by user nobody CAP_SYS_PTRACE")
        assert result["auto"] is None


def test_debug_file(tmp_path: Path) -> None:
    """A separate debug file is found by the build-id."""
    with Model(tmp_path, "-s") as model:
        notes = run("readelf", "-n", model.binary).stdout
        build_id = notes.partition("Build ID: ")[2].split()[0]
        setup = (
            "mkdir -p /usr/lib/debug\n"
            f"folder /usr/lib/debug .build-id/{build_id[:2]}\n"
            f"touch /usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
        )
        result = diagnose(tmp_path, "-p", str(model.process.pid), setup=setup)
        check(result, "symbols", True, f"{build_id[2:]}.debug")


def test_huge_pages(tmp_path: Path) -> None:
    """Shared memory in huge pages is seen as such."""
    pool = Path("/proc/sys/vm/nr_hugepages")
    before = int(pool.read_text())
    pool.write_text(str(before + 2))
    try:
        with Model(tmp_path, "-DHUGE") as model:
            result = diagnose(tmp_path, "-p", str(model.process.pid))
            check(result, "huge-pages", True, "in huge pages")
    finally:
        pool.write_text(str(before))


def test_site_lists(tmp_path: Path) -> None:
    """A list made elsewhere does without binutils, and must be of this very build."""
    (tmp_path / "other").mkdir()
    with Model(tmp_path) as model, Model(tmp_path / "other", "-O2") as other:
        listed = run(SCRIPTS / "waitfold-probes", "sites", model.binary)
        assert listed.returncode == 0, listed.stderr
        file = tmp_path / "a list"
        file.write_text(listed.stdout)
        env = path_without(tmp_path, "objdump", "readelf")
        pid = str(model.process.pid)
        result = diagnose(tmp_path, "-p", pid, "--sites", file, env=env)
        check(result, "sites", True, "2 stores")
        assert result["auto"] == "sites ftrace"
        result = diagnose(tmp_path, "-p", str(other.process.pid), "--sites", file, env=env)
        check(result, "sites", False, "of another build waitfold-probes sites")
        assert result["auto"] is None
        changed = listed.stdout.replace("\tstore\t", "90\tstore\t", 1)
        for text, words in (("what?\n", "not a list"), ("", "not a list"), (changed, "other code")):
            file.write_text(text)
            result = diagnose(tmp_path, "-p", pid, "--sites", file, env=env)
            check(result, "sites", False, words)
            assert result["auto"] is None


## All of it


def test_a_real_server(cluster: Cluster, tmp_path: Path) -> None:
    """A stock server can be recorded by sites; told in words within 80 columns, and as JSON."""
    result = diagnose(tmp_path, "-D", cluster.data, "--sites", known_sites())
    assert result["auto"] == "sites ftrace"
    assert [name for name in result["modes"] if result["modes"][name]["ok"]] == ["sites", "mem"]
    text = ask(tmp_path, "-D", cluster.data, "--sites", known_sites()).stdout
    assert max(map(len, text.splitlines())) <= 80
    verdicts = {}
    for line in text.splitlines():
        if line[:5].strip() in ("OK", "no", "note"):
            verdict, name, *_ = line.split()
            verdicts[name] = verdict
    expected = {
        check["name"]: "OK" if check["ok"] else "no" if check["needed"] else "note"
        for check in result["checks"].values()
    }
    for kind in (result["modes"], result["engines"]):
        expected |= {name: "OK" if said["ok"] else "no" for name, said in kind.items()}
    assert (
        verdicts.items()
        >= {k: v for k, v in expected.items() if k not in ("perf", "trace-cmd")}.items()
    )
    assert text.endswith("By itself it takes -m sites --engine ftrace.\n")
    for check_ in result["checks"].values():
        assert check_["ok"] or check_["mend"].split()[0] in text


def test_the_servers_own_user(cluster: Cluster, tmp_path: Path) -> None:
    """Who owns the server's processes may watch them without being root."""
    sites = cluster.folder / "sites.tsv"
    postgres = ["runuser", "-u", "postgres", "--"]
    result = diagnose(tmp_path, "-D", cluster.data, "--sites", sites, prefix=postgres)
    check(result, "sites", False, "cannot be read waitfold-probes sites")
    shutil.copy(known_sites(), sites)
    result = diagnose(tmp_path, "-D", cluster.data, "--sites", sites, prefix=postgres)
    assert result["auto"] == "mem perf"
    assert not result["modes"]["sites"]["ok"]
    check(result, "memory", True, "may be read")


@pytest.mark.parametrize(
    ("setup", "prefix", "way"),
    [
        ("", [], "sites ftrace"),
        ("mount -o remount,bind,ro /sys/kernel/tracing", [], "mem perf"),
        ("", ["runuser", "-u", "postgres", "--"], "mem perf"),
    ],
)
def test_the_recorder_agrees(
    setup: str, prefix: list[str], way: str, cluster: Cluster, tmp_path: Path
) -> None:
    """waitfold-record takes the way that the doctor says it takes."""
    sites, capture = cluster.folder / "sites.tsv", cluster.folder / "capture"
    shutil.copy(known_sites(), sites)
    server = ("-D", cluster.data, "--sites", sites)
    assert diagnose(tmp_path, *server, setup=setup, prefix=prefix)["auto"] == way
    recorder: list[str | Path] = [SCRIPTS / "waitfold-record", *server, "-d", "1", "-o", capture]
    answer = run(*where(setup, tmp_path, *prefix, *recorder))
    assert answer.returncode == 0, answer.stderr
    lines = (capture / "manifest").read_text().splitlines()
    shutil.rmtree(capture)
    manifest = dict(line.split("\t", 1) for line in lines)
    assert f"{manifest['mode']} {manifest['engine']}" == way


def test_another_user(cluster: Cluster, tmp_path: Path) -> None:
    """An ordinary user is told that he may not look at the server."""
    answer = ask(tmp_path, "-D", cluster.data, prefix=NOBODY)
    assert answer.returncode == 1
    assert "no   server" in answer.stdout
    assert "as root" in answer.stdout
    assert answer.stdout.endswith("It cannot record here.\n")


def test_several_servers(cluster: Cluster, tmp_path: Path) -> None:
    """Of several servers one has to be named, and how is said."""
    with Model(tmp_path, data="my 'data'") as model:
        result = diagnose(tmp_path, "--json")
        check(result, "server", False, f"several {cluster.data} my\\ \\'data\\'")
        assert result["modes"]["sites"]["mend"] == result["checks"]["server"]["mend"]
        assert result["engines"]["perf"]["ok"]
        assert model.process.poll() is None


@pytest.mark.parametrize(
    "name", [b'"\\', b"a\nb\tc\x01\x7f", "Größe 𝄞 €".encode(), b"\xff\xc3\xa9\xe2\x82 \xed\xa0\x80"]
)
def test_names_of_any_bytes(name: bytes, tmp_path: Path) -> None:
    """A path of any bytes leaves JSON that is valid, and text of one line."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    folder.mkdir()
    with Model(folder) as model:
        pid = str(model.process.pid)
        found = diagnose(tmp_path, "-p", pid)["checks"]["server"]["found"]
        readable = name.decode(errors="replace")
        assert readable.partition(" ")[0].rstrip("\ufffd") in found
        answer = subprocess.run([DOCTOR, "-p", pid], capture_output=True, check=True)
        assert not {9, 1, 0x7F} & set(answer.stdout)


CHROOT = f"""
mkdir -p "$W"/{{bin,proc,sys,dev,tmp,usr/lib,usr/lib64}} "$W{SCRIPTS.parent}"
ln -s usr/lib usr/lib64 "$W"; ln -s ../bin "$W/usr/bin"
for dir in usr/lib usr/lib64 proc sys dev ".{SCRIPTS.parent}"; do
    mount --rbind "/$dir" "$W/$dir"
done
for tool in awk basename bash cat cut dd df dirname env id mktemp od readlink rm sh sleep \
    sort stat tail tr uname wc; do
    [ $tool = "$MISSING" ] || cp -L "$(type -P $tool)" "$W/bin/"
done
exec chroot "$W" "$@"
"""


@pytest.mark.parametrize("missing", ["", "awk", "od"])
def test_chroot(missing: str, cluster: Cluster, tmp_path: Path) -> None:
    """In a chroot with only what it needs it says what is missing, and never stumbles."""
    answer = run(
        "unshare", "--mount", "bash", "-ec", CHROOT, "-",
        "/bin/bash", DOCTOR, "--json", "-p", str(cluster.pid),
        env={"PATH": "/bin:/usr/bin:/usr/sbin", "W": str(tmp_path), "MISSING": missing},
    )  # fmt: skip
    assert answer.returncode == 1
    if missing:
        assert answer.stderr == f"waitfold-doctor: no {missing}: install coreutils and awk\n"
        return
    assert answer.stderr == ""
    checks = {check["name"]: check["ok"] for check in json.loads(answer.stdout)["checks"]}
    for name in ("perf", "slots", "trace-cmd", "binutils", "sites"):
        assert not checks[name]
    for name in ("server", "memory", "frames", "dtrace", "usdt"):
        assert checks[name] is (name != "usdt")


def test_called_wrongly() -> None:
    """A wrong call ends with status 2 and one line; --help and --version with 0."""
    for words in (["-x"], ["-D"], ["-p", "me"], ["-p", "1", "-D", "/"], ["--sites"], ["more"]):
        answer = run(DOCTOR, *words)
        assert answer.returncode == 2
        assert answer.stderr.count("\n") == 1
    assert "usage: waitfold-doctor" in run(DOCTOR, "--help").stdout
    assert run(DOCTOR, "--version").returncode == 0


def test_every_line_in_both_states(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The tests above, all of them, have seen each line of the doctor good and bad."""
    if request.config.option.keyword or any("::" in word for word in request.config.args):
        pytest.skip("only some of the tests were run")
    with Model(tmp_path) as model:
        lines = diagnose(tmp_path, "-p", str(model.process.pid))["checks"]
    assert {name: {True, False} for name in lines} == SEEN
