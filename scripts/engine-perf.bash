# shellcheck shell=bash
# engine-perf.bash - records events with `perf record`.
#
# Sourced, never run, by waitfold-record; what an engine is stands there.
# shellcheck disable=SC2154,SC2034 # what the recorder sets is used here, and the other way round

engine_period=0.25
# What perf's buffer for each CPU holds: events, switches with stacks of some 400 bytes, or with copies of stacks.
readonly BUFFER=4M PROFILE_BUFFER=8M DWARF_BUFFER=32M
readonly STACK_BYTES=8192
perf_pid='' perf_status=0 synth=no

# What perf is told. The whole server: on every CPU, and the kernel keeps only what carries its tag,
# so that there is no backend which is too new or gone too soon to be attached
# to; also, perf (6.1) spins at full speed from the end of the first process that it was attached to until its own.
perf_target() {
    local event buffer=$BUFFER where=(-a)
    target=()
    if [[ -n $pids ]]; then
        where=(-p "$pids")
        # Who is switched in, perf tells of a CPU and not of a process.
        ! profiled offcpu || { where=(-a) && among common_pid && filter=$REPLY; }
    fi
    for event in "${events[@]}"; do
        target+=(-e "$group:$event")
        [[ -z $filter ]] || target+=(--filter "$filter")
    done
    [[ -z $profiles ]] || profile_events
    target+=("${where[@]}")
    # A flight recorder: the newest overwrite the oldest, and nothing is written before perf gets a SIGUSR2 or ends.
    # perf's buffers are a power of two of pages.
    if ((ring_bytes)); then
        local pages=1 each=$((ring_bytes / $(nproc --all) >> 12))
        while ((pages * 2 <= each)); do pages=$((pages * 2)); done
        target+=(--overwrite --switch-output=signal -m "$pages")
    else
        target+=(-m "$buffer" --max-size "$((max_bytes >> 10))K")
    fi
}

# profile_events: adds the events of the profiles to `target`.
profile_events() {
    local stack=''
    ! profiled offcpu || buffer=$PROFILE_BUFFER
    case $call_graph in
        fp) stack=call-graph=fp ;;
        # So much of the stack is copied with each sample. -d: perf script also wants the mappings that hold no code.
        dwarf)
            stack=call-graph=dwarf,stack-size=$STACK_BYTES buffer=$DWARF_BUFFER
            target+=(-d)
            ;;
    esac
    # For perf script: the files that the processes' code is from.
    synth=task,mmap
    if profiled offcpu; then
        # Two, for only the stack of who is switched out is recorded. Readers tell them by their order.
        target+=(-e "sched:sched_switch${stack:+/$stack/}" --filter "$(of_server prev_)")
        target+=(-e sched:sched_switch --filter "$(of_server next_)")
        target+=(-e sched:sched_wakeup --filter "$(of_server '')")
    fi
    # By the kernel's timer: in a virtual machine cycles may be a timer, too, and would not say so. I: no idle CPUs.
    ! profiled oncpu || target+=(-e "task-clock/name=oncpu,freq=99${stack:+,$stack}/I")
}

# of_server PREFIX: a filter of the scheduler's events, by PREFIXcomm or PREFIXpid. Other servers have the same name, and
# readers tell their processes apart.
of_server() {
    if [[ -n $pids ]]; then
        among "$1pid"
        printf '%s' "$REPLY"
    else
        printf '%scomm == "%s"' "$1" "$comm"
    fi
}

# among FIELD: sets REPLY to a filter for the processes named by -p.
among() {
    REPLY="$1 == ${pids//,/ || $1 == }"
    # The kernel takes a page.
    ((${#REPLY} < 4096)) || die "-p names too many processes for offcpu: record the whole server, without -p"
}

# How perf and we talk: `hold` is the standard input of its workload, a cat that ends when nobody is
# left who could write, and with it perf: our death, by -9 as well, ends perf in good order.
# It is woken often, so that little is lost when perf itself is killed.
engine_start() {
    local tries target
    open_pipes control answer
    perf_target
    # Job control gives perf a process group of its own: Ctrl-C is for us, and we end perf.
    set -m
    perf record -o "$capture/perf.data" -k CLOCK_MONOTONIC -B -N --synth=$synth --control "fd:$control,$answer" \
        "${target[@]}" -- cat <&"$hold_reader" >"$capture/perf.log" 2>&1 {hold}>&- {clock}>&- &
    perf_pid=$!
    set +m
    for ((tries = 0; tries < 600; tries++)); do
        engine_running || die "perf could not record; it says: $(tail -n 3 "$capture/perf.log")"
        ! ask_perf || return 0
        interrupted
    done
    die "perf did not answer for a minute"
}

engine_running() { kill -0 "$perf_pid" 2>/dev/null; }

engine_tick() { wake_perf; }

# engine_stop: closes the pipe that perf's workload reads, so that perf ends and
# writes out what it holds; waits for it.
engine_stop() {
    [[ -z $hold ]] || exec {hold}>&-
    hold=''
    # Another signal ends a wait early, but not perf.
    while [[ -n $perf_pid ]]; do
        perf_status=0
        wait "$perf_pid" || perf_status=$?
        kill -0 "$perf_pid" 2>/dev/null || perf_pid=''
    done
    # What it held at its end has a name with the time.
    if ((ring_bytes)) && compgen -G "$capture/perf.data.*" >/dev/null; then
        mv -- "$capture"/perf.data.* "$capture/perf.data"
    fi
}

# dumps_said: sets REPLY to how many files perf says it has dumped.
dumps_said() { REPLY=$(awk '/Dump .*perf.data/ { n++ } END { print n + 0 }' "$capture/perf.log"); }

# engine_dump FOLDER: perf writes a file at SIGUSR2, of what came since the one before, and says so in its log when that
# is complete.
engine_dump() {
    local said tries
    dumps_said && said=$REPLY
    kill -USR2 "$perf_pid" || return 1
    for ((tries = 0; tries < 200; tries++)); do
        pause 0.05
        engine_tick
        dumps_said
        if ((REPLY > said)); then
            mv -- "$capture"/perf.data.* "$1/perf.data"
            return 0
        fi
    done
    return 1
}

engine_notes() { note perf "$(perf --version)"; }

engine_failure() { printf 'perf ended by itself (status %s). It says: %s' "$perf_status" "$(tail -n 2 "$capture/perf.log")"; }
