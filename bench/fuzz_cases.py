"""What the fuzzers share: the readers and their seeds, how a case is damaged, and how it is run.

A case is bytes for one file and the number of a use: the capture that the file belongs to and the
command that reads it. Everything runs in this process, as the command line would.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import lzma
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import zstandard

from waitfold import capture, cli, probeset, waitevents
from waitfold.errors import WaitfoldError

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SECONDS = 10
BYTES = 1 << 30

Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], None]


@dataclass(frozen=True)
class Use:
    """A way to read a file: in a capture in whose place it is laid, or alone.

    `base` is a folder of tests/data that is laid out before, empty for none. Of `argv` CAPTURE is
    the folder and FILE the file.
    """

    base: str
    file: str
    argv: str
    pack: Callable[[bytes], bytes] = bytes
    """What makes the file of the case's bytes."""

    def words(self, folder: Path) -> list[str]:
        """Return the arguments of the command."""
        names = {"CAPTURE": str(folder), "FILE": str(folder / self.file)}
        return [names.get(word, word) for word in self.argv.split()]


@dataclass(frozen=True)
class Reader:
    """What is fuzzed as one: its seeds, each with the uses that it is a whole file of."""

    name: str
    uses: list[Use]
    seeds: list[tuple[bytes, list[int]]]
    mutations: list[Mutation]


# Damage to any file


