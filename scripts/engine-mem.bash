# shellcheck shell=bash
# engine-mem.bash - a hardware watchpoint on each backend's wait_event_info, by `perf record -e mem:`.
#
# Sourced, never run, by waitfold-record; what an engine is stands there.
#
# Each backend has a perf of its own, which writes perf.data.N. A perf can watch four (`-e` four times and
# `-p A,B,C,D`), but then it sets all four watchpoints on each of the four processes, so that nobody else gets a debug
# register of theirs; and perf (6.1) takes a whole CPU from the end of the first of them until the end of the last.
# Watching one, it ends with it. What a wait costs the server is the same.
# shellcheck disable=SC2154 # what the recorder sets is used here

# Backends are not attached to before they are there: this is how often we look for new ones.
# shellcheck disable=SC2034 # for the main loop
engine_period=0.05
# Who has no wait_event_info in shared memory after so many looks, a second, is looked at so seldom.
readonly PATIENCE=20
# What a backend may write, 100 bytes a store, before its perf comes to read it.
readonly BUFFER_KB=512

told='' orders='' starter='' no_storage=0 perfs=0 attaching=0 attached=0 looks=0 suspended_ns=0 family='' refusal='' clock_offset_ns=''
# By pid: when born, how often it was looked at in vain. By number of the perf: whom it watches, since when, where.
declare -A born=() unready=()
pid_of=() born_ns=() address_of=() attached_ns=() watch_options=() own_mounts=()

