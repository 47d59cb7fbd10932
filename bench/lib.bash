# shellcheck shell=bash
# lib.bash - what the benches share: a throw-away server, its sessions, and an end to all of it.
#
# Sourced, never run. Uses the functions of scripts/lib.bash (messages, pids, memory of a process).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.bash
. "$ROOT/scripts/lib.bash"

PYTHON=$ROOT/.venv/bin/python
WAITFOLD=$ROOT/.venv/bin/waitfold
RECORD=$ROOT/scripts/waitfold-record
export PYTHON WAITFOLD RECORD
WORK='' BIN='' CLIENT='' DATA=''

say() { printf '%s\n' "$*" >&2; }

# finish: ends what a bench has started; a bench adds to it by a function at_end of its own.
finish() {
    local status=$? pid data
    trap '' INT TERM
    trap - ERR
    set +e
    [[ $(type -t at_end) != function ]] || at_end
    for pid in $(jobs -p); do kill "$pid" 2>/dev/null; done
    wait
    if [[ -n $WORK ]]; then
        for data in "$WORK"/data.*; do
            [[ ! -e $data/postmaster.pid ]] || (cd / && runuser -u postgres -- "$CLIENT/pg_ctl" -D "$data" -m immediate -w -t 30 stop >/dev/null)
        done
        rm -rf -- "$WORK"
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

as_postgres() {
    local program=$1
    shift
    (cd / && runuser -u postgres -- "$BIN/$program" "$@")
}

make_work() {
    WORK=$(mktemp -d "${TMPDIR:-/tmp}/waitfold-bench.XXXXXX")
    chown postgres "$WORK"
    export PGHOST=$WORK PGUSER=postgres PGDATABASE=postgres PGPORT=5431
}

# start_server SCALE SETTING...: the server whose programs are in BIN (the newest stock one, if that is empty) in a
# temporary folder, on a unix socket only, with pgbench's tables. Sets WORK, CLIENT, DATA, POSTMASTER and what
# inspect_server sets. A further one gets a port of its own.
start_server() {
    local scale=$1
    shift
    require root tracefs uprobes perf binutils
    CLIENT=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
    [[ -x $CLIENT/pgbench ]] || die "no PostgreSQL under /usr/lib/postgresql: make deps"
    : "${BIN:=$CLIENT}"
    [[ -n $WORK ]] || make_work
    PGPORT=$((PGPORT + 1))
    DATA=$WORK/data.$PGPORT
    as_postgres initdb -D "$DATA" -A trust -U postgres --no-sync >>"$WORK/log"
    printf '%s\n' "listen_addresses = ''" "unix_socket_directories = '$WORK'" "port = $PGPORT" 'autovacuum = off' \
        'max_wal_size = 8GB' 'checkpoint_timeout = 1h' "$@" >>"$DATA/postgresql.conf"
    as_postgres pg_ctl -D "$DATA" -l "$WORK/server.log" -w start >>"$WORK/log"
    "$CLIENT/pgbench" -i -q -s "$scale" 2>>"$WORK/log"
    look_at_server
}

# look_at_server: sets POSTMASTER and what else there is to know of the server in DATA.
look_at_server() {
    find_server "$DATA"
    inspect_server "$POSTMASTER"
    locate_wait
}

sql() { timeout 30 "$CLIENT/psql" -XAtq -c "$1"; }

# pgbench_pids COUNT [CONDITION]: sets REPLY to the pids of pgbench's sessions, once there are so many.
pgbench_pids() {
    local tries
    for ((tries = 0; tries < 100; tries++)); do
        REPLY=$(sql "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity WHERE application_name = 'pgbench' AND ${2:-true}")
        # shellcheck disable=SC2086 # words are wanted
        set -- "$1" "${2:-true}" $REPLY
        (($# - 2 < $1)) || return 0
        set -- "$1" "$2"
        sleep 0.1
    done
    die "pgbench did not connect; it says: $(cat "$WORK/pgbench" 2>/dev/null)"
}

# family PID...: sets REPLY to these processes and all that descend from them.
family() {
    local pid all=''
    for pid; do
        children "$pid"
        # shellcheck disable=SC2086 # words are wanted
        [[ -z ${REPLY// /} ]] || family $REPLY
        all+=" $pid $REPLY"
    done
    REPLY=$all
}

# start_locker: a session that holds others back, from `hold_back` to `release`, when they use pgbench_accounts.
start_locker() {
    local fifo=$WORK/locker
    mkfifo "$fifo"
    exec {LOCKER}<>"$fifo"
    rm -- "$fifo"
    PGAPPNAME=locker "$CLIENT/psql" -Xq <&"$LOCKER" >>"$WORK/log" 2>&1 &
}

hold_back() {
    local tries
    echo 'BEGIN; LOCK TABLE pgbench_accounts;' >&"$LOCKER"
    for ((tries = 0; tries < 300; tries++)); do
        [[ $(sql "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted AND relation = 'pgbench_accounts'::regclass") != 1 ]] || return 0
        sleep 0.1
    done
    die "no lock on pgbench_accounts after 30 s"
}

release() { echo 'ROLLBACK;' >&"$LOCKER"; }

# wait_event_address PID: sets REPLY to where the process keeps its wait_event_info.
wait_event_address() {
    peek "$1" $((LOAD_BASE + WAIT_POINTER)) 8 || die "the memory of process $1 cannot be read"
    printf -v REPLY '0x%x' "$REPLY"
}

# await FILE TEXT SECONDS: until the file holds the text; dies after the time.
await() {
    local tries
    for ((tries = 0; tries < $3 * 10; tries++)); do
        ! grep -qF -- "$2" "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    die "waited $3 s in vain for \"$2\" in $1: $(tail -n 3 "$1" 2>/dev/null)"
}

# await_end PID SECONDS: until the process is gone; 1 after the time.
await_end() {
    local tries
    for ((tries = 0; tries < $2 * 10; tries++)); do
        [[ -d /proc/$1 ]] || return 0
        sleep 0.1
    done
    return 1
}

# about_host: what the figures were measured on.
about_host() {
    awk -F ': ' '/^model name/ && !n { n = $2 } END { printf "%s", n }' /proc/cpuinfo
    printf ', %s CPUs, Linux %s, %s, PostgreSQL %s, %s\n' "$(nproc)" "$(uname -r)" "$(perf --version)" "$PG_VERSION" "$(date -u +%FT%TZ)"
}
