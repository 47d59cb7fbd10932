# shellcheck shell=bash
# symbols.bash - writes into a capture what names the addresses of its profile: symbols/, as docs/capture.md has it.
#
# Sourced, never run, by waitfold-record; needs lib.bash, and POSTMASTER.
# shellcheck disable=SC2154 # POSTMASTER is lib.bash's

# A .symtab that is larger, of 1.4 million symbols, is left out: it would take 10 s of CPU and 60 MB.
readonly SYMTAB_MAX=$((32 << 20))
# When those of all files take more than this of disk or time (s), the rest is left out.
readonly SYMBOLS_MAX=$((512 << 20)) SYMBOLS_TIME=60
# In a larger perf.data no addresses are looked for, which takes 60 ms of CPU a MiB: all the kernel's symbols are 6 MB.
readonly SEARCH_MAX=$((16 << 20))
# Of a process's perf-PID.map.
readonly PERF_MAP_MAX=$((16 << 20))

# write_symbols CAPTURE: makes CAPTURE/symbols, of the server POSTMASTER, whole or not at all. What cannot be had is said
# and left out.
write_symbols() {
    local folder=$1/symbols.new writer
    # On its own, so that no failure here harms the rest of the capture.
    {
        mkdir -- "$folder"
        children "$POSTMASTER"
        set -- "$1" "$folder" "$POSTMASTER $REPLY"
        printf 'file\tinode\tpath\n' >"$folder/index.tsv"
        file_symbols "$@"
        vdso_symbols "$@"
        kernel_symbols "$@"
        perf_maps "$@"
        rm -f -- "$folder/new" "$folder/elf"
        mv -- "$folder" "$1/symbols"
    } &
    writer=$!
    # A signal ends a wait early.
    until wait "$writer" || ! kill -0 "$writer" 2>/dev/null; do :; done
    [[ -d $1/symbols ]] && return 0
    rm -rf -- "$folder"
    warn "no symbols could be written: elsewhere, what is in the stacks will have no names"
}

# mapped_files PIDS: the files that are mapped executable, once each: pid, range of addresses, inode, path; tab-separated.
mapped_files() {
    local pid files=()
    for pid in $1; do files+=("/proc/$pid/maps"); done
    # Some may just have ended.
    { tail -v -n +1 -- "${files[@]}" 2>/dev/null || true; } | awk -v OFS='\t' '
        $1 == "==>" { split($2, part, "/"); pid = part[3]; next }
        $2 ~ /x/ && $5 > 0 {
            range = $1; device = $4; inode = $5
            sub(/^[^ ]+ +[^ ]+ +[^ ]+ +[^ ]+ +[^ ]+ +/, "")
            if (seen[device, inode, $0]++) next
            # The kernel names these without leading zeros.
            sub(/^0+/, "", range); sub(/-0+/, "-", range)
            print pid, range, inode, $0
        }'
}

# gone_files CAPTURE: the files that were mapped by processes of the server's which have ended, once each: inode and
# path, tab-separated; by perf, which keeps for each process what it had mapped.
gone_files() {
    [[ -e $1/perf.data ]] || return 0
    # Processes, as: pid tid ppid | comm; each followed by what it had mapped: range, bits, offset, inode, path.
    { perf report -i "$1/perf.data" --mmaps </dev/null 2>/dev/null || true; } | awk -v OFS='\t' -v postmaster="$POSTMASTER" '
        $4 ~ /^\|/ { ours = $1 == postmaster || $3 in family; if (ours) family[$1]; next }
        ours && $2 ~ /x/ && $4 > 0 {
            inode = $4
            sub(/^ *[^ ]+ +[^ ]+ +[^ ]+ +[^ ]+ +/, "")
            if (!seen[inode, $0]++) print inode, $0
        }'
}

