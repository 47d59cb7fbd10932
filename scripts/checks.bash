# shellcheck shell=bash
# checks.bash - what this host and this server have of what recording needs.
#
# Sourced, never run, by lib.bash. Needs bash 4.2 and coreutils.
# shellcheck disable=SC2034 # what is set here is used by those that source it

# Each sets FOUND to what was found and, when it returns 1, MEND to what to do about it.

TRACEFS=
FOUND='' MEND=''

check_root() {
    FOUND="user $(id -un)" MEND="run this as root: sudo $TOOL ..."
    ((EUID == 0))
}

check_machine() {
    local machine
    machine=$(uname -m)
    FOUND="$machine" MEND="use an x86-64 host: sites of other machines cannot be checked yet"
    [[ $machine == x86_64 ]]
}

# Several places under one event, and immediate values, came with Linux 5.4.
check_kernel() {
    local release major minor
    release=$(uname -r)
    major=${release%%.*} minor=${release#*.} minor=${minor%%[!0-9]*}
    FOUND="Linux $release" MEND="use a kernel of 5.4 or later: older ones cannot join many places to one event"
    ((major > 5 || (major == 5 && minor >= 4)))
}

check_tracefs() {
    MEND="mount -t tracefs nodev /sys/kernel/tracing"
    for TRACEFS in /sys/kernel/tracing /sys/kernel/debug/tracing; do
        FOUND=$TRACEFS
        [[ -e $TRACEFS/README ]] && return 0
    done
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
    MEND="run this as root on a kernel that is not locked down (cat /sys/kernel/security/lockdown)"
    { : >>"$FOUND"; } 2>/dev/null || {
        FOUND="$FOUND cannot be written"
        return 1
    }
}

check_perf() {
    FOUND="no perf"
    MEND="apt-get install linux-perf (Debian), linux-tools-$(uname -r) (Ubuntu), or: dnf install perf"
    type -P perf >/dev/null || return 1
    FOUND=$(perf --version 2>&1) || {
        # Ubuntu's perf is a script that looks for the build of the running kernel.
        FOUND="perf does not run: ${FOUND%%$'\n'*}"
        return 1
    }
    MEND="use a perf of 5.15 or later: this one has no record --control, --synth"
    # Not in a pipe: perf's usage text goes to stderr with status 129.
    local usage
    usage=$(perf record -h 2>&1) || true
    [[ $usage == *--control* && $usage == *--synth* ]]
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

# require CHECK... : the first one that fails ends the script.
require() {
    local check
    for check; do
        "check_$check" || die "$FOUND. To mend it: $MEND"
    done
}
