# Turns what `perf script` prints of a hardware breakpoint into writes with their values. Reads, on
# one input, perf's lines (-F pid,tid,time,ip,uregs --ns --show-task-events --show-lost-events) and those of
# waitfold-watch itself:
#
#     start NS PID...          perf records since NS; the server's processes then
#     title PID TITLE
#     second NS HH:MM:SS       a second has passed
#     end NS                   all of perf's lines have come
#
# Variables: what (xid, oid or value), about (what is watched, for people), address and size (of the watched word,
# decimal), exe (a path to the server's file), base (what its addresses are shifted by in memory), shared
# (1: one word for all processes; 0: each process has its own), server (pid), only (pids, or empty), each (1: a
# line a write).
#
# A sample shows the instruction after the store and all registers. The store itself is disassembled. Its value is
# an immediate or in a register; or it adds to what was there, which then must be known: by an earlier store, by a
# load where those are sampled too, or read from the process's memory (see measure). What cannot be known is "-".
#
# For mawk and gawk: no strtonum, and no number beyond 2^53: wider values stay hexadecimal digits.

BEGIN {
    for (i = split("a b c d", list, " "); i; i--)
        register_names("%r" list[i] "x", "%e" list[i] "x", "%" list[i] "x", "%" list[i] "l", toupper(list[i]) "X")
    for (i = split("si di bp sp", list, " "); i; i--)
        register_names("%r" list[i], "%e" list[i], "%" list[i], "%" list[i] "l", toupper(list[i]))
    for (i = 8; i < 16; i++)
        register_names("%r" i, "%r" i "d", "%r" i "w", "%r" i "b", "R" i)
    suffixed["b"] = 1; suffixed["w"] = 2; suffixed["l"] = 4; suffixed["q"] = 8

    MODULUS = 2 ^ (8 * size)
    EXACT = 2 ^ 53
    MEMORY = 2 ^ 48                 # addresses are counted modulo this, which is all of user space
    n = split(only, list, ",")
    for (i = 1; i <= n; i++)
        chosen[list[i]] = 1
    noun = what == "value" ? "writes" : what "s"
}

# A title may hold anything.
$1 == "title" {
    pid = $2
    sub(/^title [0-9]+ (postgres: )?/, "")
    title[pid] = $0
    next
}

$2 ~ /:$/ && $3 ~ /^[0-9a-f]+$/ {
    split($1, part, "/")
    # perf may write a record twice, the second time later.
    if (part[2] in latest && ($2 == latest[part[2]] || $2 + 0 < latest[part[2]] + 0))
        next
    latest[part[2]] = $2
    if (!(part[1] in mine)) {
        others++
        next
    }
    if (!($3 in kind))
        learn($3)
    wrote(part[1], $2 + 0, $3)
}

$1 == "start" {
    started = then = $2 / 1e9
    for (i = 3; i <= NF; i++) {
        mine[$i] = 1
        if (!shared)
            measure($i)
    }
    if (shared)
        measure("")
    # From now on every write comes after these readings.
    for (k in until)
        while (now() <= until[k]);
    print about >"/dev/stderr"
    if (each)
        print "seconds\tpid\t" what
    next
}

$1 == "second" {
    if (!each)
        show_second($2 / 1e9 - then, $3)
    then = $2 / 1e9
    # Those that were added to from an unknown value on.
    for (k in wanted)
        measure(k)
    fflush()
    next
}

$1 == "end" {
    elapsed = $2 / 1e9 - started
    whole = 1
    next
}

$3 ~ /^PERF_RECORD_FORK/ {
    split($3, part, /[():]+/)
    if (part[2] != part[4] && part[4] == server)
        born(part[2], $2 + 0)
    next
}

$3 ~ /^PERF_RECORD_EXIT/ {
    split($3, part, /[():]+/)
    delete latest[part[3]]
    if (part[2] == part[3])
        delete mine[part[2]]
    next
}

