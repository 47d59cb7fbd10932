#!/usr/bin/env bash
# flood.sh - 300,000 transitions a second: is anything lost, and is what is lost shown to the event?
#
# usage: make flood            (or bench/flood.sh [SECONDS])
#
# With either engine, at the defaults of waitfold-record but for --max-size:
#   counted   bench/flood.c, a program that makes transitions and counts them: 4 processes, 300,000 a second in all, 30 s
#   at most   the same, as fast as it can, 5 million
#   stalled   300,000 a second again, for 10 s, but for 3 s of them what records is stopped (SIGSTOP), as on a host that
#             has no time for it: more than the buffers hold, so that something is lost
#   server    PostgreSQL: four sessions read a table of one row a page past tiny shared_buffers, 30 s; the server
#             counts the blocks read, and each is one wait
# Of the program, made = recorded + lost must hold to the event, and without loss for each process. What was lost can
# also be a record of another kind (a process that began or ended, for perf any on this host): then lost is more.
#
# needs: what `make deps` installs; root; 2 GB in $TMPDIR (default /tmp).
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

seconds=${1:-30}
readonly CHILDREN=4 RATE=300000

# counted NAME ENGINE WAITS RATE [STALL]: of each child; RATE 0 is as fast as it can. After 3 s what records stands
# still for STALL seconds.
counted() {
    local name=$1 engine=$2 waits=$3 rate=$4 stall=${5-} folder=$WORK/program recorder program tries
    rm -rf -- "$folder" "$WORK/capture"
    mkdir "$folder"
    (cd "$folder" && exec "$WORK/postmaster" $CHILDREN "$waits" "$rate") >"$folder/made" &
    program=$!
    while [[ ! -s $folder/postmaster.pid ]]; do sleep 0.1; done
    record "$engine" "$folder"
    recorder=$REPLY
    children "$program"
    # shellcheck disable=SC2086 # words are wanted
    kill -USR1 $REPLY
    if [[ -n $stall ]]; then
        sleep 3
        children "$recorder"
        # shellcheck disable=SC2086
        kill -STOP $REPLY 2>/dev/null || true
        sleep "$stall"
        # shellcheck disable=SC2086
        kill -CONT $REPLY 2>/dev/null || true
    fi
    for ((tries = 0; tries < 3000; tries++)); do
        (($(wc -l <"$folder/made") < CHILDREN)) || break
        sleep 0.1
    done
    end "$recorder"
    children "$program"
    # shellcheck disable=SC2086
    kill -USR1 $REPLY
    wait "$program"
    "$PYTHON" "$ROOT/bench/flood.py" made "$name, $engine" "$WORK/capture" "$folder/made"
}

# record ENGINE DATA: starts a recorder; sets REPLY to its pid. At the default --max-size, 1G, perf stops at 12 million.
record() {
    rm -f -- "$WORK/record.log"
    "$RECORD" -D "$2" --engine "$1" -m sites --max-size 4G -o "$WORK/capture" 2>"$WORK/record.log" &
    REPLY=$!
    await "$WORK/record.log" 'recording PostgreSQL' 60
}

# end PID: a recorder.
end() {
    kill "$1" 2>/dev/null || true
    wait "$1" || die "waitfold-record: $(tail -n 3 "$WORK/record.log")"
}

blocks() { sql "SELECT pg_stat_force_next_flush(); SELECT sum(blks_read) FROM pg_stat_database" | awk 'NF { n = $1 } END { print n }'; }

server() {
    local engine=$1 before recorder
    rm -rf -- "$WORK/capture"
    record "$engine" "$DATA"
    recorder=$REPLY
    before=$(blocks)
    timeout $((seconds + 60)) "$CLIENT/pgbench" -n -c $CHILDREN -j 1 -T "$seconds" -f "$WORK/read.sql" >"$WORK/pgbench"
    # Statistics of sessions that have ended are in.
    sleep 1
    before=$(($(blocks) - before))
    end "$recorder"
    "$PYTHON" "$ROOT/bench/flood.py" read "server, $engine" "$WORK/capture" "$before"
}

start_server 1 'shared_buffers = 128kB' 'max_connections = 10' 'max_parallel_workers_per_gather = 0' 'jit = off'
about_host
gcc -O2 -Wall -Wextra -Wl,-E -Wl,--build-id -o "$WORK/postmaster" "$ROOT/bench/flood.c"
sql "CREATE TABLE wide (filler text); ALTER TABLE wide ALTER filler SET STORAGE PLAIN;
     INSERT INTO wide SELECT repeat('x', 7000) FROM generate_series(1, 20000)"
sql 'VACUUM FREEZE wide'
echo 'SELECT count(*) FROM wide;' >"$WORK/read.sql"
status=0
for engine in ftrace perf; do
    counted counted $engine $((RATE * seconds / CHILDREN / 2)) $((RATE / CHILDREN / 2)) || status=1
    counted 'at most' $engine $((5000000 / CHILDREN / 2)) 0 || status=1
    counted stalled $engine $((RATE * 10 / CHILDREN / 2)) $((RATE / CHILDREN / 2)) 3 || status=1
    server $engine || status=1
done
exit "$status"
