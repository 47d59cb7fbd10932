# shellcheck shell=bash
# lib.bash - what waitfold's scripts share: messages, processes, finding the server.
#
# Sourced, never run. Needs bash 4.2, coreutils, awk; binutils where sites are looked for.
# shellcheck disable=SC2034 # what is set here is used by those that source it

readonly WAITFOLD_VERSION=0.1.0
readonly TOOL=${0##*/}
LIB=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
readonly LIB
readonly PROBES=${LIB%/*}/probes
export LC_ALL=C

# shellcheck source=scripts/checks.bash
. "$LIB/checks.bash"
# shellcheck source=scripts/elf.bash
. "$LIB/elf.bash"
# shellcheck source=scripts/sites.bash
. "$LIB/sites.bash"
# shellcheck source=scripts/sets.bash
. "$LIB/sets.bash"
# shellcheck source=scripts/probes.bash
. "$LIB/probes.bash"

## Messages

warn() { printf '%s: %s\n' "$TOOL" "$*" >&2; }

# Could not: exit status 1.
die() {
    warn "$@"
    exit 1
}

# Called wrongly: exit status 2.
misused() {
    warn "$* (see $TOOL --help)"
    exit 2
}

# A command failed where nobody expected it. Without this, `set -e` would end the
# script without a word.
stopped() {
    # Ctrl-C and kill reach what runs for us as well.
    (($1 != 130 && $1 != 143)) || return 0
    warn "stopped: line $2 of ${3##*/}: \"$4\" ended with status $1; please report this"
}
set -o errtrace
trap 'stopped $? $LINENO "${BASH_SOURCE[0]}" "$BASH_COMMAND"' ERR

