# shellcheck shell=bash
# engine-ftrace.bash - records events through an instance of ftrace of our own: tracefs, bash and coreutils.
#
# Sourced, never run, by waitfold-record; what an engine is stands there.
#
# A child, the drainer, takes the pages out of the kernel's buffers. It removes the instance in the end, also when
# the recorder was killed; what a killed drainer leaves, the next run removes. Meanwhile the capture holds
# trace.head, all that stands before the CPUs in a trace.dat, and trace.cpuN, the pages of each. In the end these
# become trace.dat; where they could not, they can be read as they are.
# shellcheck disable=SC2154,SC2034 # what the recorder sets is used here, and the other way round

engine_period=0.25
# 300,000 events a second, all on one CPU, fill it in a second; the drainer looks five times a second.
readonly CPU_BUFFER_KB=8192
readonly PAGE=4096 PAGE_DATA=4080 # of which events can be that much, events/header_page
instance='' drainer=''

engine_start() {
    local event kb
    instance=$TRACEFS/instances/${group/#waitfold_/waitfold_rec_}
    mkdir "$instance" 2>/dev/null || die "the kernel gives us no instance of ftrace: use --engine perf"
    count_cpus
    kb=$CPU_BUFFER_KB
    ((! ring_bytes)) || kb=$(((ring_bytes >> 10) / cpus))
    tell buffer_size_kb "$kb"
    tell trace_clock mono
    follow_recorded
    trace_head >"$capture/trace.head" || die "\"$capture/trace.head\" cannot be written"
    # Job control gives the drainer a process group of its own: Ctrl-C is for us, and we end it.
    set -m
    drain {hold}>&- {clock}>&- </dev/null >"$capture/ftrace.log" 2>&1 &
    drainer=$!
    set +m
    # A pid can come again: its end, and its next beginning, are recorded as well.
    tell events/sched/sched_process_fork/enable 1
    tell events/sched/sched_process_exit/enable 1
    for event in "${events[@]}"; do
        tell "events/$group/$event/enable" 1
    done
}

# follow_recorded: has ftrace record the processes named, or all of the server: its postmaster first, so that none is
# born unseen while its children are listed. What the server runs besides, such as a shell, is of no interest.
follow_recorded() {
    if [[ -z $pids ]]; then
        tell events/sched/sched_process_fork/filter "parent_pid == $POSTMASTER"
        tell events/sched/sched_process_exit/filter "comm == \"$comm\""
        follow "$instance" "$POSTMASTER"
    fi
    processes
    # shellcheck disable=SC2086 # words are wanted
    follow "$instance" $REPLY
}

engine_running() { kill -0 "$drainer" 2>/dev/null; }

engine_tick() { :; }

# engine_stop: the drainer ends when the pipe is closed. Where it was killed, its work is done here.
engine_stop() {
    { echo 0 >"$instance/tracing_on"; } 2>/dev/null || true
    [[ -z $hold ]] || exec {hold}>&-
    hold=''
    while [[ -n $drainer ]]; do
        wait "$drainer" || true
        engine_running || drainer=''
    done
    [[ ! -d $instance ]] || {
        finish
        rmdir "$instance"
    }
}

# engine_dump FOLDER: the pages are taken out while ftrace goes on to write, so each is in one dump only; with a limit,
# as there may always be one more.
engine_dump() (
    umask 077
    for ((cpu = 0; cpu < cpus; cpu++)); do
        take "$1" "$cpu" $((ring_bytes / PAGE / cpus + 16)) || exit 1
    done
    trace_file "$1"
)

engine_notes() { :; }

engine_failure() {
    local said
    said=$(tail -n 2 "$capture/ftrace.log")
    printf 'what reads the buffers of ftrace ended by itself%s' "${said:+. It says: $said}"
}

## The instance

# tell FILE TEXT: writes to a file of the instance.
tell() {
    { printf '%s\n' "$2" >"$instance/$1"; } 2>/dev/null ||
        die "ftrace refuses \"$2\" for $1. Its reason: $(tail -n 3 "$instance/error_log" 2>/dev/null)"
}

# count_cpus: sets cpus. One that is not there, but might be plugged in, has no buffer.
count_cpus() {
    cpus=0
    while [[ -d $instance/per_cpu/cpu$cpus && -d /sys/devices/system/cpu/cpu$cpus ]]; do cpus=$((cpus + 1)); done
}

# statistic CPU NAME: sets REPLY to a number from the CPU's statistics.
statistic() {
    local lines line
    mapfile -t lines <"$instance/per_cpu/cpu$1/stats"
    for line in "${lines[@]}"; do
        [[ $line != "$2: "* ]] || REPLY=${line#*: }
    done
}

# take FOLDER CPU PAGES: appends pages to the CPU's file, at most as many as there are. Where the disk is full, the last
# page goes that was not written whole.
take() {
    local error file=$1/trace.cpu$2
    error=$(dd if="$instance/per_cpu/cpu$2/trace_pipe_raw" of="$file" bs=$PAGE count="$3" \
        iflag=nonblock oflag=append conv=notrunc status=none 2>&1) ||
        [[ $error == *'Resource temporarily unavailable'* ]] || { # there are no more
        warn "$error"
        truncate -s /$PAGE "$file"
        return 1
    }
}

# drain: the drainer. It takes only as many pages as are surely full: the one that is written to would come
# as it is, again and again. The threshold saves processes: an idle server costs a look at the numbers.
drain() {
    local cpu count taken=0 looks=0 status taker takers failed='' busy
    trap '' INT TERM HUP
    umask 077 # as perf does it
    # Another script that finds the recorder gone cannot remove the instance while a file of it is open.
    exec {busy}<"$instance/tracing_on"
    # A ring is taken out when somebody asks for it, and at the end.
    ((! ring_bytes)) || read -r -u "$hold_reader" || true
    while ((! ring_bytes && taken * PAGE < max_bytes)); do
        status=0
        read -r -t 0.2 -u "$hold_reader" || status=$?
        ((status > 128)) || break # the recorder has closed the pipe, or is gone
        looks=$((looks + 1)) takers=()
        for ((cpu = 0; cpu < cpus; cpu++)); do
            statistic $cpu bytes
            count=$((REPLY / PAGE_DATA))
            if ((count >= 16 || (count && looks % 10 == 0))); then
                take "$capture" $cpu $count &
                takers+=($!)
                taken=$((taken + count))
            fi
        done
        for taker in ${takers[@]+"${takers[@]}"}; do
            wait "$taker" || failed=yes
        done
        # Nothing may follow upon pages that are lost.
        [[ -z $failed ]] || break
    done
    [[ -n $failed ]] || finish
    exec {busy}<&-
    rmdir "$instance"
}

# finish: ends the tracing, takes out the rest, makes the file.
finish() (
    umask 077
    left=''
    echo 0 >"$instance/tracing_on"
    for ((cpu = 0; cpu < cpus; cpu++)); do
        take "$capture" "$cpu" $((1 << 30)) || left=yes
    done
    # Else the pages stay as they are, to be read so.
    if [[ -z $left && ! -e $capture/trace.dat ]] && trace_file "$capture"; then
        rm -- "$capture/trace.head"
    fi
)

## trace.dat
# As trace-cmd.dat.v6(5) says, little-endian: trace.head, names of the processes, options, where the pages of each
# CPU are, the pages.

# number BYTES N
number() {
    local i text=
    for ((i = 0; i < $1; i++)); do printf -v text '%s\\x%02x' "$text" $(($2 >> 8 * i & 255)); done
    printf '%b' "$text"
}

# sized BYTES FILE...: the files' content, all of one length word before it. Files of tracefs do not know their size.
sized() {
    local bytes=$1 text
    shift
    text=$(cat "$@" && echo .) || return 1
    text=${text%.}
    number "$bytes" ${#text} && printf '%s' "$text"
}

# trace_head: the kernel's descriptions of pages and events.
trace_head() {
    local event
    printf '\x17\x08Dtracing6\0\0\x08'
    number 4 $PAGE
    printf 'header_page\0'
    sized 8 "$TRACEFS/events/header_page"
    printf 'header_event\0'
    sized 8 "$TRACEFS/events/header_event"
    number 4 0 # events of ftrace itself
    number 4 2
    printf 'sched\0'
    number 4 2
    for event in fork exit; do sized 8 "$TRACEFS/events/sched/sched_process_$event/format"; done
    printf '%s\0' "$group"
    number 4 ${#events[@]}
    for event in "${events[@]}"; do sized 8 "$TRACEFS/events/$group/$event/format"; done
    number 4 0 # kallsyms
    number 4 0 # formats of trace_printk
}

# trace_file FOLDER: makes its trace.dat of the pages there. A CPU's file goes when it is in, so that the disk
# need not hold all twice; a trace.dat that ends in between is complete together with the files that are left.
# It stops at the first thing that fails, also in a condition, where `set -e` does not hold.
trace_file() {
    local cpu new=$1/trace.new size
    trace_start >"$new" && size=$(stat -c %s "$new") && trace_table "$1" "$size" >>"$new" &&
        truncate -s %$PAGE "$new" && mv -- "$new" "$1/trace.dat" || return 1
    for ((cpu = 0; cpu < cpus; cpu++)); do
        cat "$1/trace.cpu$cpu" >>"$1/trace.dat" && rm -- "$1/trace.cpu$cpu" || return 1
    done
}

# trace_start: what stands before the table of the CPUs.
trace_start() {
    local cpu
    cat "$capture/trace.head" &&
        sized 8 <(awk -v name="$comm" '$2 == name' "$TRACEFS/saved_cmdlines") &&
        number 4 "$cpus" && printf 'options  \0' && option 4 "$instance/trace_clock" || return 1
    for ((cpu = 0; cpu < cpus; cpu++)); do
        option 2 <(printf 'CPU: %s\n' $cpu) "$instance/per_cpu/cpu$cpu/stats" || return 1
    done
    number 2 0 && printf 'flyrecord\0'
}

# trace_table FOLDER BYTES: where the pages of each CPU will be: behind so many bytes and the table, on the next page.
trace_table() {
    local cpu size at=$((($2 + 16 * cpus + PAGE - 1) / PAGE * PAGE))
    for ((cpu = 0; cpu < cpus; cpu++)); do
        size=$(stat -c %s "$1/trace.cpu$cpu") && number 8 "$at" && number 8 "$size" || return 1
        at=$((at + size))
    done
}

# option ID FILE...: TRACECMD_OPTION_CPUSTAT is 2, TRACECMD_OPTION_TRACECLOCK is 4.
option() {
    number 2 "$1" && sized 4 "${@:2}"
}
