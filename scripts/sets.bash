# shellcheck shell=bash
# sets.bash - reads probe sets (docs/probe-sets.md), and puts the server's static probes into words for uprobe_events.
#
# Sourced, never run, by lib.bash, which has die, and elf.bash with find_notes and note_argument.
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
#   SET_STATIC    by event: a line for each static probe it stands for, PROBE FIELD=ARGUMENT ...
#   SET_SYMBOL    the global whose stores SET_EVENT stands for, with one field SET_FIELD of SET_TYPE; or all empty
read_set() {
    local file=$PROBES/$1.set keyword name how what rest
    [[ $1 != */* && -r $file ]] || die "no probe set \"$1\": $TOOL knows $(set_names)"
    SET_NAME=$1 SET_ABOUT='' SET_VERSIONS='' SET_EVENTS=() SET_EVENT='' SET_FIELD='' SET_TYPE='' SET_SYMBOL=''
    declare -gA SET_FIELDS=() SET_STATIC=()
    while read -r keyword rest; do
        rest=${rest%%#*}
        read -r name how what <<<"$rest"
        case $keyword in
            about) SET_ABOUT=${rest%"${rest##*[! ]}"} ;;
            versions) SET_VERSIONS=$name ;;
            event)
                SET_EVENTS+=("$name")
                SET_FIELDS[$name]="$how $what"
                ;;
            place)
                if [[ $how == stores ]]; then
                    SET_EVENT=$name SET_SYMBOL=$what
                else
                    SET_STATIC[$name]+=$what$'\n'
                fi
                ;;
        esac
    done <"$file"
    if [[ -n $SET_EVENT ]]; then
        read -r SET_FIELD _ <<<"${SET_FIELDS[$SET_EVENT]}"
        SET_TYPE=${SET_FIELD#*:} SET_FIELD=${SET_FIELD%%:*}
    fi
}

# read_notes FILE: sets NOTES to what find_notes prints, or why it cannot, and returns 1. Reading them takes a while, and
# several ask.
read_notes() {
    [[ ${NOTES_OF-} != "$1" ]] || return 0
    NOTES=$(find_notes "$1" 2>&1) || return 1
    NOTES_OF=$1
}

# define_set_probes GROUP EXE SET: the lines for uprobe_events that put the set's events on the static probes of an
# executable, one a place. Uses PG_VERSION and START_TIME, of the server that runs it. Dies where the server lacks one.
define_set_probes() {
    local group=$1 exe=$2 event probe given
    read_set "$3"
    ((${#SET_EVENTS[@]})) || die "the set \"$3\" has no probes of its own: it reads those that others registered"
    check_set
    read_notes "$exe" || {
        printf '%s\n' "$NOTES" >&2
        exit 1
    }
    for event in "${SET_EVENTS[@]}"; do
        while read -r probe given; do
            define_event
        done <<<"${SET_STATIC[$event]%$'\n'}"
    done
}

# check_set: dies unless the set that was read is right for the server, and safe here.
check_set() {
    local panic=0 first=${SET_VERSIONS%-*} last=${SET_VERSIONS#*-} major=${PG_VERSION%%[!0-9]*}
    ((major >= ${first:-0} && major <= ${last:-999})) ||
        die "the set \"$SET_NAME\" is for PostgreSQL ${first:+from $first }${last:+to $last }only, and the server is $PG_VERSION"
    # A string of 4,080 to 4,095 bytes trips a WARN_ON_ONCE in prepare_uprobe_buffer() (seen in 6.18).
    [[ "${SET_FIELDS[*]}" != *:string* ]] || { read -r panic </proc/sys/kernel/panic_on_warn; } 2>/dev/null || true
    ((panic == 0)) ||
        die "the set \"$SET_NAME\" records strings, at which the kernel can warn, and here it would panic: see kernel.panic_on_warn"
}

# define_event: the lines of define_set_probes for one event and one static probe of it.
define_event() {
    local name place offset semaphore arguments found='' field words
    while IFS=$'\t' read -r _ name place offset semaphore _ arguments; do
        [[ $name == "$probe" ]] || continue
        found=yes words=''
        for field in ${SET_FIELDS[$event]}; do
            fetch_field "${field%%:*}" "${field#*:}"
            words+=" ${field%%:*}=$REPLY"
        done
        [[ $semaphore == 0x0 ]] && semaphore='' || semaphore="($semaphore)"
        printf 'p:%s/%s %s:%s%s%s server=@+%d:u32\n' "$group" "$event" "$exe" "$offset" "$semaphore" "$words" \
            $((START_TIME - (place - offset)))
    done < <(awk -F '\t' '$1 == "postgresql"' <<<"$NOTES")
    [[ -n $found ]] || die "the set \"$SET_NAME\" needs the static probe $probe, which the server was built without" \
        "(PostgreSQL's configure --enable-dtrace adds those of PostgreSQL's own)"
}

# fetch_field FIELD TYPE: sets REPLY to FETCH:TYPE, from what the place says in `given` and the note in `arguments`. All places of
# an event must carry the same types, so the set's type holds and not the note's.
fetch_field() {
    local argument words index
    argument=" $given "
    argument=${argument#* "$1"=} argument=${argument%% *}
    if [[ $argument =~ ^(string\()?arg(-?[0-9]+)\)?$ ]]; then
        read -r -a words <<<"$arguments"
        index=${BASH_REMATCH[2]}
        ((index > 0)) && index=$((index - 1)) || index=$((${#words[@]} + index))
        ((index >= 0 && index < ${#words[@]})) ||
            die "the set \"$SET_NAME\" wants $argument of the static probe $probe, which has ${#words[@]} arguments in this server"
        # shellcheck disable=SC2153 # FOUND is set by note_argument
        note_argument "${words[index]}" "$exe" "$place" "$offset" ||
            die "the set \"$SET_NAME\" cannot be recorded of this server: $FOUND"
        if [[ $argument != string* ]]; then
            # More than the argument has would be read from what stands beside it.
            [[ $REPLY == \\* ]] || ((${2#?} <= ${REPLY##*:?})) ||
                die "the set \"$SET_NAME\" wants $1 as $2, but this server's $probe has ${REPLY##*:}"
            REPLY=${REPLY%:*}:$2
        elif [[ $REPLY == \\* ]]; then
            REPLY=${REPLY%:*}
            REPLY=@${REPLY#\\}:string
        else
            REPLY="+0(${REPLY%:*}):string"
        fi
    else
        REPLY="\\$argument:$2"
    fi
}