$3 ~ /^PERF_RECORD_LOST/ {
    lost += $NF
    # What was added there is not known.
    for (k in current)
        forget(k)
    next
}

END {
    if (whole)
        show_all()
}

# One register: what objdump calls all of it and its lower parts, and what perf calls it.
function register_names(of8, of4, of2, of1, perf_name) {
    width[of8] = 8; width[of4] = 4; width[of2] = 2; width[of1] = 1
    sampled[of8] = sampled[of4] = sampled[of2] = sampled[of1] = perf_name
}

# Four digits at a time, which are remembered: this is where most of the time goes.
function hex(s,   v, n, four) {
    v = 0
    while (n = length(s)) {
        four = substr(s, 1, (n - 1) % 4 + 1)
        if (!(four in number))
            number[four] = hex4(four)
        v = v * 65536 + number[four]
        s = substr(s, length(four) + 1)
    }
    return v
}

function hex4(s,   i, v) {
    v = 0
    for (i = 1; i <= length(s); i++)
        v = v * 16 + index("123456789abcdef", substr(s, i, 1))
    return v
}

# CLOCK_MONOTONIC in seconds, as perf's times are; "" where the kernel does not say.
function now(   line, word) {
    word[3] = ""
    while ((getline line <"/proc/timer_list") > 0)
        if (line ~ /^now at /) {
            split(line, word, " ")
            break
        }
    close("/proc/timer_list")
    return word[3] == "" ? "" : word[3] / 1e9
}

## What was stored

# Takes the instruction before an address in memory apart: sets kind (set, add, cmpxchg, load, read or unknown), source (its
# other operand), bytes (how many it writes) and where in memory: fixed, or offset, first, second and factor.
function learn(ip,   at, from, cmd, line, field, last, insn, i, mnemonic, to, part) {
    kind[ip] = "unknown"
    at = hex(ip) - base
    from = function_before(at)
    if (from == "")
        return
    cmd = sprintf("objdump -dw --start-address=0x%x --stop-address=0x%x %s 2>/dev/null", from, at, exe)
    while ((cmd | getline line) > 0)
        if (split(line, field, "\t") >= 3)
            last = line
    close(cmd)
    split(last, field, "\t")
    gsub(/[ :]/, "", field[1])
    gsub(/ /, "", field[2])
    if (hex(field[1]) + length(field[2]) / 2 != at)
        return
    insn = field[3]
    sub(/ *<.*/, "", insn)
    if (i = index(insn, "# ")) {
        fixed[ip] = base + hex(substr(insn, i + 2))
        insn = substr(insn, 1, i - 1)
    }
    sub(/^(lock +|data16 +|notrack +|rex[.A-Z]* +)*/, "", insn)
    gsub(/ +$/, "", insn)
    i = index(insn, " ")
    mnemonic = i ? substr(insn, 1, i - 1) : insn
    insn = substr(insn, length(mnemonic) + 1)
    gsub(/ /, "", insn)

    # The target is the last operand; a comma within parentheses is its own.
    if (match(insn, /(^|,)([cdes]s:)?(-?0x[0-9a-f]+)?(\([^)]*\))?$/)) {
        to = substr(insn, RSTART)
        sub(/^,/, "", to)
        source[ip] = substr(insn, 1, RSTART - 1)
    } else {
        match(insn, /,%[a-z0-9]+$/)
        to = substr(insn, 1, RSTART - 1)
        source[ip] = substr(insn, RSTART + 1)
        kind[ip] = mnemonic == "mov" && (source[ip] in width) ? "load" : "read"
    }
    if (mnemonic ~ /^(cmp|test)[bwlq]?$/)
        kind[ip] = "read"
    sub(/^[cdes]s:/, "", to)
    if (to !~ /\(/)
        fixed[ip] = hex(substr(to, 3))
    else if (!(ip in fixed)) {
        i = index(to, "(")
        offset[ip] = (to ~ /^-/ ? -1 : 1) * hex(substr(to, index(to, "x") + 1, i - 1 - index(to, "x")))
        split(substr(to, i + 1, length(to) - i - 1), part, ",")
        first[ip] = part[1]
        second[ip] = part[2]
        factor[ip] = part[3] == "" ? 1 : part[3]
    }

    if (source[ip] in width)
        bytes[ip] = width[source[ip]]
    else
        bytes[ip] = suffixed[substr(mnemonic, length(mnemonic))]
    if (kind[ip] != "unknown" || bytes[ip] == "" || source[ip] !~ /^(%[a-z0-9]+|\$0x[0-9a-f]+)?$/ || source[ip] ~ /^%/ && !(source[ip] in width))
        return
    if (mnemonic ~ /^(mov|movnti|mov[bwlq])$/)
        kind[ip] = "set"
    else if (mnemonic ~ /^(add|sub|inc|dec)[bwlq]?$/) {
        kind[ip] = "add"
        sign[ip] = mnemonic ~ /^(add|inc)/ ? 1 : -1
        if (source[ip] == "")
            source[ip] = "$0x1"
    } else if (mnemonic ~ /^cmpxchg[bwlq]?$/)
        kind[ip] = "cmpxchg"
}

