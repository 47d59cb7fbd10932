# shellcheck shell=bash
# lib.bash - what waitfold's scripts share: messages, finding the server, and
# putting probes in and taking them out again.
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
# shellcheck source=scripts/sites.bash
. "$LIB/sites.bash"

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
    warn "stopped: line $2 of ${3##*/}: \"$4\" ended with status $1; please report this"
}
set -o errtrace
trap 'stopped $? $LINENO "${BASH_SOURCE[0]}" "$BASH_COMMAND"' ERR

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

## The server

# is_postmaster PID: its working directory is a data directory whose postmaster.pid names it.
is_postmaster() {
    local first
    { read -r first <"/proc/$1/cwd/postmaster.pid"; } 2>/dev/null && [[ $first == "$1" ]]
}

# postmasters: the pid of every running server, one line each.
postmasters() {
    local dir comm
    for dir in /proc/[0-9]*; do
        { read -r comm <"$dir/comm"; } 2>/dev/null || continue
        [[ $comm == postgres || $comm == postmaster ]] || continue
        is_postmaster "${dir#/proc/}" && printf '%s\n' "${dir#/proc/}"
    done
    return 0
}

# find_server [PGDATA]: sets POSTMASTER to the server's pid.
find_server() {
    local running pid
    if [[ -n ${1-} ]]; then
        [[ -d $1 ]] || die "no directory \"$1\": name a data directory, as SHOW data_directory does"
        { read -r POSTMASTER <"$1/postmaster.pid"; } 2>/dev/null ||
            die "no server runs in \"$1\": it has no postmaster.pid. Running: $(list_servers)"
        [[ $POSTMASTER =~ ^[0-9]+$ && /proc/$POSTMASTER/cwd -ef $1 ]] ||
            die "no server runs in \"$1\": its postmaster.pid is left over from process $POSTMASTER. Running: $(list_servers)"
        return 0
    fi
    mapfile -t running < <(postmasters)
    case ${#running[@]} in
        0) die "no PostgreSQL server runs here: start one, or name a backend with -p PID" ;;
        1) POSTMASTER=${running[0]} ;;
        *)
            warn "several servers run here; choose one with -D:"
            for pid in "${running[@]}"; do
                printf '    -D %q\n' "$(readlink "/proc/$pid/cwd")" >&2
            done
            exit 1
            ;;
    esac
}

list_servers() {
    local pid list=
    for pid in $(postmasters); do
        list+="${list:+, }\"$(readlink "/proc/$pid/cwd")\""
    done
    printf '%s' "${list:-none}"
}

# server_of PID: sets POSTMASTER to the server that a backend belongs to (a server's own pid is that server).
server_of() {
    [[ -d /proc/$1 ]] || die "no process $1: list the server's with: ps -C postgres -o pid,args"
    POSTMASTER=$1
    is_postmaster "$1" && return 0
    stat_of "$1" || die "process $1 has just ended"
    is_postmaster "${STAT[1]}" || die "process $1 ($(<"/proc/$1/comm")) is not a PostgreSQL server or one of its processes"
    POSTMASTER=${STAT[1]}
}

# elf FILE: sets MACHINE and KIND to what the ELF header says (e_machine, e_type); 1 when FILE is no little-endian 64-bit ELF file.
elf() {
    local magic
    # shellcheck disable=SC2046 # words are wanted
    set -- $(od -An -v -t x1 -N 20 "$1" 2>/dev/null)
    magic=${1-}${2-}${3-}${4-}${5-}${6-}
    [[ $magic == 7f454c460201 ]] || return 1
    KIND=${18}${17} MACHINE=${20}${19}
}

# symbol_address FILE SYMBOL: its address as the file numbers it, in decimal.
symbol_address() {
    local value
    value=$(readelf --dyn-syms -W "$1" | awk -v symbol="$2" '
        { name = $8; sub(/@.*/, "", name) }
        name == symbol && $7 != "UND" { value = $2 }
        END { print value }')
    [[ -n $value ]] || die "\"$1\" does not export $2, so it cannot be probed"
    printf '%d' "0x$value"
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
    # pg_config.h's string in the server's own words, so that nothing of it needs to be run.
    PG_VERSION=$(tr -c '[:print:]' '\n' <"$EXE" |
        awk '/^postgres \(PostgreSQL\) [0-9]/ && !v { v = $3 } END { print v }')
    [[ -n $PG_VERSION ]] || die "\"$BINARY\" (process $1) is not a PostgreSQL server"
    ((${PG_VERSION%%[!0-9]*} >= 14)) ||
        die "the server is PostgreSQL $PG_VERSION: sites are found from version 14 on"
    BUILD_ID=$(build_id_of "$EXE")
    [[ -n $BUILD_ID ]] || die "\"$BINARY\" has no build-id, so a list of sites could not be told to be its own"
    LOAD_BASE=0
    if [[ $KIND == 0003 ]]; then # ET_DYN
        # The first mapping of the file holds its first byte.
        LOAD_BASE=$((16#$(awk -v inode="$(stat -L -c %i "$EXE")" \
            '$5 == inode && $3 == "00000000" && !found { split($1, a, "-"); found = a[1] } END { print found }' "/proc/$1/maps")))
    fi
}

