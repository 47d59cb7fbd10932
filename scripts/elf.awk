# elf.awk - reads an ELF file with od: symbols, entries of functions, build-id and SDT notes.
#
# Run by elf.bash with -v verb=... -v word=... and the file's name in the environment's ELF. Prints its
# answer and exits 0; or exits 1 and prints why not, as what is to follow the file's name.
# Layouts are those of elf.h; only 64-bit, little-endian files are read.
#
# Numbers are doubles: exact up to 2^53, and no address or offset of a sound file is larger.
# mawk prints %d and %x of 32 bits only, hence decimal() and hex().

BEGIN {
    Od = "od -An -v -j "
    begin("\"$ELF\"")
    if (verb == "notes") notes()
    else if (verb == "build-id") build_id()
    else if (verb == "symbol") symbol()
    else if (verb == "entry") entry()
    else if (verb == "links") links()
    else if (verb == "symbols") symbols()
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

# Reads from a file, which the shell knows as `name`, from now on.
function begin(name) {
    File = name
    Windows = 0
    size_of_file()
    header()
}

# Lines of a command on the file, and of what filters them.
function open(command, filter) {
    Command = command " -- " File " 2>/dev/null" filter
}

function next_line() {
    return (Command | getline) > 0
}

function size_of_file() {
    open("stat -Lc %s")
    Size = next_line() ? $1 + 0 : 0
    close(Command)
}

# Has the bytes in B[At], B[At + 1] ...; the file must have them. Tables longer than this have no place in a sound file.
# Some more on both sides are read as well: what belongs together mostly lies together, and each od takes its time.
function read(from, count,    i, at, to) {
    if (count > 1048576) fail("is damaged: it has a table of " decimal(count) " bytes")
    if (from + count > Size) fail("is damaged or cut short: it has " decimal(Size) " bytes and should have more")
    At = from
    for (i = 1; i <= Windows; i++)
        if (from >= Window[i] && from + count <= Window_end[i]) return
    Window[++Windows] = at = from > 512 ? from - 512 : 0
    to = from + count + 960
    Window_end[Windows] = to = to < Size ? to : Size
    open(Od decimal(at) " -N " decimal(to - at) " -t u1 -w64")
    while (at < to && next_line())
        for (i = 1; i <= NF; i++) B[at++] = $i
    close(Command)
    if (at < to) fail("cannot be read")
}

function u1(at) { return B[At + at] }
function u2(at) { return B[At + at] + 256 * B[At + at + 1] }
function u4(at) { return u2(at) + 65536 * u2(at + 2) }
function u8(at) { return u4(at) + 4294967296 * u4(at + 4) }

# The string that begins at a byte of what was read, and ends before another. Leaves After behind its NUL.
function text(at, end,    s) {
    while (at < end && u1(at)) s = s sprintf("%c", u1(at++))
    After = at + 1
    return s
}

function header() {
    if (Size < 64) fail("is not a 64-bit little-endian ELF file")
    read(0, 64)
    if (u4(0) != 1179403647 || u1(4) != 2 || u1(5) != 1) fail("is not a 64-bit little-endian ELF file")
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
        Segment_flags[i] = u4(56 * i + 4)
        Segment_offset[i] = u8(56 * i + 8)
        Segment_address[i] = u8(56 * i + 16)
        Segment_size[i] = u8(56 * i + 32)
        Segment_memory[i] = u8(56 * i + 40)
    }
}

function read_sections(    i, name, from) {
    if (!Sections || !Sections_at) fail("has no section headers: install the packaged file")
    read(Sections_at, 64 * Sections)
    for (i = 0; i < Sections; i++) {
        name[i] = u4(64 * i)
        Section_type[i] = u4(64 * i + 4)
        Section_flags[i] = u8(64 * i + 8)
        Section_address[i] = u8(64 * i + 16)
        Section_offset[i] = u8(64 * i + 24)
        Section_size[i] = u8(64 * i + 32)
        Section_link[i] = u4(64 * i + 40)
        Section_entry[i] = u8(64 * i + 56)
    }
    if (!(Names in Section_size)) fail("is damaged: its sections have no names")
    read(Section_offset[Names], Section_size[Names])
    for (i = 0; i < Sections; i++) {
        from = name[i]
        Section_name[i] = text(from, Section_size[Names])
        Section_of[Section_name[i]] = i
    }
}

