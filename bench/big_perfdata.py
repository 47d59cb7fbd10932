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


def times(data: PerfData, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where in the data section the times stand that move with a repetition."""
    places = []
    at = 0
    while at < len(words):
        head = int(words[at])
        kind, size = head & 0xFFFF_FFFF, head >> 51
        layout = data.layouts[0]
        if kind == perfdata.SAMPLE:
            places.append(at + layout.time_at)
        elif kind < 64:
            if kind in (perfdata.FORK, perfdata.EXIT):
                places.append(at + 3)
            if data.sample_id_all:
                places.append(at + size - layout.trailer_time)
        at += size
    found = np.array(places, np.int64)
    return found[words[found] > 0]  # 0 is in what perf made up


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a perf.data that was finished")
    parser.add_argument("target", type=Path)
    parser.add_argument("--samples", type=int, default=8_000_000, help="at least so many")
    options = parser.parse_args()

    data = PerfData(options.source)
    if data.cut:
        sys.exit(data.cut)
    content = options.source.read_bytes()
    start, end = data.data_offset, data.data_offset + data.data_size
    words = np.frombuffer(content[start:end], np.uint64).copy()
    moving = times(data, words)
    span = int(words[moving].max() - words[moving].min()) + 1000
    samples = sum(len(piece.samples) for piece in data.pieces())
    copies = -(-options.samples // samples)
    growth = (copies - 1) * data.data_size

    header = bytearray(content[:start])
    struct.pack_into("<Q", header, 48, copies * data.data_size)
    features = bytearray(content[end:])
    bits = int.from_bytes(header[72:104], "little")
    for number, bit in enumerate(b for b in range(256) if bits >> b & 1):
        offset, _ = struct.unpack_from("<2Q", features, 16 * number)
        struct.pack_into("<Q", features, 16 * number, offset + growth)
        if bit == _SAMPLE_TIME:
            (last,) = struct.unpack_from("<Q", features, offset - end + 8)
            struct.pack_into("<Q", features, offset - end + 8, last + (copies - 1) * span)
    with options.target.open("wb") as file:
        file.write(header)
        for _ in range(copies):
            file.write(words.data)
            words[moving] += np.uint64(span)
        file.write(features)
    print(f"{options.target}: {copies * samples} samples, {options.target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
