# Finds every store to wait_event_info, which the pointer in a global variable leads to, and the
# place where a probe sees it. Reads `objdump -dw` of the whole binary; prints "field OFFSET", and one line a store, in no order:
#
#     SORTKEY store value place offset bytes kind after
#
# or, for what could not be followed to its end, "loose ADDRESS REASON".
#
# A register or stack slot is followed along all paths from each reference to the variable,
# for as long as it holds the variable's address ("A") or the pointer in it, plus so many bytes
# ("P0", and "D0" when a store through it is done). What is not understood on the way is loose: a
# store that is missed makes the durations around it wrong.
#
# From PostgreSQL 14 on the variable is my_wait_event_info: it points to wait_event_info itself, and nothing
# else is done with it. Before, it is MyProc, which points to a PGPROC: a structure that the field is a
# member of, and that the server does much else with. Then all stores through the pointer are noted, and find_field says which are the field's.
# The pointer may go into memory and to other functions: wait_event_info is stored to by
# inline functions only (pgstat_report_wait_start and _end of pgstat.h, volatile, so by 4 bytes and at
# each call) and by InitProcess and InitAuxiliaryProcess, and each of them loads MyProc itself.
#
# Variables (addresses are hexadecimal, as objdump prints them; lists are blank-separated):
#   global   address of the variable
#   slots    addresses of the GOT entries that hold that address
#   members  1 where the field is a member of what the pointer points to
#   fixed    1 where the binary is not position-independent: addresses occur as constants
#   code, tables, loads: sections with code, sections that may hold jump tables, and loaded
#            segments, as address:offset:size
# SITES_BINARY in the environment is the file. Lines "target ADDRESS" before objdump's
# name code whose address a relocation puts into data.
#
# For mawk and gawk: no strtonum, no sorting, no arrays of arrays.

BEGIN {
    FS = "\t"
    # Any name of a register -> its name in uprobe_events; which names are of 64 and of 32 bits.
    n = split("ax bx cx dx si di bp sp", list, " ")
    for (i = 1; i <= n; i++) {
        r = list[i]
        register["%r" r] = register["%e" r] = register["%" r] = register["%" r "l"] = r
        bits["%r" r] = 64
        bits["%e" r] = 32
    }
    n = split("a b c d", list, " ")
    for (i = 1; i <= n; i++)
        register["%" list[i] "l"] = register["%" list[i] "h"] = list[i] "x"
    for (i = 8; i < 16; i++) {
        r = "r" i
        register["%" r] = register["%" r "d"] = register["%" r "w"] = register["%" r "b"] = r
        bits["%" r] = 64
        bits["%" r "d"] = 32
    }

    # Registers that a function may change; registers that an instruction changes without naming them.
    n = split("ax cx dx si di r8 r9 r10 r11", list, " ")
    for (i = 1; i <= n; i++)
        scratch[list[i]] = 1
    changing("syscall", "ax cx r11")
    changing("cpuid", "ax bx cx dx")
    changing("rdtscp", "ax cx dx")
    changing("rdtsc xgetbv cmpxchg8b cmpxchg16b", "ax dx")
    changing("cltd cqto cwtd", "dx")
    changing("leave", "sp bp")
    changing("cltq cwtl cbtw lahf cmpxchg", "ax")

    # A constant that is a wait event of PostgreSQL 10 to 13: a class, and a small number in it.
    WAIT = "^0x[13-9a]0000[0-9a-f][0-9a-f]$"

    n = split(slots, list, " ")
    for (i = 1; i <= n; i++)
        is_slot[list[i]] = 1
    absolute = slots
    gsub(/ /, "|", absolute)
    absolute = "[ ,$]0x(" global (slots == "" ? "" : "|") absolute ")([ ,]|$)"
    codes = split(code, list, " ")
    for (i = 1; i <= codes; i++) {
        split(list[i], part, ":")
        code_from[i] = hex(part[1])
        code_to[i] = code_from[i] + hex(part[3])
    }
}