# The first section of a type (elf.h's SHT_); -1 where there is none.
function of_type(type,    i) {
    for (i = 0; i < Sections; i++)
        if (Section_type[i] == type) return i
    return -1
}

# The file offset of an address; -1 where the file has no byte of it.
function offset_of(address,    i) {
    for (i = 0; i < Segments; i++)
        if (Segment_type[i] == 1 && address >= Segment_address[i] && address < Segment_address[i] + Segment_size[i])
            return address - Segment_address[i] + Segment_offset[i]
    return -1
}

# A note is: length of its name, length of its description, type; name; description; each padded to 4 bytes.
# Calls one_note(type, name, at, end) for each of those that were read, with its description.
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
    if (verb != "notes" && type == 3 && name == "GNU" && Id == "")
        while (at < end) Id = Id sprintf("%02x", u1(at++))
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
function find_symbol() {
    read_sections()
    if (!symbol_in(".dynsym") && !symbol_in(".symtab")) exit 1
}

function symbol() {
    find_symbol()
    print decimal(Address)
}

# Sets Address and Length of the symbol and returns 1 where the table has it, as a function if one is looked for.
function symbol_in(table,    strings, from, name, found) {
    if (!(table in Section_of)) return 0
    table = Section_of[table]
    strings = Section_link[table]
    if (!(strings in Section_size)) fail("is damaged: its symbols have no names")
    if (Section_offset[table] + Section_size[table] > Size) fail("is damaged or cut short")
    if (Section_size[strings] == 0) return 0
    # A name may be stored as the end of a longer one.
    open("od -v -A d -S 1 -j " decimal(Section_offset[strings]) " -N " decimal(Section_size[strings]))
    while (next_line()) {
        from = length($2) - length(word)
        if (from >= 0 && substr($2, from + 1) == word) name[$1 - Section_offset[strings] + from]
    }
    close(Command)
    # name, info and other and section, address (two halves), size (two halves)
    open(Od decimal(Section_offset[table]) " -N " decimal(Section_size[table]) " -t u4 -w24")
    while (!found && next_line())
        if (($1 + 0) in name && $2 >= 65536 && (verb != "entry" || $2 % 16 == 2)) {
            Address = $3 + 4294967296 * $4
            Length = $5 + 4294967296 * $6
            found = 1
        }
    close(Command)
    return found
}

# Where the probe goes that sees each call of a function, with the arguments still in their registers: address and
# offset. That is the first instruction which the kernel emulates, and does not step through at several
# times the cost (branch_setup_xol_ops() and push_setup_xol_ops() in arch/x86/kernel/uprobes.c), if all before it is
# known to be harmless and nothing in the function jumps to behind its first instruction; else that.
function entry(    i, from, at, size) {
    find_symbol()
    read_segments()
    from = -1
    for (i = 0; i < Segments; i++)
        if (Segment_type[i] == 1 && Segment_flags[i] % 2 && Address >= Segment_address[i] && Address + Length <= Segment_address[i] + Segment_size[i])
            from = Address - Segment_address[i] + Segment_offset[i]
    if (from < 0 || !Length) fail("is damaged: its function " word " is not in its code")
    read(from, Length)
    at = 0
    for (i = 1; i <= 6; i++) Argument[substr("126789", i, 1)] # rcx, rdx, rsi, rdi, r8, r9
    while (at < Length && !emulated(at)) at = (size = harmless(at)) ? at + size : Length
    if (at >= Length || jumped_to(at)) at = 0
    print hex(Address + at) "\t" hex(from + at)
}

# push, jcc, jmp, call, nop
function emulated(at,    byte) {
    byte = u1(at)
    if (byte == 65) return u1(at + 1) >= 80 && u1(at + 1) <= 87
    if (byte == 15) return u1(at + 1) >= 128 && u1(at + 1) <= 143
    return byte >= 80 && byte <= 87 || byte >= 112 && byte <= 127 || byte == 144 || byte >= 232 && byte <= 233 || byte == 235
}