# value OPTION [VALUE]: the argument that an option needs.
value() {
    (($# >= 2)) || misused "$1 needs a value"
    REPLY=$2
}

# The header of the script is its help: the comment from the second line on.
help() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit 0
}

## Processes

# stat_of PID: sets STAT to the fields of its /proc/PID/stat from the third, the state, on.
stat_of() {
    local line
    { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    # The second field, the name in parentheses, may hold blanks and parentheses itself.
    # shellcheck disable=SC2206 # words are wanted
    STAT=(${line##*) })
}

# starttime PID: when it started, in clock ticks since boot; with the pid this names a process for good.
starttime() {
    # A zombie has ended, whether or not its parent has noticed.
    stat_of "$1" && [[ ${STAT[0]} != Z ]] && printf '%s' "${STAT[19]}"
}

# children PID: sets REPLY to the pids of its living children.
children() {
    REPLY=
    if [[ -e /proc/$1/task/$1/children ]]; then
        { read -r REPLY <"/proc/$1/task/$1/children"; } 2>/dev/null || true
    else
        # A kernel without CONFIG_PROC_CHILDREN.
        REPLY=$(awk -v parent="$1" '
            { pid = $1; sub(/.*\) /, ""); if ($2 == parent) printf "%s ", pid }' /proc/[0-9]*/stat 2>/dev/null) || true
    fi
}

# title PID: the process title, blanks for what would break a table.
title() {
    REPLY=
    # NUL bytes, which end the arguments, are dropped by read -d ''; the first argument is the title.
    { IFS= read -r -d '' REPLY <"/proc/$1/cmdline"; } 2>/dev/null || true
    REPLY=${REPLY//[[:cntrl:]]/ }
    REPLY=${REPLY%"${REPLY##*[! ]}"}
}

# monotonic_ns: CLOCK_MONOTONIC now, the clock that perf is told to use.
monotonic_ns() {
    local word at
    while read -r word at REPLY _; do
        [[ $word == now && $at == at ]] && return 0
    done 2>/dev/null </proc/timer_list
    return 1
}

# open_pipes NAME...: sets each to a file descriptor of a pipe without a name, which one process can both write and read.
open_pipes() {
    local name fd
    for name; do
        exec {fd}<> <(:)
        printf -v "$name" %s "$fd"
    done
}

## perf, which takes commands on `control` and answers on `answer`

# ask_perf: 0 when it answers. Each time anew: an answer that the end of the time cuts in two is lost.
ask_perf() {
    local line
    # shellcheck disable=SC2154 # whoever starts a perf has opened them
    echo ping >&"$control"
    # shellcheck disable=SC2154
    read -r -t 0.1 -u "$answer" line && [[ $line == *ack* ]]
}

# wake_perf: each command wakes it, and then it writes out what its buffers hold.
wake_perf() {
    echo ping >&"$control"
    # With a limit: perf ends each answer with a NUL byte after the newline, which no line holds.
    while read -r -t 0.01 -u "$answer" _; do :; done
}

## The server

# own_pid PID: sets REPLY to the pid by which a process knows itself, in its own pid namespace.
own_pid() {
    local key
    while read -r key REPLY; do
        # One number for each namespace, the innermost last.
        [[ $key != NSpid: ]] || {
            REPLY=${REPLY##*[[:space:]]}
            return 0
        }
    done 2>/dev/null <"/proc/$1/status"
    REPLY=$1 # a kernel without pid namespaces
}

# is_postmaster PID: its working directory is a data directory whose postmaster.pid names it.
is_postmaster() {
    local first
    { read -r first <"/proc/$1/cwd/postmaster.pid"; } 2>/dev/null || return 1
    own_pid "$1" && [[ $first == "$REPLY" ]]
}

# postmasters: the pid of every running server, one line each; also of those in containers.
postmasters() {
    local dir comm
    for dir in /proc/[0-9]*; do
        { read -r comm <"$dir/comm"; } 2>/dev/null || continue
        [[ $comm == postgres || $comm == postmaster ]] || continue
        is_postmaster "${dir#/proc/}" && printf '%s\n' "${dir#/proc/}"
    done
    return 0
}

# data_directory PID: sets REPLY to a server's, as seen from here.
data_directory() {
    REPLY=$(readlink "/proc/$1/cwd") || return 1
    # Under that path is something else here when the server lives in a mount namespace of its own.
    [[ $REPLY -ef /proc/$1/cwd ]] || REPLY=/proc/$1/cwd
}

# find_server [PGDATA]: sets POSTMASTER to the server's pid.
find_server() {
    local running pid
    mapfile -t running < <(postmasters)
    if [[ -n ${1-} ]]; then
        if [[ ! -d $1 ]]; then
            ((EUID == 0)) || die "no directory \"$1\" that $(id -un) may look at: run this as root, or as the server's user"
            die "no directory \"$1\": name a data directory, as SHOW data_directory does"
        fi
        for POSTMASTER in ${running[@]+"${running[@]}"}; do
            [[ ! /proc/$POSTMASTER/cwd -ef $1 ]] || return 0
        done
        [[ -x $1 ]] || die "$(id -un) may not look into \"$1\": run this as root, or as the server's user ($(stat -c %U "$1"))"
        [[ -e $1/postmaster.pid ]] ||
            die "no server runs in \"$1\": it has no postmaster.pid. Running: $(list_servers)"
        die "no server runs in \"$1\": its postmaster.pid is left over. Running: $(list_servers)"
    fi
    case ${#running[@]} in
        0) die "no PostgreSQL server runs here: start one, or name a backend with -p PID" ;;
        1) POSTMASTER=${running[0]} ;;
        *)
            warn "several servers run here; choose one with -D:"
            for pid in "${running[@]}"; do
                data_directory "$pid" && printf '    -D %q\n' "$REPLY" >&2
            done
            exit 1
            ;;
    esac
}

list_servers() {
    local pid list=
    for pid in $(postmasters); do
        data_directory "$pid" && list+="${list:+, }\"$REPLY\""
    done
    printf '%s' "${list:-none}"
}

# server_of PID: sets POSTMASTER to the server that a backend belongs to (a server's own pid is that server).
server_of() {
    [[ -d /proc/$1 ]] || die "no process $1: list the server's with: ps -C postgres -o pid,args"
    readlink "/proc/$1/cwd" >/dev/null ||
        die "$(id -un) may not look at process $1: run this as root, or as its user ($(stat -c %U "/proc/$1"))"
    POSTMASTER=$1
    is_postmaster "$1" && return 0
    stat_of "$1" || die "process $1 has just ended"
    is_postmaster "${STAT[1]}" || die "process $1 ($(<"/proc/$1/comm")) is not a PostgreSQL server or one of its processes"
    POSTMASTER=${STAT[1]}
}

# choose_server: sets POSTMASTER to the server that the options -D (`pgdata`) and -p (`pids`) name. A server's own pid stands
# for the whole of it, and empties `pids`.
choose_server() {
    local pid first
    [[ -n $pids ]] || {
        # shellcheck disable=SC2154 # an option
        find_server "$pgdata"
        return 0
    }
    server_of "${pids%%,*}"
    first=$POSTMASTER
    for pid in ${pids//,/ }; do
        server_of "$pid"
        [[ $POSTMASTER == "$first" ]] || die "process $pid belongs to another server than process ${pids%%,*}: one server at a time"
        [[ $pid != "$POSTMASTER" ]] || pids=''
    done
}

# pg_version_of FILE: prints it as 15.18 or 19beta1, in the server's own words, so that nothing of it needs to be run.
pg_version_of() {
    tr -cs '[:print:]' '\n' <"$1" | awk '/^postgres \(PostgreSQL\) [0-9]/ && !v { v = $3 } END { print v }'
}

# inspect_server PID: sets
#   EXE         a path to the very file that the process runs, also after an upgrade has replaced it
#   BINARY      where that file was, for people
#   BUILD_ID    its GNU build-id
#   PG_VERSION  as 15.18 or 19beta1
#   LOAD_BASE   what to add to the file's addresses in the process's memory
inspect_server() {
    EXE=/proc/$1/exe
    BINARY=$(readlink "$EXE") || die "process $1 has ended, or may not be looked at: run this as root"
    elf "$EXE" || die "\"$BINARY\" (process $1) is not a 64-bit little-endian ELF file"
    [[ $MACHINE == 003e ]] || die "\"$BINARY\" is not for x86-64 (ELF machine 0x$MACHINE): sites of other machines cannot be checked yet"
    PG_VERSION=$(pg_version_of "$EXE")
    [[ -n $PG_VERSION ]] || die "\"$BINARY\" (process $1) is not a PostgreSQL server"
    ((${PG_VERSION%%[!0-9]*} >= 10)) ||
        die "the server is PostgreSQL $PG_VERSION: wait events are found from version 10 on"
    BUILD_ID=$(build_id_of "$EXE")
    [[ -n $BUILD_ID ]] || die "\"$BINARY\" has no build-id, so a list of sites could not be told to be its own"
    LOAD_BASE=0
    if [[ $KIND == 0003 ]]; then # ET_DYN
        # The first mapping of the file holds its first byte.
        LOAD_BASE=$((16#$(awk -v inode="$(stat -L -c %i "$EXE")" \
            '$5 == inode && $3 == "00000000" && !found { split($1, a, "-"); found = a[1] } END { print found }' "/proc/$1/maps")))
    fi
}

# memory PID ADDRESS BYTES: writes out what a process has there. The address is a multiple of
# the size, so it is read at once, not while it is half written.
memory() { dd if="/proc/$1/mem" bs="$3" skip=$(($2 / $3)) count=1 2>/dev/null; }

# look PID ADDRESS BYTES: the same, zeros where it cannot be read.
look() { memory "$@" || head -c "$3" /dev/zero; }

# peek PID ADDRESS BYTES: sets REPLY to an unsigned number read from a process's memory.
peek() {
    REPLY=$(memory "$@" | od -An -t "u$3") || return 1
    REPLY=${REPLY//[[:space:]]/}
    [[ -n $REPLY ]]
}

# locate_wait: sets what list_backends and server_tag need, all as the file numbers it: WAIT_POINTER, the address of the
# variable that points to wait_event_info; WAIT_FIELD, how far behind it; START_TIME, the address of PgStartTime.
locate_wait() {
    WAIT_FIELD=0
    { WAIT_POINTER=$(symbol_address "$EXE" my_wait_event_info) && START_TIME=$(symbol_address "$EXE" PgStartTime); } ||
        die "\"$BINARY\" does not export my_wait_event_info and PgStartTime, so its backends cannot be told apart"
}

# locate_start: sets START_TIME alone.
locate_start() {
    START_TIME=$(symbol_address "$EXE" PgStartTime) || die "\"$BINARY\" does not export PgStartTime, so it cannot be told from others"
}

# pointers ADDRESS PID...: sets POINTERS to what a variable of the server's binary, a pointer, is in each process, 0 where it
# cannot be read. One short process for each: there may be hundreds of backends.
pointers() {
    local address=$((LOAD_BASE + $1)) pid
    shift
    mapfile -t POINTERS < <(for pid; do look "$pid" $address 8; done | od -An -v -t u8 -w8)
}

# texts ADDRESS PID...: sets TEXTS to what a variable of the server's binary, a char *, points to in each process: at most
# 1023 bytes, with blanks for what would break a table; `-` where it is null, empty or cannot be read, or ADDRESS is empty.
texts() {
    local who=("${@:2}") i text fd
    TEXTS=("${who[@]/*/-}")
    [[ -n $1 ]] || return 0
    pointers "$@"
    # NUL bytes, which bash cannot hold, change places with newlines.
    exec {fd}< <(for i in "${!who[@]}"; do
        ((POINTERS[i] == 0)) || dd if="/proc/${who[i]}/mem" bs=1024 count=1 iflag=skip_bytes skip=$((POINTERS[i])) conv=sync ||
            head -c 1024 /dev/zero
    done 2>/dev/null | tr '\0\1-\37\177' '\n[ *]')
    for i in "${!who[@]}"; do
        ((POINTERS[i] == 0)) || {
            IFS= read -r -N 1024 -u "$fd" text || break
            text=${text%%$'\n'*}
            [[ -z $text ]] || TEXTS[i]=${text:0:1023}
        }
    done
    exec {fd}<&-
}

# server_tag: sets REPLY to the lower half of the server's PgStartTime: the microsecond at which it was started,
# which all its processes inherit, and which tells it from others of the same binary. (Its pid would not: in
# each container it is 1.)
server_tag() {
    peek "$POSTMASTER" $((LOAD_BASE + START_TIME)) 4
}
