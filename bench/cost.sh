#!/usr/bin/env bash
# cost.sh - the CPU that tracing adds to a backend, for each transition.
#
# usage: make cost WAITFOLD_USDT=PREFIX      (or bench/cost.sh [ROUNDS [SECONDS]])
#
# Two ways to measure. Bare: bench/flood.c, which does nothing but such stores, 300,000 of them; its own CPU; twice as
# many rounds. In a server: two pgbench sessions do the same number of transactions (SECONDS of them, untraced), on three servers that differ
# only in their wait__event probes, as do three builds of flood.c: a plain one has none (PREFIX-plain, or the stock one), PREFIX has them with nops of
# one byte, PREFIX-nop5 with nops of five. On each untraced and traced by
#   SERVER-untraced                     nothing records: what the probes cost by themselves
#   plain-sites-ftrace, -sites-perf, -mem-perf, usdt-usdt-ftrace, -usdt-perf, nop5-usdt-ftrace, -usdt-perf
#                                       waitfold-record
#   usdt-bpftrace                       bpftrace on the same wait__event probes, that only counts
#   plain-bpftrace                      a bpftrace watchpoint on each wait_event_info, that only counts
# (bpftrace cannot count at the sites: it puts no uprobe inside a function, and the kernel refuses its kind of
# program on an event of uprobe_events.)
# Each round has all of them, in an order that changes from round to round. In a server, a lock on the table holds the
# sessions back until the tracer is attached, so that its start is not counted. The CPU of the
# backends is what the postmaster collects when they have ended, less what they had used at the lock; that
# of a tracer is what its processes use in the same time.
#
# needs: what `make deps` installs; root; servers by `make usdt-postgres`, with NOP5=1, and with PLAIN=1; a machine with
#   nothing else to do.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

rounds=${1:-5} seconds=${2:-5}
readonly BARE=300000
readonly LIMIT=300 # seconds for what should take a fraction of it
TICK_US=$((1000000 / $(getconf CLK_TCK)))
readonly TICK_US
readonly VARIANTS=(plain-untraced plain-sites-ftrace usdt-usdt-perf nop5-usdt-ftrace usdt-bpftrace plain-mem-perf
    usdt-untraced nop5-usdt-perf plain-sites-perf nop5-untraced plain-bpftrace usdt-usdt-ftrace)

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

declare -A port=() locker=() prefix=()

# add_server NAME BIN
add_server() {
    BIN=$2
    start_server 20 'shared_buffers = 8MB'
    start_locker
    port[$1]=$PGPORT locker[$1]=$LOCKER prefix[$1]=$BIN
    "$ROOT/scripts/waitfold-probes" sites "$BIN/postgres" >"$WORK/$1.tsv"
}

use_server() {
    PGPORT=${port[$1]} LOCKER=${locker[$1]} BIN=${prefix[$1]} DATA=$WORK/data.${port[$1]} sites=$WORK/$1.tsv
    look_at_server
}

# add_program NAME GCC-OPTION...
add_program() {
    local folder=$WORK/$1
    mkdir "$folder"
    gcc -O2 -Wl,-E -Wl,--build-id "${@:2}" -o "$folder/postmaster" "$ROOT/bench/flood.c"
    "$ROOT/scripts/waitfold-probes" sites "$folder/postmaster" >"$folder/sites.tsv"
}

# trace SERVER WAY PID...: attaches to the sessions and sets REPLY to what is to be ended.
trace() {
    local server=$1 way=$2 pid all=''
    shift 2
    case $way in
        untraced) REPLY='' ;;
        bpftrace)
            if [[ $server == plain ]]; then
                for pid; do
                    wait_event_address "$pid"
                    count_by_bpftrace -p "$pid" -e "watchpoint:$REPLY:4:w { @ = count(); }"
                    all+=" $REPLY"
                done
                REPLY=$all
            else
                local binary=$BINARY:postgresql:wait__event__
                count_by_bpftrace -e "usdt:${binary}start { @ = count(); } usdt:${binary}end { @ = count(); }"
            fi
            ;;
        *)
            local options=(-D "$DATA" -m "${way%-*}" --engine "${way#*-}" -o "$WORK/capture")
            [[ $way == usdt-* ]] || options+=(--sites "$sites")
            rm -f -- "$WORK/record.log"
            timeout $LIMIT "$RECORD" "${options[@]}" 2>"$WORK/record.log" &
            REPLY=$!
            await "$WORK/record.log" 'recording PostgreSQL' 60
            ;;
    esac
}

# count_by_bpftrace OPTION...: one more bpftrace. It prints its sum each second, as it takes 20 s to end.
count_by_bpftrace() {
    local out
    out=$(mktemp "$WORK/bpftrace.XXXXXX")
    timeout $LIMIT bpftrace -o "$out" "${@:1:$#-1}" "${!#} interval:s:1 { print(@); }" >/dev/null 2>&1 &
    REPLY=$!
    await "$out" Attaching 30
    await "$out" @: 60
}

# end PID...: of tracers.
end() {
    local pid
    for pid; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" || true
    done
}

