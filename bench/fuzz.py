#!/usr/bin/env python3
"""Give `waitfold report` damaged perf.data and trace.dat files: a report or a clear error each.

Each case runs in a worker that may use 1 GiB beyond what it has after its imports, and 5 s. The
same seed gives the same cases; --only repeats one of them, with its traceback.
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

from waitfold import cli
from waitfold.errors import WaitfoldError
from waitfold.tracedat import MAGIC

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 5
BYTES = 1 << 30
MANIFEST = "".join(
    f"{key}\t{value}\n"
    for key, value in {
        "format": 2,
        "waitfold": "0.1.0",
        "sets": "wait-event",
        "mode": "sites",
        "engine": "ENGINE",
        "group": "*",
        "pg_version": "15.18",
    }.items()
)
CUT = ("was cut short", "was not finished")

Mutation = Callable[[random.Random, bytearray, list[bytes]], None]


def flip_bits(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Change single bits, anywhere or only near the start."""
    reach = rng.choice((110, 600, 4096, len(data)))
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        data[rng.randrange(min(reach, len(data)))] ^= 1 << rng.randrange(8)


def truncate(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Cut off the end."""
    del data[rng.randrange(len(data)) :]


def splice(rng: random.Random, data: bytearray, others: list[bytes]) -> None:
    """Put a part of a file over or into another place."""
    other = rng.choice(others)
    start = rng.randrange(len(other))
    part = other[start : start + rng.choice((8, 64, 1000, 20000))]
    at = rng.randrange(len(data)) & rng.choice((-1, -8))
    data[at : at + len(part) * rng.randrange(2)] = part


def numbers(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Put a great or a small number, or one near the file's size, where a size may be."""
    for _ in range(rng.choice((1, 1, 3, 10))):
        size = rng.choice((2, 4, 8))
        at = rng.randrange(min(len(data), rng.choice((104, 600, 70000)))) & -size
        value = rng.choice((0, 1, 7, 8, len(data), len(data) - 1, 1 << 31, -1, 1 << 62, 0xFFFF))
        data[at : at + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")


def record_headers(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Change types and sizes of records, or their first fields."""
    (at,) = struct.unpack_from("<Q", data, 40)
    places = []
    while at + 8 <= len(data) and (step := int.from_bytes(data[at + 6 : at + 8], "little")):
        places.append(at)
        at += step
    for place in rng.sample(places, min(len(places), rng.choice((1, 2, 20)))):
        kind = rng.randrange(4)
        if kind == 0:
            data[place : place + 4] = rng.choice((*range(24), *range(64, 90), 255)).to_bytes(
                4, "little"
            )
        elif kind == 1:
            data[place + 6 : place + 8] = rng.choice((0, 8, 16, 24, 72, 0xFFF8, 0xFFFF)).to_bytes(
                2, "little"
            )
        else:
            field = place + 8 * rng.randrange(1, 12)
            data[field : field + 8] = rng.choice(
                (0, (1 << 64) - 1, 1 << 63, rng.getrandbits(64))
            ).to_bytes(8, "little")


def pages(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Change times, sizes and flags of pages, or first words of records in them."""
    places = range(0, len(data), 4096)
    for place in rng.sample(places, min(len(places), rng.choice((1, 2, 20)))):
        kind = rng.randrange(4)
        if kind == 0:
            data[place : place + 8] = rng.choice((0, 1, 1 << 62, rng.getrandbits(64))).to_bytes(
                8, "little"
            )
        elif kind == 1:
            size = rng.choice((0, 4, 24, 4080, 4084, rng.randrange(4081), rng.getrandbits(27)))
            size |= rng.choice((0, 1 << 31, 3 << 30))
            data[place + 8 : place + 12] = size.to_bytes(4, "little")
        else:
            at = place + 4 * rng.randrange(4, 1024)
            word = rng.choice((0, 1, 28, 29, 30, 31)) | rng.choice((0, 32, rng.getrandbits(32)))
            data[at : at + 4] = (word & 0xFFFF_FFFF).to_bytes(4, "little")


def zeros(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Zero a part, as after a crash of the file system."""
    start = rng.randrange(len(data))
    end = rng.choice((len(data), min(len(data), start + 4096)))
    data[start:end] = bytes(end - start)


def noise(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Nothing but noise, with or without a magic number."""
    magic = rng.choice(
        (b"", b"PERFILE2", b"2ELIFREP", b"PERFFILE", b"\x17\x08Dtracing6\0", bytes(data[:104]))
    )
    data[:] = magic + rng.randbytes(rng.choice((0, 50, 5000)))


def unfinished(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Leave the file as a killed perf does, and cut it."""
    data[48:56] = bytes(8)
    del data[rng.randrange(104, len(data)) :]


ANY: list[Mutation] = [flip_bits, truncate, splice, numbers, zeros, noise]
PERF_DATA: list[Mutation] = [*ANY, record_headers, unfinished]
TRACE_DAT: list[Mutation] = [*ANY, pages, pages]


def mutate(seed: int, number: int, sources: list[bytes]) -> tuple[bytes, str, str]:
    """Return a case, what it is, and the engine that made the file."""
    rng = random.Random(f"{seed}/{number}")
    data = bytearray(rng.choice(sources))
    engine = "ftrace" if data.startswith(MAGIC) else "perf"
    mutations = TRACE_DAT if engine == "ftrace" else PERF_DATA
    kinds = rng.sample(mutations, rng.choice((1, 1, 1, 2)))
    for kind in kinds:
        if len(data) > 110:
            kind(rng, data, sources)
    return bytes(data), "+".join(kind.__name__ for kind in kinds), engine


class Hang(BaseException):
    """A case took too long."""


def _alarm(_: int, __: FrameType | None) -> None:
    raise Hang


def report(arguments: list[str]) -> tuple[str, str]:
    """Return what became of a report, and what is wrong with that."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = cli.main(["report", *arguments])
    except (WaitfoldError, SystemExit) as error:
        return "escaped", repr(error)
    except Hang:
        return "hang", f"more than {SECONDS} s"
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    if status == 0:
        return ("cut report" if any(word in "".join(texts) for word in CUT) else "report"), ""
    if status not in (1, 2) or not texts[1].strip() or "Traceback" in texts[1]:
        return "bad error", f"status {status}: {texts[1]}"
    return "error", ""


def work(seed: int, numbers: range, sources: list[bytes], pipe: int) -> None:
    """Run cases and write a line about each: number, kinds, outcome, seconds, complaint."""
    os.environ["WAITFOLD_DEBUG"] = "1"  # the command line lets a bug's exception through
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    signal.signal(signal.SIGALRM, _alarm)
    with tempfile.TemporaryDirectory() as folder, os.fdopen(pipe, "w") as lines:
        # Every other case is a capture, whose manifest names the events of a cut file.
        for number in numbers:
            data, kinds, engine = mutate(seed, number, sources)
            for old in Path(folder).iterdir():
                old.unlink()
            path = Path(folder) / ("perf.data" if engine == "perf" else "trace.dat")
            by_hand = [str(path), "--start", "*:w", "--value", "v", "--pg-version", "15.18"]
            (Path(folder) / "manifest").write_text(MANIFEST.replace("ENGINE", engine))
            path.write_bytes(data)
            if engine == "ftrace" and number % 8 == 2:
                # As a recorder leaves it that is killed while it puts the file together.
                (Path(folder) / "trace.cpu0").write_bytes(data[8192:])
            print(number, kinds, "begun", 0, "", sep="\t", file=lines, flush=True)
            begun = time.monotonic()
            outcome, wrong = report(by_hand if number % 4 < 2 else [folder])
            if kinds == "truncate" and outcome == "report":
                wrong = "a truncated file is reported without a word"
            seconds = time.monotonic() - begun
            print(number, kinds, outcome, seconds, repr(wrong), sep="\t", file=lines, flush=True)


def main() -> None:
    """Run all cases in two workers and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", type=int, help="run this case alone")
    parser.add_argument("files", nargs="*", type=Path, help="what to damage (default: tests/data)")
    options = parser.parse_args()
    files = options.files or sorted(
        path for end in ("*.data", "*.dat") for path in (ROOT / "tests" / "data").rglob(end)
    )
    sources = [path.read_bytes() for path in files]
    begun = time.monotonic()
    shares = [range(w, options.count, 2) for w in range(2)]
    if options.only is not None:
        shares = [range(options.only, options.only + 1)]
    pipes = []
    for share in shares:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            work(options.seed, share, sources, writer)
            os._exit(0)
        os.close(writer)
        pipes.append(os.fdopen(reader))
    outcomes: collections.Counter[str] = collections.Counter()
    bad = 0
    slowest = 0.0
    for share, pipe in zip(shares, pipes, strict=True):
        done = 0
        last = ""
        for line in pipe:
            number, kinds, outcome, seconds, wrong = line.rstrip("\n").split("\t")
            last = f"{number} ({kinds})"
            if outcome == "begun":
                continue
            done += 1
            outcomes[outcome] += 1
            slowest = max(slowest, float(seconds))
            if wrong != "''":
                bad += 1
                text = wrong.encode().decode("unicode_escape").strip("'\n")
                if options.only is None:
                    text = text.splitlines()[-1]
                print(f"case {last}: {outcome}: {text}")
        if done < len(share):
            bad += 1
            print(f"case {last}: the worker died; {len(share) - done} cases were not run")
    for _ in shares:
        os.wait()
    print(f"{options.count} cases, seed {options.seed}: {dict(outcomes)}; {bad} bad;")
    print(f"slowest {slowest:.2f} s, in all {time.monotonic() - begun:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
