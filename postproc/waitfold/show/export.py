"""Exports for other tools, by the name of the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from waitfold.api import INTERVALS, Recording, interval_tables
from waitfold.show.firefox import write_firefox
from waitfold.show.perfetto import write_perfetto
from waitfold.show.speedscope import write_speedscope


def write_csv(recording: Recording, file: IO[bytes]) -> None:
    """Write the intervals as CSV, columns of api.INTERVALS, texts in quotes, nothing for missing.

    Rows come piece by piece, each piece in order of start.
    """
    # Arrow quotes a header's names always.
    file.write(",".join(INTERVALS.names).encode() + b"\n")
    options = pa.csv.WriteOptions(include_header=False, quoting_style="needed")
    with pa.csv.CSVWriter(file, INTERVALS, write_options=options) as writer:
        for table in interval_tables(recording.joined, recording.progress):
            writer.write_table(table)


def write_parquet(recording: Recording, file: IO[bytes]) -> None:
    """Write the intervals as Parquet, columns of api.INTERVALS, piece by piece."""
    with pa.parquet.ParquetWriter(file, INTERVALS, compression="zstd") as writer:
        for table in interval_tables(recording.joined, recording.progress):
            writer.write_table(table)


WRITERS: dict[str, Callable[[Recording, IO[bytes]], None]] = {
    "perfetto": write_perfetto,
    "speedscope": write_speedscope,
    "firefox": write_firefox,
    "csv": write_csv,
    "parquet": write_parquet,
}
"""By the name of the format."""

BINARY = ("perfetto", "parquet")
"""Formats that are no text."""
