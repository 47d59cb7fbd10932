#!/usr/bin/env bash
# truth.sh - is every transition seen, with its value, in order?
#
# usage: make truth            (or bench/truth.sh [SECONDS])
#
# A bpftrace watchpoint on a pgbench backend's wait_event_info reads each value from memory when
# it has been stored; waitfold-record runs at the same time. The two sequences are compared from the
# recording's first transition to its last;
# where they differ, a watchpoint by perf says what it saw; once for reads and once for writes with row locks; and the
# package's reader is compared with perf script, on every event of the same capture.
#
# needs: what `make deps` installs; root.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

seconds=${1:-40}

# compare NAME PGBENCH-OPTION...
compare() {
    local name=$1 pgbench pid address watch second backends
    shift
    timeout $((seconds + 120)) "$CLIENT/pgbench" -n -c 2 -T $((seconds + 90)) "$@" >"$WORK/pgbench" 2>&1 &
    pgbench=$!
    pgbench_pids 2
    backends=$REPLY
    pid=${backends%% *}
    wait_event_address "$pid"
    address=$REPLY
    BPFTRACE_PERF_RB_PAGES=16384 timeout $((seconds + 100)) bpftrace -p "$pid" -o "$WORK/$name.bpftrace" \
        -e "watchpoint:$address:4:w { printf(\"%llu %u\\n\", nsecs, *(uint32*)uptr($address)); }" >/dev/null 2>"$WORK/$name.bpftrace.log" &
    watch=$!
    await "$WORK/$name.bpftrace" 'Attaching 1 probe' 30
    # A second witness, for what only one of the two has seen. Attached later, it is served after bpftrace.
    timeout $((seconds + 100)) perf record -o "$WORK/$name.mem" -k CLOCK_MONOTONIC -m 4M -B -N -c 1 \
        -e "mem:$address/4:w" -p "$pid" >"$WORK/$name.mem.log" 2>&1 &
    second=$!
    sleep 1
    timeout $((seconds + 60)) "$RECORD" -D "$DATA" -m sites --engine perf -d "$seconds" -o "$WORK/$name" 2>"$WORK/$name.log" ||
        die "waitfold-record: $(tail -n 3 "$WORK/$name.log")"
    sleep 1
    # To bpftrace itself; timeout would pass INT on only in the foreground.
    children "$watch"
    kill -INT "${REPLY% }"
    wait "$watch" || true
    kill "$second"
    wait "$second" || true
    kill "$pgbench"
    wait "$pgbench" || true
    perf script -i "$WORK/$name.mem" --ns -F time >"$WORK/$name.mem.script"
    perf script -i "$WORK/$name/perf.data" --ns -F trace:tid,time,event,trace >"$WORK/$name.script"
    printf '%s: backend %s, %s s\n' "$name" "$pid" "$seconds"
    "$PYTHON" "$ROOT/bench/truth.py" "$WORK/$name" "$pid" "$WORK/$name.bpftrace" "$WORK/$name.script" "$WORK/$name.mem.script"
    # Where the limit on locked memory may not be raised, it says so and goes on.
    awk '!/RLIMIT_MEMLOCK/ && NF' "$WORK/$name.bpftrace.log"
}

start_server 20 'shared_buffers = 8MB'
about_host
status=0
compare select-only -S -M prepared || status=1
# One branch: two sessions wait for each other's row locks.
"$CLIENT/pgbench" -i -q -s 1 2>>"$WORK/log"
compare tpcb || status=1
exit "$status"