# Where to disassemble from: the last function that the binary names before an address; "" outside of its code.
function function_before(at,   cmd, line, field, i, last) {
    if (!functions) {
        cmd = "readelf -lsW " exe " 2>/dev/null"
        while ((cmd | getline line) > 0) {
            split(line, field, " ")
            if (field[1] == "LOAD" && line ~ / R E /) {
                code_from = hex(substr(field[3], 3))
                code_to = code_from + hex(substr(field[6], 3))
            } else if (field[4] == "FUNC" && field[7] != "UND")
                starts[++functions] = hex(field[2])
        }
        close(cmd)
    }
    if (at <= code_from || at > code_to)
        return ""
    last = code_from
    for (i = 1; i <= functions; i++)
        if (starts[i] < at && starts[i] > last)
            last = starts[i]
    return last
}

# A register's digits, as perf names it, in the sample that is the current line.
function register(name,   at, s) {
    at = index($0, " " name ":0x")
    s = substr($0, at + length(name) + 4, 17)
    return at ? substr(s, 1, index(s " ", " ") - 1) : ""
}

# The lowest 48 bits of a register: what an address is made of.
function low(name) {
    return hex(digits(name, 6))
}

# How far into what the instruction writes the watched word begins; negative or too far where it does not write all of it.
function shift(ip,   to) {
    if (ip in fixed)
        to = fixed[ip]
    else {
        to = offset[ip]
        if (first[ip] in sampled)
            to += low(first[ip])
        if (second[ip] in sampled)
            to += low(second[ip]) * factor[ip]
        to -= MEMORY * int(to / MEMORY)
        if (to < 0)
            to += MEMORY
    }
    return address - to
}

# An operand as hexadecimal digits, as many as the instruction writes.
function digits(operand, count) {
    operand = operand ~ /^\$/ ? substr(operand, 4) : register(sampled[operand])
    operand = "0000000000000000" operand
    return substr(operand, length(operand) - 2 * count + 1)
}

