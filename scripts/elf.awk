# elf.awk - reads an ELF file with od: symbols, build-id, SDT notes, file offsets.
#
# Run by elf.bash with -v verb=... -v word=... and the file's name in the environment's ELF. Prints its
# answer and exits 0; or exits 1 and prints why not, as what is to follow the file's name.
# Layouts are those of elf.h; only 64-bit, little-endian files are read.
#
# Numbers are doubles: exact up to 2^53, and no address or offset of a sound file is larger.
# mawk prints %d and %x of 32 bits only, hence decimal() and hex().

BEGIN {
    Od = "od -An -v -j "
    size_of_file()
    header()
    if (verb == "notes") notes()
    else if (verb == "build-id") build_id()
    else if (verb == "symbol") symbol()
    else if (verb == "offset") offset()
    exit 0
}

function fail(why) {
    print why
    exit 1
}

function decimal(n) {
    return sprintf("%.0f", n)
}

function hex(n) {
    return n < 268435456 ? sprintf("0x%x", n) : sprintf("0x%x%07x", int(n / 268435456), n % 268435456)
}

# Lines of a command, which names the file as "$ELF".
function open(command) {
    Command = command " -- \"$ELF\" 2>/dev/null"
}

function next_line() {
    return (Command | getline) > 0
}

function size_of_file() {
    open("stat -Lc %s")
    Size = next_line() ? $1 + 0 : 0
    close(Command)
}

# Reads bytes into B[0 ...]; the file must have them. Tables longer than this have no place in a sound file.
function read(from, count,    n, i) {
    if (count > 1048576) fail("is damaged: it has a table of " decimal(count) " bytes")
    if (from + count > Size) fail("is damaged or cut short: it has " decimal(Size) " bytes and should have more")
    open(Od decimal(from) " -N " decimal(count) " -t u1 -w64")
    while (count && next_line())
        for (i = 1; i <= NF; i++) B[n++] = $i
    close(Command)
    if (n < count) fail("cannot be read")
}

function u2(at) { return B[at] + 256 * B[at + 1] }
function u4(at) { return u2(at) + 65536 * u2(at + 2) }
function u8(at) { return u4(at) + 4294967296 * u4(at + 4) }

# The string at B[at], which ends before B[end]. Leaves After behind its NUL.
function text(at, end,    s) {
    while (at < end && B[at]) s = s sprintf("%c", B[at++])
    After = at + 1
    return s
}

function header() {
    if (Size < 64) fail("is not a 64-bit little-endian ELF file")
    read(0, 64)
    if (u4(0) != 1179403647 || B[4] != 2 || B[5] != 1) fail("is not a 64-bit little-endian ELF file")
    Segments_at = u8(32)
    Sections_at = u8(40)
    Segments = u2(56)
    Sections = u2(60)
    Names = u2(62)
    if (Segments && u2(54) != 56 || Sections && u2(58) != 64) fail("is damaged: its headers have an unknown size")
}

function read_segments(    i) {
    read(Segments_at, 56 * Segments)
    for (i = 0; i < Segments; i++) {
        Segment_type[i] = u4(56 * i)
        Segment_offset[i] = u8(56 * i + 8)
        Segment_address[i] = u8(56 * i + 16)
        Segment_size[i] = u8(56 * i + 32)
    }
}

function read_sections(    i, name, from) {
    if (!Sections || !Sections_at) fail("has no section headers: install the packaged file")
    read(Sections_at, 64 * Sections)
    for (i = 0; i < Sections; i++) {
        name[i] = u4(64 * i)
        Section_type[i] = u4(64 * i + 4)
        Section_address[i] = u8(64 * i + 16)
        Section_offset[i] = u8(64 * i + 24)
        Section_size[i] = u8(64 * i + 32)
        Section_link[i] = u4(64 * i + 40)
    }
    if (!(Names in Section_size)) fail("is damaged: its sections have no names")
    read(Section_offset[Names], Section_size[Names])
    for (i = 0; i < Sections; i++) {
        from = name[i]
        Section_of[text(from, Section_size[Names])] = i
    }
}

# The file offset of an address; -1 where the file has no byte of it.
function offset_of(address,    i) {
    for (i = 0; i < Segments; i++)
        if (Segment_type[i] == 1 && address >= Segment_address[i] && address < Segment_address[i] + Segment_size[i])
            return address - Segment_address[i] + Segment_offset[i]
    return -1
}

function offset(    n) {
    read_segments()
    n = offset_of(word + 0)
    if (n < 0) fail("has no byte at address " hex(word + 0))
    print decimal(n)
}

# A note is: length of its name, length of its description, type; name; description; each padded to 4 bytes.
# Calls one_note(type, name, at, end) for each of B[0 ... size - 1], with its description.
function each_note(size,    at, name_size, size_of_description, description) {
    for (at = 0; at + 12 <= size; at = description + size_of_description + (4 - size_of_description % 4) % 4) {
        name_size = u4(at)
        size_of_description = u4(at + 4)
        description = at + 12 + name_size + (4 - name_size % 4) % 4
        if (description + size_of_description > size) fail("is damaged: a note is longer than its section")
        one_note(u4(at + 8), text(at + 12, at + 12 + name_size), description, description + size_of_description)
    }
}

