# shellcheck shell=bash
# symbols.bash - writes into a capture what names the addresses of its profile: symbols/, as docs/capture.md has it.
#
# Sourced, never run, by waitfold-record; needs lib.bash, and POSTMASTER.
# shellcheck disable=SC2154 # POSTMASTER is lib.bash's

# Larger tables than this are left out, and with them the functions that a file does not export: 2.7 million symbols.
readonly SYMTAB_MAX=$((64 << 20))
# When all of them are larger, or take longer (s), the rest is left out.
readonly SYMBOLS_MAX=$((512 << 20)) SYMBOLS_TIME=60
# In a larger perf.data (50 ms of CPU a MiB) no addresses are looked for; then the kernel's symbols are written all: 4 MiB.
readonly SEARCH_MAX=$((32 << 20))
# Of a process's perf-PID.map.
readonly PERF_MAP_MAX=$((16 << 20))

# write_symbols CAPTURE: makes CAPTURE/symbols, of the server POSTMASTER. Whatever cannot be had is said and left out.
write_symbols() {
    local folder=$1/symbols pids file
    mkdir -- "$folder" 2>/dev/null || {
        warn "cannot make \"$folder\": what is in the stacks will have no names elsewhere"
        return 0
    }
    children "$POSTMASTER"
    pids="$POSTMASTER $REPLY"
    file_symbols "$1" "$pids"
    vdso_symbols "$folder" "$pids"
    kernel_symbols "$1"
    perf_maps "$1" "$pids"
}

# mapped_files PIDS: the files that are mapped executable, once each: pid, range of addresses, inode, path; tab-separated.
mapped_files() {
    local pid
    for pid in $1; do
        printf 'pid %s\n' "$pid"
        cat "/proc/$pid/maps"
    done 2>/dev/null | awk -v OFS='\t' '
        $1 == "pid" { pid = $2; next }
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

# debug_file ROOT PATH BUILD_ID LINK: sets REPLY to the separate debug file of a file, empty where there is none.
debug_file() {
    local folder=${2%/*} candidates=() candidate
    [[ -z $4 || $4 == */* ]] || candidates=("$1$folder/$4" "$1$folder/.debug/$4" "$1/usr/lib/debug$folder/$4")
    [[ -z $3 ]] || candidates+=({"$1",}"/usr/lib/debug/.build-id/${3:0:2}/${3:2}.debug")
    for candidate in ${candidates[@]+"${candidates[@]}"}; do
        if [[ -f $candidate ]] && ask_elf "$candidate" links && [[ $REPLY == "$3"$'\t'[1-9]* ]]; then
            REPLY=$candidate
            return 0
        fi
    done
    REPLY=''
}

# elf_symbols FILE DEBUG: prints the symbols of a file, or those that its separate debug file has; 1 with the reason.
elf_symbols() { ELF=$1 DEBUG=$2 awk -v verb=symbols -v word="$SYMTAB_MAX" -f "$ELF_AWK"; }

