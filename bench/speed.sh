#!/usr/bin/env bash
# speed.sh - report from a large perf.data: waitfold against perf script and mawk.
#
# usage: bench/speed.sh [--source FILE] [--samples N] [--rounds N]
#
# Repeats a real perf.data (default: the sample capture's) to N samples (8 million). First it sees
# that `perf script | mawk -f bench/pair.awk` and waitfold find the same counts and totals, to the
# nanosecond. Then both run by turns, and it prints the ratio of their times and its spread; at last
# time and peak memory of `waitfold report` by size of the file.
#
# cost: some minutes; 3 GB in $TMPDIR (default /tmp) for 8 million samples.
# needs: perf, mawk and what `make deps` installs.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
exec "$root/.venv/bin/python" "$root/bench/speed.py" "$@"