# The value that this sample's store left, in decimal, or in hexadecimal from 2^53 on, or "-"; "" when it is no
# store. K is whose memory it is in.
function value(ip, k,   skip, s, v) {
    if (kind[ip] == "read")
        return ""
    skip = shift(ip)
    if (kind[ip] == "load") {
        s = substr(digits(source[ip], bytes[ip]), 2 * (bytes[ip] - skip - size) + 1, 2 * size)
        if (skip >= 0 && skip + size <= bytes[ip] && hex(s) < EXACT)
            found_out(k, hex(s))
        return ""
    }
    if (kind[ip] == "unknown" || skip < 0 || skip + size > bytes[ip] || kind[ip] != "set" && bytes[ip] != size) {
        forget(k)
        return "-"
    }
    if (kind[ip] == "add") {
        s = digits(source[ip], bytes[ip])
        # A negative number of 64 bits.
        v = s ~ /^ffffffff/ && bytes[ip] == 8 ? hex(substr(s, 9)) - 2 ^ 32 : hex(s)
        if (v >= EXACT) {
            forget(k)
            return "-"
        }
        current[k] += sign[ip] * v
        if (!(k in known)) {
            wanted[k] = 1
            return "-"
        }
        wrap(k)
        return sprintf("%.0f", current[k])
    }
    s = source[ip]
    # cmpxchg stores nothing new when what is there is not what it found in %rax before.
    if (kind[ip] == "cmpxchg" && int(hex(register("FLAGS")) / 64) % 2 == 0)
        s = "%rax"
    s = digits(s, bytes[ip])
    s = substr(s, 2 * (bytes[ip] - skip - size) + 1, 2 * size)
    v = hex(s)
    if (v >= EXACT) {
        forget(k)
        return "0x" s
    }
    found_out(k, v)
    return sprintf("%.0f", v)
}

function found_out(k, v) {
    forget(k)
    delete wanted[k]
    known[k] = 1
    current[k] = v
}

function wrap(k) {
    current[k] -= MODULUS * int(current[k] / MODULUS)
    if (current[k] < 0)
        current[k] += MODULUS
    if (current[k] >= EXACT)
        forget(k)
}

## What was there before
# For memory that was only added to since we look, current[k] is the sum of what was added. The
# memory is read, and the times before and after taken. The sum was what it was at some time between the two, so that the
# value before it all lies between two bounds; they are one when nothing was written in that time, else the next
# reading narrows them.

function forget(k) {
    delete known[k]
    delete asked[k]
    delete least[k]
    delete most[k]
    delete lower[k]
    delete upper[k]
    current[k] = 0
}

function measure(k,   from, cmd, s) {
    if (k in asked)
        return
    from = now()
    cmd = sprintf("dd if=/proc/%d/mem bs=%d skip=%.0f count=1 2>/dev/null | od -An -v -t x%d", k == "" ? server : k, size, address / size, size)
    s = ""
    cmd | getline s
    close(cmd)
    gsub(/ /, "", s)
    if (from == "" || s == "" || hex(s) >= EXACT)
        return
    asked[k] = hex(s)
    since[k] = from
    # A store is seen before its sample is timed; the processor may be taken away in between.
    until[k] = now() + 0.001
}

# Makes use of a reading when all writes up to its end have been seen.
function settle(k, time,   from, to) {
    if (!(k in asked) || time <= until[k])
        return
    if (!(k in least))
        least[k] = most[k] = current[k]
    from = asked[k] - most[k]
    to = asked[k] - least[k]
    if (k in lower && lower[k] > from)
        from = lower[k]
    if (k in upper && upper[k] < to)
        to = upper[k]
    delete asked[k]
    delete least[k]
    delete most[k]
    lower[k] = from
    upper[k] = to
    if (from == to) {
        known[k] = 1
        current[k] += from
        wrap(k)
        delete wanted[k]
    } else if (from > to) {
        delete lower[k]
        delete upper[k]
    }
}

# A new process has a copy of the server's memory.
function born(pid, time) {
    mine[pid] = 1
    if (shared)
        return
    settle(server, time)
    forget(pid)
    delete wanted[pid]
    if (server in known) {
        known[pid] = 1
        current[pid] = current[server]
    }
}

## Counting

