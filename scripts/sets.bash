# shellcheck shell=bash
# sets.bash - reads probe sets (docs/probe-sets.md), and puts the server's static probes and functions into words for
# uprobe_events.
#
# Sourced, never run, by lib.bash, which has die, and elf.bash with find_notes, note_argument and function_entry.
# shellcheck disable=SC2034 # what is set here is used by those that source it

set_names() {
    local file names=
    for file in "$PROBES"/*.set; do
        file=${file##*/}
        names+="${names:+, }${file%.set}"
    done
    printf '%s' "$names"
}

# read_set NAME: reads probes/NAME.set; sets
#   SET_NAME, SET_ABOUT
#   SET_VERSIONS  FIRST-LAST, or empty
#   SET_EVENTS    the names of its events; none for a set that only names the events of others
#   SET_FIELDS    by event: FIELD:TYPE ...
#   SET_ONLY      by event: FIRST-LAST, where it is for some majors only
#   SET_PLACES    by event: a line for each static probe and function it stands for, probe|function NAME FIELD=ARGUMENT ...
#   SET_SYMBOL    the global whose stores SET_EVENT stands for, with one field SET_FIELD of SET_TYPE; or all empty
read_set() {
    local file=$PROBES/$1.set keyword name how what rest
    [[ $1 != */* && -r $file ]] || die "no probe set \"$1\": $TOOL knows $(set_names)"
    SET_NAME=$1 SET_ABOUT='' SET_VERSIONS='' SET_EVENTS=() SET_EVENT='' SET_FIELD='' SET_TYPE='' SET_SYMBOL=''
    declare -gA SET_FIELDS=() SET_ONLY=() SET_PLACES=()
    while read -r keyword rest; do
        rest=${rest%%#*}
        read -r name how what <<<"$rest"
        case $keyword in
            about) SET_ABOUT=${rest%"${rest##*[! ]}"} ;;
            versions) if [[ -n $how ]]; then SET_ONLY[$how]=$name; else SET_VERSIONS=$name; fi ;;
            event)
                SET_EVENTS+=("$name")
                SET_FIELDS[$name]="$how $what"
                ;;
            place)
                if [[ $how == stores ]]; then
                    SET_EVENT=$name SET_SYMBOL=$what
                else
                    SET_PLACES[$name]+="$how $what"$'\n'
                fi
                ;;
        esac
    done <"$file"
    if [[ -n $SET_EVENT ]]; then
        read -r SET_FIELD _ <<<"${SET_FIELDS[$SET_EVENT]}"
        SET_TYPE=${SET_FIELD#*:} SET_FIELD=${SET_FIELD%%:*}
    fi
}

# has_static_probes: 0 when the set that was read has events at static probes.
has_static_probes() { [[ " ${SET_PLACES[*]}" == *[[:space:]]probe\ * ]]; }

# read_notes FILE: sets NOTES to what find_notes prints, or why it cannot, and returns 1. Reading them takes a while, and
# several ask.
read_notes() {
    [[ ${NOTES_OF-} != "$1" ]] || return 0
    NOTES=$(find_notes "$1" 2>&1) || return 1
    NOTES_OF=$1
}

# define_set_probes GROUP EXE SET: the lines for uprobe_events that put the set's events on the static probes and functions of an
# executable, one a place. Uses PG_VERSION and START_TIME, of the server that runs it. Dies where the server lacks one.
define_set_probes() {
    local group=$1 exe=$2 event how what given
    read_set "$3"
    ((${#SET_EVENTS[@]})) || die "the set \"$3\" has no probes of its own: it reads those that others registered"
    check_set
    if has_static_probes; then
        read_notes "$exe" || {
            printf '%s\n' "$NOTES" >&2
            exit 1
        }
    fi
    for event in "${SET_EVENTS[@]}"; do
        major_in "${SET_ONLY[$event]-}" || continue
        while read -r how what given; do
            "define_$how"
        done <<<"${SET_PLACES[$event]%$'\n'}"
    done
}

# major_in FIRST-LAST: 0 when the server's major is one of these; either may be left out.
major_in() {
    local first=${1%-*} last=${1#*-} major=${PG_VERSION%%[!0-9]*}
    ((major >= ${first:-0} && major <= ${last:-999}))
}

# check_set: dies unless the set that was read is right for the server, and safe here.
check_set() {
    local panic=0 first=${SET_VERSIONS%-*} last=${SET_VERSIONS#*-}
    major_in "$SET_VERSIONS" ||
        die "the set \"$SET_NAME\" is for PostgreSQL ${first:+from $first }${last:+to $last }only, and the server is $PG_VERSION"
    # A string of 4,080 to 4,095 bytes trips a WARN_ON_ONCE in prepare_uprobe_buffer() (seen in 6.18).
    [[ "${SET_FIELDS[*]}" != *:string* ]] || { read -r panic </proc/sys/kernel/panic_on_warn; } 2>/dev/null || true
    ((panic == 0)) ||
        die "the set \"$SET_NAME\" records strings, at which the kernel can warn, and here it would panic: see kernel.panic_on_warn"
}

# define_probe: the lines of define_set_probes for one event and one static probe of it.
define_probe() {
    local name place offset semaphore arguments found=''
    while IFS=$'\t' read -r _ name place offset semaphore _ arguments; do
        [[ $name == "$what" ]] || continue
        found=yes
        [[ $semaphore == 0x0 ]] && semaphore='' || semaphore="($semaphore)"
        define_place note_field
    done < <(awk -F '\t' '$1 == "postgresql"' <<<"$NOTES")
    [[ -n $found ]] || die "the set \"$SET_NAME\" needs the static probe $what, which the server was built without" \
        "(PostgreSQL's configure --enable-dtrace adds those of PostgreSQL's own)"
}

# define_function: the line of define_set_probes for one event and one function of it.
define_function() {
    local place offset semaphore=''
    function_entry "$exe" "$what" ||
        die "the set \"$SET_NAME\" needs the function $what, which the server does not export"
    # shellcheck disable=SC2153 # function_entry sets them
    place=$PLACE offset=$OFFSET
    define_place register_field
}

# define_place FETCH: one line, whose fields FETCH puts into words.
define_place() {
    local field argument words=''
    for field in ${SET_FIELDS[$event]}; do
        argument=" $given "
        argument=${argument#* "${field%%:*}"=} argument=${argument%% *}
        if [[ $argument == *arg* ]]; then
            "$1" "${field%%:*}" "${field#*:}"
        else
            REPLY="\\$argument:${field#*:}"
        fi
        words+=" ${field%%:*}=$REPLY"
    done
    printf 'p:%s/%s %s:%s%s%s server=@+%d:u32\n' "$group" "$event" "$exe" "$offset" "$semaphore" "$words" \
        $((START_TIME - (place - offset)))
}

# register_field FIELD TYPE: sets REPLY to FETCH:TYPE, of the function's argument that `argument` names.
register_field() {
    local registers=(di si dx cx r8 r9) index=${argument//[!0-9-]/}
    ((index >= 1 && index <= 6)) || die "the set \"$SET_NAME\" wants $argument of the function $what: arg1 to arg6 are in registers"
    REPLY=%${registers[index - 1]}:$2
    [[ $argument != string* ]] || REPLY="+0(${REPLY%:*}):string"
}

# note_field FIELD TYPE: the same of a static probe's argument, from its note in `arguments`. All places of an event must carry the
# same types, so the set's type holds and not the note's.
note_field() {
    local words index
    read -r -a words <<<"$arguments"
    index=${argument//[!0-9-]/}
    ((index > 0)) && index=$((index - 1)) || index=$((${#words[@]} + index))
    ((index >= 0 && index < ${#words[@]})) ||
        die "the set \"$SET_NAME\" wants $argument of the static probe $what, which has ${#words[@]} arguments in this server"
    # shellcheck disable=SC2153 # FOUND is set by note_argument
    note_argument "${words[index]}" "$exe" "$place" "$offset" ||
        die "the set \"$SET_NAME\" cannot be recorded of this server: $FOUND"
    if [[ $argument != string* ]]; then
        # More than the argument has would be read from what stands beside it.
        [[ $REPLY == \\* ]] || ((${2#?} <= ${REPLY##*:?})) ||
            die "the set \"$SET_NAME\" wants $1 as $2, but this server's $what has ${REPLY##*:}"
        REPLY=${REPLY%:*}:$2
    elif [[ $REPLY == \\* ]]; then
        REPLY=${REPLY%:*}
        REPLY=@${REPLY#\\}:string
    else
        REPLY="+0(${REPLY%:*}):string"
    fi
}
