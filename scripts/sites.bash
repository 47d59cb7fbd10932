# shellcheck shell=bash
# sites.bash - where a stripped PostgreSQL stores to wait_event_info, and where probes see it.
#
# Sourced, never run, by lib.bash, which has die, and elf.bash. Needs pipefail; find_sites also needs binutils.

SITES_AWK=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/sites.awk
readonly SITES_AWK

# find_sites BINARY SYMBOL: prints each store to wait_event_info in the code of an x86-64 PostgreSQL, as docs/capture.md
# says of sites.tsv. SYMBOL is the global that points to it from version 14 on, before which it is a member of
# what MyProc points to. Dies where one may be missing.
find_sites() {
    local binary=$1 symbol=$2 header version major members='' fixed='' loads global started sections code tables slots sites field

    [[ -r $binary ]] || die "cannot read \"$binary\""
    header=$(readelf -hW -- "$binary" 2>/dev/null) || header=''
    [[ $header == *'ELF Header:'* ]] || die "\"$binary\" is not an executable: it has no ELF header"
    [[ $header == *ELF64* && $header == *X86-64* ]] ||
        die "\"$binary\" is not for x86-64: sites of other machines cannot be checked yet"
    [[ $header =~ Type:\ +EXEC ]] && fixed=1
    loads=$(readelf -lW -- "$binary" 2>/dev/null |
        awk '$1 == "LOAD" { print substr($3, 3) ":" substr($2, 3) ":" substr($5, 3) }')
    check_length "$binary" "$loads"
    # One line a section with contents: name, address, offset, size, flags.
    sections=$(readelf -SW -- "$binary" 2>/dev/null |
        awk 'sub(/^ *\[ *[0-9]+\] /, "") && $2 == "PROGBITS" { print $1, $3, $4, $5, $7 }')
    code=$(sections_like 5 X)
    [[ -n $code ]] || die "\"$binary\" has no section headers, so its code cannot be read: install the packaged binary"
    tables=$(sections_like 1 '^[.](l?rodata|data)')
    version=$(pg_version_of "$binary")
    [[ -n $version ]] || die "\"$binary\" is not a PostgreSQL server"
    major=${version%%[!0-9]*}
    ((major >= 10)) || die "\"$binary\" is PostgreSQL $version: sites are found from version 10 on"
    ((major >= 14)) || symbol=MyProc members=1
    { global=$(symbol_address "$binary" "$symbol") && started=$(symbol_address "$binary" PgStartTime); } ||
        die "\"$binary\" has no symbol $symbol or PgStartTime: it was stripped of its dynamic symbols"
    printf -v global %x "$global"
    slots=$(got_entries "$binary" "$symbol" "$global")

    sites=$({
        readelf -rW -- "$binary" | awk '$3 == "R_X86_64_RELATIVE" { print "target " $4 }'
        objdump -dw -- "$binary"
    } 2>/dev/null | SITES_BINARY=$binary awk -f "$SITES_AWK" -v global="$global" -v slots="${slots//$'\n'/ }" \
        -v fixed="$fixed" -v members="$members" -v code="${code//$'\n'/ }" -v loads="${loads//$'\n'/ }" -v tables="${tables//$'\n'/ }" |
        sort -n | cut -f 2-) || die "the code of \"$binary\" could not be read by objdump and awk"
    field=${sites%%$'\n'*} field=${field#field } sites=${sites#*$'\n'}
    [[ $field != none ]] || die "where wait_event_info is in a PGPROC could not be made out from the code of \"$binary\": too few" \
        "constants are stored to it"
    [[ $sites != field* ]] || die "no store through $symbol was found in \"$binary\""
    if [[ $sites == loose* ]]; then
        sites=$(awk 'sub(/^loose /, "")' <<<"$sites")
        die "$(wc -l <<<"$sites") of the uses of $symbol in \"$binary\" could not be followed, so durations would" \
            "be wrong; please report this. The first is at ${sites%%$'\n'*}"
    fi
    printf 'store\tvalue\tplace\toffset\tbytes\tkind\tafter\n'
    printf '# %s\t%s\n' build_id "$(build_id_of "$binary")" binary "$(readlink -f -- "$binary")" \
        symbol "$symbol" field "$field" pointer "0x$global" pg_start_time "$(printf '0x%x' "$started")" pg_version "$version"
    printf '%s\n' "$sites"
}

# Of the list in "sections" those with this PATTERN in this FIELD, as address:offset:size.
sections_like() {
    awk -v field="$1" -v pattern="$2" '$field ~ pattern { print $2 ":" $3 ":" $4 }' <<<"$sections"
}

# Dies unless the file is as long as its segments say.
check_length() {
    local size load part
    size=$(stat -Lc %s -- "$1")
    for load in $2; do
        IFS=: read -r -a part <<<"$load"
        ((16#${part[1]} + 16#${part[2]} <= size)) || die "\"$1\" is cut short: it has $size bytes and should have more"
        ((16#${part[0]} + 16#${part[2]} <= 0xffffffff)) || die "\"$1\" is linked to addresses beyond 4 GiB, which is not supported"
    done
}

# Addresses of the global offset table's entries for SYMBOL, which is at address GLOBAL: by
# relocation, or by contents where the linker filled them in.
got_entries() {
    local section part
    readelf -rW -- "$1" 2>/dev/null | awk -v symbol="$2" -v global="$3" '
        $3 == "R_X86_64_RELATIVE" && $4 == global || $3 == "R_X86_64_GLOB_DAT" && $5 == symbol {
            sub(/^0+/, "", $1)
            print $1
        }'
    for section in $(sections_like 1 '^[.]got'); do
        IFS=: read -r -a part <<<"$section"
        od -An -v -tx8 -w8 -j $((16#${part[1]})) -N $((16#${part[2]})) -- "$1" |
            awk -v word="$(printf '%16s' "$3")" -v at=$((16#${part[0]})) '
                BEGIN { gsub(/ /, "0", word) }
                $1 == word { printf "%x\n", at + 8 * (NR - 1) }'
    done
}

# verify_sites SITES BINARY: dies unless the file is the one the list was made from, and has
# the list's bytes at the list's offsets. A probe on anything but an instruction's first byte corrupts the server.
verify_sites() {
    local sites=$1 binary=$2 id list from to
    id=$(awk -F '\t' '$1 == "# build_id" { print $2 }' "$sites")
    [[ $id == "$(build_id_of "$binary")" ]] ||
        die "\"$binary\" is not the file that the sites were found in: its build-id is not $id"
    # Offset (decimal) and bytes of each place.
    list=$(while IFS=$'\t' read -r _ _ _ offset bytes _; do
        [[ $offset == 0x* ]] && echo "$((offset)) $bytes"
    done <"$sites" | sort -n)
    from=${list%% *} to=${list##*$'\n'} to=${to% *}
    od -An -v -tx8 --endian=big -w64 -j "$from" -N $((to - from + 16)) -- "$binary" |
        awk -v list="$list" -v from="$from" '
            BEGIN {
                n = split(list, word)
                for (i = 1; i < n; i += 2) {
                    row[i] = int((word[i] - from) / 64)
                    wanted[row[i]] = wanted[row[i] + 1] = 1
                }
            }
            (NR - 1) in wanted { gsub(/ /, ""); text[NR - 1] = $0 }
            END {
                for (i = 1; i < n; i += 2)
                    differ += substr(text[row[i]] text[row[i] + 1], 2 * ((word[i] - from) % 64) + 1, length(word[i + 1])) != word[i + 1]
                exit differ > 0
            }' || die "\"$binary\" has other code than the list of sites: its file was changed"
}
