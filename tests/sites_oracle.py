"""Stores through a global pointer, by data flow over whole functions: what sites.awk must find.

The awk walks forward from each reference over objdump's text. This one takes functions from
.eh_frame, their instructions and the registers they change from capstone, and solves what each
register and stack slot holds at every instruction, joining over all ways to it. So it also tells
where the ways disagree, which a walk along single paths cannot see.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass
from pathlib import Path

import capstone
from capstone import x86_const as x86

# Registers by name, stack slots as (base, displacement), and "stack": how far %rsp has moved.
Place = str | tuple[str, int]
State = dict[Place, str]

# What a function may change (System V ABI), if nothing better is known of it.
SCRATCH = frozenset({"rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11"})


@dataclass
class Section:
    """One section of an ELF file."""

    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int


class Elf:
    """As much of a 64-bit little-endian ELF file as is needed here."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.fixed = struct.unpack_from("<H", self.data, 16)[0] == 2
        at, count, names = (
            struct.unpack_from("<Q", self.data, 40)[0],
            *struct.unpack_from("<HH", self.data, 60),
        )
        raw = [struct.unpack_from("<IIQQQQIIQQ", self.data, at + 64 * i) for i in range(count)]
        base = raw[names][4]
        self.sections = [
            Section(self._text(base + r[0]), r[1], r[2], r[3], r[4], r[5], r[6]) for r in raw
        ]
        head, heads = (
            struct.unpack_from("<Q", self.data, 32)[0],
            struct.unpack_from("<H", self.data, 56)[0],
        )
        self.loads = []
        for i in range(heads):
            kind, _, offset, address, _, size = struct.unpack_from(
                "<IIQQQQ", self.data, head + 56 * i
            )
            if kind == 1:
                self.loads.append((address, offset, size))

    def _text(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def section(self, name: str) -> Section | None:
        """Return the section of this name."""
        return next((s for s in self.sections if s.name == name), None)

    def contents(self, s: Section) -> bytes:
        """Return a section's bytes."""
        return self.data[s.offset : s.offset + s.size]

    def offset(self, address: int) -> int:
        """Return where in the file an address is loaded from."""
        for start, offset, size in self.loads:
            if start <= address < start + size:
                return int(address - start + offset)
        raise ValueError(hex(address))

    def bytes_at(self, address: int, size: int) -> bytes:
        """Return what is loaded at an address."""
        at = self.offset(address)
        return self.data[at : at + size]

    def symbol(self, name: str, kind: int = 1) -> int:
        """Return the address of a symbol, 0 if there is none; kind 1 is data, 2 a function."""
        for table in self.sections:
            if table.kind not in (2, 11):
                continue
            strings = self.sections[table.link]
            for at in range(table.offset, table.offset + table.size, 24):
                label, info, _, part, value, _ = struct.unpack_from("<IBBHQQ", self.data, at)
                if info & 15 == kind and part and self._text(strings.offset + label) == name:
                    return int(value)
        return 0

    def got_entries(self, address: int) -> set[int]:
        """Return where the global offset table holds an address."""
        found = set()
        for s in self.sections:
            if s.name.startswith(".got"):
                words = struct.unpack(f"<{s.size // 8}Q", self.contents(s)[: s.size // 8 * 8])
                found |= {s.address + 8 * i for i, word in enumerate(words) if word == address}
        for s in self.sections:
            if s.kind == 4:
                for at in range(s.offset, s.offset + s.size, 24):
                    where, info, addend = struct.unpack_from("<QQq", self.data, at)
                    if info & 0xFFFFFFFF == 8 and addend == address and self.in_got(where):
                        found.add(where)
        return found

    def in_got(self, address: int) -> bool:
        """Tell whether an address lies in the global offset table."""
        return any(
            s.name.startswith(".got") and s.address <= address < s.address + s.size
            for s in self.sections
        )

    def relocated(self) -> set[int]:
        """Return all addresses that relocations put into data."""
        found = set()
        for s in self.sections:
            if s.kind == 4:
                for at in range(s.offset, s.offset + s.size, 24):
                    _, info, addend = struct.unpack_from("<QQq", self.data, at)
                    if info & 0xFFFFFFFF == 8:
                        found.add(addend)
        return found

    def functions(self) -> list[tuple[int, int]]:
        """Return first address and end of each function or part of one, from .eh_frame."""
        s = self.section(".eh_frame")
        assert s is not None
        found, encodings, at, end = [], {}, s.offset, s.offset + s.size
        while at < end:
            length = struct.unpack_from("<I", self.data, at)[0]
            if length == 0:
                at += 4
                continue
            body, identity = at + 4, struct.unpack_from("<I", self.data, at + 4)[0]
            if identity == 0:
                augmentation = self._text(body + 5)
                p = body + 5 + len(augmentation) + 1
                for _ in range(3):  # code alignment, data alignment, return register
                    while self.data[p] & 128:
                        p += 1
                    p += 1
                p += 1  # length of what follows
                encodings[at] = 0
                for letter in augmentation[1:]:
                    if letter == "R":
                        encodings[at] = self.data[p]
                        p += 1
                    elif letter == "P":
                        p += 1 + (8 if self.data[p] & 15 in (0, 4, 12) else 4)
                    elif letter == "L":
                        p += 1
            else:
                code = encodings[body - identity]
                form = {0: "<qq", 4: "<qq", 12: "<qq", 3: "<iI", 11: "<iI"}[code & 15]
                start, size = struct.unpack_from(form, self.data, body + 4)
                if code & 0x70 == 0x10:
                    start += s.address + body + 4 - s.offset
                found.append((start, start + size))
            at = body + length
        return sorted(found)


def full(name: str) -> str:
    """Return the 64-bit register that a register is part of."""
    if name[:1] == "r" and name[1:2].isdigit():
        return name.rstrip("dwb")
    stem = name[1:] if len(name) == 3 and name[0] in "re" else name
    if len(stem) == 2 and stem[0] in "abcd" and stem[1] in "lhx":
        return f"r{stem[0]}x"
    return f"r{stem[:2]}" if stem[:2] in ("si", "di", "bp", "sp") else name


class Oracle:
    """The stores through the pointer that a global of an executable holds.

    With `events`, the values that wait events have, the pointer is to a structure, and the
    stores are those to its member that most of these values are stored to.

    Attributes
    ----------
    field : distance of what is stored to from what the pointer points to
    stores : address of each store -> "0x..." or "%register", as in sites.tsv
    doubtful : addresses of stores through what holds the pointer on some of the ways only
    references : addresses of all instructions that name the variable or its GOT entry
    """

    def __init__(self, path: Path, symbol: str, events: frozenset[int] = frozenset()) -> None:
        self.elf = Elf(path)
        self.disassembler = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        self.disassembler.detail = True
        self.variable = self.elf.symbol(symbol)
        self.slots = self.elf.got_entries(self.variable)
        self.functions = self.elf.functions()
        self.starts = [start for start, _ in self.functions]
        self.cache: dict[int, dict[int, capstone.CsInsn]] = {}
        self.changes: dict[int, frozenset[str]] = {}
        self.targets = self.elf.relocated()
        self.named: set[int] = set()
        self.references: set[int] = set()
        self._sweep()
        self.raising = {self.elf.symbol(name, 2) for name in ("elog_finish", "errfinish")}
        self.stores: dict[int, str] = {}
        self.doubtful: set[int] = set()
        # Of each store of each distance: address, size, value; "?" for no distance known.
        self.written: dict[int, list[tuple[int, int, str]]] = {}
        self.unsure: list[tuple[int, int, int]] = []
        self._solve()
        self.field = self._find_field(events) if events else 0
        self._choose()

    def _sweep(self) -> None:
        """Note direct jump targets and references in all code."""
        lite = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        wanted = {self.variable} | self.slots
        words = [hex(address) for address in wanted]
        for start, end in self.functions:
            for at, size, name, operands in lite.disasm_lite(
                self.elf.bytes_at(start, end - start), start
            ):
                if name[0] in "jlb" and operands.startswith("0x"):
                    self.targets.add(int(operands, 16))
                elif name == "jmp" and "*8 + 0x" in operands:
                    self.named.add(int(operands.rpartition("+")[2].rstrip("]"), 16))
                elif "[rip" in operands:
                    distance = operands.partition("[rip")[2].partition("]")[0].replace(" ", "")
                    address = at + size + int(distance or "0", 16)
                    if address in wanted:
                        self.references.add(at)
                    if name == "lea":
                        self.named.add(address)
                elif self.elf.fixed and any(word in operands for word in words):
                    self.references.add(at)

    def function_of(self, address: int) -> int:
        """Return the index in `functions` of the one that an address lies in, or -1."""
        i = bisect.bisect_right(self.starts, address) - 1
        return i if i >= 0 and address < self.functions[i][1] else -1

    def code(self, index: int) -> dict[int, capstone.CsInsn]:
        """Return a function's instructions by address."""
        if index not in self.cache:
            start, end = self.functions[index]
            self.cache[index] = {
                insn.address: insn
                for insn in self.disassembler.disasm(self.elf.bytes_at(start, end - start), start)
            }
        return self.cache[index]

    def changed_by(self, index: int) -> frozenset[str]:
        """Return the scratch registers that a function and those that it calls may change.

        A caller in the same file may count on the others (gcc's -fipa-ra).
        """
        if index in self.changes:
            return self.changes[index]
        self.changes[index] = frozenset()  # for a function that calls itself
        changed: set[str] = set()
        if index < 0 or self.is_stub(index):
            changed |= SCRATCH
        todo, been = ([] if changed else [self.functions[index][0]]), set()
        while todo and not changed >= SCRATCH:
            address = todo.pop()
            insn = self.code(self.function_of(address)).get(address)
            if address in been or insn is None:
                continue
            been.add(address)
            ops = insn.operands
            branch = insn.group(x86.X86_GRP_CALL) or insn.group(x86.X86_GRP_JUMP)
            if branch and ops[0].type != x86.X86_OP_IMM or insn.id == x86.X86_INS_SYSCALL:
                changed |= SCRATCH
            elif insn.group(x86.X86_GRP_CALL):
                changed |= self.changed_by(self.function_of(ops[0].imm))
            elif insn.group(x86.X86_GRP_JUMP):
                todo.append(ops[0].imm)
            changed |= {full(insn.reg_name(r)) for r in insn.regs_access()[1]} & SCRATCH
            if not insn.group(x86.X86_GRP_RET) and insn.id != x86.X86_INS_JMP:
                todo.append(address + insn.size)
        self.changes[index] = frozenset(changed)
        return self.changes[index]

    def is_stub(self, index: int) -> bool:
        """Tell whether a function lies in the procedure linkage table."""
        return any(
            s.name.startswith(".plt") and s.address <= self.starts[index] < s.address + s.size
            for s in self.elf.sections
        )

    def through_table(self, insn: capstone.CsInsn) -> bool:
        """Tell whether an indirect jump goes through a table; else it is a call before a return."""
        op = insn.operands[0]
        if op.type == x86.X86_OP_MEM:
            return bool(op.mem.scale == 8)
        code = self.code(self.function_of(insn.address))
        for size in range(1, 16):
            before = code.get(insn.address - size)
            if before is not None and before.size == size:
                return bool(before.id == x86.X86_INS_ADD and before.operands[0].reg == op.reg)
        return False

    def leads_to(self, insn: capstone.CsInsn, state: State) -> list[int]:
        """Return where a jump through a table goes: by its table if that is known, else by any."""
        index, op = self.function_of(insn.address), insn.operands[0]
        if op.type == x86.X86_OP_REG:
            held = state.get(full(insn.reg_name(op.reg)), "")
            if held.startswith("table "):
                base = int(held.split()[1])
                return self._entries(base, index, "<i", base)
        elif not op.mem.base:
            return self._entries(op.mem.disp, index, "<Q", 0)
        return self.table(index)

    def table(self, index: int) -> list[int]:
        """Return what a function's jump tables point to, as far as it lies in that function."""
        found = []
        for insn in self.code(index).values():
            for op in insn.operands:
                if op.type != x86.X86_OP_MEM:
                    continue
                if insn.id == x86.X86_INS_LEA and op.mem.base == x86.X86_REG_RIP:
                    base = insn.address + insn.size + op.mem.disp
                    found += self._entries(base, index, "<i", base)
                elif insn.group(x86.X86_GRP_JUMP) and op.mem.scale == 8 and not op.mem.base:
                    found += self._entries(op.mem.disp, index, "<Q", 0)
        return found

    def _entries(self, at: int, index: int, form: str, base: int) -> list[int]:
        # A table ends where code names something else, or where an entry leads out of the function.
        found: list[int] = []
        size = struct.calcsize(form)
        while not found or at not in self.named:
            try:
                target = base + struct.unpack(form, self.elf.bytes_at(at, size))[0]
            except (ValueError, struct.error):
                return found
            if self.function_of(target) != index or target not in self.code(index):
                return found
            found.append(target)
            at += size
        return found

    def _solve(self) -> None:
        """Find what holds the pointer before each instruction, and so the stores through it."""
        before: dict[int, State] = {}
        work: list[int] = []

        def reach(address: int, state: State) -> None:
            old = before.get(address)
            new = dict(state) if old is None else join(old, state)
            if new != old:
                before[address] = new
                work.append(address)

        for index in {self.function_of(address) for address in self.references}:
            reach(self.functions[index][0], {"stack": "0"})
        while work:
            address = work.pop()
            index = self.function_of(address)
            insn = self.code(index).get(address) if index >= 0 else None
            if insn is None:
                continue
            state = before[address]
            after = self._after(insn, dict(state))
            if insn.group(x86.X86_GRP_RET) or insn.id in (x86.X86_INS_UD2, x86.X86_INS_HLT):
                continue
            if insn.group(x86.X86_GRP_JUMP):
                if insn.operands[0].type == x86.X86_OP_IMM:
                    reach(insn.operands[0].imm, after)
                elif self.through_table(insn):
                    for target in self.leads_to(insn, state):
                        reach(target, after)
                if insn.id == x86.X86_INS_JMP:
                    continue
            follows = address + insn.size
            if follows < self.functions[index][1] and not self._ends(insn):
                reach(follows, after)
        for address, state in before.items():
            insn = self.code(self.function_of(address)).get(address)
            if insn is not None:
                self._note_store(insn, state)

    def _ends(self, insn: capstone.CsInsn) -> bool:
        """Tell whether a call raises an error: then nothing but padding is behind it."""
        if not insn.group(x86.X86_GRP_CALL) or insn.operands[0].type != x86.X86_OP_IMM:
            return False
        behind = self.code(self.function_of(insn.address)).get(insn.address + insn.size)
        padded = behind is not None and behind.id == x86.X86_INS_NOP
        return padded and insn.operands[0].imm in self.raising

    def _names(self, insn: capstone.CsInsn, op: capstone.x86.X86Op) -> str:
        """Return "A" for an operand that is the variable, "G" for its GOT entry, else ""."""
        if op.type == x86.X86_OP_IMM and self.elf.fixed:
            address = op.imm
        elif op.type == x86.X86_OP_MEM and op.mem.base == x86.X86_REG_RIP:
            address = insn.address + insn.size + op.mem.disp
        elif op.type == x86.X86_OP_MEM and not op.mem.base and not op.mem.index:
            address = op.mem.disp
        else:
            return ""
        return "A" if address == self.variable else "G" if address in self.slots else ""

    def _place(self, insn: capstone.CsInsn, op: capstone.x86.X86Op, state: State) -> Place | None:
        """Return the key in a state of a register or a stack slot; None for other operands."""
        if op.type == x86.X86_OP_REG:
            return full(insn.reg_name(op.reg))
        if op.type == x86.X86_OP_MEM and not op.mem.index:
            if op.mem.base == x86.X86_REG_RBP:
                return ("rbp", op.mem.disp)
            if op.mem.base == x86.X86_REG_RSP and state["stack"] != "?":
                return ("rsp", op.mem.disp + int(state["stack"]))
        return None

    def _value(self, insn: capstone.CsInsn, op: capstone.x86.X86Op, state: State) -> str:
        """Return what an operand of 8 bytes holds."""
        named = self._names(insn, op)
        if named:
            if op.type == x86.X86_OP_IMM:
                return "A" if named == "A" else ""
            return "P0" if named == "A" else "A"
        if op.type == x86.X86_OP_MEM and not op.mem.index and not op.mem.disp:
            held = state.get(full(insn.reg_name(op.mem.base) or ""), "")
            if held == "A":
                return "P0"
        place = self._place(insn, op, state)
        return state.get(place, "") if place is not None and op.size == 8 else ""

    def _after(self, insn: capstone.CsInsn, state: State) -> State:
        """Return the state behind an instruction."""
        ops = insn.operands
        value = ""
        if insn.id in (x86.X86_INS_MOV, x86.X86_INS_MOVABS) and ops[0].size == 8:
            value = self._value(insn, ops[1], state)
        elif insn.id == x86.X86_INS_LEA and ops[1].mem.base == x86.X86_REG_RIP:
            address = insn.address + insn.size + ops[1].mem.disp
            value = "A" if address == self.variable else f"table {address}"
        elif insn.id == x86.X86_INS_LEA and not ops[1].mem.index:
            held = state.get(full(insn.reg_name(ops[1].mem.base)), "")
            if held[:1] == "P":
                value = f"P{int(held[1:]) + ops[1].mem.disp}"
        elif insn.id in (x86.X86_INS_ADD, x86.X86_INS_SUB) and ops[1].type == x86.X86_OP_IMM:
            held = self._value(insn, ops[0], state)
            if held[:1] == "P":
                sign = 1 if insn.id == x86.X86_INS_ADD else -1
                value = f"P{int(held[1:]) + sign * ops[1].imm}"
        elif insn.group(x86.X86_GRP_CMOV):
            if "P" in {self._value(insn, op, state)[:1] for op in ops}:
                value = "?"
        elif insn.id == x86.X86_INS_ADD:
            both = {self._value(insn, op, state) for op in ops}
            value = next((v for v in both if v.startswith("table ")), "")
        stack = state["stack"]
        if insn.group(x86.X86_GRP_CALL):
            changed = SCRATCH
            if ops[0].type == x86.X86_OP_IMM:
                changed = self.changed_by(self.function_of(ops[0].imm))
            return {k: v for k, v in state.items() if k not in changed}
        target = self._place(insn, ops[0], state) if ops else None
        written = {full(insn.reg_name(r)) for r in insn.regs_access()[1]}
        if isinstance(target, tuple) and ops[0].access & capstone.CS_AC_WRITE:
            state.pop(target, None)
        for name in written:
            state.pop(name, None)
            if name == "rbp":
                state = {k: v for k, v in state.items() if k[0] != "rbp"}
        if "rsp" in written:
            moved = stack_moved(insn)
            if moved is None or stack == "?":
                state = {k: v for k, v in state.items() if k[0] != "rsp"}
                state["stack"] = "?"
            else:
                state["stack"] = str(int(stack) + moved)
        if value and target is not None and target != "rsp":
            state[target] = value
        if insn.id == x86.X86_INS_MOV and ops[1].type == x86.X86_OP_REG and ops[1].size == 8:
            base = ops[0].mem.base if ops[0].type == x86.X86_OP_MEM else 0
            plain = base and not ops[0].mem.disp and not ops[0].mem.index
            if (
                self._names(insn, ops[0]) == "A"
                or plain
                and state.get(full(insn.reg_name(base))) == "A"
            ):
                state[full(insn.reg_name(ops[1].reg))] = "P0"  # the variable is set from it
        return state

    def _note_store(self, insn: capstone.CsInsn, state: State) -> None:
        """Note a store through the pointer, or through what may be the pointer."""
        ops = insn.operands
        if not ops or ops[0].type != x86.X86_OP_MEM or ops[0].mem.index or ops[0].mem.segment:
            return
        if not ops[0].access & capstone.CS_AC_WRITE or insn.id == x86.X86_INS_LEA:
            return
        held = state.get(full(insn.reg_name(ops[0].mem.base) or ""), "")
        if held == "?":
            self.unsure.append((insn.address, ops[0].size, ops[0].mem.disp))
        if held[:1] != "P":
            return
        value = "?"
        if insn.id in (x86.X86_INS_MOV, x86.X86_INS_AND) and ops[1].type == x86.X86_OP_IMM:
            value = hex(ops[1].imm & (1 << 8 * ops[0].size) - 1)
        elif insn.id == x86.X86_INS_MOV and ops[1].type == x86.X86_OP_REG:
            name = full(insn.reg_name(ops[1].reg))
            value = "%" + (name if name[1].isdigit() else name[1:])
        at = int(held[1:]) + ops[0].mem.disp
        self.written.setdefault(at, []).append((insn.address, ops[0].size, value))

    def _find_field(self, events: frozenset[int]) -> int:
        """Return the member that most different wait events are stored to."""
        found = {
            at: {v for _, n, v in stores if n == 4 and v[0] == "0" and int(v, 16) in events}
            for at, stores in self.written.items()
        }
        best = sorted(found, key=lambda at: len(found[at]))[-2:]
        assert len(found[best[1]]) > 5 * len(found[best[0]]), "no member stands out"
        return best[1]

    def _choose(self) -> None:
        """Take the stores to the field; what overlaps it otherwise is doubtful."""
        for at, stores in self.written.items():
            for address, size, value in stores:
                if at >= self.field + 4 or at + size <= self.field:
                    continue
                whole = at <= self.field and at + size >= self.field + 4
                if (at, size) == (self.field, 4) and value != "?" or whole and value == "0x0":
                    self.stores[address] = value
                else:
                    self.doubtful.add(address)
        for address, size, distance in self.unsure:
            if distance < self.field + 4 and distance + size > self.field:
                self.doubtful.add(address)

    def after(self, store: int) -> int:
        """Return the address of the instruction behind a store."""
        return store + int(self.code(self.function_of(store))[store].size)

    def anchor(self, store: int) -> tuple[int, str]:
        """Return the address and the kind of the instruction that a store's probe belongs on."""
        index = self.function_of(store)
        code, tables = self.code(index), set(self.table(index))
        value = self.stores[store]
        address = store + code[store].size
        second = (store, "store")
        while address in code:
            insn = code[address]
            if address in self.targets or address in tables or address in self.stores:
                break
            kind = emulated(insn.bytes)
            if kind == "long nop":
                second = (address, "nop") if second[1] == "store" else second
            elif kind:
                return address, kind
            groups = (x86.X86_GRP_CALL, x86.X86_GRP_JUMP, x86.X86_GRP_RET, x86.X86_GRP_INT)
            if any(insn.group(g) for g in groups) or insn.prefix[0] == x86.X86_PREFIX_LOCK:
                break
            written = {full(insn.reg_name(r)) for r in insn.regs_access()[1]}
            if value[0] == "%" and {"r" + value[1:].lstrip("r"), value[1:]} & written:
                break
            address += insn.size
        return second


def emulated(code: bytes) -> str:
    """Return the kind of an instruction that the kernel emulates, by arch/x86/kernel/uprobes.c."""
    first, size = code[0], len(code)
    if first == 0xE8 and size == 5:
        return "call"
    if (first, size) in ((0xEB, 2), (0xE9, 5)):
        return "jmp"
    if first >> 4 == 7 and size == 2 or first == 0x0F and code[1] >> 4 == 8 and size == 6:
        return "jcc"
    if 0x50 <= first < 0x58 and size == 1 or first == 0x41 and 0x50 <= code[1] < 0x58:
        return "push"
    if code == b"\x90":
        return "nop"
    # Not the ones of 5 and 10 bytes, which newer kernels replace by a call.
    nops = "6690 0f1f00 0f1f4000 660f1f440000 0f1f8000000000 0f1f840000000000 660f1f840000000000"
    return "long nop" if code.hex() in nops.split() else ""


def stack_moved(insn: capstone.CsInsn) -> int | None:
    """Return by how much an instruction moves the stack pointer, None where that depends."""
    ops = insn.operands
    if insn.id == x86.X86_INS_PUSH:
        return -8
    if insn.id == x86.X86_INS_POP:
        return 8
    if insn.id in (x86.X86_INS_ADD, x86.X86_INS_SUB) and ops[1].type == x86.X86_OP_IMM:
        return int(ops[1].imm) * (1 if insn.id == x86.X86_INS_ADD else -1)
    if insn.id == x86.X86_INS_LEA and ops[1].mem.base == x86.X86_REG_RSP and not ops[1].mem.index:
        return int(ops[1].mem.disp)
    return None


def join(a: State, b: State) -> State:
    """Return what is known where two ways meet: "?" for what holds the pointer on one of them."""
    met: State = {}
    for key in a.keys() | b.keys():
        left, right = a.get(key, ""), b.get(key, "")
        if left == right:
            met[key] = left
        elif key == "stack" or {left[:1], right[:1]} & {"A", "P", "?"}:
            met[key] = "?"
    return met