engine_start() {
    local started=$SECONDS
    mkfifo "$capture/told"
    exec {told}<>"$capture/told"
    rm -- "$capture/told"
    monotonic_ns || wall_clock || die "there is no way to tell CLOCK_MONOTONIC here: run this as root"
    time_suspended
    # The postmaster has no wait_event_info in shared memory: its pointer is what each process has before InitProcess.
    peek "$POSTMASTER" $((LOAD_BASE + WAIT_POINTER)) 8 ||
        die "the memory of the server (process $POSTMASTER) cannot be read: run this as root, or as the server's user"
    no_storage=$REPLY
    set_watch_options
    start_starter
    printf 'pid\tborn_ns\tattached_ns\tread_ns\twait\tfile\twhy\n' >"$capture/attached.tsv"
    [[ -n $pids ]] || watch 0 "$POSTMASTER" - 0
    engine_tick
    while ((attaching)); do
        interrupted
        ((SECONDS - started < 60)) || die "perf did not attach within a minute"
        hear 100
    done
    ((${#attached_ns[@]} > (${#pids} == 0))) || die "no process could be attached to: ${refusal:-none has a wait_event_info}"
    [[ -z $refusal ]] || warn "not all processes could be attached to: $refusal"
}

engine_running() { kill -0 "$starter" 2>/dev/null && { [[ -z $pids ]] || ((attaching + attached)); }; }

# Where no process came or went there is nothing to do.
engine_tick() {
    local now=$pids
    hear 0
    [[ -n $now ]] || { children "$POSTMASTER" && now=$REPLY; }
    looks=$((looks + 1))
    [[ $now == "$family" ]] || look_for_new "${now//,/ }"
    family=$now
    ((${#unready[@]} == 0)) || attach_ready
}

# engine_stop: closes the pipe that the starter and the perfs' workloads read, so that all end and write out what they hold.
engine_stop() {
    local pid why
    [[ -z $hold ]] || exec {hold}>&-
    hold=''
    [[ -n $starter ]] || return 0
    # Another signal ends a wait early, but not the starter.
    while kill -0 "$starter" 2>/dev/null; do wait "$starter" || true; done
    hear 0
    for pid in "${!unready[@]}"; do
        why='no wait_event_info in shared memory'
        ((unready[$pid] > PATIENCE)) || why='the recording ended before it could be attached to'
        never "$pid" "${born[$pid]}" "$why"
    done
    unready=()
}

engine_notes() {
    note perf "$(perf --version)"
    [[ -n $clock_offset_ns ]] || return 0
    local before=$clock_offset_ns moved
    wall_clock || return 0
    moved=$((clock_offset_ns - before))
    ((${moved#-} < 1000000)) ||
        warn "the wall clock was set by $((moved / 1000000)) ms meanwhile: when backends were attached to, and the window, are off by it"
}

engine_failure() { printf 'what starts the perfs was killed'; }

## What perf is told

# set_watch_options: what is the same for all.
set_watch_options() {
    local registers buffer=$BUFFER_KB limit
    # Registers whose values are stored, as perf calls them: %rax is ax, %r14 is r14.
    registers=$(awk -F '\t' '$2 ~ /^%/ && !seen[$2]++ {
        name = substr($2, 2)
        if (name !~ /^r[0-9]/) sub(/^r/, "", name)
        printf ",%s", name
    }' "$capture/sites.tsv")
    # An ordinary user's perf may pin so many KiB (ulimit -l), whatever others of his have; a page more than
    # the buffer is needed.
    limit=$(ulimit -l)
    if ((EUID)) && [[ $limit != unlimited ]]; then
        while ((buffer > 4 && buffer + 4 > limit)); do buffer=$((buffer / 2)); done
    fi
    watch_options=(-k CLOCK_MONOTONIC -T -c 1 --per-thread --no-bpf-event --synth=no -B -N -m "${buffer}K"
        --max-size "$((max_bytes >> 10))K")
    [[ -z $registers ]] || watch_options+=(--user-regs="${registers#,}")
    # perf reads /proc/kallsyms three times before it begins, for 100 ms, and has no use for it here. In a mount
    # namespace of its own it finds it empty, and begins in 10 ms. On CPUs that are all busy, perf and the next
    # backend to be attached to would wait long for one.
    own_mounts=(nice -n -10 unshare -m --propagation slave)
    "${own_mounts[@]}" mount --bind /dev/null /proc/kallsyms 2>/dev/null || own_mounts=()
}

# start_starter: starts the process that starts the perfs: it reads number of the perf, pid and address, and ends, when the
# recorder has closed `hold` or is gone, with the last of them. Number 0 writes down who is born and when,
# also of those that are gone before we see them.
start_starter() {
    local fd
    mkfifo "$capture/orders"
    exec {orders}<>"$capture/orders"
    exec {fd}<"$capture/orders"
    rm -- "$capture/orders"
    # Job control gives it, and the perfs, a process group of their own: Ctrl-C is for us. A perf starts its workload when
    # it records, and ends with it, or with its backend.
    set -m
    # shellcheck disable=SC2016 # for sh to expand
    ${own_mounts[@]+"${own_mounts[@]}"} sh -c '
        folder=$1
        shift
        [ "$1" = 0 ] || mount --bind /dev/null /proc/kallsyms
        shift
        { cat <&4 && echo end >&5; } &
        exec 5>&-
        while read -r number pid address && [ "$number" != end ]; do
            {
                if [ "$number" = 0 ]; then
                    set -- -k CLOCK_MONOTONIC --no-bpf-event --synth=no -B -N -m 16K -e dummy:u
                else
                    set -- "$@" -e "mem:$address/4:wu"
                fi
                perf record -o "$folder/perf.data.$number" "$@" -p "$pid" -- \
                    sh -c "echo $number attached >&3 && exec cat"
                echo "$number ended $?" >&3
            } <&4 >"$folder/perf.log.$number" 2>&1 &
        done
        wait' sh "$capture" ${#own_mounts[@]} "${watch_options[@]}" \
        <&"$fd" 3>&"$told" 4<&"$hold_reader" 5>&"$orders" {hold}>&- {clock}>&- {told}>&- {orders}>&- &
    starter=$!
    set +m
    exec {fd}<&-
}

# watch NUMBER PID BORN ADDRESS: has a perf started for a process. We hear of it, and of its end, on `told`.
watch() {
    pid_of[$1]=$2 born_ns[$1]=$3 address_of[$1]=$4
    printf '%s %s 0x%x\n' "$1" "$2" "$4" >&"$orders"
    attaching=$((attaching + 1))
}

# why_not NUMBER: sets REPLY to why a perf did not attach, by what it said.
why_not() {
    local log pid=${pid_of[$1]}
    log=$(<"$capture/perf.log.$1")
    case $log in
        *'No space left on device'* | *'Device or resource busy'*)
            REPLY="its four hardware breakpoints are taken"
            holders "$pid"
            ;;
        *'mapping pages'* | *'failed to mmap'*)
            REPLY="perf may not pin its buffer of memory: raise ulimit -l (now $(ulimit -l)) or kernel.perf_event_mlock_kb"
            ;;
        *'Permission denied'* | *'Operation not permitted'* | *'is limited'*)
            REPLY="$(id -un) may not watch it: kernel.perf_event_paranoid is $(</proc/sys/kernel/perf_event_paranoid), and it is a process of $(stat -c %U "/proc/$pid" 2>/dev/null || echo nobody)"
            ;;
        *'not supported'* | *'No such device'* | *'No such file or directory'*)
            REPLY="this machine or its kernel has no debug registers to give"
            ;;
        *)
            REPLY="perf says: $(awk 'NF > 1 { print; exit }' <<<"$log")"
            [[ -d /proc/$pid ]] || REPLY="it ended before it could be attached to"
            ;;
    esac
}

# holders PID: adds to REPLY who may have the breakpoints of a process: its debugger, and whoever has perf events but us.
holders() {
    local key tracer list
    while read -r key tracer; do
        [[ $key != TracerPid: || $tracer == 0 ]] || REPLY+=", by process $tracer ($(<"/proc/$tracer/comm")), which debugs it"
    done 2>/dev/null <"/proc/$1/status" || true
    list=$({ ls -l /proc/[0-9]*/fd 2>/dev/null || true; } | awk '
        /^\/proc/ { split($0, part, "/") }
        /perf_event/ && !seen[part[3]]++ { print part[3] }' | while read -r key; do
        [[ $(tr '\0' ' ' <"/proc/$key/cmdline") == *"$capture/"* ]] || printf ' %s (%s)' "$key" "$(<"/proc/$key/comm")"
    done 2>/dev/null) || true
    [[ -z $list ]] || REPLY+=", maybe by one of those that have perf events:$list"
}

## Processes that come and go

# look_for_new PIDS: takes down who was born, and forgets who has ended.
look_for_new() {
    local pid
    local -A here=()
    for pid in $1; do
        here[$pid]=yes
        [[ -z ${born[$pid]-} ]] || continue
        stat_of "$pid" || continue
        # In hundredths of a second, by a clock that goes on while the host is suspended.
        born[$pid]=$((STAT[19] * 10000000 - suspended_ns))
        unready[$pid]=0
    done
    for pid in "${!born[@]}"; do
        [[ -z ${here[$pid]-} ]] || continue
        [[ -z ${unready[$pid]-} ]] || never "$pid" "${born[$pid]}" "it ended before it could be attached to"
        unset "born[$pid]" "unready[$pid]"
    done
}

# attach_ready: attaches to those that have come by a wait_event_info in shared memory. Some never do, as the logger.
attach_ready() {
    local pid i pointers candidates=()
    for pid in "${!unready[@]}"; do
        unready[$pid]=$((unready[$pid] + 1))
        ((unready[$pid] > PATIENCE && looks % PATIENCE)) || candidates+=("$pid")
    done
    ((${#candidates[@]})) || return 0
    mapfile -t pointers < <(for pid in "${candidates[@]}"; do
        look "$pid" $((LOAD_BASE + WAIT_POINTER)) 8
    done | od -An -v -t u8 -w8)
    for i in "${!candidates[@]}"; do
        ((pointers[i] && pointers[i] != no_storage)) || continue
        unset "unready[${candidates[i]}]"
        watch $((++perfs)) "${candidates[i]}" "${born[${candidates[i]}]}" $((pointers[i] + WAIT_FIELD))
    done
    ((attaching == 0)) || hear 50
}

# hear MS: takes down what perfs have told; waits so long for each next word while some attach.
hear() {
    local waited=0 number word status i waits fresh=() gone=()
    while :; do
        # A line is there as a whole or not at all; a read that waits for one might time out in the middle of it.
        if ! read -t 0 -u "$told"; then
            ((attaching && waited < $1)) || break
            pause 0.005
            waited=$((waited + 5))
            continue
        fi
        waited=0
        read -r -u "$told" number word status
        if [[ $word == attached ]]; then
            monotonic_ns
            attached_ns[number]=$REPLY
            attaching=$((attaching - 1)) attached=$((attached + 1))
            ((number == 0)) || fresh+=("$number")
        else
            gone+=("$number")
            if [[ -z ${attached_ns[number]-} ]]; then
                attaching=$((attaching - 1))
            elif ((status > 128 && status != 143)) && [[ -n $hold && -n ${born[${pid_of[number]}]-} ]]; then
                # It was killed, its backend is there. (When that ends, perf dies of the SIGTERM that it sent its workload.)
                unready[${pid_of[number]}]=0
            fi
        fi
    done
    if ((${#fresh[@]})); then
        # What each waits for. It is recorded from attached_ns on, so this is its state then, unless it changes
        # until read_ns.
        mapfile -t waits < <(for number in "${fresh[@]}"; do
            look "${pid_of[number]}" "${address_of[number]}" 4
        done | od -An -v -t x4 -w4)
        monotonic_ns
        for i in "${!fresh[@]}"; do
            number=${fresh[i]}
            printf '%s\t%s\t%s\t%s\t0x%s\t%s\t-\n' "${pid_of[number]}" "${born_ns[number]}" \
                "${attached_ns[number]}" "$REPLY" "${waits[i]# }" "perf.data.$number"
        done >>"$capture/attached.tsv"
    fi
    for number in ${gone[@]+"${gone[@]}"}; do ended "$number"; done
}

# ended NUMBER: a perf has ended: with its backend, or because it could not attach.
ended() {
    if [[ -n ${attached_ns[$1]-} ]]; then
        attached=$((attached - 1))
        rm -- "$capture/perf.log.$1"
    else
        why_not "$1"
        refusal="process ${pid_of[$1]}: $REPLY"
        never "${pid_of[$1]}" "${born_ns[$1]}" "$REPLY"
        cat "$capture/perf.log.$1" >>"$capture/perf.log"
        rm -f -- "$capture/perf.log.$1" "$capture/perf.data.$1"
    fi
    unset "pid_of[$1]" "born_ns[$1]" "address_of[$1]" "attached_ns[$1]"
}

# never PID BORN WHY: a process that is not recorded.
never() { printf '%s\t%s\t-\t-\t-\t-\t%s\n' "$@" >>"$capture/attached.tsv"; }

## Time

# time_suspended: sets suspended_ns, by which the clock of processes' birth is ahead of CLOCK_MONOTONIC.
time_suspended() {
    local up now
    monotonic_ns && now=$REPLY
    read -r up _ </proc/uptime
    suspended_ns=$((10#${up/./} * 10000000 - now))
    ((suspended_ns > 100000000)) || suspended_ns=0
}

# wall_clock: makes monotonic_ns go by the wall clock, as /proc/timer_list is root's. The offset, to some microseconds, is
# from perf, which notes both clocks when it begins.
wall_clock() {
    perf record -q -k CLOCK_MONOTONIC -e dummy:u --synth=no -B -N -o "$capture/clock" -- true >/dev/null 2>&1 || return 1
    clock_offset_ns=$(perf report --header-only -i "$capture/clock" 2>/dev/null | awk '
        # reference time: 2026-11-21 20:00:12.301532 = 1795291212.301532 (TOD) = 11606.069964905 (monotonic)
        /^# reference time:/ { wall = $(NF - 4); at = $(NF - 1) }
        END { sub(/\./, "", wall); sub(/\./, "", at); if (wall ~ /^[0-9]+$/ && at ~ /^[0-9]+$/) print wall "000-" at }')
    rm -f -- "$capture/clock"
    [[ -n $clock_offset_ns ]] || return 1
    clock_offset_ns=$((clock_offset_ns))
    monotonic_ns() {
        # bash before 5.0 has no clock of its own
        REPLY=${EPOCHREALTIME-$(date +%s.%6N)}
        REPLY=$((${REPLY/./} * 1000 - clock_offset_ns))
    }
}
