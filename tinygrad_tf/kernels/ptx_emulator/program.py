"""Reads PTX text: kernels, their parameters, registers, shared variables, and instructions.

    @!%p3  ld.shared.v4.f32  {%f1, %f2, %f3, %f4}, [%r7+16];
    guard  opcode            operands
"""
import re
from dataclasses import dataclass, field
from functools import cached_property

TYPES = re.compile(r"(pred|[usb](8|16|32|64)|f(16|32|64)|bf16|f16x2|bf16x2)$")
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{", re.S)
VARIABLE = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?")
ENDS_A_RUN = {"bra", "ret", "exit"}             # after these the next instruction may be another one


class UnknownInstruction(NotImplementedError):
    """PTX that the emulator does not know. It never guesses."""


@dataclass
class Instruction:
    opcode: str
    operands: list
    guard: str = None                           # the predicate register: only threads where it is true (or false) execute this
    negated: bool = False
    line: int = 0                               # in the PTX text
    source: str = ""                            # in the CUDA C++, where the compiler said so
    run: object = None                          # the row of the table that executes it

    def __str__(self):
        operands = ", ".join(o if isinstance(o, str) else "{" + ", ".join(o) + "}" for o in self.operands)
        return f"{self.opcode} {operands} (PTX line {self.line}{self.source and ', '}{self.source})"

    @cached_property
    def parts(self):
        return self.opcode.split(".")

    @cached_property
    def types(self):
        """Of `cvt.rn.f16.f32`: f16, f32. (For `mov.v2.b32`, b32.)"""
        return [part for part in self.parts[1:] if TYPES.match(part)]

    @cached_property
    def modifiers(self):
        return [part for part in self.parts[1:] if not TYPES.match(part)]

    @property
    def synchronizes(self):
        """Waits for other threads: bar.sync, shfl.sync, mma.sync.aligned…"""
        return "sync" in self.parts


@dataclass
class Entry:
    """One kernel."""
    name: str
    parameters: dict = field(default_factory=dict)      # name → (offset, bytes, type)
    parameter_bytes: int = 0
    max_threads: int = 1024
    registers: dict = field(default_factory=dict)       # type of the registers by the name before the number: %rd → b64
    shared: dict = field(default_factory=dict)          # name → offset of a variable in shared memory
    static_bytes: int = 0
    code: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)          # name → index of the instruction that follows

    def type_of(self, register):
        """The declared type: b32 of %r12, where `.reg .b32 %r<99>` was said."""
        declared = self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))
        if declared is None:
            raise UnknownInstruction(f"{self.name}: neither a register, a variable nor a number that the emulator knows: {register!r}")
        return declared

    @cached_property
    def run_end(self):
        """Where the run of instructions ends that starts at an index: before a label, a wait, or after a jump."""
        starts = {0, len(self.code)} | set(self.labels.values())
        for i, instruction in enumerate(self.code):
            if instruction.synchronizes:
                starts |= {i, i + 1}
            elif instruction.parts[0] in ENDS_A_RUN:
                starts.add(i + 1)
        starts = sorted(starts)
        return dict(zip(starts, starts[1:]))


def parse(text):
    """{name: Entry} of a PTX module."""
    from .instructions import lookup
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*[/\\])?([^"]*)"', text))
    entries = {}
    outside, bodies = _split(text)
    for name, parameters, directives, body, line in bodies:
        entry = entries[name] = Entry(name)
        _parameters(entry, parameters)
        _shared_variables(entry, outside + body)
        limit = re.search(r"\.maxntid\s+([\d, ]+)", directives)
        entry.max_threads = _product(limit[1]) if limit else 1024
        _statements(entry, body, line, files)
        for instruction in entry.code:
            instruction.run = lookup(instruction)
    return entries


def _split(text):
    """The text outside of kernels, and (name, parameters, directives, body, first line) of each kernel."""
    outside, bodies, at = "", [], 0
    while found := ENTRY.search(text, at):
        end = _closing_brace(text, found.end())
        outside += text[at:found.start()]
        bodies.append((*found.groups(), text[found.end():end], text.count("\n", 0, found.end()) + 1))
        at = end + 1
    return outside + text[at:], bodies


def _closing_brace(text, start):
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    raise UnknownInstruction("a kernel that does not end: the PTX text is cut off")


def _product(numbers):
    product = 1
    for n in numbers.split(","):
        product *= int(n)
    return product


def _parameters(entry, text):
    offset = 0
    for found in re.finditer(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^,]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)", text):
        align, kind, name, count = found.groups()
        size = int(kind.lstrip("usbf")) // 8 * int(count or 1)
        offset = _round_up(offset, int(align or size))
        entry.parameters[name] = (offset, size, kind)
        offset += size
    entry.parameter_bytes = offset


def _shared_variables(entry, text):
    """Each at a multiple of its alignment; what the launch asks for (`extern __shared__`) begins behind them all."""
    dynamic = []
    for extern, align, kind, name, count in VARIABLE.findall(text):
        size = int(kind.lstrip("usbf")) // 8
        if extern:
            dynamic.append(name)
        else:
            entry.shared[name] = offset = _round_up(entry.static_bytes, int(align or size))
            entry.static_bytes = offset + size * int(count or 1)
    entry.static_bytes = _round_up(entry.static_bytes, 16) if dynamic else entry.static_bytes
    entry.shared.update(dict.fromkeys(dynamic, entry.static_bytes))


def _round_up(n, step):
    return -(-n // step) * step


# --- statements -------------------------------------------------------------------------------------------------------

STATEMENT = re.compile(r"\s*(?:([$\w]+):|[{}]|(\.loc\b[^\n]*|\.pragma\b[^\n]*)\n|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")
GUARDED = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)


def _statements(entry, body, line, files):
    """Instructions and labels in order. Braces only limit where a name is known, and the compiler's names are all different."""
    at, source, lines = 0, "", _LineCounter(body, line)
    while found := STATEMENT.match(body, at):
        label, location, statement = found.groups()
        if label:
            entry.labels[label] = len(entry.code)
        elif location and location.startswith(".loc"):
            number, row = location.split()[1:3]
            source = f"{files.get(number, '?')}:{row}"
        elif statement and statement.startswith(".reg"):
            _registers(entry, statement)
        elif statement and not statement.startswith("."):
            entry.code.append(_instruction(statement, lines.at(found.start(3)), source))
        at = found.end()
    if body[at:].strip():
        raise UnknownInstruction(f"cannot read {body[at:].strip().splitlines()[0]!r} (PTX line {lines.at(at)})")


class _LineCounter:
    """Line numbers of positions that only grow."""

    def __init__(self, text, line):
        self.text, self.position, self.line = text, 0, line

    def at(self, position):
        self.line += self.text.count("\n", self.position, position)
        self.position = position
        return self.line


def _registers(entry, statement):
    kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()
    for name in names.split(","):
        entry.registers[name.strip().partition("<")[0]] = kind


def _instruction(statement, line, source):
    found = GUARDED.match(statement)
    if not found:
        raise UnknownInstruction(f"cannot read {statement!r} (PTX line {line})")
    negated, guard, opcode, operands = found.groups()
    return Instruction(opcode, _operands(operands), guard, negated == "!", line, source)


def _operands(text):
    """The operands between commas; those in braces are a list."""
    found = re.findall(r"\s*(\{[^}]*\}|[^,{}]+)\s*(?:,|$)", text)
    return [[name.strip() for name in operand[1:-1].split(",")] if operand[0] == "{" else operand.strip() for operand in found]