function changing(mnemonics, registers,   i, n, list) {
    n = split(mnemonics, list, " ")
    for (i = 1; i <= n; i++)
        unsaid[list[i]] = registers
}

function hex(s,   i, v) {
    v = 0
    for (i = 1; i <= length(s); i++)
        v = v * 16 + index("123456789abcdef", substr(s, i, 1))
    return v
}

function is_code(a,   i) {
    for (i = 1; i <= codes; i++)
        if (a >= code_from[i] && a < code_to[i])
            return i
    return 0
}

## First pass: all direct jump targets, where functions begin, all bases of jump tables, and the code behind
## each reference with the code that it jumps forward to.

NF < 3 {
    if (sub(/^target /, ""))
        jumped_to[$0] = 1
    else if (sub(/ <.*>:$/, "")) {
        sub(/^0+/, "")
        begins[$0] = 1
    }
    next
}

{
    found = fixed && $3 ~ absolute
    if ($3 ~ /^(j|bnd j|loop|xbegin)/) {
        if (match($3, / [0-9a-f]+ </)) {
            t = substr($3, RSTART + 1, RLENGTH - 3)
            jumped_to[t] = 1
            if (window)
                wanted[sprintf("%8s:", t)] = 1
        } else if (match($3, /\*0x[0-9a-f]+\(,/))
            base[substr($3, RSTART + 3, RLENGTH - 5)] = 8
    } else if (i = index($3, "# ")) {
        t = substr($3, i + 2)
        sub(/ .*/, "", t)
        if (t == global || t in is_slot)
            found = 1
        else if ($3 ~ /^lea /)
            base[t] = 4
    } else if (match($3, /^call +[0-9a-f]+ </)) {
        t = substr($3, 1, RLENGTH - 2)
        sub(/^call +/, "", t)
        begins[t] = 1
    } else if (members && $3 ~ /^movl +\$0x[0-9a-f]+,0x[0-9a-f]+\(%r[a-z0-9]+\)$/) {
        t = $3
        gsub(/^movl +\$|,.*/, "", t)
        if (t ~ WAIT) {
            n = $1
            gsub(/[ :]/, "", n)
            constant[n] = number(substr($3, index($3, ",") + 1))
        }
    }
    if (found) {
        t = $1
        gsub(/[ :]/, "", t)
        origins[++references] = t
        window = 100
    } else if ($1 in wanted && window < 30)
        window = 30
    if (window) {
        window--
        remember($1, $2, $3)
    } else
        previous = ""
}

function remember(address, bytes, insn) {
    gsub(/[ :]/, "", address)
    gsub(/ /, "", bytes)
    text[address] = insn
    raw[address] = bytes
    if (previous != "") {
        following[previous] = address
        preceding[address] = previous
    }
    previous = address
}

END {
    read_tables()
    for (o = 1; o <= references; o++) {
        origin = origins[o]
        stored = compared = 0
        visits = 0
        branch(origin, "")
        while (todo) {
            a = todo_address[todo]
            follow(a, todo_state[todo--])
        }
        if (!members && !stored && !compared)
            loose(origin, "no store through the pointer was found behind this reference")
    }
    field = members ? find_field() : 0
    if (field == "none") {
        print "field none"
        exit
    }
    printf "field 0x%x\n", field
    for (a in written)
        note_store(a)
    for (a in constant)
        if (constant[a] == field && !(a in value))
            loose(a, "a wait event is stored to the field through a pointer of unknown origin")
    for (a in value)
        print_site(a)
}

## What was stored

# Where in the structure wait_event_info is: the one member that constants of the shape of wait events are
# stored to, many of them, and no other constant but 0.
function find_field(   a, i, n, list, part, class, count, classes, ends, others, best) {
    best = "none"
    for (a in written) {
        n = split(written[a], list, " ")
        for (i = 1; i <= n; i++) {
            split(list[i], part, ":")
            if (part[2] == 4 && part[3] ~ WAIT) {
                if (!((part[1], part[3]) in count)) {
                    count[part[1], part[3]] = 1
                    if (++count[part[1]] > count[best])
                        best = part[1]
                }
                class = substr(part[3], 1, 3)
                if (!((part[1], class) in classes)) {
                    classes[part[1], class] = 1
                    classes[part[1]]++
                }
            } else if (part[3] == "0x0")
                ends[part[1]] += part[2] == 4
            else if (part[3] ~ /^0x/)
                others[part[1]] = 1
        }
    }
    return count[best] < 8 || classes[best] < 2 || ends[best] < 8 || best in others ? "none" : best
}

# Which of the stores are the field's, or loose.
function note_store(address,   i, n, list, part, from, to) {
    n = split(written[address], list, " ")
    for (i = 1; i <= n; i++) {
        split(list[i], part, ":")
        from = part[1]
        to = from + part[2]
        if (from >= field + 4 || to <= field) {
            if (!members || address in value)
                loose(address, "a store through the pointer that is not understood: " text[address])
        } else if (from == field && part[2] == 4 && part[3] != "?" ||
            from <= field && to >= field + 4 && part[3] == "0x0" && (i == 1 || value[address] == "0x0"))
            value[address] = part[3]        # a wider store of 0 is part of a process's start
        else
            loose(address, "a store through the pointer that is not understood: " text[address])
    }
}

## Jump tables

# Notes what tables point to: 4-byte distances from the table's start (position-independent code),
# 8-byte addresses (other code). A table ends where another begins or where an entry points
# to no code. Takes strings for tables now and then; a target too many costs an anchor at worst.
function read_tables(   n, list, part, i, cmd, line, half, j, at, low, word, words, t, start, first, kind) {
    for (t in base)
        if (length(t) < 9)
            start[hex(t)] = t
    n = split(tables, list, " ")
    for (i = 1; i <= n; i++) {
        split(list[i], part, ":")
        at = hex(part[1])
        kind = word = 0
        cmd = sprintf("od -An -v -td4 -w64 -j %d -N %d -- \"$SITES_BINARY\"", hex(part[2]), hex(part[3]))
        while ((cmd | getline line) > 0) {
            words = split(line, half, " ")
            for (j = 1; j <= words; j++) {
                low = word
                word = half[j] + 0
                if (at in start) {
                    t = start[at]
                    kind = base[t]
                    first = at
                }
                if (kind == 4) {
                    if (is_code(first + word))
                        entry(t, first + word)
                    else
                        kind = 0
                }
                # The high half of what may be an address.
                if (word == 0 && is_code(low)) {
                    jumped_to[sprintf("%x", low)] = 1
                    if (kind == 8 && (at - first) % 8 == 4)
                        entry(t, low)
                } else if (kind == 8 && (at - first) % 8 == 4)
                    kind = 0
                at += 4
            }
        }
        close(cmd)
    }
}

function entry(table, address) {
    address = sprintf("%x", address)
    jumped_to[address] = 1
    entries[table] = entries[table] " " address
}

# Is the indirect jump at an address one through a table? Then its operand has an index, or its register
# is a sum. All others call a function in the place of a return.
function through_table(address,   target, i) {
    parse(text[address])
    target = op[1]
    if (target ~ /,8\)$/)
        return 1
    sub(/^\*/, "", target)
    for (i = 0; i < 10 && (address in preceding); i++) {
        address = preceding[address]
        parse(text[address])
        if (ops && op[ops] == target)
            return mnemonic ~ /^add/
    }
    return 0
}