# The size of an instruction, if it is one that leaves the six arguments where they are; else 0.
function harmless(at,    rex, code, modrm, register, target) {
    if (u4(at) == 4196274163) return 4 # endbr64
    if (u2(at) == 15744) return 7 # cmpb $constant,variable(%rip)
    rex = u1(at)
    if (rex < 64 || rex > 79) return 0
    code = u1(at + 1)
    modrm = u1(at + 2)
    register = int(modrm / 8) % 8 + 8 * (int(rex / 4) % 2)
    target = modrm % 8 + 8 * (rex % 2)
    if (code == 131 && modrm == 236) return 4 # sub $constant,%rsp
    if (code == 133 && modrm >= 192) return 3 # test %register,%target
    if (code == 137 && modrm >= 192) return target in Argument ? 0 : 3 # mov %register,%target
    if (code == 137 && int(modrm / 64) == 1 && modrm % 8 == 4 && u1(at + 3) == 36) return 5 # mov %register,constant(%rsp)
    if (code == 139 && modrm < 64 && modrm % 8 == 5) return register in Argument ? 0 : 7 # mov variable(%rip),%register
    return 0
}

# Whether any bytes of the function could be a jump to behind its first byte and no further than `last`.
function jumped_to(last,    at, byte, to) {
    for (at = 0; at + 2 <= Length; at++) {
        byte = u1(at)
        to = 0
        if (byte == 235 || byte >= 112 && byte <= 127) to = at + 2 + u1(at + 1) - (u1(at + 1) > 127) * 256
        else if (at + 5 <= Length && byte == 233) to = at + 5 + signed4(at + 1)
        else if (at + 6 <= Length && byte == 15 && u1(at + 1) >= 128 && u1(at + 1) <= 143) to = at + 6 + signed4(at + 2)
        if (to > 0 && to <= last) return 1
    }
    return 0
}

function signed4(at) { return u4(at) - (u1(at + 3) > 127) * 4294967296 }

# What leads to its symbols: build-id, bytes of .symtab, name of the separate debug file; a line each.
function links(    i, symtab, name) {
    read_sections()
    symtab = of_type(2)
    for (i = 0; i < Sections && Id == ""; i++)
        if (Section_type[i] == 7) {
            read(Section_offset[i], Section_size[i])
            each_note(Section_size[i])
        }
    if (".gnu_debuglink" in Section_of) {
        i = Section_of[".gnu_debuglink"]
        read(Section_offset[i], Section_size[i])
        name = text(0, Section_size[i])
    }
    printf "# build_id\t%s\n# symtab\t%s\n# debug_link\t%s\n", Id, decimal(symtab < 0 ? 0 : Section_size[symtab]), name
}

# All that symbols.py needs of a file: after what `links` says, what is loaded where, its symbols (those of a .symtab of
# more than `word` bytes not), and the entries of its .plt. The rules of which symbols count are symbols.py's.
function symbols(    i, exported, all, stubs, stub, at) {
    links()
    read_segments()
    for (i = 0; i < Segments; i++)
        if (Segment_type[i] == 1)
            printf "# load\t%s %s %s\n", hex(Segment_offset[i]), hex(Segment_address[i]), hex(Segment_memory[i])
    all = of_type(2)
    exported = of_type(11)
    at = ".plt" in Section_of ? Section_of[".plt"] : -1
    if (exported >= 0 && at >= 0 && ".rela.plt" in Section_of) {
        i = Section_of[".rela.plt"]
        if (Section_offset[i] + Section_size[i] > Size) fail("is damaged or cut short")
        # offset (two halves), type, symbol, addend (two halves)
        open(Od decimal(Section_offset[i]) " -N " decimal(Section_size[i]) " -t u4 -w24")
        while (next_line())
            if (NF == 6) {
                stub[++stubs] = $4
                Called[$4]
            }
        close(Command)
    }
    if (ENVIRON["DEBUG"] == "" && all >= 0 && Section_size[all] <= word) print_table(all)
    else if (ENVIRON["DEBUG"] == "") print_functions()
    if (exported >= 0) print_table(exported, ENVIRON["DEBUG"] != "")
    # The first entry of .plt is the resolver's.
    for (i = 1; i <= stubs; i++) {
        if (!(stub[i] in Name_of)) fail("is damaged: it has a relocation of a symbol that is not there")
        print_symbol(Section_address[at] + Section_entry[at] * i, Section_entry[at], 18, Name_of[stub[i]] "@plt")
    }
    if (ENVIRON["DEBUG"] != "") {
        split("", Called)
        split("", Section_of)
        begin("\"$DEBUG\"")
        read_sections()
        if (of_type(2) >= 0) print_table(of_type(2))
        if (of_type(11) >= 0) print_table(of_type(11))
    }
}