# peek PID ADDRESS BYTES: sets REPLY to an unsigned number read from a process's memory.
peek() {
    REPLY=$(dd if="/proc/$1/mem" bs=1 skip="$2" count="$3" 2>/dev/null | od -An -t "u$3") || return 1
    REPLY=${REPLY//[[:space:]]/}
    [[ -n $REPLY ]]
}

# current_wait PID POINTER: sets REPLY to its wait_event_info now, in hexadecimal. POINTER is the address of
# my_wait_event_info in the file. Before InitProcess the pointer is to a variable of the
# process's own, which is as good: it holds what was stored.
current_wait() {
    peek "$1" $((LOAD_BASE + $2)) 8 && peek "$1" "$REPLY" 4 && printf -v REPLY '0x%08x' "$REPLY"
}

## Probes
# A group of events belongs to a run of ours, by its name: waitfold_ and the pid
# namespace, pid and start time of the process that registered it. Groups that
# `waitfold-probes add` leaves for use by hand are named waitfold_keep_ and a build-id.

pid_namespace() {
    REPLY=$(readlink /proc/self/ns/pid) || return 1
    REPLY=${REPLY//[!0-9]/}
}

group_of_this_run() {
    pid_namespace
    REPLY=waitfold_${REPLY}_$$_$(starttime $$)
}

# registered GROUP-PATTERN: the events of the groups that match, as GROUP/EVENT, one line each.
registered() {
    awk -v pattern="^($1)/" '
        { event = $1; sub(/^[^:]*:/, "", event) }
        event ~ pattern && !seen[event]++ { print event }' "$TRACEFS/uprobe_events"
}

# What the group of a run looks like, of any pid namespace.
readonly RUNS='waitfold_[0-9]+_[0-9]+_[0-9]+'

# dead INSTANCE-OR-GROUP: 0 when it is of this pid namespace and the run that it is named after is gone.
dead() {
    pid_namespace
    [[ ${1##*/} =~ ^waitfold_${REPLY}_([0-9]+)_([0-9]+)$ ]] || return 1
    [[ $(starttime "${BASH_REMATCH[1]}") != "${BASH_REMATCH[2]}" ]]
}

# remove_dead_instances: those of runs that were killed while they asked. The kernel disables what they had enabled.
remove_dead_instances() {
    local dir
    for dir in "$TRACEFS"/instances/waitfold_*; do
        if [[ -d $dir ]] && dead "$dir"; then rmdir "$dir" 2>/dev/null || true; fi
    done
}

# enabled GROUP/EVENT: 0 unless every instance of ftrace says that it is off.
enabled() {
    local file state
    for file in "$TRACEFS/events/$1/enable" "$TRACEFS"/instances/*/events/"$1"/enable; do
        [[ -e $file ]] || continue
        { read -r state <"$file"; } 2>/dev/null && [[ $state == 0 ]] || return 0
    done
    return 1
}

# named_by_a_process GROUP/EVENT: 0 when a process has the group on its command line: a perf that may be about to
# open it. Those for use by hand may be named by a pattern, so any of them counts.
named_by_a_process() {
    local name=${1%%/*}
    [[ $name != waitfold_keep_* ]] || name=waitfold_keep_
    # Through the environment: on its command line awk would find itself.
    { cat /proc/[0-9]*/cmdline 2>/dev/null || true; } | tr '\0' '\n' |
        NAME=$name awk 'index($0, ENVIRON["NAME"]) { found = 1 } END { exit !found }'
}

# unregister GROUP/EVENT: takes an event out. Returns 1, and leaves it whole, while anything still uses it.
#
# Linux (seen in 6.1 and 6.18) removes an event of several places piece by piece: it
# finds out that somebody uses it only after all places but one are freed, and the next
# backend that runs into one of those takes the kernel down. So ask first. What perf
# uses cannot be enabled for ftrace (EINTR): the question is put in an instance of our own, which
# records nothing. What ftrace uses is enabled in some instance, so the others are looked at, and only one
# of our runs asks at a time: whoever sees another's instance withdraws. The instance stays until the event is
# gone, so that this holds to the end.
# A perf that opens the event while we ask would get it between our answer and the removal (the kernel takes
# 50 ms to disable 180 places), so a perf that is only starting counts as use.
unregister() {
    local event=$1 instance other removed=1
    remove_dead_instances
    group_of_this_run
    instance=$TRACEFS/instances/$REPLY
    mkdir "$instance" 2>/dev/null || return 1
    for other in "$TRACEFS"/instances/waitfold_*; do
        [[ $other == "$instance" ]] || removed=
    done
    if [[ -n $removed ]] && ! named_by_a_process "$event" && ! enabled "$event" &&
        echo 0 >"$instance/tracing_on" && { echo 1 >"$instance/events/$event/enable"; } 2>/dev/null; then
        echo 0 >"$instance/events/$event/enable" && ! enabled "$event" && ! named_by_a_process "$event" &&
            { echo "-:$event" >>"$TRACEFS/uprobe_events"; } 2>/dev/null || removed=
    else
        removed=
    fi
    # Busy while somebody reads a file of it.
    rmdir "$instance" 2>/dev/null || { sleep 0.2 && rmdir "$instance"; } || true
    [[ -n $removed ]]
}

# remove_stale: takes out what runs of ours left that were killed: of this pid namespace, the process gone.
remove_stale() {
    local event group pid
    remove_dead_instances
    while read -r event; do
        group=${event%%/*}
        dead "$group" || continue
        pid=${group%_*} pid=${pid##*_}
        # A perf that the run had just forked has its command line by then, and is seen by it.
        sleep 0.5
        if unregister "$event"; then
            warn "removed the probes that a killed run (process $pid) had left"
        elif [[ -n $(registered "$group") ]]; then # not removed by another script meanwhile
            warn "the probes of a killed run (process $pid) are still in use, by the perf that it left: they go with the next run"
        fi
    done < <(registered "$RUNS")
}

# read_set NAME: reads probes/NAME.set; sets SET_EVENT, SET_FIELD, SET_TYPE and SET_SYMBOL to what is to be
# registered, and SET_ABOUT. They are empty for a set that only names the probes of others.
read_set() {
    local file=$PROBES/$1.set keyword a b c
    SET_ABOUT='' SET_EVENT='' SET_FIELD='' SET_TYPE='' SET_SYMBOL=''
    [[ $1 != */* && -r $file ]] || die "no probe set \"$1\": $TOOL knows $(set_names)"
    while read -r keyword a b c; do
        case $keyword in
            about) SET_ABOUT="$a${b:+ $b}${c:+ $c}" ;;
            event) SET_EVENT=$a SET_FIELD=${b%%:*} SET_TYPE=${b#*:} ;;
            place) [[ $b == stores ]] && SET_SYMBOL=$c ;;
        esac
    done <"$file"
}

set_names() {
    local file names=
    for file in "$PROBES"/*.set; do
        file=${file##*/}
        names+="${names:+, }${file%.set}"
    done
    printf '%s' "$names"
}

