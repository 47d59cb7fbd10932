# shellcheck shell=bash
# INTERIM by the lead: the sets helper overwrites this file whole.
# read_set NAME: reads probes/NAME.set; sets SET_EVENT, SET_FIELD, SET_TYPE and SET_SYMBOL to what is to be
# registered, and SET_ABOUT. They are empty for a set that only names the probes of others.
read_set() {
    local file=$PROBES/$1.set keyword a b c
    SET_ABOUT='' SET_EVENT='' SET_FIELD='' SET_TYPE='' SET_SYMBOL=''
    [[ $1 != */* && -r $file ]] || die "no probe set \"$1\": $TOOL knows $(set_names)"
    while read -r keyword a b c; do
        case $keyword in
            about) SET_ABOUT="$a${b:+ $b}${c:+ $c}" ;;
            event) SET_EVENT=$a SET_FIELD=${b%%:*} SET_TYPE=${b#*:} ;;
            place) [[ $b == stores ]] && SET_SYMBOL=$c ;;
        esac
    done <"$file"
}

set_names() {
    local file names=
    for file in "$PROBES"/*.set; do
        file=${file##*/}
        names+="${names:+, }${file%.set}"
    done
    printf '%s' "$names"
}

