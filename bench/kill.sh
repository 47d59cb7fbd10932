#!/usr/bin/env bash
# kill.sh - kill -9 at random moments.
#
# usage: make kill             (or bench/kill.sh [ROUNDS])
#
# In each round a recorder is started on a server under load, and it, its perf, or both are killed
# with -9: in every second round at any moment of the time that a whole run takes, in the others within a
# second of its registering the probes and attaching. Then the
# server must answer and not have lost a process; waitfold-probes, run again while the
# orphaned perf ends, must have removed the round's probes; somebody else's probe must be there unchanged;
# no perf may be left; what was recorded must be readable; the kernel must not have complained.
# Ends at the first thing that is wrong.
#
# needs: what `make deps` installs; root. A kernel that fails here needs a reboot.
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/lib.bash"

rounds=${1:-23}
readonly OTHER=try_other_$$
recorder=''
declare -A phases=()

at_end() {
    kill "$recorder" 2>/dev/null
    # A single place, which nobody records: the kernel removes it whole.
    { echo "-:$OTHER/w" >>"$TRACEFS/uprobe_events"; } 2>/dev/null
}

wrong() {
    warn "round $round: $*"
    [[ ! -e $capture.log ]] || sed 's/^/    /' "$capture.log" >&2
    exit 1
}

# probes PATTERN: sets REPLY to the registered probes that match; a kernel whose tracing hangs ends the bench.
probes() {
    local reader
    cat "$TRACEFS/uprobe_events" >"$WORK/uprobe_events" &
    reader=$!
    # cat itself could not be killed then.
    await_end "$reader" 20 || wrong "reading uprobe_events hangs: the kernel's tracing is wedged, reboot"
    wait "$reader"
    REPLY=$(awk -v pattern="$1" '$0 ~ pattern' "$WORK/uprobe_events")
}

# complaints: sets REPLY to the number of lines in which the kernel says that something is broken.
complaints() {
    REPLY=$(dmesg | awk '/Oops|BUG:|kernel BUG|general protection fault|list_(add|del) corruption|use-after-free|WARNING: CPU|hung_task|blocked for more than/ { n++ } END { print n + 0 }')
}

# perfs: sets REPLY to the perfs that name the round's group.
perfs() {
    REPLY=$(for dir in /proc/[0-9]*; do
        { tr '\0' ' ' <"$dir/cmdline"; } 2>/dev/null | NAME="$group:" awk -v pid="${dir#/proc/}" \
            'index($0, "perf record") == 1 && index($0, ENVIRON["NAME"]) { print pid }' || true
    done)
}

# record: starts a recorder of 4 s into $capture; sets recorder and group.
record() {
    "$RECORD" -D "$DATA" -d 4 -o "$capture" >"$capture.log" 2>&1 &
    recorder=$!
    # So that bash does not report how it ended.
    disown "$recorder"
    pid_namespace
    group=waitfold_${REPLY}_${recorder}_$(starttime "$recorder")
}

# now_ms: sets REPLY to a time in milliseconds.
now_ms() {
    monotonic_ns
    REPLY=$((REPLY / 1000000))
}

# sleep_ms MILLISECONDS
sleep_ms() { sleep "$(($1 / 1000)).$(printf '%03d' $(($1 % 1000)))"; }

# phase_of: sets REPLY to what the recorder was at, by what it has left.
phase_of() {
    probes "$group/"
    if [[ -e $capture/manifest ]] && grep -q ^ended_by "$capture/manifest"; then
        REPLY=ended
    elif [[ -e $capture/manifest ]] && grep -q ^start_ns "$capture/manifest"; then
        REPLY=recording
    elif [[ -e $capture/perf.data ]]; then
        REPLY=attaching
    elif [[ -n $REPLY ]]; then
        REPLY=registered
    else
        REPLY=reading
    fi
}