def flip_bits(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Change single bits, anywhere or only near the start."""
    reach = rng.choice((110, 600, 4096, len(data)))
    for _i in range(rng.choice((1, 1, 2, 5, 40))):
        data[rng.randrange(min(reach, len(data)))] ^= 1 << rng.randrange(8)


def truncate(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Cut off the end."""
    del data[rng.randrange(len(data)) :]


def splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Put a part of a file over or into another place."""
    other = rng.choice(others)
    start = rng.randrange(len(other))
    part = other[start : start + rng.choice((8, 64, 1000, 20000))]
    at = rng.randrange(len(data)) & rng.choice((-1, -8))
    data[at : at + len(part) * rng.randrange(2)] = part


def numbers(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Put a great or a small number, or one near the file's size, where a size may be."""
    for _i in range(rng.choice((1, 1, 3, 10))):
        size = rng.choice((2, 4, 8))
        at = rng.randrange(min(len(data), rng.choice((104, 600, 70000)))) & -size
        value = rng.choice((0, 1, 7, 8, len(data), len(data) - 1, 1 << 31, -1, 1 << 62, 0xFFFF))
        data[at : at + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")


def zeros(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Zero a part, as after a crash of the file system."""
    start = rng.randrange(len(data))
    end = rng.choice((len(data), min(len(data), start + 4096)))
    data[start:end] = bytes(end - start)


def noise(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Nothing but noise, with or without how the file began."""
    data[:] = bytes(data[: rng.choice((0, 8, 16, 104))]) + rng.randbytes(rng.choice((0, 50, 5000)))


# Damage to a perf.data

_VALUES = (0, 1, (1 << 64) - 1, 1 << 63, (1 << 63) - 1, 1 << 62, 1 << 32, 0xFFFF_FFFF)


def _records(data: bytearray) -> list[tuple[int, int]]:
    """Return where the records of a perf.data begin, and their sizes."""
    if len(data) < 104:
        return []
    (at,) = struct.unpack_from("<Q", data, 40)
    if data[8:16] == struct.pack("<Q", 16):
        at = 16  # of a pipe
    places = []
    while at + 8 <= len(data) and (step := int.from_bytes(data[at + 6 : at + 8], "little")):
        if data[at] == 66:  # PERF_RECORD_HEADER_TRACING_DATA, behind which the data stand
            step += (int.from_bytes(data[at + 8 : at + 12], "little") + 7) & -8
        places.append((at, step))
        at += step
    return places


def record_headers(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Change types and sizes of records, or their fields."""
    places = _records(data)
    for place, size in rng.sample(places, min(len(places), rng.choice((1, 2, 20)))):
        kind = rng.randrange(5)
        if kind == 0:
            number = rng.choice((*range(24), *range(64, 90), 255))
            data[place : place + 4] = number.to_bytes(4, "little")
        elif kind == 1:
            length = rng.choice((0, 8, 16, 24, 72, size - 8, size + 8, 0xFFF8, 0xFFFF)) & 0xFFFF
            data[place + 6 : place + 8] = length.to_bytes(2, "little")
        elif kind == 2:
            field = place + 4 * rng.randrange(2, max(size // 4, 3))
            data[field : field + 4] = rng.choice(_VALUES).to_bytes(8, "little")[:4]
        else:
            field = place + 8 * rng.randrange(1, max(size // 8, 2))
            value = rng.choice((*_VALUES, rng.getrandbits(64)))
            data[field : field + 8] = value.to_bytes(8, "little")


def _rearrange(parts: list[bytes], kind: int, at: int, to: int) -> None:
    """Double a part, drop it unless it is the last one left, or move it."""
    if kind == 0:
        parts.insert(to, parts[at])
    elif kind == 2:
        parts.insert(to, parts.pop(at))
    elif len(parts) > 1:
        del parts[at]


def records(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Double, drop, move or swap whole records; the header says how many bytes they are then."""
    places = _records(data)
    if len(places) < 4:
        return
    begin, end = places[0][0], places[-1][0] + places[-1][1]
    whole = [bytes(data[at : at + size]) for at, size in places]
    for _i in range(rng.choice((1, 3, 30))):
        at, to = rng.randrange(len(whole)), rng.randrange(len(whole))
        kind = rng.randrange(4)
        if kind < 3:
            _rearrange(whole, kind, at, to)
        else:
            whole[at], whole[to] = whole[to], whole[at]
    body = b"".join(whole)
    if begin > 16:
        (size,) = struct.unpack_from("<Q", data, 48)
        struct.pack_into("<Q", data, 48, max(size + len(body) - (end - begin), 0))
    data[begin:end] = body


def unfinished(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Leave the file as a killed perf does, and cut it."""
    data[48:56] = bytes(8)
    del data[rng.randrange(min(104, len(data) - 1), len(data)) :]


# Damage to a trace.dat


def pages(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Change times, sizes and flags of pages, or first words of records in them."""
    places = range(0, len(data), 4096)
    for place in rng.sample(places, min(len(places), rng.choice((1, 2, 20)))):
        kind = rng.randrange(4)
        if kind == 0:
            time = rng.choice((0, 1, 1 << 62, rng.getrandbits(64)))
            data[place : place + 8] = time.to_bytes(8, "little")
        elif kind == 1:
            size = rng.choice((0, 4, 24, 4080, 4084, rng.randrange(4081), rng.getrandbits(27)))
            size |= rng.choice((0, 1 << 31, 3 << 30))
            data[place + 8 : place + 12] = size.to_bytes(4, "little")
        else:
            at = place + 4 * rng.randrange(4, 1024)
            word = rng.choice((0, 1, 28, 29, 30, 31)) | rng.choice((0, 32, rng.getrandbits(32)))
            data[at : at + 4] = (word & 0xFFFF_FFFF).to_bytes(4, "little")


# Damage to text

_WORDS = (
    b"", b"-", b"0", b"-1", b"1", b"0x", b"0x0", b"00", b"nan", b"inf", b"1e9", b"1_000", b"*",
    b"9" * 9, b"9" * 18, b"9" * 19, b"9" * 40, b"9" * 5000, b"4294967296", b"2147483648",
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"?", b"#",
    b"0xffffffffffffffff", b"0x8000000000000000", b"ffffffffffffffff", b"10000000000000000",
    b"\xd9\xa3", b"\xc2\xb2", b"\xe2\x80\xae", b"\x1b[31m", b"\0", b"\r", b"\x0b", b"\x85", b"\xff",
    b"\xed\xa0\x80", b"../../etc/passwd", b"/dev/zero", b"%s%n", b"[", b"(", b"\\", b"a" * 300,
    b"x" * 100_000, b"server", b"string", b"u64", b"wait-event", b"=", b"\t", b"\t\t", b" ", b"\n",
)  # fmt: skip


def lines(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Double, drop, move, cut or join lines, or take one of another file."""
    rows = bytes(data).split(b"\n")
    for _i in range(rng.choice((1, 1, 3, 20))):
        at, to = rng.randrange(len(rows)), rng.randrange(len(rows))
        kind = rng.randrange(7)
        if kind < 3:
            _rearrange(rows, kind, at, to)
        elif kind == 3:
            rows[at] = rows[at][: rng.randrange(len(rows[at]) + 1)]
        elif kind == 4:
            rows[at] += rows[to]
        elif kind == 5:
            rows.insert(at, rng.choice(rng.choice(others).split(b"\n")))
        else:
            rows[at] += rng.choice((b"\r", b" ", b"\t", b"\0"))
    data[:] = b"\n".join(rows)


def words(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Put other words, and numbers at their limits, in the place of some."""
    rows = bytes(data).split(b"\n")
    for _i in range(rng.choice((1, 1, 2, 10))):
        at = rng.randrange(len(rows))
        mark = rng.choice((b"\t", b"\t", b" ", b":", b"=", b","))
        cells = rows[at].split(mark)
        cells[rng.randrange(len(cells))] = rng.choice(_WORDS)
        rows[at] = mark.join(cells)
    data[:] = b"\n".join(rows)


# Damage to a bundle: its tar as it is before xz


def _members(data: bytes) -> list[tuple[int, int]]:
    """Return where the headers of a tar are, and the sizes of what follows each."""
    found = []
    at = 0
    while at + 512 <= len(data) and any(data[at : at + 512]):
        try:
            size = int(data[at + 124 : at + 136].rstrip(b" \0"), 8)
        except ValueError:
            break
        if size < 0:
            break
        found.append((at, size))
        at += 512 + (size + 511 & -512)
    return found


def bundle_of(data: bytes) -> bytes:
    """Return a tar in xz, its checksums set right."""
    own = bytearray(data)
    for at, _ in _members(data):
        own[at + 148 : at + 156] = b" " * 8
        own[at + 148 : at + 156] = b"%06o\0 " % sum(own[at : at + 512])
    return lzma.compress(own, preset=0)


def _rebuilt(members: list[tuple[bytes, bytes]]) -> bytes:
    parts = []
    for head, content in members:
        parts.append(head[:124] + b"%011o\0" % len(content) + head[136:])
        parts.append(content + bytes(-len(content) % 512))
    return b"".join(parts) + bytes(1024)


def members(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Change what members hold, by their kind, or drop, double or rename them."""
    own = [
        (bytes(data[a : a + 512]), bytes(data[a + 512 : a + 512 + s])) for a, s in _members(data)
    ]
    for _i in range(rng.choice((1, 1, 2, 5))):
        if not own:
            return
        at = rng.randrange(len(own))
        head, content = own[at]
        name = head[:100].rstrip(b"\0")
        kind = rng.randrange(12)
        if kind == 0:
            del own[at]
        elif kind == 1:
            other = rng.choice((rng.choice(own)[0][:100], b"../x", b"/etc/x", name + b"x"))
            own[at] = other.ljust(100, b"\0") + head[100:], content
        elif kind == 2:
            own[at] = head, rng.choice(own)[1]
        else:
            changed = bytearray(content)
            if name.endswith(b".npy"):
                _numbers_of_column(rng, changed)
            elif name.endswith(b".json"):
                _values_of_json(rng, changed)
            else:
                rng.choice((words, lines))(rng, changed, [content])
            own[at] = head, bytes(changed)
    data[:] = _rebuilt(own)


def _numbers_of_column(rng: random.Random, data: bytearray) -> None:
    begin = data.find(b"\n") + 1
    kind = re.search(rb"[iu]([1248])", data)
    each = int(kind[1]) if kind else 1
    count = (len(data) - begin) // each
    for _i in range(min(count, rng.choice((1, 2, 20)))):
        at = begin + each * rng.randrange(count)
        value = rng.choice((*_VALUES, rng.getrandbits(64), rng.randrange(300)))
        data[at : at + each] = value.to_bytes(8, "little")[:each]
    if rng.random() < 0.2:
        other = rng.choice((b"<u1", b"<i8", b"<u8", b"<i1", b"<f8", b"|O", b">u4"))
        data[:begin] = re.sub(rb"[<|][iu][1248]", other, data[:begin])
    if rng.random() < 0.2 and begin > 10:  # fewer rows, or more, with a header that fits
        rows = rng.choice((0, 1, max(count - 1, 0), count + 1))
        head = re.sub(rb"\((\d+),\)", b"(%d,)" % rows, data[:begin])
        data[:] = head + data[begin : begin + rows * each].ljust(rows * each, b"\1")
        data[8:10] = (len(head) - 10).to_bytes(2, "little")


def _values_of_json(rng: random.Random, data: bytearray) -> None:
    try:
        top = json.loads(data)
    except ValueError:
        top = None
    if not isinstance(top, dict | list):  # damaged before
        words(rng, data, [])
        return
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(top)
    for _i in range(rng.choice((1, 1, 3))):
        if not places:
            return
        value, key = rng.choice(places)
        new = rng.choice(
            (0, -1, 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1e308, None, True,
             "", "x", "\ud800", "\0", "a" * 100_000, "\x1b[31m", [], {}, [[]], [0], {"a": 0})
        )  # fmt: skip
        if isinstance(value, list) and (key >= len(value) or rng.random() < 0.3):
            value.append(new)
        elif isinstance(value, list) and rng.random() < 0.2:
            del value[key]
        else:
            value[key] = new
    data[:] = json.dumps(top, separators=(",", ":")).encode()


ANY: list[Mutation] = [flip_bits, truncate, splice, numbers, zeros, noise]
PERF_DATA: list[Mutation] = [*ANY, record_headers, record_headers, records, unfinished]
TRACE_DAT: list[Mutation] = [*ANY, pages, pages, pages]
BUNDLE: list[Mutation] = [flip_bits, truncate, splice, *[members] * 8]
TEXT: list[Mutation] = [flip_bits, truncate, splice, noise, lines, lines, words, words, words]

BY_HAND = "--start *:w --value v --pg-version 15.18"


def _reader(
    name: str, mutations: list[Mutation], *groups: tuple[Sequence[bytes], Sequence[Use]]
) -> Reader:
    """Return a reader of groups of seeds, each with all its uses."""
    uses: list[Use] = []
    seeds = []
    for contents, own in groups:
        numbers_ = list(range(len(uses), len(uses) + len(own)))
        uses += own
        seeds += [(content, numbers_) for content in contents]
    return Reader(name, uses, seeds, mutations)


def _files(names: str) -> list[bytes]:
    return [(DATA / name).read_bytes() for name in names.split()]


def _uses(base: str, file: str, *argvs: str) -> list[Use]:
    return [Use(base, file, argv) for argv in argvs]


def perf_data() -> Reader:
    """Read perf.data by hand, and in captures of all that is recorded."""
    by_hand = ["one", "chains", "group", "lost", "regs", "several", "packed", "pipe"]
    everything = (
        "report --json CAPTURE",
        "report --by query,event CAPTURE",
        "report --audit CAPTURE",
        "report --html /dev/null CAPTURE",
        "report --markdown CAPTURE",
        "fold --kind wall --event --query CAPTURE",
        "diff CAPTURE CAPTURE",
        "bundle -o /dev/null CAPTURE",
        "export --format csv -o - CAPTURE",
        "export --format firefox -o - CAPTURE",
        "export --format perfetto -o /dev/null CAPTURE",
    )
    waits = (
        "report --json CAPTURE",
        "export --format speedscope -o - CAPTURE",
        "timeline -o /dev/null CAPTURE",
    )
    return _reader(
        "perf.data",
        PERF_DATA,
        (
            _files(" ".join(f"fuzz/{name}.data" for name in by_hand)),
            _uses("", "perf.data", f"report --json FILE {BY_HAND}", f"waits FILE {BY_HAND} -o -"),
        ),
        (_files("usdt.data"), _uses("", "perf.data", "report FILE --pg-version 15.18")),
        (
            _files("fuzz/chains.data fuzz/zpipe.data"),
            _uses("", "perf.data", "fold FILE"),
        ),
        (
            _files("fuzz/dwarf/perf.data"),
            _uses("fuzz/dwarf", "perf.data", "fold --kind oncpu CAPTURE"),  # runs perf script
        ),
        (_files("fuzz/ring/perf.data"), _uses("mixed", "perf.data", *waits)),
        (
            _files("fuzz/ring/perf.data"),
            _uses("fuzz/ring", "perf.data", "report --histogram CAPTURE"),
        ),
        (
            _files("fuzz/sets.data"),
            _uses("sets", "perf.data", "report CAPTURE", "waits --set query -o - CAPTURE"),
        ),
        (_files("fuzz/all/perf.data"), _uses("fuzz/all", "perf.data", *everything)),
        (_files("fuzz/mem/perf.data.6"), _uses("fuzz/mem", "perf.data.6", "report --json CAPTURE")),
        (_files("fuzz/mem/perf.data.0"), _uses("fuzz/mem", "perf.data.0", "report CAPTURE")),
    )


def trace_dat() -> Reader:
    """Read trace.dat by hand, in captures, and in pieces as a killed recorder leaves them."""
    traces = ["engine", "killed", "lost", "ring", "ring2", "tracecmd"]
    newer = "inputs/engine-v7.dat inputs/engine-v7-zstd.dat"
    (own,) = _files("fuzz/ftrace/trace.dat")
    return _reader(
        "trace.dat",
        TRACE_DAT,
        (
            _files(" ".join(f"trace/{name}.dat" for name in traces) + f" {newer}"),
            _uses(
                "",
                "trace.dat",
                f"report --json FILE {BY_HAND}",
                "report FILE --start *:* --value common_pid --pg-version 15.18",
            ),
        ),
        (
            [own],
            _uses(
                "fuzz/ftrace",
                "trace.dat",
                "report --json CAPTURE",
                "report --by query,event CAPTURE",
                "waits --set query -o - CAPTURE",
            ),
        ),
        ([own], _uses("fuzz/ftrace-ring", "trace.dat", "report --json CAPTURE")),
        ([own[-8192:]], _uses("fuzz/ftrace", "trace.cpu0", "report CAPTURE")),
    )


def capture_text() -> Reader:
    """Read the text files of capture folders."""
    stacks = "fold --kind wall CAPTURE"
    of = {
        "fuzz/all/manifest": "report --by event,backend CAPTURE",
        "fuzz/all/backends.tsv": "report --by user,database,application CAPTURE",
        "fuzz/all/query.set": "report --by query CAPTURE",
        "fuzz/all/wait-event.set": "report --json CAPTURE",
        "fuzz/all/lwlock-wait.set": "waits --set lwlock-wait -o - CAPTURE",
        "fuzz/all/symbols/index.tsv": stacks,
        "fuzz/all/symbols/kernel": stacks,
        "fuzz/mem/manifest": "report --json CAPTURE",
        "fuzz/mem/attached.tsv": "report --json CAPTURE",
        "fuzz/mem/sites.tsv": "report --json CAPTURE",
        "fuzz/mem/backends.tsv": "report --by backend CAPTURE",
        "fuzz/ring/manifest": "report CAPTURE",
        "fuzz/ftrace/manifest": "report CAPTURE",
    }
    elf = sorted(p.name for p in (DATA / "fuzz/all/symbols").iterdir() if len(p.name) == 40)
    of |= {f"fuzz/all/symbols/{name}": stacks for name in elf}
    return _reader(
        "capture text",
        TEXT,
        *(
            (_files(path), _uses("/".join(path.split("/")[:2]), path.split("/", 2)[2], argv))
            for path, argv in of.items()
        ),
    )


def bundle() -> Reader:
    """Read bundles, as their tar is before it is compressed, and damaged in xz."""
    few = ["report --json FILE", "report --by query,event FILE"]
    many = [
        *few,
        "report --audit FILE",
        "report --html /dev/null FILE",
        "waits --set query -o - FILE",
        "fold --kind wall --event --query FILE",
        "timeline -o /dev/null FILE",
        "export --format csv -o - FILE",
    ]
    groups: list[tuple[Sequence[bytes], Sequence[Use]]] = []
    whole = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        for base, argvs in (("fuzz/all", many), ("sets", few), ("fuzz/ftrace", few)):
            path = Path(folder) / f"{base.replace('/', '-')}.waitfold"
            if cli.main(["bundle", str(DATA / base), "--keep", "queries", "-o", str(path)]):
                raise SystemExit(f"no bundle can be made of {base}")
            whole.append(path.read_bytes())
            tar = lzma.decompress(whole[-1])
            groups.append(([tar], [Use("", "x.waitfold", argv, bundle_of) for argv in argvs]))
    return _reader("bundle", BUNDLE, *groups, (whole, _uses("", "x.waitfold", "report FILE")))


def perf_text() -> Reader:
    """Read what perf script prints."""
    return _reader(
        "perf script text",
        TEXT,
        (
            _files("fuzz/text/lost.perf.txt fuzz/text/several.perf.txt fuzz/text/chains.perf.txt"),
            _uses(
                "",
                "x.txt",
                f"report --json FILE {BY_HAND}",
                f"waits FILE {BY_HAND} -o -",
                "report FILE --start *:w --value v --end *:x --pg-version 17",
            ),
        ),
        (_files("fuzz/text/chains.perf.txt"), _uses("", "x.txt", "fold FILE")),
    )


def ftrace_text() -> Reader:
    """Read what trace-cmd report prints, and ftrace itself."""
    by_hand = "--start w --value v --pg-version 15.18"
    return _reader(
        "ftrace text",
        TEXT,
        (
            _files("fuzz/text/lost.trace-cmd.txt fuzz/text/tracecmd.trace-cmd.txt"),
            _uses("", "x.txt", f"report --json FILE {by_hand}", f"waits FILE {by_hand} -o -"),
        ),
        (
            _files("fuzz/text/raw.ftrace.txt"),
            _uses("", "x.txt", "report FILE --start sched_switch --value prev_pid --pg-version 16"),
        ),
    )


def packed() -> Reader:
    """Read files in gzip, xz and zstd, in one piece and in several."""

    def of(names: str) -> list[bytes]:
        contents = _files(names)
        how: list[Callable[[bytes], bytes]] = [
            gzip.compress,
            lzma.compress,
            zstandard.ZstdCompressor(write_checksum=True).compress,
        ]
        whole = [pack(content) for content in contents for pack in how]
        return whole + [
            pack(content[:999]) + pack(content[999:]) for content in contents for pack in how
        ]

    return _reader(
        "packed",
        ANY,
        (
            of("fuzz/one.data fuzz/pipe.data trace/ring2.dat fuzz/text/lost.perf.txt"),
            _uses("", "x.packed", f"report --json FILE {BY_HAND}"),
        ),
        (
            of("fuzz/text/lost.trace-cmd.txt"),
            _uses("", "x.packed", "report FILE --start w --value v --pg-version 15.18"),
        ),
    )


READERS: dict[str, Callable[[], Reader]] = {
    "perf.data": perf_data,
    "trace.dat": trace_dat,
    "capture text": capture_text,
    "bundle": bundle,
    "perf script text": perf_text,
    "ftrace text": ftrace_text,
    "packed": packed,
}


def mutate(rng: random.Random, reader: Reader) -> tuple[bytes, int, str]:
    """Return a case, the number of its use, and what was done to it."""
    seed, uses = rng.choice(reader.seeds)
    data = bytearray(seed)
    others = [other for other, _ in reader.seeds]
    # Now and then a file of another kind in this one's place.
    use = rng.choice(uses) if rng.random() < 0.97 else rng.randrange(len(reader.uses))
    kinds = [rng.choice(reader.mutations) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    for kind in kinds:
        if len(data) > 16:
            kind(rng, data, others)
    return bytes(data), use, "+".join(kind.__name__ for kind in kinds)


_CUT = re.compile(rb"was\s+cut\s+short|was\s+not\s+finished")


def tells_of_cut(reader: Reader, use: Use, kinds: str, outcome: str) -> bool:
    """Return whether a report on a file by hand whose end is missing says that it is."""
    by_hand = reader.name in ("perf.data", "trace.dat") and not use.base
    return not (by_hand and "report" in use.argv and (kinds, outcome) == ("truncate", "result"))


class Hang(BaseException):
    """A case took too long."""


def _alarm(_: int, __: FrameType | None) -> None:
    raise Hang


def _status() -> str:
    return Path("/proc/self/status").read_text()


class Runner:
    """Runs cases in this process, which may from now on use 1 GiB in all, and each case 10 s."""

    def __init__(self, folder: Path) -> None:
        os.environ["WAITFOLD_DEBUG"] = "1"  # the command line lets a bug's exception through
        # What does not depend on the case takes longer than most of them.
        capture.load_sets = functools.cache(probeset.load_sets)
        capture.WaitEvents = functools.lru_cache(16)(waitevents.WaitEvents)  # type: ignore[misc]
        cli._parser = functools.cache(cli._parser)
        self._folder = folder
        self._laid: set[str] = set()
        signal.signal(signal.SIGALRM, _alarm)
        # What threads have reserved counts with RLIMIT_AS, but nothing of it is used.
        own = dict(re.findall(r"^(VmData|VmRSS):\s+(\d+)", _status(), re.MULTILINE))
        limit = (int(own["VmData"]) - int(own["VmRSS"])) * 1024 + BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def run(self, data: bytes, use: Use) -> tuple[str, str]:
        """Return what became of a case, and what is wrong with that."""
        folder = self._folder / (use.base.replace("/", "-") or "alone")
        if use.base not in self._laid:
            self._laid.add(use.base)
            if use.base:
                shutil.copytree(DATA / use.base, folder)
            else:
                folder.mkdir()
        path = folder / use.file
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(use.pack(data))
        try:
            return self._command(use.words(folder))
        finally:
            if before is None:
                path.unlink()
            else:
                path.write_bytes(before)

    def _command(self, argv: list[str]) -> tuple[str, str]:
        out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                status = cli.main(argv)
        except (WaitfoldError, SystemExit) as error:
            return "escaped", repr(error)
        except Hang:
            return "hang", f"more than {SECONDS} s: {traceback.format_exc()}"
        except BaseException:
            return "traceback", traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        out.flush()
        err.flush()
        shown, said = out.buffer.getvalue(), err.buffer.getvalue().decode()  # type: ignore[attr-defined]
        if status == 0:
            return ("cut result" if _CUT.search(shown + said.encode()) else "result"), ""
        # One line of its own, and warnings before it.
        last = said.rstrip("\n").rpartition("\n")[2]
        if status not in (1, 2) or not last.startswith("waitfold: ") or "Traceback" in said:
            return "bad error", f"status {status}: {said}"
        return "error", ""


# Whatever a case may need is loaded before its memory is limited.
for _module in ("pandas", "pyarrow.parquet", "waitfold.api", "waitfold.show.export"):
    __import__(_module)
sys.setrecursionlimit(1000)
