#!/usr/bin/env python3
"""Make a large trace.dat of a real one: its pages again and again, each time later."""

from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path

import numpy as np

from waitfold.events import PairRule, TransitionStream
from waitfold.tracedat import TraceDat


def enlarge(source: Path, target: Path, samples: int) -> int:
    """Write at least so many samples to `target`; return how many."""
    data = TraceDat(source)
    if data.cut:
        sys.exit(data.cut)
    stream = TransitionStream()
    for cpu in data.sources(PairRule("*:w", "v", "*:w", 0), stream):
        while cpu.read() is not None:
            pass
    copies = -(-samples // stream.samples)
    content = source.read_bytes()
    pages = [
        np.frombuffer(content, np.uint64, cpu.size // 8, cpu.offset).reshape(
            -1, data.page_size // 8
        )
        for cpu in data.cpus
    ]
    # The last events of the last pages come somewhat later than these begin.
    times = np.concatenate([page[:, 0] for page in pages])
    span = int(times.max() - times.min()) + 10**9

    at = min(cpu.offset for cpu in data.cpus)
    header = bytearray(content[:at])
    table = content.index(b"flyrecord\0") + 10
    for number, page in enumerate(pages):
        struct.pack_into("<2Q", header, table + 16 * number, at, copies * page.nbytes)
        at += copies * page.nbytes
    with target.open("wb") as file:
        file.write(header)
        for page in pages:
            later = page.copy()
            for _ in range(copies):
                file.write(later.data)
                later[:, 0] += np.uint64(span)
    return copies * stream.samples


def main() -> None:
    """Enlarge a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--samples", type=int, default=8_000_000)
    options = parser.parse_args()
    print(enlarge(options.source, options.target, options.samples), "samples")


if __name__ == "__main__":
    main()