check() {
    local tries message
    [[ $(sql 'SELECT 1') == 1 ]] || wrong "the server does not answer"
    kill -0 "$pgbench" 2>/dev/null || wrong "pgbench has ended: $(tail -n 3 "$WORK/pgbench")"
    ! grep -qE 'terminated by signal|crash|PANIC' "$WORK/server.log" || wrong "the server lost a process: $(tail -n 3 "$WORK/server.log")"

    # A recorder that only lost its perf removes the probes itself; it says what happened.
    await_end "$recorder" 60 || wrong "the recorder does not end"
    for ((tries = 0; tries < 20; tries++)); do
        timeout 60 "$ROOT/scripts/waitfold-probes" list >"$WORK/list" 2>&1 || wrong "waitfold-probes list: $(cat "$WORK/list")"
        probes "$group/"
        [[ -n $REPLY ]] || break
        sleep 0.5
    done
    [[ -z $REPLY ]] || wrong "the probes are still there: $(tail -n 3 "$WORK/list")"
    ((most_tries >= tries)) || most_tries=$tries
    perfs
    for pid in $REPLY; do await_end "$pid" 10 || wrong "perf (process $pid) is left"; done
    [[ ! -d $TRACEFS/instances/$group ]] || wrong "the instance $group is left"
    probes "$OTHER/"
    [[ $REPLY == "$other" ]] || wrong "another's probe was changed: \"$REPLY\""

    if [[ -e $capture/manifest ]] && grep -q ^start_ns "$capture/manifest"; then
        message=$(timeout 60 "$WAITFOLD" report "$capture" 2>&1 >"$WORK/report") || wrong "the capture cannot be read: $message"
        readable=$((readable + 1))
    fi
    complaints
    ((REPLY == complaints_before)) || wrong "the kernel complains: $(dmesg | tail -n 20)"
}

start_server 20 'shared_buffers = 8MB'
about_host
mkdir "$WORK/captures"
# One place, taken from those that waitfold found and compared with the file; under a group of its own.
other=$("$ROOT/scripts/waitfold-probes" show -D "$DATA" | awk -v to="p:$OTHER/w $BINARY:" '
    NR == 1 { sub(/.*:/, "", $2); line = to $2 } END { print line }')
printf '%s\n' "$other" >>"$TRACEFS/uprobe_events"
round=0 capture=$WORK/captures/none
probes "$OTHER/"
other=$REPLY
[[ -n $other ]] || die "the other probe was not registered"
complaints
complaints_before=$REPLY

# New sessions all the time beside old ones.
"$CLIENT/pgbench" -n -c 4 -T 3600 >"$WORK/pgbench" 2>&1 &
pgbench=$!
"$CLIENT/pgbench" -n -C -c 2 -S -T 3600 >"$WORK/pgbench.new" 2>&1 &

readable=0 most_tries=0
capture=$WORK/captures/whole
now_ms && begun=$REPLY
record
await_end "$recorder" 120 || wrong "a recorder that nobody killed does not end"
now_ms && whole=$((REPLY - begun))
check
printf 'a whole run: %s ms\n' "$whole"

for ((round = 1; round <= rounds; round++)); do
    capture=$WORK/captures/$round
    now_ms && begun=$REPLY
    record
    if ((round % 2)); then
        sleep_ms $((RANDOM * whole / 32768))
    else
        until [[ -e $capture/probes ]]; do
            now_ms
            ((REPLY < begun + 120000)) || wrong "the recorder registers nothing"
            sleep 0.01
        done
        sleep_ms $((RANDOM * 1000 / 32768))
    fi
    victims='' what=perf
    children "$recorder"
    for pid in $REPLY; do
        { read -r comm <"/proc/$pid/comm"; } 2>/dev/null || continue
        [[ $comm != perf ]] || victims+=" $pid"
    done
    case $((RANDOM % 3)) in
        0) victims=$recorder what=recorder ;;
        1) victims="$recorder $victims" what=both ;;
        *) [[ -n $victims ]] || victims=$recorder what='recorder, there was no perf' ;;
    esac
    # shellcheck disable=SC2086 # words are wanted
    kill -9 $victims 2>/dev/null || true
    now_ms && after=$((REPLY - begun))
    phase_of
    phase=$REPLY
    check
    phases[$phase]=$((${phases[$phase]:-0} + 1))
    printf 'round %s: after %s ms, %s, killed: %s: well\n' "$round" "$after" "$phase" "$what"
    rm -rf -- "$capture"
done
for phase in "${!phases[@]}"; do printf '%s: %s  ' "$phase" "${phases[$phase]}"; done
printf '\n%s rounds, all well; captures read: %s; runs of waitfold-probes needed at most: %s\n' "$rounds" "$readable" $((most_tries + 1))