# Where functions begin, static ones too, a stripped file still says to those who unwind its stacks: in .eh_frame_hdr, sorted
# (Linux Standard Base, "Exception Frames"). Each is called by its offset in the file, and is no symbol (type 0), so that any counts before it.
function print_functions(    i, start, last) {
    if (!(".eh_frame_hdr" in Section_of)) return
    i = Section_of[".eh_frame_hdr"]
    if (Section_size[i] < 12 || Section_offset[i] + Section_size[i] > Size) return
    read(Section_offset[i], 12)
    # version; pointers relative to where they stand, a number, a table relative to the section: all of 4 bytes
    if (u4(0) != 990059265) return
    # start, its frame description
    open(Od decimal(Section_offset[i] + 12) " -N " decimal(8 * u4(8)) " -t d4 -w8")
    while (next_line()) {
        start = Section_address[i] + $1
        if (last != "") print_function(last, start - last)
        last = start
    }
    close(Command)
    if (last != "") print_function(last, 0)
}

function print_function(address, size) {
    if (offset_of(address) >= 0) print_symbol(address, size, 0, "+" hex(offset_of(address)))
}

function print_symbol(address, size, info, name) {
    printf "%s\t%s\t%02x\t%s\n", substr(hex(address), 3), substr(hex(size), 3), info, name
}

# Prints the symbols of a table, but with `silent` only keeps in Name_of, of its Nth symbols, those that are Called.
function print_table(section, silent,    i, n, kind, home, allocated, labelled) {
    if (Section_offset[section] + Section_size[section] > Size) fail("is damaged or cut short")
    for (i = 1; i < Sections; i++) {
        if (int(Section_flags[i] / 2) % 2) allocated[i]
        if (Section_name[i] ~ /text|data/) labelled[i]
    }
    read_names(section)
    # name; info, other, section; address (two halves); size (two halves)
    open(Od decimal(Section_offset[section]) " -N " decimal(Section_size[section]) " -t u4 -w24")
    for (n = 0; next_line(); n++) {
        if (n in Called) Name_of[n] = name_at($1 + 0)
        if (silent || NF < 6 || $1 == 0) continue
        kind = $2 % 16
        home = int($2 / 65536)
        if (!(home in allocated)) continue
        # objects, functions, IFUNCs; labels, unless they are internal (1) or hidden (2)
        if (kind == 0 ? !(home in labelled) || int($2 / 256) % 4 % 3 : kind > 2 && kind != 10) continue
        if ($4 + $6 == 0 && $3 < 268435456 && $5 < 268435456)
            printf "%x\t%x\t%02x\t%s\n", $3, $5, $2 % 256, name_at($1 + 0)
        else
            print_symbol($3 + 4294967296 * $4, $5 + 4294967296 * $6, $2 % 256, name_at($1 + 0))
    }
    close(Command)
}

# Reads the names of a table's symbols into blocks of whole names: Block_of[N] is the first block with a byte of the Nth
# 1024. (One long string would do, but mawk reads such in quadratic time.)
function read_names(section,    i, at, block, content) {
    i = Section_link[section]
    if (!(i in Section_size)) fail("is damaged: its symbols have no names")
    if (Section_offset[i] + Section_size[i] > Size) fail("is damaged or cut short")
    split("", Block)
    split("", Block_at)
    split("", Block_of)
    # What would break a table of lines has no place in a name.
    open("tail -c +" decimal(Section_offset[i] + 1), " | head -c " decimal(Section_size[i]) " | tr '\\n\\t\\000' '??\\n'")
    while ((Command | getline content) > 0) {
        if (!(block in Block_at) || length(Block[block]) >= 1024) {
            Block_at[++block] = at
            if (!(int(at / 1024) in Block_of)) Block_of[int(at / 1024)] = block
        }
        Block[block] = Block[block] content "\n"
        at += length(content) + 1
        for (i = int(Block_at[block] / 1024) + 1; i <= int((at - 1) / 1024); i++)
            if (!(i in Block_of)) Block_of[i] = block
    }
    close(Command)
    Block_at[block + 1] = Names_end = at
}

function name_at(at,    block, found) {
    if (at >= Names_end) fail("is damaged: a symbol\047s name is not among the names")
    block = Block_of[int(at / 1024)]
    while ((block + 1) in Block_at && at >= Block_at[block + 1]) block++
    found = substr(Block[block], at - Block_at[block] + 1)
    return substr(found, 1, index(found, "\n") - 1)
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