# count_sites SITES: prints how many places the list has, and how many of them are anchors.
count_sites() {
    awk -F '\t' '$4 ~ /^0x/ { n++; if ($6 != "store") anchored++ } END { print n + 0, anchored + 0 }' "$1"
}

# define_probes GROUP SITES: the lines for uprobe_events, one a site of the list, all of one event. Besides what the set
# says each carries the global PostmasterPid, by which one cluster is told from others that run the same
# binary: the kernel reads `@+N` at N behind where the file's offset 0 would be, as seen from the probe.
define_probes() {
    local postmaster_pid value place offset
    postmaster_pid=$(symbol_address "$EXE" PostmasterPid)
    while IFS=$'\t' read -r _ value place offset _ _; do
        [[ $offset == 0x* ]] || continue
        [[ $value == %* ]] || value=\\$value
        printf 'p:%s/%s %s:%s %s=%s:%s postmaster=@+%d:s32\n' "$1" "$SET_EVENT" "$EXE" "$offset" \
            "$SET_FIELD" "$value" "$SET_TYPE" $((postmaster_pid - (place - offset)))
    done <"$2"
}

# register_probes FILE: appends the lines to uprobe_events in one write: a line that is split
# between two would be refused, with half of the set registered.
register_probes() {
    local error size
    size=$(stat -c %s "$1")
    error=$(dd if="$1" of="$TRACEFS/uprobe_events" bs="$size" count=1 oflag=append conv=notrunc 2>&1) ||
        die "the kernel refused the probes: ${error%%$'\n'*}; its reason: $(tail -n 2 "$TRACEFS/error_log" 2>/dev/null)"
}
