# shellcheck shell=bash
# elf.bash - reads ELF files with od and awk, where there are no binutils: build-id, symbols,
# file offsets, SDT probes and their arguments.
#
# Sourced, never run, by lib.bash, which has warn and die.
# shellcheck disable=SC2034 # what is set here is used by those that source it

ELF_AWK=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/elf.awk
readonly ELF_AWK

# ask_elf FILE VERB [WORD]: elf.awk's answer in REPLY; returns 1 with the reason, or nothing, in REPLY.
ask_elf() {
    REPLY=$(ELF=$1 LC_ALL=C awk -v verb="$2" -v word="${3-}" -f "$ELF_AWK")
}

# elf FILE: sets MACHINE and KIND to what the ELF header says (e_machine, e_type); 1 when FILE is no little-endian 64-bit ELF file.
elf() {
    local magic
    # shellcheck disable=SC2046 # words are wanted
    set -- $(od -An -v -t x1 -N 20 -- "$1" 2>/dev/null)
    magic=${1-}${2-}${3-}${4-}${5-}${6-}
    [[ $magic == 7f454c460201 && -n ${20-} ]] || return 1
    KIND=${18}${17} MACHINE=${20}${19}
}

# build_id_of FILE: prints its GNU build-id; nothing where it has none or cannot be read.
build_id_of() {
    ask_elf "$1" build-id || REPLY=''
    printf '%s' "$REPLY"
}

# symbol_address FILE SYMBOL: prints its address as the file numbers it, in decimal; returns 1
# when FILE does not define SYMBOL, exported or not.
symbol_address() {
    if ask_elf "$1" symbol "$2"; then
        printf '%s' "$REPLY"
    else
        [[ -z $REPLY ]] || warn "\"$1\" $REPLY"
        return 1
    fi
}

# function_entry FILE FUNCTION: sets PLACE and OFFSET, in hexadecimal, to the address and the file's offset of the instruction where a
# probe sees each call of a function and its arguments; returns 1 when FILE does not define FUNCTION.
function_entry() {
    if ask_elf "$1" entry "$2"; then
        PLACE=${REPLY%%$'\t'*} OFFSET=${REPLY##*$'\t'}
    else
        [[ -z $REPLY ]] || die "\"$1\" $REPLY"
        return 1
    fi
}

# find_notes FILE: prints the SDT probes that FILE's .note.stapsdt section lists, one a line, tab-separated:
#   provider, name, place (address), offset (in the file), offset of its semaphore or 0x0, bytes of the nop there, arguments
# Dies where a note does not point to a nop: a probe on anything but an instruction's first byte corrupts the process.
find_notes() {
    ask_elf "$1" notes || die "\"$1\" $REPLY"
    [[ -z $REPLY ]] || printf '%s\n' "$REPLY"
}

# note_argument ARGUMENT [FILE PLACE OFFSET]: sets REPLY to what uprobe_events calls an SDT probe's argument, as
# %ax:s32 for -4@%eax; returns 1, with FOUND saying why, when it has no words for it. An operand
# that names a symbol needs the file, and the probe's place and offset as find_notes gives them.
note_argument() {
    local argument=$1 type operand symbol address
    FOUND="\"$argument\" is not an SDT probe's argument"
    [[ $argument =~ ^(-?)([1248])@(.+)$ ]] || return 1
    type=u$((BASH_REMATCH[2] * 8)) operand=${BASH_REMATCH[3]}
    [[ -z ${BASH_REMATCH[1]} ]] || type=s${type#u}
    if [[ $operand =~ ^\$(-?[0-9]+)$ ]]; then
        REPLY="\\${BASH_REMATCH[1]}:$type"
    elif [[ $operand =~ ^%([a-z0-9]+)$ ]]; then
        register "${BASH_REMATCH[1]}" || return 1
        REPLY="%$REPLY:$type"
    elif [[ $operand =~ ^(-?[0-9]*)\(%([a-z0-9]+)\)$ && ${BASH_REMATCH[2]} != rip ]]; then
        local displacement=${BASH_REMATCH[1]:-0}
        register "${BASH_REMATCH[2]}" || return 1
        [[ $displacement == -* ]] || displacement=+$displacement
        REPLY="$displacement(%$REPLY):$type"
    elif [[ $operand =~ ^((-?[0-9]+)\+)?([A-Za-z_.$][A-Za-z0-9_.$]*)([+-][0-9]+)?\(%rip\)$ ]]; then
        symbol=${BASH_REMATCH[3]}
        local displacement=$((${BASH_REMATCH[2]:-0} + ${BASH_REMATCH[4]:-0}))
        FOUND="\"$argument\" names the variable $symbol, whose address is not known"
        [[ -n ${2-} ]] && address=$(symbol_address "$2" "$symbol") || return 1
        # The kernel reads @+N at N behind where the file's offset 0 would be, as seen from the probe.
        REPLY="@+$((address + displacement - ($3 - $4))):$type"
    else
        FOUND="\"$argument\" is an operand that uprobe_events cannot express"
        return 1
    fi
}

# register NAME: sets REPLY to the kernel's name of an x86-64 register, whatever part of it NAME is; the type of the
# argument says how much is read. There is no such name for ah, bh, ch and dh.
register() {
    case $1 in
        r[89] | r1[0-5]) REPLY=$1 ;;
        r[89][bwd] | r1[0-5][bwd]) REPLY=${1%[bwd]} ;;
        [re][abcd]x | [re]s[ip] | [re]di | [re]bp) REPLY=${1#?} ;;
        [abcd]x | s[ip] | di | bp) REPLY=$1 ;;
        [abcd]l) REPLY=${1%l}x ;;
        s[ip]l | dil | bpl) REPLY=${1%l} ;;
        *)
            FOUND="uprobe_events has no word for the register %$1"
            return 1
            ;;
    esac
}
