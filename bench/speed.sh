#!/usr/bin/env bash
# speed.sh - report from a large perf.data: waitfold against perf script and mawk.
#
# usage: make speed            (or bench/speed.sh [--source FILE] [--samples N] [--rounds N])
#
# Repeats a real perf.data, each time later, to N samples (8 million). Without --source it records
# one: pgbench's tpcb, four sessions, five seconds, on a throw-away server. First it sees that
# `perf script | mawk -f bench/pair.awk` and waitfold find the same counts and totals, to the
# nanosecond. Then both run by turns, and it prints the ratio of their times and its spread; at last
# time and peak memory of `waitfold report` by size of the file.
#
# cost: some minutes; 3 GB in $TMPDIR (default /tmp) for 8 million samples.
# needs: perf, mawk and what `make deps` installs; root where it records.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

if [[ " $* " != *' --source'* ]]; then
    start_server 5 'shared_buffers = 16MB'
    "$RECORD" -D "$DATA" -m sites --engine perf -o "$WORK/capture" -- "$CLIENT/pgbench" -n -c 4 -T 5 >"$WORK/pgbench" 2>&1
    set -- --source "$WORK/capture/perf.data" "$@"
fi
"$PYTHON" "$ROOT/bench/speed.py" "$@"
