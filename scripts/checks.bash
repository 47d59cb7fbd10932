# shellcheck shell=bash
# checks.bash - what this host and this server have of what recording needs.
#
# Sourced, never run, by lib.bash. Needs bash 4.2, coreutils and awk.
#
# Each check sets FOUND to what was found and, when it returns 1, MEND to what to do about it. None changes anything.
# Those of the server need what inspect_server sets.
# shellcheck disable=SC2034 # what is set here is used by those that source it

TRACEFS=
FOUND='' MEND=''

## What is needed for what

# What each mode and each engine cannot do without. Finding the sites themselves is not
# among it: that takes seconds.
declare -rA MODE_NEEDS=(
    [sites]='machine kernel rights lockdown uprobes memory site_list'
    [usdt]='machine kernel rights lockdown uprobes memory wait_notes red_zone'
    [mem]='machine memory perf paranoid slots site_list'
)
declare -rA ENGINE_NEEDS=(
    [ftrace]='instances pid_namespace'
    [perf]='perf paranoid'
    ['trace-cmd']='instances pid_namespace trace_cmd'
)

# The ways to record that are chosen by themselves, the cheapest first.
readonly WAYS=('sites ftrace' 'sites perf' 'usdt ftrace' 'usdt perf' 'mem perf')

# mode_possible MODE, engine_possible ENGINE: 1, with FOUND and MEND, at the first thing that is missing.
mode_possible() { all_of "${MODE_NEEDS[$1]}"; }
engine_possible() { all_of "${ENGINE_NEEDS[$1]}"; }

all_of() {
    local check
    for check in $1; do
        "check_$check" || return 1
    done
}

# require CHECK... : the first one that fails ends the script.
require() { all_of "$*" || die "$FOUND. To mend it: $MEND"; }

## The host

check_machine() {
    local machine
    machine=$(uname -m)
    FOUND="$machine" MEND="use an x86-64 host: sites of other machines cannot be checked yet"
    [[ $machine == x86_64 ]]
}

