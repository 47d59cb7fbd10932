# shellcheck shell=bash
# probes.bash - putting probes in, and taking out again only those that are ours.
#
# Sourced, never run, by lib.bash, which has warn and die.
# shellcheck disable=SC2034 # what is set here is used by those that source it

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

# groups GROUP-PATTERN: the groups that match, one line each.
groups() { registered "$1" | awk -F / '!seen[$1]++ { print $1 }'; }

# What the group of a run looks like, of any pid namespace.
readonly RUNS='waitfold_[0-9]+_[0-9]+_[0-9]+'

# dead INSTANCE-OR-GROUP: 0 when it is of this pid namespace and the run that it is named after is gone.
dead() {
    pid_namespace
    [[ ${1##*/} =~ ^waitfold(_rec)?_${REPLY}_([0-9]+)_([0-9]+)$ ]] || return 1
    [[ $(starttime "${BASH_REMATCH[2]}") != "${BASH_REMATCH[3]}" ]]
}

# remove_dead_instances: those of runs that were killed while they asked. The kernel disables what they had enabled.
remove_dead_instances() {
    local dir
    for dir in "$TRACEFS"/instances/waitfold_*; do
        if [[ -d $dir ]] && dead "$dir"; then rmdir "$dir" 2>/dev/null || true; fi
    done
}

# follow INSTANCE PID...: adds them, and what they will fork, to those that ftrace records in the instance. A number
# that is split between two writes would be two; each write takes the kernel some 20 ms.
follow() {
    local instance=$1 i
    shift
    echo 1 >"$instance/options/event-fork"
    for ((i = 1; i <= $#; i += 100)); do
        printf '%s ' "${@:i:100}" >>"$instance/set_event_pid"
    done
}

# enabled GROUP: 0 unless every instance of ftrace says that all its events are off.
enabled() {
    local file state
    for file in "$TRACEFS/events/$1"/*/enable "$TRACEFS"/instances/*/events/"$1"/*/enable; do
        [[ -e $file ]] || continue
        { read -r state <"$file"; } 2>/dev/null && [[ $state == 0 ]] || return 0
    done
    return 1
}

# named_by_a_process GROUP: 0 when a process has the group on its command line: a perf that may be about to
# open an event of it. Those for use by hand may be named by a pattern, so any of them counts.
named_by_a_process() {
    local name=$1
    [[ $name != waitfold_keep_* ]] || name=waitfold_keep_
    # Through the environment: on its command line awk would find itself.
    { cat /proc/[0-9]*/cmdline 2>/dev/null || true; } | tr '\0' '\n' |
        NAME=$name awk 'index($0, ENVIRON["NAME"]) { found = 1 } END { exit !found }'
}

# unregister GROUP [EVENT...]: takes out these events of a group, by default all. Returns 1, and leaves them whole, while
# anything still uses one of the group.
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
    local used=$1 instance other removed=1 lines
    shift
    lines=$(if (($#)); then printf -- "-:$used/%s\n" "$@"; else registered "$used" | awk '{ print "-:" $0 }'; fi)
    remove_dead_instances
    group_of_this_run
    instance=$TRACEFS/instances/$REPLY
    mkdir "$instance" 2>/dev/null || return 1
    for other in "$TRACEFS"/instances/waitfold_[0-9]*; do
        [[ $other == "$instance" ]] || removed=
    done
    if [[ -n $removed ]] && ! named_by_a_process "$used" && ! enabled "$used" &&
        echo 0 >"$instance/tracing_on" && { echo 1 >"$instance/events/$used/enable"; } 2>/dev/null; then
        echo 0 >"$instance/events/$used/enable" && ! enabled "$used" && ! named_by_a_process "$used" &&
            { echo "$lines" >>"$TRACEFS/uprobe_events"; } 2>/dev/null || removed=
    else
        # Of several events some may be enabled by now.
        { echo 0 >"$instance/events/$used/enable"; } 2>/dev/null || true
        removed=
    fi
    # Busy while somebody reads a file of it.
    rmdir "$instance" 2>/dev/null || { sleep 0.2 && rmdir "$instance"; } || true
    [[ -n $removed ]]
}

# remove_stale: takes out what runs of ours left that were killed: of this pid namespace, the process gone.
remove_stale() {
    local group pid
    remove_dead_instances
    while read -r group; do
        dead "$group" || continue
        pid=${group%_*} pid=${pid##*_}
        # A perf that the run had just forked has its command line by then, and is seen by it.
        sleep 0.5
        if unregister "$group"; then
            warn "removed the probes that a killed run (process $pid) had left"
        elif [[ -n $(registered "$group") ]]; then # not removed by another script meanwhile
            warn "the probes of a killed run (process $pid) are still in use, by the perf that it left: they go with the next run"
        fi
    done < <(groups "$RUNS")
}

# read_sites SITES: sets from a list of sites what locate_wait sets, and SITE_SYMBOL; dies unless the list is of BUILD_ID.
read_sites() {
    local key value id='' pointer=0 field=0 start_time=0
    while IFS=$'\t' read -r key value; do
        case $key in
            '# build_id') id=$value ;;
            '# symbol') SITE_SYMBOL=$value ;;
            '# pointer') pointer=$value ;;
            '# field') field=$value ;;
            '# pg_start_time') start_time=$value ;;
        esac
    done < <(awk '/^#/' "$1")
    [[ $id =~ ^[0-9a-f]+$ && "$pointer $field $start_time" =~ ^0x[0-9a-f]+\ 0x[0-9a-f]+\ 0x[0-9a-f]+$ ]] ||
        die "\"$1\" is not a list of sites: make one with: waitfold-probes sites BINARY"
    [[ $id == "$BUILD_ID" ]] ||
        die "the list of sites \"$1\" is of another build ($id) than the server ($BUILD_ID): make one with: waitfold-probes sites BINARY"
    WAIT_POINTER=$((pointer)) WAIT_FIELD=$((field)) START_TIME=$((start_time))
}

# count_sites SITES: prints how many places the list has, and how many of them are anchors.
count_sites() {
    awk -F '\t' '$4 ~ /^0x/ { n++; if ($6 != "store") anchored++ } END { print n + 0, anchored + 0 }' "$1"
}

# define_sites GROUP SITES: the lines for uprobe_events, one a site of the list, all of one event. Besides the value stored
# each carries `server`, the lower half of PgStartTime: the kernel reads `@+N` at N behind where the file's offset 0
# would be, as seen from the probe.
define_sites() {
    local value place offset
    while IFS=$'\t' read -r _ value place offset _; do
        [[ $offset == 0x* ]] || continue
        [[ $value == %* ]] || value=\\$value
        printf 'p:%s/%s %s:%s %s=%s:%s server=@+%d:u32\n' "$1" "$SET_EVENT" "$EXE" "$offset" \
            "$SET_FIELD" "$value" "$SET_TYPE" $((START_TIME - (place - offset)))
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
