#!/usr/bin/env bash
# speed.sh - report from a large perf.data and a large trace.dat: waitfold against the text of perf and trace-cmd, and mawk.
#
# usage: make speed            (or bench/speed.sh [--source FILE] [--samples N] [--rounds N])
#
# Repeats a real file, each time later, to N samples (8 million). Without --source it records one by
# each engine: pgbench's tpcb, four sessions, five seconds, on a throw-away server. First it sees that
# `perf script | mawk -f bench/pair.awk`, of a trace.dat `trace-cmd report | mawk -f bench/pair_trace.awk`,
# and waitfold find the same counts and totals, to the nanosecond. Then both run by turns, and it prints the
# ratio of their times and its spread; at last time and peak memory of `waitfold report` by size of the file.
#
# cost: some minutes; 3 GB in $TMPDIR (default /tmp) for 8 million samples.
# needs: perf, trace-cmd, mawk and what `make deps` installs; root where it records.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

if [[ " $* " == *' --source'* ]]; then
    "$PYTHON" "$ROOT/bench/speed.py" "$@"
    exit
fi
start_server 5 'shared_buffers = 16MB'
for engine in perf ftrace; do
    "$RECORD" -D "$DATA" -m sites --engine $engine -o "$WORK/$engine" -- "$CLIENT/pgbench" -n -c 4 -T 5 >"$WORK/pgbench" 2>&1
    "$PYTHON" "$ROOT/bench/speed.py" --source "$(echo "$WORK/$engine"/*.dat*)" "$@"
done