# debug_file ROOT PATH BUILD_ID LINK: sets DEBUG to the separate debug file of a file, empty where there is none, and SYMTAB
# to the bytes of its .symtab.
debug_file() {
    local folder=${2%/*} root candidates=()
    # A process in a mount namespace of its own has paths from its root; of one that was chrooted we see those from ours.
    for root in "$1" ''; do
        [[ -z $4 || $4 == */* ]] || candidates+=("$root$folder/$4" "$root$folder/.debug/$4" "$root/usr/lib/debug$folder/$4")
        [[ -z $3 ]] || candidates+=("$root/usr/lib/debug/.build-id/${3:0:2}/${3:2}.debug")
    done
    for DEBUG in ${candidates[@]+"${candidates[@]}"}; do
        if [[ -f $DEBUG ]] && ask_elf "$DEBUG" links &&
            [[ $REPLY =~ ^'# build_id'$'\t'([^$'\n']*)$'\n# symtab\t'([1-9][0-9]*) && ${BASH_REMATCH[1]} == "$3" ]]; then
            SYMTAB=${BASH_REMATCH[2]}
            return 0
        fi
    done
    DEBUG=''
}

# elf_symbols FILE DEBUG: prints the symbols of a file, or those that its separate debug file has; 1 with the reason.
elf_symbols() { ELF=$1 DEBUG=$2 awk -v verb=symbols -v word="$SYMTAB_MAX" -f "$ELF_AWK"; }

# open_mapped PID RANGE INODE PATH: sets FILE to a file that can be read as it was mapped, and ROOT to what its path begins
# from; 1 where that is gone. PID is - where the process has ended.
open_mapped() {
    ROOT=/proc/$1/root FILE=/proc/$1/map_files/$2
    if [[ $1 == - ]]; then
        ROOT=/proc/$POSTMASTER/root
        [[ -d $ROOT/ ]] || ROOT=''
    fi
    # That is the very file, whatever has become of its name, but for root only.
    [[ -r $FILE ]] && return 0
    for FILE in "$ROOT$4" "$4"; do
        [[ ! -f $FILE || $(stat -Lc %i -- "$FILE") != "$3" ]] || return 0
    done
    return 1
}

