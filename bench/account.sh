#!/usr/bin/env bash
# account.sh - is all of every backend's time accounted for, and rightly?
#
# usage: make account          (or bench/account.sh [SECONDS])
#
# Records pgbench's tpcb, its select-only with small shared_buffers, and eight clients that lock one table by
# turns, each with context switches and on-CPU samples, without and with queries. A line each: the residual, as a
# share of wall time, of the worst backend that lived through the capture; what the kernel itself counted of the
# time on a CPU and in the run queue (/proc/PID/schedstat) against what the capture says, of the worst backend;
# of the lock, the share of wall time in Lock:relation. Ends with 1 where a residual is above 1 %, or the share is
# not 7/8 within 3 points.
#
# cost: some minutes; 1 GB in $TMPDIR (default /tmp).
# needs: what `make deps` installs; root.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

seconds=${1:-10}
status=0

# account NAME PGBENCH-OPTION...: pgbench runs from before the recording until after it.
account() {
    local name=$1 with pgbench
    shift
    for with in offcpu,oncpu offcpu,oncpu,query; do
        timeout $((seconds + 120)) "$CLIENT/pgbench" -n -T $((seconds + 90)) "$@" >"$WORK/pgbench" 2>&1 &
        pgbench=$!
        pgbench_pids 2
        sleep 1
        timeout $((seconds + 80)) "$RECORD" -D "$DATA" --sites "$WORK/sites" --with $with --max-size 2G -o "$WORK/capture" -- \
            "$PYTHON" "$ROOT/bench/account.py" watch "$POSTMASTER" "$seconds" "$WORK/watched" 2>"$WORK/record.log" ||
            die "waitfold-record: $(tail -n 3 "$WORK/record.log")"
        kill "$pgbench"
        wait "$pgbench" || true
        "$PYTHON" "$ROOT/bench/account.py" check "$name" "$with" "$WORK/capture" "$WORK/watched" || status=1
        rm -rf -- "$WORK/capture"
    done
}

# One client works, the others wait: its table fits into shared_buffers, and each scan takes some 50 ms, so
# that what goes by between two transactions is little beside it, however busy the host is.
make_work
cat >"$WORK/lock.sql" <<'END'
BEGIN\; LOCK pgbench_accounts\; SELECT sum(abalance) FROM pgbench_accounts\; COMMIT;
END
start_server 5 'shared_buffers = 512MB' 'max_parallel_workers_per_gather = 0'
"$ROOT/scripts/waitfold-probes" sites "$BIN/postgres" >"$WORK/sites"
about_host
"$PYTHON" "$ROOT/bench/account.py" head
account lock -c 8 -j 8 -f "$WORK/lock.sql"
as_postgres pg_ctl -D "$DATA" -m immediate -w stop >>"$WORK/log"
start_server 20 'shared_buffers = 8MB'
account tpcb -c 4
account select-only -c 4 -S
exit "$status"