# kernel_from MAJOR MINOR: sets FOUND; 0 when the running kernel is that one or a later one.
kernel_from() {
    local release major minor
    release=$(uname -r)
    major=${release%%.*} minor=${release#*.} minor=${minor%%[!0-9]*}
    FOUND="Linux $release"
    ((major > $1 || (major == $1 && minor >= $2)))
}

# Several places under one event, and immediate values, came with Linux 5.4.
check_kernel() {
    MEND="use a kernel of 5.4 or later: older ones cannot join many places to one event"
    kernel_from 5 4
}

# Needed of no way to record, but cheaper.
check_optimised() {
    MEND="Linux 6.18 or later makes probes on 5-byte nops a quarter cheaper: no trap"
    kernel_from 6 18 || return 1
    FOUND+=" makes a call of a probe on a 5-byte nop: no trap"
}

user() {
    REPLY=$(id -un 2>/dev/null) || REPLY=$EUID
    REPLY="user $REPLY"
}

# shellcheck disable=SC2153 # TOOL is set by lib.bash
check_root() {
    user
    FOUND=$REPLY MEND="run this as root: sudo $TOOL ..."
    ((EUID == 0)) || {
        FOUND+=", not root"
        return 1
    }
}

# capable NUMBER: whether we have this capability, by its number in linux/capability.h.
capable() {
    local key value
    while read -r key value; do
        [[ $key != CapEff: ]] || return $((! (16#$value >> $1 & 1)))
    done </proc/self/status
    return 1
}
readonly CAP_SYS_ADMIN=21 CAP_PERFMON=38

check_rights() {
    local first last count
    check_root || return 1
    MEND="run this as root of the host"
    read -r first last count </proc/self/uid_map
    [[ "$first $last $count" == '0 0 4294967295' ]] || {
        FOUND+=" of a user namespace, without rights over the kernel"
        return 1
    }
    MEND="run this on the host, or give the container the capabilities PERFMON and SYS_PTRACE"
    capable $CAP_PERFMON || capable $CAP_SYS_ADMIN || {
        FOUND+=" without CAP_PERFMON and CAP_SYS_ADMIN"
        return 1
    }
    FOUND+=" with CAP_PERFMON or CAP_SYS_ADMIN"
}

# Debian's kernels have a level 3 of their own: nobody without the capability.
check_paranoid() {
    local level file=/proc/sys/kernel/perf_event_paranoid
    MEND="use a kernel with CONFIG_PERF_EVENTS=y"
    { read -r level <$file; } 2>/dev/null || {
        FOUND="no $file"
        return 1
    }
    FOUND="perf_event_paranoid is $level"
    MEND="run this as root, or: sysctl kernel.perf_event_paranoid=2"
    if capable $CAP_PERFMON || capable $CAP_SYS_ADMIN; then
        FOUND+=", which does not bind us"
        return 0
    fi
    ((level <= 2)) && FOUND+=": backends of one's own may be watched (-m mem)"
}

# Confidentiality shuts tracefs; integrity shuts nothing that is used here.
check_lockdown() {
    local file=/sys/kernel/security/lockdown
    MEND="boot without lockdown=confidentiality, or record with -m mem"
    FOUND="the kernel is not locked down"
    { read -r FOUND <$file; } 2>/dev/null || return 0
    FOUND="lockdown: $FOUND"
    [[ $FOUND != *'[confidentiality]'* ]]
}

check_tracefs() {
    local at type
    MEND="mount -t tracefs nodev /sys/kernel/tracing"
    for TRACEFS in /sys/kernel/tracing /sys/kernel/debug/tracing; do
        FOUND=$TRACEFS
        [[ -e $TRACEFS/README ]] && return 0
    done
    while read -r _ at type _; do
        [[ $type == tracefs ]] || continue
        user
        FOUND="$at may not be looked at by $REPLY" MEND="run this as root: sudo $TOOL ..."
        return 1
    done </proc/self/mounts
    FOUND="tracefs is not mounted"
    return 1
}

check_uprobes() {
    check_tracefs || return 1
    FOUND=$TRACEFS/uprobe_events
    [[ -e $FOUND ]] || {
        FOUND="no $FOUND" MEND="use a kernel with CONFIG_UPROBE_EVENTS=y"
        return 1
    }
    # Opened for appending and closed again: that changes nothing, and asks the kernel's lockdown too.
    MEND="run this as root of the host, where $TRACEFS may be written"
    { : >>"$FOUND"; } 2>/dev/null || {
        FOUND="$FOUND cannot be written"
        return 1
    }
}

check_instances() {
    check_tracefs || return 1
    FOUND=$TRACEFS/instances MEND="mount -o remount,rw $TRACEFS, or record with --engine perf"
    [[ -w $FOUND ]] || {
        FOUND="no instance of ftrace can be made in $FOUND"
        return 1
    }
}

# For --with offcpu.
check_sched() {
    local event
    check_tracefs || return 1
    MEND="use a kernel with CONFIG_EVENT_TRACING=y, and run this as root"
    for event in sched_switch sched_wakeup; do
        FOUND="no tracepoint sched:$event"
        [[ -r $TRACEFS/events/sched/$event/id ]] || return 1
    done
    FOUND="tracepoints of the scheduler (--with offcpu)"
}

# PROC_PID_INIT_INO, the kernel's own number of the first pid namespace.
readonly FIRST_PID_NAMESPACE='pid:[4026531836]'

# What ftrace writes down are pids of the host, whoever reads them; perf translates.
check_pid_namespace() {
    FOUND="pids are the host's" MEND="run this on the host, or record with --engine perf"
    [[ $(readlink /proc/self/ns/pid) == "$FIRST_PID_NAMESPACE" ]] || {
        FOUND="in a pid namespace, ftrace would tell other pids than we see"
        return 1
    }
}

## Tools

check_perf() {
    local usage option
    FOUND="no perf"
    MEND="apt-get install linux-perf (Debian), linux-tools-$(uname -r) (Ubuntu), or: dnf install perf"
    type -P perf >/dev/null || return 1
    FOUND=$(perf --version 2>&1) || {
        # Ubuntu's perf is a script that looks for the build of the running kernel.
        FOUND="perf does not run: ${FOUND%%$'\n'*}"
        return 1
    }
    MEND="use a perf of 5.15 or later"
    # Not in a pipe: perf's usage text goes to stderr with status 129.
    usage=$(perf record -h 2>&1) || true
    for option in control synth clockid overwrite switch-output; do
        [[ $usage == *--$option* ]] || {
            FOUND+=" has no record --$option"
            return 1
        }
    done
    FOUND+=" with --control --synth -k --overwrite"
}

# trace-cmd writes a 1 into ftrace_enabled and gives up where it may not. What is there already is
# written, so that nothing changes.
check_trace_cmd() {
    local file=/proc/sys/kernel/ftrace_enabled value
    FOUND="no trace-cmd" MEND="apt-get install trace-cmd, or record with --engine ftrace: the same file"
    type -P trace-cmd >/dev/null || return 1
    FOUND="trace-cmd may not write $file" MEND="record with --engine ftrace: the same file"
    { read -r value <$file && echo "$value" >$file; } 2>/dev/null || return 1
    FOUND=$(trace-cmd --version 2>&1) || true
    FOUND=$(awk '/version/ { print $1, $2, $3; exit }' <<<"$FOUND")
}

check_binutils() {
    FOUND="objdump and readelf" MEND="apt-get install binutils (or: dnf install binutils)"
    local tool
    for tool in objdump readelf; do
        type -P $tool >/dev/null || {
            FOUND="no $tool"
            return 1
        }
    done
}

# The sites come from a list that was given with --sites, or are looked for.
check_site_list() {
    if [[ -z ${site_list-} ]]; then
        check_binutils && return 0
        MEND+=", or make a list elsewhere: waitfold-probes sites BINARY, and give it here: --sites FILE"
        return 1
    fi
    local id
    MEND="make one of the server's own binary: waitfold-probes sites $(printf %q "$BINARY")"
    FOUND="\"$site_list\""
    [[ -r $site_list ]] || {
        FOUND+=" cannot be read"
        return 1
    }
    id=$(awk -F '\t' '$1 == "# build_id" { print $2 }' "$site_list" 2>/dev/null) || id=''
    [[ -n $id ]] || {
        FOUND+=" is not a list of sites"
        return 1
    }
    [[ $id == "$BUILD_ID" ]] || {
        FOUND+=" is of another build: $id"
        return 1
    }
    FOUND+=" is of this build"
}

## The CPUs

check_counters() {
    local dir
    FOUND="cycles are counted by the CPU" MEND="take task-clock, as waitfold does: perf's cycles would be a timer here"
    for dir in /sys/bus/event_source/devices/cpu{,_core}; do
        [[ ! -d $dir ]] || return 0
    done
    FOUND="no hardware counters (a virtual machine?)"
    return 1
}

# free_slots: sets REPLY to how many breakpoints a process of our own gets of the four that an x86 has, and ERROR to
# what perf said of the next one. Nothing is ever written to these addresses.
free_slots() {
    local events=() address said
    for ((REPLY = 0; REPLY < 4; REPLY++)); do
        printf -v address '0x%x' $((4096 * (REPLY + 1)))
        events+=(-e "mem:$address/4:w:u")
    done
    while ((REPLY)); do
        said=$(perf stat -x, "${events[@]:0:REPLY*2}" -- true 2>&1) && return 0
        ERROR=$said
        ((REPLY--)) || true
    done
}

# One does: a backend has one address that is written to.
check_slots() {
    check_perf || return 1
    free_slots
    FOUND="$REPLY of 4 breakpoint slots are free"
    ((REPLY == 0)) || return 0
    MEND="end the debugger or the perf -e mem: that holds them: ps -C gdb,perf -o pid,args"
    if [[ $ERROR != *' 28 '* ]]; then # ENOSPC
        FOUND="no breakpoint: $(awk 'NF > 1 { print; exit }' <<<"$ERROR")"
        MEND="run this where the kernel gives debug registers, as root or with perf_event_paranoid 2"
    fi
    return 1
}

# All of these read the CPU's own counter; others ask a device, a microsecond and more each time.
check_clock() {
    local file=/sys/devices/system/clocksource/clocksource0 source
    MEND="echo tsc >$file/current_clocksource, if available_clocksource there has it"
    FOUND="the clock source is not told"
    { read -r source <$file/current_clocksource; } 2>/dev/null || return 1
    FOUND="clock source $source"
    [[ $source =~ ^(tsc|kvm-clock|hyperv_clocksource_tsc_page)$ ]]
}

# The clock of the events: the recorder asks for it when it begins and ends.
check_timer_list() {
    FOUND="/proc/timer_list tells CLOCK_MONOTONIC" MEND="run this as root of the host, where /proc/timer_list can be read"
    monotonic_ns || {
        FOUND="CLOCK_MONOTONIC is not told: begin and end of a recording are less exact"
        return 1
    }
}

check_turbo() {
    local dir=/sys/devices/system/cpu file off value
    FOUND="turbo is not told (the host of a virtual machine decides)"
    MEND="compare only runs that alternate"
    # In one file a 1 means off, in the other a 0 does.
    for file in intel_pstate/no_turbo:1 cpufreq/boost:0; do
        off=${file#*:} file=$dir/${file%:*}
        { read -r value <"$file"; } 2>/dev/null || continue
        FOUND="turbo is off"
        [[ $value != "$off" ]] || return 0
        FOUND="turbo is on: CPUs are faster while others idle" MEND="echo $off >$file while you measure"
        return 1
    done
    return 1
}

# How long the CPU sleeps itself to the next wakeup adds to each wait.
check_idle() {
    local dir disabled latency most=0
    for dir in /sys/devices/system/cpu/cpu0/cpuidle/state*; do
        { read -r latency <"$dir/latency" && read -r disabled <"$dir/disable"; } 2>/dev/null || continue
        ((disabled || latency <= most)) || most=$latency
    done
    FOUND="a wakeup takes up to $most us out of the deepest idle state"
    ((most)) || FOUND="no idle states (the host of a virtual machine decides)"
    MEND="while you measure: cpupower idle-set -D 10"
    ((most <= 10))
}

check_thp() {
    local state file=/sys/kernel/mm/transparent_hugepage/enabled
    FOUND="none" MEND="echo madvise >$file: gathering pages stalls backends"
    { read -r state <$file; } 2>/dev/null || return 0
    FOUND=$state
    [[ $state != *'[always]'* ]]
}

# The smallest room on the disk that a recording begins or goes on with: the server may live on the same file system.
readonly ROOM=$((256 << 20))

# Where captures go unless -o says otherwise.
check_disk() {
    local free
    MEND="go to a folder with room, or name one with waitfold-record -o"
    free=$(df -Pk . 2>/dev/null | awk 'NR == 2 { print $4 }') || free=0
    FOUND="$((free >> 10)) MiB are free in $PWD"
    ((free << 10 >= ROOM)) || return 1
    [[ -w . ]] || {
        FOUND="nothing can be written in $PWD"
        return 1
    }
}

## The server

# An upgrade replaces the file; the server runs the old one until it is restarted.
check_upgraded() {
    FOUND="runs the file that is there now" MEND="record all the same, or restart the server first"
    [[ $BINARY -ef $EXE || /proc/$POSTMASTER/root$BINARY -ef $EXE ]] || {
        FOUND="the file was replaced or removed since the server's start"
        return 1
    }
}

# Opening it asks the same question as reading it.
check_memory() {
    FOUND="process $POSTMASTER may be read"
    MEND="run this as root, with CAP_SYS_PTRACE (or as the server's user with sysctl kernel.yama.ptrace_scope=0)"
    { : <"/proc/$POSTMASTER/mem"; } 2>/dev/null || {
        user
        FOUND="the memory of process $POSTMASTER may not be read by $REPLY"
        return 1
    }
}

# count_notes: sets FOUND to how many SDT notes the server has, NOTE_COUNT to that number, WAIT_NOTES to how many of
# them are of wait events, and CALLED_NOTES to how many are 5-byte nops.
count_notes() {
    MEND="take the packaged server; waits need no notes (-m sites)"
    read_notes "$EXE" || {
        FOUND=${NOTES#"$TOOL: "}
        return 1
    }
    read -r NOTE_COUNT WAIT_NOTES CALLED_NOTES < <(awk -F '\t' '
        $6 == "0f1f440000" { called++ }
        NF > 5 { n++ } # other lines are what tools say to stderr, as sh does of a working directory that is gone
        $1 == "postgresql" && $2 ~ /^wait__event__(start|end)$/ { waits++ }
        END { print n + 0, waits + 0, called + 0 }' <<<"$NOTES")
    FOUND="$NOTE_COUNT SDT notes"
}

check_notes() {
    count_notes || return 1
    MEND="take a build with --enable-dtrace; waits need none (-m sites)"
    ((NOTE_COUNT))
}

check_wait_notes() {
    count_notes || return 1
    FOUND+=", $WAIT_NOTES of them of wait events"
    MEND="take a server built with them: make usdt-postgres; -m sites needs none"
    ((WAIT_NOTES))
}

# The call that Linux makes of a 5-byte nop writes below the stack pointer, where a function that calls no other
# may keep its variables (the red zone). Whether the compiler was told not to (-mno-red-zone), the file does not say.
check_red_zone() {
    count_notes || return 1
    FOUND="no static probe at which this kernel would overwrite a red zone"
    ((CALLED_NOTES)) && kernel_from 6 18 || return 0
    FOUND="$CALLED_NOTES SDT notes are 5-byte nops, at which this kernel would overwrite the red zone"
    MEND="if the server was built with -mno-red-zone, as by make usdt-postgres NOP5=1: -m usdt"
    [[ ${mode-} == usdt ]]
}

# number FILE OFFSET BYTES: sets REPLY to a number in the file.
number() {
    REPLY=$(od -An -v -t "u$3" -j "$2" -N "$3" -- "$1" 2>/dev/null) || return 1
    REPLY=${REPLY//[[:space:]]/}
    [[ -n $REPLY ]]
}

# count_functions FILE: sets REPLY to how many functions its table for unwinding (.eh_frame_hdr) has, static ones
# as well; it is there in a stripped file too.
count_functions() {
    local at entries i
    number "$1" 32 8 && at=$REPLY && number "$1" 56 2 && entries=$REPLY || return 1
    for ((i = 0; i < entries; i++, at += 56)); do
        number "$1" "$at" 4 || return 1
        ((REPLY == 0x6474e550)) || continue # PT_GNU_EH_FRAME
        number "$1" $((at + 8)) 8 && number "$1" $((REPLY + 8)) 4
        return
    done
    return 1
}

# With -fno-omit-frame-pointer more than half of the functions hold a `mov %rsp,%rbp` (some do without, and
# parts of functions count as well); without it some tens of many thousands do.
check_frames() {
    local functions kept
    FOUND="the table of functions cannot be read" MEND="take a build with -fno-omit-frame-pointer, or record with --call-graph dwarf, which costs more"
    count_functions "$EXE" && functions=$REPLY || return 1
    kept=$(awk 'BEGIN { RS = "H\211\345" } END { print NR - 1 }' "$EXE")
    FOUND="$kept of $functions functions keep frame pointers"
    ((kept * 4 > functions))
}

# has_symtab FILE: 0 when it has the symbols that strip removes (SHT_SYMTAB).
has_symtab() {
    local at count
    number "$1" 40 8 && at=$REPLY && number "$1" 60 2 && count=$REPLY || return 1
    od -An -v -t u4 -w64 -j "$at" -N $((count * 64)) -- "$1" |
        awk '$2 == 2 { found = 1 } END { exit !found }'
}

# Where debuggers and perf look for what was stripped off.
check_symbols() {
    local file=/usr/lib/debug/.build-id/${BUILD_ID:0:2}/${BUILD_ID:2}.debug
    FOUND=".symtab, in the binary" MEND=''
    ! has_symtab "$EXE" || return 0
    FOUND=$file
    [[ ! -e $file ]] || return 0
    FOUND=".dynsym only, and no debug file of its build-id in /usr/lib/debug: static functions have no names in stacks"
    MEND="apt-get install postgresql-${PG_VERSION%%[!0-9]*}-dbgsym (or: dnf debuginfo-install postgresql-server)"
    return 1
}

check_namespaces() {
    local kind own='' theirs
    MEND="mind that paths and pids that the server tells are its own; a capture has the pids seen from here"
    for kind in pid mnt; do
        FOUND="the namespaces of process $POSTMASTER may not be looked at"
        theirs=$(readlink "/proc/$POSTMASTER/ns/$kind") || return 1
        [[ $theirs == "$(readlink /proc/self/ns/$kind)" ]] || own+="${own:+ and }$kind"
    done
    FOUND="the server's are ours"
    [[ -z $own ]] || {
        FOUND="the server has a $own namespace of its own (a container)"
        return 1
    }
}

check_huge_pages() {
    FOUND="the server's shared memory is in huge pages"
    MEND="sysctl vm.nr_hugepages=N and huge_pages = on (SHOW shared_memory_size_in_huge_pages says N): page faults count as CPU"
    awk '/\/anon_hugepage/ { found = 1 } END { exit !found }' "/proc/$POSTMASTER/maps" 2>/dev/null || {
        FOUND="the server's shared memory is in pages of 4 KiB"
        return 1
    }
}
