#!/usr/bin/env bash
# modes.sh - do all modes, by all engines, see the same transitions of the same backends at the same time?
#
# usage: make modes WAITFOLD_USDT=PREFIX     (or bench/modes.sh [TRANSACTIONS])
#
# On a server with the wait__event probes, five recorders at once: sites by ftrace and by perf, usdt by ftrace and by
# perf, mem. Four pgbench sessions are held back by a lock until all five record, do TRANSACTIONS each (5,000 of
# tpcb with one branch, and ten times as many select-only), and end before the recorders do: what each
# recorded of a session from the lock on must be the same, in order, to the last transition. Every pair is compared;
# where two differ, it is shown when, how, and what the other three saw.
#
# A store that a probe itself is on is executed elsewhere (in uprobes' own page), so that the watchpoint's IP does not
# tell which it was: with sites beside it, mem sees that there was a store, and not its value. So usdt and mem
# are also compared alone.
#
# needs: what `make deps` installs; root; WAITFOLD_USDT: a server made by `make usdt-postgres NOP5=1`. (With 1-byte
#   nops sites go on these nops too, and the kernel wants all probes on one place to have the same semaphore.)
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

transactions=${1:-5000}

# compare NAME TRANSACTIONS PGBENCH-OPTION...: by the recorders of `ways`.
compare() {
    local name=$1 transactions=$2 way pgbench pids recorders=() pid
    shift 2
    rm -rf -- "$WORK"/{sites,usdt,mem}-*
    hold_back
    timeout 600 "$CLIENT/pgbench" -n -c 4 -j 4 -t "$transactions" "$@" >"$WORK/pgbench" 2>&1 &
    pgbench=$!
    pgbench_pids 4 "wait_event = 'relation'"
    pids=$REPLY
    # Longer than deadlock_timeout: then a session looks about once, and goes on to wait for good.
    sleep 1.5
    for way in "${ways[@]}"; do
        local options=(-D "$DATA" -m "${way%-*}" --engine "${way#*-}" -o "$WORK/$way")
        [[ $way == usdt-* ]] || options+=(--sites "$WORK/sites.tsv")
        "$RECORD" "${options[@]}" 2>"$WORK/$way.log" &
        recorders+=("$!")
        await "$WORK/$way.log" 'recording PostgreSQL' 60
    done
    release
    wait "$pgbench" || die "pgbench: $(tail -n 3 "$WORK/pgbench")"
    # shellcheck disable=SC2086 # words are wanted
    for pid in $pids; do
        await_end "$pid" 10 || die "backend $pid does not end"
    done
    sleep 0.5
    for pid in "${recorders[@]}"; do kill "$pid"; done
    for pid in "${recorders[@]}"; do
        wait "$pid" || die "a recorder failed: $(tail -n 2 "$WORK"/*-*.log)"
    done
    say "$name: sessions $pids"
    # shellcheck disable=SC2086
    "$PYTHON" "$ROOT/bench/modes.py" "$name" --pids $pids --captures "${ways[@]/#/$WORK/}"
}

[[ -n ${WAITFOLD_USDT-} ]] || die "name a server with the wait__event probes: WAITFOLD_USDT=PREFIX (make usdt-postgres NOP5=1)"
BIN=$WAITFOLD_USDT/bin
# One branch: sessions wait for each other's row locks. Reads go past shared_buffers.
start_server 1 'shared_buffers = 1MB'
about_host
start_locker
"$ROOT/scripts/waitfold-probes" sites "$BIN/postgres" >"$WORK/sites.tsv"
status=0
for ways in 'sites-ftrace sites-perf usdt-ftrace usdt-perf mem-perf' 'usdt-ftrace mem-perf'; do
    read -r -a ways <<<"$ways"
    compare select-only $((transactions * 10)) -S -M prepared || status=1
    compare tpcb "$transactions" || status=1
done
exit "$status"
