# shellcheck shell=bash
# Completion for waitfold and its scripts in bash 4.2 or later; needs no other package.
# tests/test_install.py compares it with what --help of each command says.

# What may follow a command, as words in REPLY: an option, OPTION=KIND where it takes a value, and
# =KIND for what is not an option. A KIND is FILE, FOLDER, words parted by | of which one is
# meant or, after a comma, some, or nothing that could be offered. Fails for what is no command.
_waitfold_takes() {
    local sets='buffer-read|checkpoint|lock-wait|lwlock-wait|query|sort|transaction'
    local stacks="--kind=waits|oncpu|offcpu|wall --event --query --idle --set=$sets"
    local capture='--start= --value= --end= --pg-version= =FILE'
    case $1 in
        waitfold) REPLY='=report|waits|fold|flamegraph|diff|timeline|export|bundle|record|probes|doctor|watch --version' ;;
        'waitfold report') REPLY="--by=,backend|query|event|database|user|application --audit --histogram --json --html=FILE --markdown $capture" ;;
        'waitfold waits') REPLY="-o=FILE --set=$sets $capture" ;;
        'waitfold fold') REPLY="$stacks $capture" ;;
        'waitfold flamegraph') REPLY="-o=FILE --title= $stacks $capture" ;;
        'waitfold diff') REPLY="--by=event|query|stack --per=second|transaction --json --flamegraph=FILE $capture" ;;
        'waitfold timeline') REPLY="-o=FILE --title= --from= --to= $capture" ;;
        'waitfold export') REPLY="--format=perfetto|speedscope|firefox|csv|parquet -o=FILE $capture" ;;
        'waitfold bundle') REPLY="-o=FILE --max= --keep=queries|user|database|application|host|paths|command|addresses|texts $capture" ;;
        waitfold-record)
            REPLY="-D=FOLDER -p= -d= -m=sites|usdt|mem|auto --engine=ftrace|perf|trace-cmd --with=,offcpu|oncpu|all|$sets"
            REPLY+=' --call-graph=fp|dwarf|none --sites=FILE -o=FILE --max-size= --ring= -- =dump --version'
            ;;
        'waitfold-record dump') REPLY='=FOLDER' && return ;;
        waitfold-probes) REPLY='=list|show|add|del|sites --version' ;;
        'waitfold-probes list') REPLY='' && return ;;
        'waitfold-probes sites') REPLY='=FILE' && return ;;
        'waitfold-probes '*) REPLY="-D=FOLDER =wait-event|wait-event-usdt|$sets" && return ;;
        waitfold-doctor) REPLY='-D=FOLDER -p= --sites=FILE --json --version' ;;
        waitfold-watch) REPLY='-D=FOLDER -p= -d= --each =xid|oid --version' ;;
        *) return 1 ;;
    esac
    REPLY+=' --help'
}

_waitfold() {
    local command=${COMP_WORDS[0]##*/} at=1 word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local takes one kind='' REPLY
    COMPREPLY=()
    _waitfold_takes "$command" || return 0
    takes=" $REPLY "
    # A verb, and maybe one of a script that is called as a verb.
    while ((at < COMP_CWORD && at <= 2)); do
        one="$command ${COMP_WORDS[at]}"
        if ! _waitfold_takes "$one"; then
            one=${one/#waitfold /waitfold-}
            _waitfold_takes "$one" || break
        fi
        command=$one takes=" $REPLY " at=$((at + 1))
    done
    # What follows -- is another program's.
    if [[ $command == *record && " ${COMP_WORDS[*]:at:COMP_CWORD-at} " == *' -- '* ]]; then
        [[ $before != -- ]] || mapfile -t COMPREPLY < <(compgen -c -- "$word")
        return 0
    fi
    # bash takes --by=query for three words.
    [[ $word != = ]] || word=''
    [[ $before != = ]] || before=${COMP_WORDS[COMP_CWORD - 2]}
    if [[ $before == -?* && $takes == *" $before="* ]]; then
        kind=${takes#*" $before="}
    elif [[ $word == -* ]]; then
        for one in $takes; do [[ $one != -* ]] || kind+="|${one%%=*}"; done
    elif [[ $takes == *' ='* ]]; then
        kind=${takes#*' ='}
    fi
    kind=${kind%% *}
    case $kind in
        FILE) return 0 ;;
        FOLDER) compopt +o default -o dirnames ;;
        ,*)
            compopt +o default -o nospace
            one=${word%"${word##*,}"}
            mapfile -t COMPREPLY < <(compgen -P "$one" -W "${kind//[,|]/ }" -- "${word##*,}")
            ;;
        *)
            compopt +o default
            mapfile -t COMPREPLY < <(compgen -W "${kind//|/ }" -- "$word")
            ;;
    esac
}

complete -o default -F _waitfold waitfold waitfold-record waitfold-probes waitfold-doctor waitfold-watch
