#!/usr/bin/env bash
# demo.sh - waitfold at work: a throw-away server under load, recorded, reported and drawn.
#
# usage: make demo            (or samples/demo.sh, once `make deps` is done)
#
# Starts the newest PostgreSQL under /usr/lib/postgresql in a temporary folder, reachable by a
# unix socket only; fills it with more than its shared_buffers hold; records pgbench
# for ten seconds; prints the report. Capture, report and flame graph stay in a new
# folder waitfold-demo-TIME of the current directory. The server is stopped and removed
# whatever happens; servers that run here already are left alone.
#
# Where tracing is not possible, it says why and analyses samples/pgbench-cold-reads.
#
# cost: half a minute of both CPUs of a small machine; 600 MB in $TMPDIR (default /tmp) meanwhile.
# needs: what `make deps` installs; to record: root and uprobes.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
waitfold=$root/.venv/bin/waitfold
work=''

say() { printf 'demo: %s\n' "$*"; }

die() {
    printf 'demo: %s\n' "$*" >&2
    exit 1
}

clean_up() {
    [[ -n $work ]] || return 0
    [[ ! -e $work/data/postmaster.pid ]] || as_postgres pg_ctl -D "$work/data" -m immediate -w stop >/dev/null || true
    rm -rf -- "$work"
}
trap clean_up EXIT

as_postgres() {
    local program=$1
    shift
    (cd / && runuser -u postgres -- "$bin/$program" "$@")
}

# can_record: 1 with what keeps us from recording the server, each with what mends it.
can_record() {
    "$root/scripts/waitfold-doctor" -D "$work/data" >"$work/doctor" && return 0
    say "waits cannot be recorded here; waitfold-doctor says:"
    awk '/^$/ { exit } /^[^ ]/ { shown = $1 == "no" } shown' "$work/doctor"
    return 1
}

start_server() {
    chown postgres "$work"
    as_postgres initdb -D "$work/data" -A trust -U postgres --no-sync >"$work/log"
    cat >>"$work/data/postgresql.conf" <<END
listen_addresses = ''
unix_socket_directories = '$work'
shared_buffers = 8MB
autovacuum = off
END
    as_postgres pg_ctl -D "$work/data" -l "$work/server.log" -w start >>"$work/log"
}

# fill: data far larger than the server's buffers, and not in the kernel's page cache either, so that reads
# show as waits.
fill() {
    "$bin/pgbench" -h "$work" -U postgres -i -q -s 20 postgres 2>>"$work/log"
    "$bin/psql" -h "$work" -U postgres -q -c CHECKPOINT postgres
    find "$work/data/base" -type f -size +1M -exec dd if={} iflag=nocache count=0 status=none \;
}

# record: 1 when nothing could be recorded.
record() {
    local status=0
    "$root/scripts/waitfold-record" -D "$work/data" -o "$out/capture" -- \
        "$bin/pgbench" -h "$work" -U postgres -n -c 8 -j 2 -T 10 postgres >"$work/pgbench" || status=$?
    awk -F ' = |: ' '
        /^number of transactions actually/ { n = $2 }
        /^latency average/ { latency = $2 }
        /^tps/ { split($2, word, " "); tps = word[1] }
        END { printf "demo: pgbench made %d transactions, %d a second, %s each\n", n, tps, latency }' "$work/pgbench"
    # What was recorded before something went wrong is shown.
    ((status == 0)) || [[ -d $out/capture ]]
}

# record_here: 1 when this host does not allow it; it has said why.
record_here() {
    local error
    ((EUID == 0)) || {
        say "waits cannot be recorded here by an ordinary user"
        return 1
    }
    # In a container, and on some hosts, nobody has mounted it yet.
    if [[ ! -e /sys/kernel/tracing/README ]]; then
        if error=$(mount -t tracefs nodev /sys/kernel/tracing 2>&1); then
            say "mounted tracefs on /sys/kernel/tracing"
        else
            say "tracefs cannot be mounted here: ${error%%$'\n'*}"
        fi
    fi
    work=$(mktemp -d "${TMPDIR:-/tmp}/waitfold-demo.XXXXXX")
    bin=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
    [[ -x $bin/pgbench ]] || {
        say "no PostgreSQL under /usr/lib/postgresql; to install it: make deps"
        return 1
    }
    say "starting $("$bin/postgres" --version) in $work ..."
    start_server || {
        say "the server could not be started; it says: $(tail -n 3 "$work/log")"
        return 1
    }
    can_record || return 1
    say "filling it with 300 MB ..."
    fill
    record || {
        say "waits cannot be recorded here; waitfold-record says why above"
        return 1
    }
}

[[ -x $waitfold ]] || die "no $waitfold: run \"make deps\" in $root first"
out=waitfold-demo-$(date +%Y%m%d-%H%M%S)
mkdir "$out" || die "run this from a folder that you may write to: cd; $root/samples/demo.sh"

record_here || {
    say "so this is a capture that was made elsewhere, samples/pgbench-cold-reads:"
    cp -R "$root/samples/pgbench-cold-reads" "$out/capture"
}
printf '\n'
"$waitfold" report "$out/capture" | tee "$out/report.txt"
"$waitfold" flamegraph "$out/capture" --title 'waits of pgbench, 8 clients' -o "$out/waits.svg"
printf '\n'
say "the report again:  $out/report.txt"
say "a flame graph:     $out/waits.svg   (open it in a browser)"
say "the capture:       $out/capture   (waitfold report --histogram, waits, fold ...)"
