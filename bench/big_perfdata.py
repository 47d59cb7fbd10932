#!/usr/bin/env python3
"""Make a large perf.data of a real one: its records again and again, each time later."""

from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from waitfold import perfdata
from waitfold.perfdata import PerfData

_SAMPLE_TIME = 21  # the feature section that holds the times of the first and the last sample


def times(data: PerfData, words: NDArray[np.uint64]) -> tuple[NDArray[np.int64], int, int]:
    """Return where in the data the times stand, and the part to repeat: all that has one.

    What perf made up of processes that existed already stands before it, without time.
    """
    layout = data.layouts[0]
    places: list[int] = []
    at = first = last = 0
    while at < len(words):
        head = int(words[at])
        kind, size = head & 0xFFFF_FFFF, head >> 51
        if kind == perfdata.SAMPLE:
            found = [at + layout.time_at]
        elif kind in (perfdata.FORK, perfdata.EXIT):
            found = [at + 3, at + size - layout.trailer_time]
        else:
            found = [at + size - layout.trailer_time] if kind < 64 else []
        places += found
        if any(words[place] for place in found):
            first = first or at
            last = at + size
        elif kind == perfdata.FINISHED_ROUND:
            last = at + size
        at += size
    all_ = np.array(places, np.int64)
    return all_[words[all_] > 0], first, last


def enlarge(source: Path, target: Path, samples: int) -> int:
    """Write at least so many samples to `target`; return how many."""
    data = PerfData(source)
    if data.cut:
        sys.exit(data.cut)
    content = source.read_bytes()
    start, end = data.data_offset, data.data_offset + data.data_size
    words = np.frombuffer(content[start:end], np.uint64).copy()
    moving, first, last = times(data, words)
    span = int(words[moving].max() - words[moving].min()) + 1000
    each = sum(len(piece.samples) for piece in data.pieces())
    copies = -(-samples // each)
    growth = (copies - 1) * 8 * (last - first)

    header = bytearray(content[:start])
    struct.pack_into("<Q", header, 48, data.data_size + growth)
    features = bytearray(content[end:])
    bits = int.from_bytes(header[72:104], "little")
    for number, bit in enumerate(b for b in range(256) if bits >> b & 1):
        offset, _ = struct.unpack_from("<2Q", features, 16 * number)
        struct.pack_into("<Q", features, 16 * number, offset + growth)
        if bit == _SAMPLE_TIME:
            (newest,) = struct.unpack_from("<Q", features, offset - end + 8)
            struct.pack_into("<Q", features, offset - end + 8, newest + (copies - 1) * span)
    with target.open("wb") as file:
        file.write(header)
        file.write(words[:first].data)
        for _ in range(copies):
            file.write(words[first:last].data)
            words[moving] += np.uint64(span)
        file.write(words[last:].data)
        file.write(features)
    return copies * each


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a perf.data that was finished")
    parser.add_argument("target", type=Path)
    parser.add_argument("--samples", type=int, default=8_000_000, help="at least so many")
    options = parser.parse_args()
    samples = enlarge(options.source, options.target, options.samples)
    print(f"{options.target}: {samples} samples, {options.target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
