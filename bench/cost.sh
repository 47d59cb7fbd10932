#!/usr/bin/env bash
# cost.sh - the CPU that tracing adds to a backend, for each transition.
#
# usage: make cost             (or bench/cost.sh [ROUNDS [SECONDS]])
#
# Two pgbench sessions do the same number of transactions (SECONDS of them, untraced) untraced and traced by
#   sites      waitfold-record
#   mem        perf record -e mem:ADDRESS/4:w, a hardware breakpoint
#   bpftrace   a watchpoint on the same address that only counts
# Each round has all four, in an order that changes from round to round. A lock on the table holds the
# sessions back until the tracer is attached, so that its start is not counted. The CPU of the
# backends is what the postmaster collects when they have ended, less what they had used at the lock; that
# of a tracer is what its processes use in the same time. mem and bpftrace do less than sites: neither
# its sample nor its counter carries the value that was stored.
#
# needs: what `make deps` installs; root; a machine with nothing else to do.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

rounds=${1:-5} seconds=${2:-5}
readonly LIMIT=300 # seconds for what should take a fraction of it
TICK_US=$((1000000 / $(getconf CLK_TCK)))
readonly TICK_US
# Each follows each other one once.
readonly ORDERS=(
    'untraced sites bpftrace mem'
    'sites mem untraced bpftrace'
    'mem bpftrace sites untraced'
    'bpftrace untraced mem sites'
)

# cpu_us PID...: sets REPLY to the CPU that they, and their children that have ended, have used.
cpu_us() {
    local pid stat sum=0
    for pid; do
        # What a short-lived one has used, its parent says.
        { read -r stat <"/proc/$pid/stat"; } 2>/dev/null || continue
        # shellcheck disable=SC2086 # words are wanted
        set -- ${stat##*) }
        sum=$((sum + (${12} + ${13} + ${14} + ${15}) * TICK_US))
    done
    REPLY=$sum
}

# trace_VARIANT PID PID: attaches to the sessions and sets REPLY to what is to be ended.
trace_untraced() { REPLY=''; }

trace_sites() {
    timeout $LIMIT "$RECORD" -D "$DATA" -o "$WORK/sites" 2>"$WORK/sites.log" &
    await "$WORK/sites.log" 'recording PostgreSQL' 60
    REPLY=$!
}

trace_mem() {
    local pid events=()
    for pid; do
        wait_event_address "$pid"
        events+=(-e "mem:$REPLY/4:w")
    done
    # The session that holds the lock outlives the two, and so perf does until it is told to end.
    timeout $LIMIT perf record -o "$WORK/mem" -k CLOCK_MONOTONIC -m 1M -B -N -c 1 "${events[@]}" \
        -p "$1,$2,$locker" >"$WORK/mem.log" 2>&1 &
    sleep 2
    REPLY=$!
}

trace_bpftrace() {
    local pid all=''
    for pid; do
        wait_event_address "$pid"
        timeout $LIMIT bpftrace -p "$pid" -o "$WORK/bpftrace.$pid" -e "watchpoint:$REPLY:4:w { @ = count(); }" \
            >/dev/null 2>"$WORK/bpftrace.$pid.log" &
        all+=" $!"
    done
    for pid; do
        await "$WORK/bpftrace.$pid" 'Attaching 1 probe' 30
    done
    sleep 2
    REPLY=$all
}

# measure WORKLOAD ROUND VARIANT TRANSACTIONS PGBENCH-OPTION...: adds a line to $WORK/cost.
measure() {
    local workload=$1 round=$2 variant=$3 transactions=$4
    local pgbench pids pid tracers all run at_lock=0 own before begun took
    shift 4
    rm -rf -- "$WORK"/{sites,mem,bpftrace}*
    sql CHECKPOINT
    echo 'BEGIN; LOCK TABLE pgbench_accounts;' >&"$lock"
    until [[ $(sql "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND relation = 'pgbench_accounts'::regclass") == 1 ]]; do
        sleep 0.1
    done
    timeout $LIMIT "$CLIENT/pgbench" -n -c 2 -j 2 -t $((transactions / 2)) "$@" >"$WORK/pgbench" 2>&1 &
    pgbench=$!
    pgbench_pids 2 "wait_event = 'relation'"
    pids=$REPLY
    # shellcheck disable=SC2086 # words are wanted
    "trace_$variant" $pids
    tracers=$REPLY
    # shellcheck disable=SC2086
    family $tracers
    all=$REPLY
    for pid in $pids; do
        read -r run _ <"/proc/$pid/schedstat"
        at_lock=$((at_lock + run / 1000))
    done
    # shellcheck disable=SC2086
    cpu_us $all && own=$REPLY
    cpu_us "$POSTMASTER" && before=$REPLY
    monotonic_ns && begun=$REPLY

    echo 'ROLLBACK;' >&"$lock"
    wait "$pgbench" || die "pgbench: $(tail -n 3 "$WORK/pgbench")"
    monotonic_ns && took=$((REPLY - begun))
    # shellcheck disable=SC2086
    cpu_us $all && own=$(((REPLY - own) * 1000))
    # bpftrace ends with its backend, before it can be asked; it works in the kernel, in the backend's time.
    [[ $variant != bpftrace ]] || own=nan
    for pid in $pids; do
        await_end "$pid" 10 || die "backend $pid does not end"
    done
    cpu_us "$POSTMASTER"
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s' "$workload" "$round" "$variant" "$transactions" "$took" \
        $(((REPLY - before - at_lock) * 1000)) "$own" >>"$WORK/cost"
    for pid in $tracers; do
        [[ $variant == bpftrace ]] || kill "$pid"
        wait "$pid" || true
    done
    # shellcheck disable=SC2086
    "$PYTHON" "$ROOT/bench/cost.py" count "$variant" "$WORK" $pids >>"$WORK/cost"
    say "$(tail -n 1 "$WORK/cost")"
}

# bench WORKLOAD PGBENCH-OPTION...
bench() {
    local workload=$1 round variant transactions
    shift
    timeout 60 "$CLIENT/pgbench" -n -c 2 -j 2 -T 5 "$@" >"$WORK/pgbench" 2>&1
    transactions=$(awk -F '[: ]+' -v s="$seconds" '/^number of transactions actually/ { print 2 * int($NF * s / 10) }' "$WORK/pgbench")
    for ((round = 0; round < rounds; round++)); do
        for variant in ${ORDERS[round % 4]}; do
            measure "$workload" "$round" "$variant" "$transactions" "$@"
        done
    done
}

start_server 20 'shared_buffers = 8MB'
about_host
mkfifo "$WORK/lock"
exec {lock}<>"$WORK/lock"
"$CLIENT/psql" -Xq <&"$lock" >>"$WORK/log" 2>&1 &
sleep 1
locker=$(sql "SELECT pid FROM pg_stat_activity WHERE application_name = 'psql' AND pid <> pg_backend_pid()")
printf 'workload\tround\tvariant\ttransactions\ttook_ns\tcpu_ns\town_ns\ttransitions\n' >"$WORK/cost"
bench select-only -S -M prepared
bench tpcb -M prepared
"$PYTHON" "$ROOT/bench/cost.py" show "$WORK/cost"
