# shellcheck shell=bash
# INTERIM by the lead: the elf helper overwrites this file whole.
# elf FILE: sets MACHINE and KIND to what the ELF header says (e_machine, e_type); 1 when FILE is no little-endian 64-bit ELF file.
elf() {
    local magic
    # shellcheck disable=SC2046 # words are wanted
    set -- $(od -An -v -t x1 -N 20 "$1" 2>/dev/null)
    magic=${1-}${2-}${3-}${4-}${5-}${6-}
    [[ $magic == 7f454c460201 ]] || return 1
    KIND=${18}${17} MACHINE=${20}${19}
}

symbol_address() {
    local value
    value=$(readelf --dyn-syms -W "$1" | awk -v symbol="$2" '
        { name = $8; sub(/@.*/, "", name) }
        name == symbol && $7 != "UND" { value = $2 }
        END { print value }')
    [[ -n $value ]] || return 1
    printf '%d' "0x$value"
}