function wrote(pid, time, ip,   k, v) {
    k = shared ? "" : pid
    settle(k, time)
    if (k in asked && time >= since[k] && !(k in least))
        least[k] = most[k] = current[k]
    v = value(ip, k)
    if (k in known) {
        delete asked[k]
        delete least[k]
    } else if (k in least) {
        if (current[k] < least[k]) least[k] = current[k]
        if (current[k] > most[k]) most[k] = current[k]
    }
    if (v == "" || only != "" && !(pid in chosen))
        return
    if (what != "value" && v != "-") {
        v = handed_out(v + 0)
        if (v == "") {
            steps++
            return
        }
        follow(v)
    }
    v = shown(v)
    count[pid]++
    writes++
    recent++
    busy[pid] = 1
    if (v == "-") {
        unknown[pid]++
        unknowns++
        recent_unknown++
    }
    if (!(pid in earliest) || earliest[pid] == "-")
        earliest[pid] = v
    last_value[pid] = v
    if (recent == 1)
        recent_first = v
    recent_last = v
    if (each)
        printf "%.6f\t%d\t%s\n", time - started, pid, v
}

# What a backend got when it left this in nextXid or nextOid: the number before it. "" for what is stored on the way past
# the numbers that are never handed out: xids 0 to 2, oids below 16384 (access/transam.h, varsup.c).
function handed_out(v) {
    if (what == "oid")
        return v == 0 ? 2 ^ 32 - 1 : v == 16384 ? "" : v - 1
    if (v % 2 ^ 32 == 3)
        v -= 3
    else if (v % 2 ^ 32 < 3)
        return ""
    return v > 0 ? v - 1 : size == 4 ? 2 ^ 32 - 1 : ""
}

# Numbers that are handed out follow one another. The highest so far is all that is kept of them.
function follow(v) {
    if (highest == "")
        lowest = v
    else if (size == 4 && highest - v > 2 ^ 31 || int(v / 2 ^ 32) > int(highest / 2 ^ 32)) {
        wraps++
        skipped += size == 8 && v - highest > 4 ? v - highest - 4 : 0
    } else if (v <= highest) {
        backwards++
        return
    } else
        skipped += v - highest - 1
    highest = v
    distinct++
}

# A value as people see it: numbers from 2^40 on are addresses more often than counts.
function shown(v) {
    if (v ~ /^(-|0x)/)
        return v
    if (what == "value" && v + 0 >= 2 ^ 40)
        return sprintf("0x%x%08x", int(v / 2 ^ 32), v % 2 ^ 32)
    return sprintf("%.0f", v)
}

## Showing

function show_second(seconds, clock,   n, pid) {
    if (!lines++)
        printf "%-8s %9s %9s %18s %18s %9s\n", "TIME", toupper(noun) "/S", "PROCESSES", "FIRST", "LAST", "UNKNOWN"
    n = 0
    for (pid in busy)
        n++
    printf "%-8s %9.0f %9d %18s %18s %9s\n", clock, recent / seconds, n, n ? recent_first : "-", n ? recent_last : "-", recent_unknown + 0
    recent = recent_unknown = 0
    for (pid in busy)
        delete busy[pid]
}

function show_all(   sort, pid) {
    printf "%s%7s %8s %8s %14s %14s %7s  %s\n", each || lines ? "\n" : "", "PID", toupper(noun), "PER S", "FIRST", "LAST", "UNKNOWN", "PROCESS"
    fflush()
    sort = "sort -k2,2nr -k1,1n"
    for (pid in count)
        printf "%7d %8d %8.1f %14s %14s %7d  %.15s\n", pid, count[pid], count[pid] / elapsed,
            earliest[pid], last_value[pid], unknown[pid], pid in title ? title[pid] : "-" | sort
    close(sort)
    printf "%d %s in %.1f s, %.1f per second\n", writes, writes == 1 ? substr(noun, 1, length(noun) - 1) : noun, elapsed, writes / elapsed
    if (highest != "" && only == "")
        printf "%d distinct, %.0f to %.0f; %d skipped, %d backwards or again, %d wrapped around\n",
            distinct, lowest, highest, skipped, backwards, wraps
    if (unknowns)
        printf "%d with a value that cannot be told from the store\n", unknowns
    if (steps)
        printf "%d writes that hand out none (numbers that are passed over)\n", steps
    if (lost)
        printf "%d samples lost by perf: too many writes at once\n", lost
    if (others)
        printf "%d writes by processes that are not of this server, to the same address\n", others
}