function one_note(type, name, at, end) {
    if (verb == "build-id" && type == 3 && name == "GNU")
        while (at < end) Id = Id sprintf("%02x", B[at++])
    if (verb == "notes" && type == 3 && name == "stapsdt") probe(at, end)
}

function build_id(    i) {
    read_segments()
    for (i = 0; i < Segments && Id == ""; i++)
        if (Segment_type[i] == 4) {
            read(Segment_offset[i], Segment_size[i])
            each_note(Segment_size[i])
        }
    print Id
}

# Looks for a defined symbol: first in what is exported.
function symbol() {
    read_sections()
    symbol_in(".dynsym")
    symbol_in(".symtab")
    exit 1
}

function symbol_in(table,    strings, from, name) {
    if (!(table in Section_of)) return
    table = Section_of[table]
    strings = Section_link[table]
    if (!(strings in Section_size)) fail("is damaged: its symbols have no names")
    if (Section_offset[table] + Section_size[table] > Size) fail("is damaged or cut short")
    if (Section_size[strings] == 0) return
    # A name may be stored as the end of a longer one.
    open("od -v -A d -S 1 -j " decimal(Section_offset[strings]) " -N " decimal(Section_size[strings]))
    while (next_line()) {
        from = length($2) - length(word)
        if (from >= 0 && substr($2, from + 1) == word) name[$1 - Section_offset[strings] + from]
    }
    close(Command)
    # name, info and other and section, address (two halves), size (two halves)
    open(Od decimal(Section_offset[table]) " -N " decimal(Section_size[table]) " -t u4 -w24")
    while (next_line())
        if (($1 + 0) in name && $2 >= 65536) {
            print decimal($3 + 4294967296 * $4)
            exit 0
        }
    close(Command)
}

# SDT probes, one a line: provider, name, place, offset, semaphore's offset, bytes of the nop, arguments.
function notes(    section, i) {
    read_sections()
    if (!(".note.stapsdt" in Section_of)) return
    section = Section_of[".note.stapsdt"]
    Base = ".stapsdt.base" in Section_of ? Section_address[Section_of[".stapsdt.base"]] : -1
    read_segments()
    read(Section_offset[section], Section_size[section])
    each_note(Section_size[section])
    find_nops()
    for (i = 1; i <= Probes; i++)
        printf "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", Provider[i], Name[i], hex(Place[i]), hex(Offset[i]), hex(Semaphore[i]), Nop[i], Arguments[i]
}

# The description of a probe: its address, the address of .stapsdt.base when it was linked, that of its semaphore,
# provider, name, arguments. If .stapsdt.base has been moved since, as by prelink, so has everything.
function probe(at, end,    moved) {
    if (at + 24 > end) fail("is damaged: a note of an SDT probe is too short")
    moved = Base < 0 ? 0 : Base - u8(at + 8)
    Place[++Probes] = u8(at) + moved
    Semaphore[Probes] = u8(at + 16)
    Provider[Probes] = text(at + 24, end)
    Name[Probes] = text(After, end)
    Arguments[Probes] = text(After, end)
    Offset[Probes] = offset_of(Place[Probes])
    if (Semaphore[Probes]) Semaphore[Probes] = offset_of(Semaphore[Probes] + moved)
    if (Offset[Probes] < 0 || Semaphore[Probes] < 0)
        fail("is damaged: its probe " Name[Probes] " at " hex(Place[Probes]) " is not in its code, or the probe's semaphore not in its data")
    if ((Provider[Probes] Name[Probes] Arguments[Probes]) ~ /[[:cntrl:]]/) fail("is damaged: an SDT probe has an impossible name")
}

# Sets Nop[...]. A probe is only safe on the first byte of an instruction, so each note is
# believed only where there is one of the nops that sdt.h may be told to emit.
function find_nops(    i, k, from, to, row, wanted, words, at, bytes) {
    if (!Probes) return
    from = to = Offset[1]
    for (i = 2; i <= Probes; i++) {
        if (Offset[i] < from) from = Offset[i]
        if (Offset[i] > to) to = Offset[i]
    }
    for (i = 1; i <= Probes; i++) {
        row = int((Offset[i] - from) / 64)
        wanted[row]
        wanted[row + 1]
    }
    # The whole of it in words of 8 bytes: od is by far the fastest with these.
    open(Od decimal(from) " -N " decimal(to - from + 6) " -t x8 -w64")
    for (row = 0; next_line(); row++)
        if (row in wanted) words[row] = $0
    close(Command)
    for (i = 1; i <= Probes; i++) {
        bytes = ""
        for (k = 0; k < 6; k++) {
            at = Offset[i] - from + k
            row = int(at / 64)
            at %= 64
            bytes = bytes substr(words[row], 17 * int(at / 8) + 2 + 2 * (7 - at % 8), 2)
        }
        if (!match(bytes, /^(90|0f1f440000|660f1f440000)/))
            fail("has no nop at " hex(Place[i]) ", where its probe " Name[i] " should be: its code was changed")
        Nop[i] = substr(bytes, 1, RLENGTH)
    }
}