# Where the jump through a table can go: by the table that the code before it named last.
function table_targets(address,   i, t, insn) {
    for (i = 0; i < 40; i++) {
        insn = text[address]
        t = ""
        if (match(insn, /\*0x[0-9a-f]+\(,/))
            t = substr(insn, RSTART + 3, RLENGTH - 5)
        else if (insn ~ /^lea .*# /) {
            t = substr(insn, index(insn, "# ") + 2)
            sub(/ .*/, "", t)
        }
        if (t != "" && t in entries)
            return entries[t]
        if (!(address in preceding))
            break
        address = preceding[address]
    }
    return ""
}

## Following what holds the pointer

function loose(address, reason) {
    print "loose 0x" address " " reason
}

# Disassembles more, from an address that is known to begin an instruction. What the end of
# the range cuts in two is no instruction, so the range is longer than what is kept.
function fetch(address,   cmd, line, field, end, a) {
    end = hex(address) + 1024
    cmd = sprintf("objdump -dw --start-address=0x%s --stop-address=0x%x -- \"$SITES_BINARY\"", address, end + 16)
    previous = ""
    while ((cmd | getline line) > 0)
        if (split(line, field, "\t") >= 3) {
            a = field[1]
            gsub(/[ :]/, "", a)
            if (hex(a) < end)
                remember(a, field[2], field[3])
        }
    close(cmd)
    return address in text
}

function branch(address, state) {
    if (!((origin, address, state) in seen)) {
        todo_address[++todo] = address
        todo_state[todo] = state
    }
}

# A state as a string: what holds what.
function pack(   k, i, n, t, list, s) {
    n = 0
    for (k in hold) {
        t = k "=" hold[k]
        for (i = ++n; i > 1 && list[i - 1] > t; i--)
            list[i] = list[i - 1]
        list[i] = t
    }
    s = ""
    for (i = 1; i <= n; i++)
        s = s " " list[i]
    return s
}

function unpack(state,   k, i, n, list) {
    for (k in hold)
        delete hold[k]
    n = split(state, list, " ")
    for (i = 1; i <= n; i++) {
        k = index(list[i], "=")
        hold[substr(list[i], 1, k - 1)] = substr(list[i], k + 1)
    }
}

# Follows one path until nothing is held any more. The ways that branch off wait in the list.
function follow(address, state,   i, n, list) {
    unpack(state)
    for (;;) {
        if ((origin, address, state) in seen)
            return
        seen[origin, address, state] = 1
        if (++visits > 50000) {
            loose(origin, "the ways from here have no end")
            todo = 0
            return
        }
        if (!(address in text) && !fetch(address)) {
            loose(address, "there is no code")
            return
        }
        parse(text[address])
        if (mnemonic ~ /^(ret|hlt|ud[012]|int3|iret)/)
            return
        if (mnemonic ~ /^(j|loop|xbegin)/) {
            if (op[1] ~ /^\*/) {
                if (!through_table(address))
                    return
                n = split(table_targets(address), list, " ")
                for (i = 1; i <= n; i++)
                    branch(list[i], state)
                # Once stored through, the pointer is loaded anew (PostgreSQL's -fno-strict-aliasing).
                if (!n && state ~ /=[AP]/)
                    loose(address, "no table was found for this jump while the pointer is held")
                return
            }
            if (mnemonic == "jmp") {
                address = op[1]
                continue
            }
            branch(op[1], state)
        } else
            step(address)
        state = pack()
        if (state == "")
            return
        if (!(address in following) && (!fetch(address) || !(address in following))) {
            loose(address, "the code ends here")
            return
        }
        address = following[address]
        if (address in begins)
            return      # behind a call that does not return, another function
    }
}

# Does a register that functions may change keep its value over this call? It does where no way
# through the function changes it: gcc counts on that for functions of the same file (-fipa-ra).
function survives(call, r,   address, from, n, list, been) {
    if (call ~ /@plt/ || !match(call, /^call +[0-9a-f]+/))
        return 0
    from = substr(call, 1, RLENGTH)
    sub(/^call +/, "", from)
    if ((from, r) in kept)
        return kept[from, r]
    kept[from, r] = 1       # for a function that calls itself
    list[n = 1] = from
    while (n) {
        address = list[n--]
        while (!(address in been)) {
            been[address] = 1
            if (!(address in text) && !fetch(address))
                return kept[from, r] = 0
            parse(text[address])
            if (mnemonic ~ /^(ret|hlt|ud[012])/)
                break
            if (mnemonic ~ /^sys/ || op[1] ~ /^\*/ || overwrites(r))
                return kept[from, r] = 0
            if (mnemonic == "jmp") {
                address = op[1]
                continue
            }
            if (mnemonic ~ /^(j|loop)/)
                list[++n] = op[1]
            else if (mnemonic ~ /^call/ && !survives(text[address], r))
                return kept[from, r] = 0
            if (!(address in following) && (!fetch(address) || !(address in following)))
                return kept[from, r] = 0
            address = following[address]
        }
    }
    return 1
}

# Splits an instruction into prefix, mnemonic and op[1..ops]; points_at is the address that
# objdump worked out for a %rip-relative operand.
function parse(insn,   i, c, depth) {
    points_at = ""
    if (i = index(insn, "# ")) {
        points_at = substr(insn, i + 2)
        sub(/ .*/, "", points_at)
        insn = substr(insn, 1, i - 1)
    }
    sub(/ *<.*/, "", insn)
    sub(/ +$/, "", insn)
    prefix = ""
    while (match(insn, /^(lock|rep[a-z]*|notrack|bnd|[c-gs]s|data16|addr32|rex[.A-Z]*|xacquire|xrelease) +/)) {
        prefix = prefix substr(insn, 1, RLENGTH)
        insn = substr(insn, RLENGTH + 1)
    }
    ops = 0
    op[1] = ""
    i = index(insn, " ")
    mnemonic = i ? substr(insn, 1, i - 1) : insn
    if (!i)
        return
    insn = substr(insn, i)
    gsub(/ /, "", insn)
    ops = 1
    depth = 0
    for (i = 1; i <= length(insn); i++) {
        c = substr(insn, i, 1)
        depth += (c == "(") - (c == ")")
        if (c == "," && !depth)
            op[++ops] = ""
        else
            op[ops] = op[ops] c
    }
}

# The displacement of a memory operand, or an immediate, as a number.
function number(s,   sign) {
    sub(/^\$/, "", s)
    sub(/\(.*/, "", s)
    sign = s ~ /^-/ ? -1 : 1
    sub(/^-?0x/, "", s)
    if (length(s) == 16)    # negative
        return hex(substr(s, 9)) - 4294967296
    return sign * hex(s)
}

# Where a value can be held: the name of a register, or a stack slot ("b-8" by %rbp, "s8" by
# %rsp); "" for any other operand.
function place(o) {
    if (o in register)
        return register[o]
    if (o ~ /^(-?0x[0-9a-f]+)?\(%rbp\)$/)
        return "b" number(o)
    if (o ~ /^(-?0x[0-9a-f]+)?\(%rsp\)$/)
        return "s" number(o)
    return ""
}

# The register R of an operand (R) or 0x0(R), or of any N(R) if that is asked for; "" for any other operand.
function pointer(o, any) {
    if (o !~ (any ? "^(-?0x[0-9a-f]+)?\\(%r[a-z0-9]+\\)$" : "^(0x0)?\\(%r[a-z0-9]+\\)$"))
        return ""
    gsub(/^[^%]*|\)$/, "", o)
    return register[o]
}

function held(k) {
    return (k != "" && k in hold) ? hold[k] : ""
}

# What an operand's address is: "A" for the variable itself, "G" for a GOT entry of it.
function refers(o,   a) {
    a = ""
    if (o ~ /\(%rip\)$/)
        a = points_at
    else if (fixed && o ~ /^\$?0x[0-9a-f]+$/) {
        a = o
        sub(/^\$?0x/, "", a)
    }
    return a == "" ? "" : a == global ? "A" : (a in is_slot) ? "G" : ""
}

# Does a memory operand reach through the pointer? Then "P", "D" or "M", and "member" is how far behind
# what the variable points to it is. A member that is no array is never reached by an index.
function through(o,   k) {
    k = held(pointer(o, 1))
    if (k !~ /^[PDM]/)
        return ""
    member = substr(k, 2) + number(o)
    return substr(k, 1, 1)
}

# What a move of this operand moves: "A", "P", "D" or "".
function moved(address, o,   r) {
    r = refers(o)
    if (r != "") {
        # Each reference has a walk of its own.
        if (address != origin)
            return ""
        if (o ~ /^\$/)
            return r == "A" ? "A" : ""
        return r == "A" ? "P0" : "A"
    }
    if (held(pointer(o)) == "A")
        return "P0"
    if (o in register && bits[o] != 64)
        return ""
    return held(place(o))
}

# The effect of one instruction that is not a jump.
function step(address,   i, k, n, to, source, what, insn) {
    if (mnemonic ~ /^(nop|endbr64|pause)/ || mnemonic == "xchg" && op[1] == op[2])
        return
    if (mnemonic ~ /^call/) {
        insn = text[address]
        for (k in hold)
            if ((k in scratch) && !survives(insn, k))
                delete hold[k]
        return
    }
    if (mnemonic ~ /^(cmp|test)[bwlq]?$/) {
        for (i = 1; i <= 2; i++)
            if (held(place(op[i])) != "" || held(pointer(op[i])) == "A" || through(op[i]) || refers(op[i]) != "")
                compared = 1
        return
    }
    to = ops ? op[ops] : ""
    source = ops > 1 ? op[1] : ""
    if (through(to) && (ops > 1 || mnemonic ~ /^(inc|dec|neg|not|set|pop|fst|fist)/)) {
        store(address, source)
        return
    }
    what = ""
    if (mnemonic ~ /^mov(q|abs)?$/) {
        what = moved(address, source)
        if (through(source))
            compared = 1        # the value is read
        if (held(pointer(to)) == "A" || refers(to) == "A") {
            # The variable is set: what it is set from is the pointer now.
            compared = 1
            if (bits[source] == 64)
                hold[place(source)] = members ? "P0" : "D0"
        } else if (place(to) == "" && what ~ (members ? "A" : "[AP]"))
            loose(address, "the pointer goes where it cannot be followed")
        if (to in register && bits[to] != 64)
            what = ""
    } else if (mnemonic ~ /^lea/ && refers(source) == "A") {
        if (address == origin)
            what = "A"
    } else if (members && (what = displaced(address, source, to)) == "") {
        if (mnemonic ~ /^xchg/ && (held(place(source)) != "" || held(place(to)) != ""))
            loose(address, "a use of the pointer that is not understood: " mnemonic)
    } else if (!members) {
        # A register that is written only is not read; nor is one that any value makes the same.
        n = (to in register) && !reads_target(source, to) ? ops - 1 : ops
        if (source == to && mnemonic ~ /^(xor|sub|sbb)/)
            n = 0
        for (i = 1; i <= n; i++)
            if (mnemonic !~ /^(push|pop)/ && uses(op[i]))
                loose(address, "a use of the pointer that is not understood: " mnemonic)
    }

    for (k in hold)
        if (overwrites(k))
            delete hold[k]
    if (overwrites("bp"))
        drop_slots("b")
    if (mnemonic ~ /^push/)
        move_stack(-8)
    else if (mnemonic ~ /^popf?q?$/)
        move_stack(8)
    else if (to == "%rsp" && mnemonic ~ /^(add|sub)q?$/ && source ~ /^\$/)
        move_stack((mnemonic ~ /^add/ ? 1 : -1) * number(source))
    else if (to == "%rsp" && mnemonic ~ /^lea/ && source ~ /^[-0-9a-fx]*\(%rsp\)$/)
        move_stack(number(source))
    else if (overwrites("sp"))
        drop_slots("s")
    if (what != "" && place(to) != "")
        hold[place(to)] = what
}

# What an instruction that adds a distance to the pointer leaves in its target ("M": this may be the pointer or
# not); "" for other instructions. gcc -Os goes along a structure so. In a loop over an array that would never end,
# so each instruction adds to three different distances at most.
function displaced(address, source, to,   k, sum) {
    if (mnemonic ~ /^cmov/) {
        k = held(place(source))
        if (k == "")
            k = held(place(to))
        return k == "" ? "" : "M" substr(k, 2)
    }
    if (mnemonic ~ /^lea/ && through(source)) {
        k = held(pointer(source, 1))
        sum = member
    } else if (mnemonic ~ /^(add|sub)q?$/ && source ~ /^\$/ && held(place(to)) ~ /^[PM]/) {
        k = held(place(to))
        sum = substr(k, 2) + (mnemonic ~ /^add/ ? 1 : -1) * number(source)
    } else
        return ""
    if (!((origin, address, k) in displacing)) {
        displacing[origin, address, k] = 1
        displacing[origin, address]++
    }
    return displacing[origin, address] > 3 ? "" : substr(k, 1, 1) sum
}

# A store through the pointer: notes the member's offset, the size and the value, "?" where that is none
# that a probe could show.
function store(address, source,   k, what) {
    what = "?"
    if (mnemonic ~ /^mov[bwlq]$/ && source ~ /^\$/)
        what = "0x" substr(source, 4)
    else if (mnemonic == "mov" && source in register)
        what = "%" register[source]
    else if (mnemonic ~ /^and[lq]$/ && source == "$0x0")     # gcc -Os
        what = "0x0"
    what = member ":" width(source) ":" (through(op[ops]) == "M" ? "?" : what)
    if (index(written[address] " ", " " what " ") == 0)
        written[address] = written[address] " " what
    stored = 1
    if (!members)
        for (k in hold)
            if (hold[k] == "P0")
                hold[k] = "D0"
}

# How many bytes the instruction just parsed stores to memory; 64 where that is not looked up.
function width(source) {
    if (source in register)
        return bits[source] ? bits[source] / 8 : source ~ /[lhb]$/ ? 1 : 2
    if (source ~ /^%xmm/)
        return mnemonic ~ /^v?mov(d|ss)$/ ? 4 : mnemonic ~ /^v?mov(q|sd|[lh]p[sd])$/ ? 8 : 16
    if (mnemonic ~ /^set/)
        return 1
    return mnemonic ~ /b$/ ? 1 : mnemonic ~ /w$/ ? 2 : mnemonic ~ /l$/ ? 4 : mnemonic ~ /q$/ ? 8 : 64
}

# %rsp has moved: slots get other names, or are given back (but for the red zone below it).
function move_stack(distance,   k, i, n, list, what) {
    for (k in hold)
        if (k ~ /^s-?[0-9]/) {
            list[++n] = substr(k, 2) - distance
            what[n] = hold[k]
        }
    if (!n)
        return
    drop_slots("s")
    for (i = 1; i <= n; i++)
        if (list[i] >= -128)
            hold["s" list[i]] = what[i]
}

# Without its base register nobody knows where a slot is.
function drop_slots(base,   k) {
    for (k in hold)
        if (k ~ ("^" base "-?[0-9]"))
            delete hold[k]
}

# Does the instruction just parsed read the register that it writes?
function reads_target(source, to) {
    if (mnemonic ~ /^(and|or)/ && source ~ /^\$0x(0|f+)$/ || mnemonic ~ /^imul/ && ops == 3)
        return 0
    return mnemonic ~ /^(add|adc|sub|sbb|and|or|xor|inc|dec|neg|not|sh[lr]|sa[lr]|ro[lr]|rc[lr]|imul|bt[crs])[bwlqd]?$/ ||
        mnemonic ~ /^(cmov|xchg|xadd|cmpxchg|bswap)/
}

# Does an operand need a value that is held and not yet stored through?
function uses(o,   n, list, i) {
    n = split(o, list, /[(),]/)
    for (i = 1; i <= n; i++)
        if (list[i] in register && held(register[list[i]]) ~ /[AP]/)
            return 1
    return held(place(o)) ~ /[AP]/
}

## Where the probe goes

# The kernel emulates a call, a jump and a push of one register, but steps through a store,
# which costs many times as much. So the probe goes on the next such instruction, if
# control can come to it only from the store and it finds the stored value unchanged.
function print_site(address,   a, kind, at, i) {
    at = address
    kind = "store"
    for (a = address; (a in following) || fetch(a) && (a in following); ) {
        a = following[a]
        # Another store behind this one: the order of the two events would be lost.
        if ((a in jumped_to) || (a in value))
            break
        if (!(a in text) && !fetch(a))
            break
        parse(text[a])
        i = emulated(raw[a])
        if (i == "nop2" && kind == "store") {
            kind = "nop"
            at = a
        } else if (i != "" && i != "nop2") {
            kind = i
            at = a
            break
        }
        if (mnemonic ~ /^(call|j|ret|loop|xbegin|hlt|ud|int|iret|sys)/ || prefix ~ /lock|xacq|xrel/ ||
            value[address] ~ /^%/ && overwrites(substr(value[address], 2)))
            break
    }
    printf "%.0f\t0x%s\t%s\t0x%s\t0x%x\t%s\t%s\t0x%x\n",
        hex(address), address, value[address], at, offset(hex(at)), raw[at], kind, hex(address) + length(raw[address]) / 2
}

# Offset in the file of an address, by way of the segment that loads it.
function offset(address,   i, n, list, part) {
    n = split(loads, list, " ")
    for (i = 1; i <= n; i++) {
        split(list[i], part, ":")
        if (address >= hex(part[1]) && address < hex(part[1]) + hex(part[3]))
            return address - hex(part[1]) + hex(part[2])
    }
}

# What arch/x86/kernel/uprobes.c emulates, by the bytes: a prefix makes it something else.
# Long nops only newer kernels do ("nop2"). One of 5 bytes never: Linux 6.18 replaces it
# by a call, which overwrites what a leaf function keeps below %rsp; of 10 likewise, later.
function emulated(bytes) {
    if (bytes ~ /^e8/ && length(bytes) == 10) return "call"
    if (bytes ~ /^eb/ && length(bytes) == 4 || bytes ~ /^e9/ && length(bytes) == 10) return "jmp"
    if (bytes ~ /^7/ && length(bytes) == 4 || bytes ~ /^0f8/ && length(bytes) == 12) return "jcc"
    if (bytes ~ /^(41)?5[0-7]$/) return "push"
    if (bytes == "90") return "nop"
    if (bytes ~ /^(6690|0f1f00|0f1f4000|660f1f440000|0f1f8000000000|0f1f840000000000|660f1f840000000000)$/)
        return "nop2"
    return ""
}

# Does the instruction just parsed change this register or stack slot, or may it?
function overwrites(k,   i, n, list) {
    if (!ops || mnemonic in unsaid) {
        n = split(unsaid[mnemonic], list, " ")
        for (i = 1; i <= n; i++)
            if (list[i] == k)
                return 1
    }
    if (!ops || mnemonic ~ /^(cmp|test|bt|push|nop)[bwlq]?$/)
        return 0
    if (mnemonic ~ /^i?(mul|div)[bwlq]?$/ && ops == 1)
        return k == "ax" || k == "dx"
    if (op[ops] ~ /:\(%rdi\)/ || op[1] ~ /:\(%rsi\)/)     # strings
        return k == "cx" || k == "di" || k == "si" && op[1] ~ /rsi/ || k == "ax" && mnemonic ~ /^lods/
    return place(op[ops]) == k || mnemonic ~ /^(xchg|xadd|mulx)/ && place(op[ops - 1]) == k
}