# measure_bare ROUND PROGRAM-WAY: adds a line to $WORK/bare.
measure_bare() {
    local round=$1 program=${2%%-*} way=${2#*-} pid server tries
    DATA=$WORK/program sites=$WORK/$program/sites.tsv
    rm -rf -- "$WORK/capture" "$WORK"/bpftrace.* "$DATA"
    mkdir "$DATA"
    (cd "$DATA" && exec "$WORK/$program/postmaster" 1 $((BARE / 2)) 0) >"$DATA/made" &
    server=$!
    while [[ ! -s $DATA/postmaster.pid ]]; do sleep 0.1; done
    look_at_server
    children "$POSTMASTER" && pid=${REPLY% }
    trace "$program" "$way" "$pid"
    kill -USR1 "$pid"
    for ((tries = 0; tries < LIMIT * 10; tries++)); do
        [[ ! -s $DATA/made ]] || break
        sleep 0.1
    done
    # shellcheck disable=SC2086 # words are wanted
    end $REPLY
    kill -USR1 "$pid"
    wait "$server"
    awk -v round="$round" -v variant="$program-$way" '{ print round "\t" variant "\t" $2 "\t" $4 }' "$DATA/made" >>"$WORK/bare"
}

# each ROUND COMMAND...: the command with every variant; begun elsewhere, and every other time backwards.
each() {
    local round=$1 i at
    shift
    for ((i = 0; i < ${#VARIANTS[@]}; i++)); do
        at=$(((i + 5 * round) % ${#VARIANTS[@]}))
        ((round % 2 == 0)) || at=$((${#VARIANTS[@]} - 1 - at))
        "$@" "${VARIANTS[at]}"
    done
}

# measure SERVER-WAY: adds a line to $WORK/cost.
measure() {
    local server=${1%%-*} way=${1#*-}
    local pgbench pids pid tracers all run at_lock=0 own before begun took
    use_server "$server"
    rm -rf -- "$WORK/capture" "$WORK"/bpftrace.*
    sql CHECKPOINT
    hold_back
    timeout $LIMIT "$CLIENT/pgbench" -n -c 2 -j 2 -t $((transactions / 2)) "${load[@]}" >"$WORK/pgbench" 2>&1 &
    pgbench=$!
    pgbench_pids 2 "wait_event = 'relation'"
    pids=$REPLY
    # shellcheck disable=SC2086 # words are wanted
    trace "$server" "$way" $pids
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

    release
    wait "$pgbench" || die "pgbench: $(tail -n 3 "$WORK/pgbench")"
    monotonic_ns && took=$((REPLY - begun))
    # shellcheck disable=SC2086
    cpu_us $all && own=$(((REPLY - own) * 1000))
    # bpftrace counts in the kernel, in the backend's time; one of a process ends with it.
    [[ $way != bpftrace ]] || own=nan
    for pid in $pids; do
        await_end "$pid" 10 || die "backend $pid does not end"
    done
    cpu_us "$POSTMASTER"
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s' "$workload" "$round" "$server-$way" "$transactions" "$took" \
        $(((REPLY - before - at_lock) * 1000)) "$own" >>"$WORK/cost"
    # For the last sum of bpftrace's.
    [[ $way != bpftrace ]] || sleep 1.5
    # shellcheck disable=SC2086
    end $tracers
    # shellcheck disable=SC2086
    "$PYTHON" "$ROOT/bench/cost.py" count "$way" "$WORK" $pids >>"$WORK/cost"
    say "$(tail -n 1 "$WORK/cost")"
}

# bench WORKLOAD PGBENCH-OPTION...
bench() {
    local workload=$1 load=("${@:2}") round transactions
    use_server plain
    timeout 60 "$CLIENT/pgbench" -n -c 2 -j 2 -T 5 "${load[@]}" >"$WORK/pgbench" 2>&1
    transactions=$(awk -F '[: ]+' -v s="$seconds" '/^number of transactions actually/ { print 2 * int($NF * s / 10) }' "$WORK/pgbench")
    for ((round = 0; round < rounds; round++)); do each "$round" measure; done
}

[[ -n ${WAITFOLD_USDT-} && -x $WAITFOLD_USDT-nop5/bin/postgres ]] ||
    die "name a server with the wait__event probes: WAITFOLD_USDT=PREFIX, and PREFIX-nop5 beside it (make usdt-postgres)"
plain=$WAITFOLD_USDT-plain/bin
[[ -x $plain/postgres ]] || {
    plain=''
    say "no $WAITFOLD_USDT-plain: the stock server, which was compiled otherwise, stands for one without probes"
}
require root tracefs uprobes perf binutils
make_work

add_program plain
add_program usdt -DPROBES
mkdir -p "$WORK/include/sys"
printf '%s\n' '#include_next <sys/sdt.h>' '#undef _SDT_NOP' '#define _SDT_NOP .nops 5' >"$WORK/include/sys/sdt.h"
add_program nop5 -DPROBES -mno-red-zone -I"$WORK/include"
printf 'round\tvariant\ttransitions\tcpu_ns\n' >"$WORK/bare"
for ((round = 0; round < 2 * rounds; round++)); do each "$round" measure_bare "$round"; done
"$PYTHON" "$ROOT/bench/cost.py" bare "$WORK/bare"

add_server plain "$plain"
add_server usdt "$WAITFOLD_USDT/bin"
add_server nop5 "$WAITFOLD_USDT-nop5/bin"
about_host
printf 'workload\tround\tvariant\ttransactions\ttook_ns\tcpu_ns\town_ns\ttransitions\n' >"$WORK/cost"
bench select-only -S -M prepared
bench tpcb -M prepared
"$PYTHON" "$ROOT/bench/cost.py" show "$WORK/cost"
