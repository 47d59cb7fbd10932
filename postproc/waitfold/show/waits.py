"""The intervals themselves, as CSV or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from waitfold.pair import FLAGS, Intervals

Label = Callable[[int], tuple[str, str]]
"""Class and name of a value."""

SCHEMA = pa.schema(
    {
        "start_ns": pa.int64(),
        "dur_ns": pa.int64(),
        "pid": pa.int32(),
        "tid": pa.int32(),
        "class": pa.string(),
        "name": pa.string(),
        "flags": pa.string(),
    }
)
"""One row per interval; `flags` is empty, or `start`, `end`, `lost` joined by `|`."""

_FLAGS = pa.array(FLAGS)


def write_csv(
    batches: Iterator[Intervals], label: Label, file: IO[bytes], quoted: bool = False
) -> None:
    """Write the intervals as CSV, piece by piece, each piece in order of start.

    Names of wait events need no quotes, those of other sets may hold anything: `quoted`.
    """
    # Arrow quotes a header's names always.
    file.write(",".join(SCHEMA.names).encode() + b"\n")
    options = pa.csv.WriteOptions(
        include_header=False, quoting_style="needed" if quoted else "none", batch_size=1 << 16
    )
    with pa.csv.CSVWriter(file, SCHEMA, write_options=options) as writer:
        for batch in batches:
            writer.write_table(_table(batch, label))


def write_parquet(batches: Iterator[Intervals], label: Label, file: IO[bytes]) -> None:
    """Write the intervals as Parquet, piece by piece, each piece in order of start."""
    with pa.parquet.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for batch in batches:
            if len(batch.start_ns):
                writer.write_table(_table(batch, label))


def _table(batch: Intervals, label: Label) -> pa.Table:
    batch = batch.take(np.argsort(batch.start_ns, kind="stable"))
    values, codes = np.unique(batch.value, return_inverse=True)
    labels = [label(value) for value in values.tolist()]
    codes = pa.array(codes)
    return pa.table(
        [
            pa.array(batch.start_ns),
            pa.array(batch.dur_ns),
            pa.array(batch.pid),
            pa.array(batch.tid),
            pa.array([class_ for class_, _ in labels], pa.string()).take(codes),
            pa.array([name for _, name in labels], pa.string()).take(codes),
            _FLAGS.take(pa.array(batch.flags)),
        ],
        schema=SCHEMA,
    )
