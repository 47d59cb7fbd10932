# shellcheck shell=bash
# engine-trace-cmd.bash - records events with `trace-cmd record`, in an instance of ftrace of its own.
#
# Sourced, never run, by waitfold-record; what an engine is stands there. For hosts where trace-cmd is the tool
# that is allowed: engine-ftrace makes the same file without it.
# shellcheck disable=SC2154,SC2034 # what the recorder sets is used here, and the other way round

engine_period=0.25
readonly CPU_BUFFER_KB=8192
instance='' trace_cmd=''

# trace-cmd records for as long as its workload runs: a cat that ends when nobody is left who could write into
# `hold`, be it that we were killed. The workload is begun when all events are on.
engine_start() {
    local event tries options=()
    ((! ring_bytes)) || die "trace-cmd keeps no ring: leave out --engine trace-cmd"
    instance=${group/#waitfold_/waitfold_rec_}
    for event in "${events[@]}"; do
        options+=(-e "$group:$event")
    done
    options+=(-c -P "${pids:-$POSTMASTER}" -e sched:sched_process_fork)
    [[ -n $pids ]] || options+=(-f "parent_pid == $POSTMASTER")
    options+=(-e sched:sched_process_exit)
    [[ -n $pids ]] || options+=(-f "comm == \"$comm\"")
    # Job control gives trace-cmd a process group of its own: Ctrl-C is for us, and we end trace-cmd.
    set -m
    run_trace_cmd <&"$hold_reader" >"$capture/trace-cmd.log" 2>&1 {hold}>&- {clock}>&- &
    trace_cmd=$!
    set +m
    for ((tries = 0; tries < 300; tries++)); do
        [[ ! -e $capture/begun ]] || {
            rm -- "$capture/begun"
            # The postmaster's new children are followed by now; those it has come here.
            processes
            # shellcheck disable=SC2086 # words are wanted
            follow "$TRACEFS/instances/$instance" $REPLY
            return 0
        }
        engine_running || die "trace-cmd could not record: $(trace_cmd_says). To mend it: use --engine ftrace, which makes the same file"
        pause 0.1
        interrupted
    done
    die "trace-cmd did not begin within 30 s"
}

# run_trace_cmd: in place of the shell that calls it.
run_trace_cmd() {
    umask 077 # as perf does it
    # shellcheck disable=SC2016 # for the inner shell
    exec trace-cmd record -o "$capture/trace.dat" --file-version 6 --compression none -B "$instance" -C mono \
        -b $CPU_BUFFER_KB "${options[@]}" sh -c ': >"$1" && exec cat' sh "$capture/begun"
}

engine_running() { kill -0 "$trace_cmd" 2>/dev/null; }

engine_tick() { :; }

engine_stop() {
    [[ -z $hold ]] || exec {hold}>&-
    hold=''
    while [[ -n $trace_cmd ]]; do
        wait "$trace_cmd" || true
        engine_running || trace_cmd=''
    done
    # It removes the instance itself, but not where it failed.
    [[ -z $instance || ! -d $TRACEFS/instances/$instance ]] || rmdir "$TRACEFS/instances/$instance" || true
}

engine_notes() { note trace_cmd "$(trace-cmd --version 2>&1 | awk '/version/ && !v { v = $3 } END { print v }')"; }

engine_failure() { printf 'trace-cmd ended by itself. It says: %s' "$(trace_cmd_says)"; }

# trace_cmd_says: the last of its log, as one line.
trace_cmd_says() { tail -n 2 "$capture/trace-cmd.log" | tr -s '\n\t ' ' '; }
