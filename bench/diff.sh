#!/usr/bin/env bash
# diff.sh - is noise read as change, and is a slower disk found?
#
# usage: make diff-truth       (or bench/diff.sh [PAIRS [SECONDS [MICROSECONDS]]])
#
# pgbench's tpcb by two clients, recorded again and again for some seconds each: A, A, and B, in which fsync and
# fdatasync take 20 % longer (bench/slow_fsync.c, preloaded into the server). A against the A after it must show no
# significant row; B against the A before it must show IO:WALSync as the first.
#
# What else happens on the host is change too, to the server and so to diff. So that the result depends on it less, the
# data is in memory (/dev/shm), where the library makes an fsync take from a half to one and a half MICROSECONDS
# (default 1000; 0 is no disk but this host's, with the data in $TMPDIR), and server and pgbench run at real-time priority.
#
# needs: what `make deps` installs; root; about 20 s for each of the PAIRS (default 20) times three.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

pairs=${1:-20} seconds=${2:-8} microseconds=${3:-1000}
((microseconds == 0)) || TMPDIR=/dev/shm

# disk PERCENT: sets how much longer than it should an fsync takes.
disk() {
    local number
    for number in "$microseconds" "$1"; do
        # shellcheck disable=SC2059 # the format is made here
        printf "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((number & 255)) $((number >> 8 & 255)) $((number >> 16 & 255)) 0)"
    done | dd of="$WORK/disk" conv=notrunc status=none
}

# take CAPTURE PERCENT
take() {
    local pgbench
    disk "$2"
    chrt -r 1 timeout $((seconds + 200)) "$CLIENT/pgbench" -n -c 2 -T $((seconds + 190)) >"$WORK/pgbench" 2>&1 &
    pgbench=$!
    pgbench_pids 2
    sleep 0.5
    timeout $((seconds + 180)) "$RECORD" -D "$DATA" --sites "$WORK/sites" --with transaction -d "$seconds" -o "$1" </dev/null 2>"$WORK/record.log" ||
        die "waitfold-record: $(tail -n 3 "$WORK/record.log")"
    kill "$pgbench"
    wait "$pgbench" || true
}

start_server 10
about_host
as_postgres pg_ctl -D "$DATA" -m fast -w stop >>"$WORK/log"
gcc -O2 -Wall -Wextra -shared -fPIC -o "$WORK/slow_fsync.so" "$ROOT/bench/slow_fsync.c" -ldl
truncate -s 4096 "$WORK/disk"
disk 0
LD_PRELOAD=$WORK/slow_fsync.so SLOW_FSYNC=$WORK/disk as_postgres pg_ctl -D "$DATA" -l "$WORK/server.log" -w start >>"$WORK/log"
look_at_server
children "$POSTMASTER"
for pid in "$POSTMASTER" $REPLY; do chrt -r -p 1 "$pid"; done
"$ROOT/scripts/waitfold-probes" sites "$BIN/postgres" >"$WORK/sites"

mkdir "$WORK/captures"
for ((pair = 10; pair < 10 + pairs; pair++)); do
    take "$WORK/captures/$pair-1" 0
    take "$WORK/captures/$pair-2" 0
    take "$WORK/captures/$pair-3" 20
done
"$PYTHON" "$ROOT/bench/diff.py" "$WORK/captures"
