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
WORK='' BIN=''

say() { printf '%s\n' "$*" >&2; }

# finish: ends what a bench has started; a bench adds to it by a function at_end of its own.
finish() {
    local status=$? pid
    trap '' INT TERM
    trap - ERR
    set +e
    [[ $(type -t at_end) != function ]] || at_end
    for pid in $(jobs -p); do kill "$pid" 2>/dev/null; done
    wait
    if [[ -n $WORK ]]; then
        [[ ! -e $WORK/data/postmaster.pid ]] || as_postgres pg_ctl -D "$WORK/data" -m immediate -w -t 30 stop >/dev/null
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

# start_server SCALE SETTING...: the newest stock server in a temporary folder, on a unix socket only, with
# pgbench's tables. Sets WORK, BIN, POSTMASTER and what inspect_server sets.
start_server() {
    local scale=$1
    shift
    require root tracefs uprobes perf binutils
    BIN=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
    [[ -x $BIN/pgbench ]] || die "no PostgreSQL under /usr/lib/postgresql: make deps"
    WORK=$(mktemp -d "${TMPDIR:-/tmp}/waitfold-bench.XXXXXX")
    chown postgres "$WORK"
    as_postgres initdb -D "$WORK/data" -A trust -U postgres --no-sync >"$WORK/log"
    printf '%s\n' "listen_addresses = ''" "unix_socket_directories = '$WORK'" 'autovacuum = off' \
        'max_wal_size = 8GB' 'checkpoint_timeout = 1h' "$@" >>"$WORK/data/postgresql.conf"
    as_postgres pg_ctl -D "$WORK/data" -l "$WORK/server.log" -w start >>"$WORK/log"
    export PGHOST=$WORK PGUSER=postgres PGDATABASE=postgres
    "$BIN/pgbench" -i -q -s "$scale" 2>>"$WORK/log"
    find_server "$WORK/data"
    inspect_server "$POSTMASTER"
    # shellcheck disable=SC2034 # current_wait reads it
    SYMBOL_ADDRESS=$(symbol_address "$EXE" my_wait_event_info)
}

sql() { timeout 30 "$BIN/psql" -XAtq -c "$1"; }

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

# wait_event_address PID: sets REPLY to where the process keeps its wait_event_info.
wait_event_address() {
    peek "$1" $((LOAD_BASE + SYMBOL_ADDRESS)) 8 || die "the memory of process $1 cannot be read"
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