# file_symbols CAPTURE FOLDER PIDS: a file for each build of a binary.
file_symbols() {
    local folder=$2 new=$2/new pid range inode path key build_id link name begun=$SECONDS written=0 left=0
    local -A known=()
    while IFS=$'\t' read -r pid range inode path; do
        key="$inode $path"
        [[ -z ${known[$key]-} ]] || continue
        known[$key]=yes
        open_mapped "$pid" "$range" "$inode" "$path" || continue
        if ((SECONDS - begun > SYMBOLS_TIME || written > SYMBOLS_MAX)); then
            left=$((left + 1))
            continue
        fi
        if ! elf_symbols "$FILE" '' >"$new"; then
            REPLY=$(tail -n 1 "$new")
            [[ $REPLY == *'not a 64-bit'* ]] || warn "no symbols of \"$path\", which $REPLY"
            continue
        fi
        { IFS= read -r build_id && IFS= read -r SYMTAB && IFS= read -r link; } <"$new"
        build_id=${build_id#*$'\t'} SYMTAB=${SYMTAB#*$'\t'} link=${link#*$'\t'}
        name=${build_id:-inode-$inode}
        printf '%s\t%s\t%s\n' "$name" "$inode" "$path" >>"$folder/index.tsv"
        [[ ! -e $folder/$name ]] || continue
        debug_file "$ROOT" "${path% (deleted)}" "$build_id" "$link"
        if [[ -n $DEBUG ]] && ((SYMTAB <= SYMTAB_MAX)) && ! elf_symbols "$FILE" "$DEBUG" >"$new"; then
            warn "no symbols of \"$DEBUG\", which $(tail -n 1 "$new")"
            elf_symbols "$FILE" '' >"$new"
        fi
        ((SYMTAB <= SYMTAB_MAX)) ||
            warn "the $((SYMTAB >> 20)) MiB of symbols in \"${DEBUG:-$path}\" are left out: only exported names are kept"
        mv -- "$new" "$folder/$name"
        written=$((written + $(stat -c %s "$folder/$name")))
    done < <(
        mapped_files "$3"
        gone_files "$1" | awk '{ print "-\t-\t" $0 }'
    )
    ((left == 0)) || warn "the symbols of $left files are left out: those of the others took a minute, or 512 MiB"
}

# vdso_symbols CAPTURE FOLDER PIDS: the kernel's code in the processes' memory, the same in all and in ours.
vdso_symbols() {
    local pid range start pages
    for pid in $3 "$$"; do
        range=$(awk '/\[vdso\]$/ { print $1 }' "/proc/$pid/maps" 2>/dev/null) || continue
        [[ -n $range ]] || continue
        start=$((16#${range%-*} >> 12)) pages=$(((16#${range#*-} - 16#${range%-*}) >> 12))
        dd if="/proc/$pid/mem" of="$2/elf" bs=4096 skip="$start" count="$pages" 2>/dev/null || continue
        elf_symbols "$2/elf" '' >"$2/new" || continue
        mv -- "$2/new" "$2/vdso"
        printf 'vdso\t0\t[vdso]\n' >>"$2/index.tsv"
        return 0
    done
    warn 'no symbols of the vdso: its functions will have no names'
}

# words FILE: the words in it that can be addresses of the kernel, once each.
words() {
    od -An -v -t x8 -w64 -- "$1" | awk '/ ffff/ { for (i = 1; i <= NF; i++) if ($i > "ffff" && !seen[$i]++) print $i "\t~" }'
}

# kernel_symbols CAPTURE FOLDER: those of the kernel's symbols in which an address lies that occurs in perf.data, and each's
# next, which says where it ends.
kernel_symbols() {
    local all='' size
    size=$(stat -Lc %s "$1/perf.data")
    ((size <= SEARCH_MAX)) || all=yes
    # Addresses are all zeros for those who may not see them.
    if ! awk '$3 == "_text" && $1 !~ /^0+$/ { found = 1 } END { exit !found }' /proc/kallsyms 2>/dev/null; then
        warn "the kernel's addresses are hidden here (sysctl kernel.kptr_restrict): its functions will have no names"
        return 0
    fi
    {
        # Types and bindings as ELF has them, of what is text or data.
        awk -v OFS='\t' '
            BEGIN { split("T 12 t 02 W 22 w 22 D 11 d 01 B 11 b 01", word, " "); for (i = 1; i in word; i += 2) info[word[i]] = word[i + 1] }
            $2 in info { print $1, 0, info[$2], $3 }' /proc/kallsyms
        [[ -n $all ]] || words "$1/perf.data"
    } | sort -s -k 1,1 | awk -F '\t' -v all="$all" '
        # Of several at one address the last in kallsyms counts.
        function finish() {
            if (symbol != "" && (used || next_to_used)) print symbol
            next_to_used = used
        }
        $2 == "~" { used = 1; next }
        $1 != address { finish(); used = all != ""; address = $1 }
        { symbol = $0 }
        END { finish() }' >"$2/kernel"
    printf 'kernel\t0\t[kernel.kallsyms]\n' >>"$2/index.tsv"
}

# perf_maps CAPTURE FOLDER PIDS: what just-in-time compilers say in /tmp/perf-PID.map, the PID being the process's own.
perf_maps() {
    local pid file
    for pid in $3; do
        own_pid "$pid" || continue
        file=/proc/$pid/root/tmp/perf-$REPLY.map
        # Anybody may have put it there: no link is followed, and nothing but such lines is copied.
        [[ -f $file && ! -L $file ]] || continue
        head -c "$PERF_MAP_MAX" "$file" | awk -v OFS='\t' '/^(0x)?[0-9a-f]+ (0x)?[0-9a-f]+ [^\t]+$/ {
            start = $1; size = $2
            sub(/^[^ ]+ [^ ]+ /, "")
            sub(/^0x/, "", start); sub(/^0x/, "", size)
            if (length(start) <= 16 && length(size) <= 16) print start, size, 12, $0
        }' >"$2/perf-$pid.map"
        printf 'perf-%s.map\t0\t/tmp/perf-%s.map\n' "$pid" "$pid" >>"$2/index.tsv"
    done
}