# file_symbols CAPTURE PIDS: a file for each build of a binary.
file_symbols() {
    local folder=$1/symbols pid range inode path key root file new build_id symtab link name begun=$SECONDS written=0 left=0
    local -A heads=() known=()
    # First by what their processes have mapped now, which is the very file, whatever has become of its name.
    while IFS=$'\t' read -r pid range inode path; do
        key="$inode $path"
        [[ -z ${known[$key]-} ]] || continue
        known[$key]=yes
        root=/proc/$pid/root file=/proc/$pid/map_files/$range
        if [[ $pid == - ]]; then
            [[ -d /proc/$POSTMASTER/root/ ]] && root=/proc/$POSTMASTER/root || root=''
            file=$root$path
        fi
        if [[ ! -r $file ]]; then
            # Only root may use map_files.
            file=$root$path
        fi
        if [[ $file == */map_files/* ]] || [[ -f $file && $(stat -Lc %i -- "$file") == "$inode" ]]; then :; else continue; fi
        if ((SECONDS - begun > SYMBOLS_TIME || written > SYMBOLS_MAX)); then
            left=$((left + 1))
            continue
        fi
        new=$folder/new
        if ! elf_symbols "$file" "" >"$new"; then
            REPLY=$(tail -n 1 "$new")
            [[ $REPLY == *'not a 64-bit'* ]] || warn "no symbols of \"$path\", which $REPLY"
            continue
        fi
        # Build-id, bytes of .symtab, separate debug file. To read, tabs are whitespace, which drops empty fields.
        IFS= read -r REPLY <"$new"
        IFS=: read -r build_id symtab link <<<"${REPLY//$'\t'/:}"
        name=${build_id:-inode-$inode}
        heads[$name]+="# mapped"$'\t'"$inode $path"$'\n'
        [[ ! -e $folder/$name.new ]] || continue
        debug_file "$root" "${path% (deleted)}" "$build_id" "$link"
        if [[ -n $REPLY ]]; then
            path=$REPLY
            ask_elf "$path" links && IFS=: read -r _ symtab _ <<<"${REPLY//$'\t'/:}"
            if ((symtab <= SYMTAB_MAX)) && ! elf_symbols "$file" "$path" >"$new"; then
                warn "no symbols of \"$path\", which $(tail -n 1 "$new")"
                elf_symbols "$file" "" >"$new"
            fi
        fi
        ((symtab <= SYMTAB_MAX)) || warn "the $((symtab >> 20)) MiB of symbols in \"$path\" are left out: only exported names are kept"
        mv -- "$new" "$folder/$name.new"
        written=$((written + $(stat -c %s "$folder/$name.new")))
    done < <(mapped_files "$2" && gone_files "$1" | awk '{ print "-\t-\t" $0 }')
    for name in ${heads[@]+"${!heads[@]}"}; do
        {
            [[ $name == inode-* ]] || printf '# build_id\t%s\n' "$name"
            printf '%s' "${heads[$name]}"
            tail -n +2 "$folder/$name.new"
        } >"$folder/new"
        rm -- "$folder/$name.new"
        mv -- "$folder/new" "$folder/$name"
    done
    rm -f -- "$folder/new"
    ((left == 0)) || warn "the symbols of $left files are left out: those of the others took a minute, or 512 MiB"
}

# vdso_symbols FOLDER PIDS: the kernel's code in the processes' memory, the same in all.
vdso_symbols() {
    local pid range start pages
    for pid in $2; do
        range=$(awk '/\[vdso\]$/ { print $1 }' "/proc/$pid/maps" 2>/dev/null) || continue
        [[ -n $range ]] || continue
        start=$((16#${range%-*} >> 12)) pages=$(((16#${range#*-} - 16#${range%-*}) >> 12))
        dd if="/proc/$pid/mem" bs=4096 skip="$start" count="$pages" of="$1/vdso.elf" 2>/dev/null || continue
        if elf_symbols "$1/vdso.elf" "" >"$1/new"; then
            { printf '# mapped\t0 [vdso]\n' && tail -n +2 "$1/new"; } >"$1/vdso"
            rm -- "$1/vdso.elf" "$1/new"
            return 0
        fi
    done
    rm -f -- "$1/vdso.elf" "$1/new"
    warn "no symbols of the vdso: its functions will have no names"
}

# words FILE: the words in it that can be addresses of the kernel, once each.
words() {
    od -An -v -t x8 -w64 -- "$1" | awk '/ ffff/ { for (i = 1; i <= NF; i++) if ($i > "ffff" && !seen[$i]++) print $i "\t~" }'
}

# kernel_symbols CAPTURE: those of the kernel's symbols in which an address lies that occurs in perf.data, and each's next,
# which says where it ends.
kernel_symbols() {
    local folder=$1/symbols all='' size
    size=$(stat -c %s "$1/perf.data" 2>/dev/null) || size=0
    ((size <= SEARCH_MAX)) || all=yes
    {
        printf '# mapped\t0 [kernel.kallsyms]\n'
        {
            # Types and bindings as ELF has them, of what is text or data.
            awk -v OFS='\t' '
                BEGIN { split("T 12 t 02 W 22 w 22 D 11 d 01 B 11 b 01", word, " "); for (i = 1; i in word; i += 2) info[word[i]] = word[i + 1] }
                $2 in info { print $1, 0, info[$2], $3 }' /proc/kallsyms 2>/dev/null
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
            END { finish() }'
    } >"$folder/kernel.new"
    # Addresses are all zeros for those who may not see them.
    if awk 'NR == 2 { exit !/^0+\t/ }' "$folder/kernel.new"; then
        rm -- "$folder/kernel.new"
        warn "the kernel's addresses are hidden here (sysctl kernel.kptr_restrict): its functions will have no names"
        return 0
    fi
    mv -- "$folder/kernel.new" "$folder/kernel"
}

# perf_maps CAPTURE PIDS: what just-in-time compilers say in /tmp/perf-PID.map, the PID being the process's own.
perf_maps() {
    local pid file
    for pid in $2; do
        own_pid "$pid"
        file=/proc/$pid/root/tmp/perf-$REPLY.map
        # Anybody may have put it there: no link is followed, and nothing but such lines is copied.
        [[ -f $file && ! -L $file ]] || continue
        {
            printf '# mapped\t0 /tmp/perf-%s.map\n' "$pid"
            head -c "$PERF_MAP_MAX" "$file" | awk -v OFS='\t' '/^(0x)?[0-9a-f]+ (0x)?[0-9a-f]+ [^\t]+$/ {
                start = $1; size = $2
                sub(/^[^ ]+ [^ ]+ /, "")
                sub(/^0x/, "", start); sub(/^0x/, "", size)
                print start, size, 12, $0
            }'
        } >"$1/symbols/perf-$pid.map"
    done
}
