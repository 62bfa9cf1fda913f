"""PTX as the machine takes it: instructions over numbered registers."""

import functools
import re
from dataclasses import dataclass, field

from ._library import Instruction, operation_number

# Registers that are set when a block begins, before parameters and constants.
_PLACES = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_GUARD = re.compile(r"@(!?)(%p\d+)\s+(.*)", re.DOTALL)
_LABEL = re.compile(r"(\$\w+):\s*")
_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_REGISTER = re.compile(r"%(?:p|r|rd|rs)\d+")
# Decorations that change nothing on this machine.
_IGNORED = {"bra.uni": "bra", "bar.warp.sync": "nop"}


@dataclass(frozen=True)
class Program:
    """A kernel, ready to be executed."""

    name: str
    warps: int
    parameters: int
    registers: int
    """All of them; the last ones, which are fixed, hold places, parameters and constants."""
    fixed: int
    constants: tuple[int, ...]
    code: object
    length: int
    lines: tuple[str, ...]


@dataclass
class _Registers:
    """Numbers of registers by name, constants by value."""

    parameters: int
    named: dict[str, int] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)

    def number(self, operand: str) -> int:
        """The register of an operand; negative for those that are set when a block begins."""
        if _REGISTER.fullmatch(operand) or operand == "_":
            return self.named.setdefault(operand, len(self.named))
        if operand in _PLACES:
            return -1 - _PLACES.index(operand)
        value = _constant(operand)
        place = self.constants.setdefault(value, len(self.constants))
        return -1 - len(_PLACES) - self.parameters - place

    def parameter(self, index: int) -> int:
        return -1 - len(_PLACES) - index


def _constant(operand: str) -> int:
    if operand == "global_smem":  # shared memory begins at 0
        return 0
    if operand.startswith(("0f", "0d")):
        return int(operand[2:], 16)
    try:
        return int(operand.removesuffix("U"), 0) & (2**64 - 1)
    except ValueError:
        raise NotImplementedError(f"the operand {operand}") from None


@functools.cache
def assemble(text: str) -> Program:
    """The only kernel of a PTX module."""
    entry = re.search(r"\.entry (\w+)\((.*?)\)(.*?)^\{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    if entry is None:
        raise NotImplementedError("no kernel is found in the text")
    name, declared, attributes, body = entry.groups()
    threads = re.search(r"\.reqntid (\d+)", attributes)
    assert threads is not None
    registers = _Registers(parameters=len(re.findall(r"\.param", declared)))
    first_line = text[: entry.start(4)].count("\n") + 1
    statements, labels = _statements(body, first_line)
    code = [_instruction(words, line, registers, labels) for words, line in statements]
    fixed = len(_PLACES) + registers.parameters + len(registers.constants)
    named = len(registers.named)

    def placed(number: int) -> int:
        """The final register: fixed ones come after those that the code writes."""
        return number if number >= 0 else named - number - 1

    for it in code:
        for array in (it.destination, it.source):
            array[:] = [placed(number) for number in array]
        it.base = placed(it.base)
        if it.guard < -1:
            raise NotImplementedError("a guard that is a constant")
    return Program(
        name=name,
        warps=int(threads[1]) // 32,
        parameters=registers.parameters,
        registers=named + fixed,
        fixed=fixed,
        constants=tuple(registers.constants),
        code=(Instruction * len(code))(*code),
        length=len(code),
        lines=tuple(text.splitlines()),
    )


def _statements(body: str, first_line: int) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """The instructions with their lines, and to which of them labels point."""
    statements: list[tuple[str, int]] = []
    labels: dict[str, int] = {}
    for line, text in enumerate(body.splitlines(), first_line):
        text = text.partition("//")[0].strip()
        while (label := _LABEL.match(text)) is not None:
            labels[label[1]] = len(statements)
            text = text[label.end() :]
        if text and not text.startswith("."):
            statements += [(it.strip(), line) for it in text.split(";") if it.strip()]
    return statements, labels


def _operands(text: str) -> list[str]:
    """What commas divide, except within braces and brackets."""
    return [it.strip() for it in re.split(r",(?![^{\[]*[}\]])", text) if it.strip()]


def _list(operand: str) -> list[str]:
    return [it.strip() for it in operand.strip("{} ").split(",")]


def _instruction(
    text: str, line: int, registers: _Registers, labels: dict[str, int]
) -> Instruction:
    it = Instruction(guard=-1, line=line, count=1)
    guard = _GUARD.match(text)
    if guard is not None:
        it.negated, it.guard = bool(guard[1]), registers.number(guard[2])
        text = guard[3]
    name, _, rest = text.replace("\t", " ").partition(" ")
    try:
        _fill(it, _IGNORED.get(name, name), _operands(rest), registers, labels)
    except NotImplementedError as error:
        error.add_note(f"line {line}: {text}")
        raise
    return it


def _fill(
    it: Instruction, name: str, operands: list[str], registers: _Registers, labels: dict[str, int]
) -> None:
    kind, *parts = name.split(".")
    number = registers.number
    match kind:
        case "bra":
            it.target = labels[operands[0]]
            _name(it, "branch")
        case "ret" | "nop":
            _name(it, kind)
        case "bar":
            if name != "bar.sync" or operands[0] != "0":
                raise NotImplementedError(name)
            _name(it, "bar_sync")
        case "ld" if parts[0] == "param":
            _fill_parameter(it, parts[1], operands, registers)
        case "ld" | "st":
            _fill_access(it, kind, parts, operands, registers)
        case "atom":
            it.base, it.offset = _address(operands[1], registers)
            it.destination[0], it.source[0] = number(operands[0]), number(operands[2])
            _name(it, "_".join(["atom", *parts[-2:]]))
        case "shfl" | "redux":
            it.destination[0], it.source[0] = number(operands[0]), number(operands[1])
            it.source[1] = number(operands[2])
            _name(it, f"shfl_{parts[1]}" if kind == "shfl" else "_".join(["redux", *parts[1:]]))
        case "ldmatrix" | "stmatrix":
            values, address = operands if kind == "ldmatrix" else reversed(operands)
            found = [number(register) for register in _list(values)]
            it.source[: len(found)], it.count = found, len(found)
            it.base, it.offset = _address(address, registers)
            _name(it, f"{kind}_trans" if "trans" in parts else kind)
        case "mov" if "{" in operands[0] or "{" in operands[1]:
            is_part = "{" in operands[0]
            many, one = operands if is_part else reversed(operands)
            found = [number(register) for register in _list(many)]
            it.count, it.bytes = len(found), _BYTES[parts[0][1:]] // len(found)
            several, single = (
                (it.destination, it.source) if is_part else (it.source, it.destination)
            )
            several[: len(found)], single[0] = found, number(one)
            _name(it, "part" if is_part else "join")
        case _:
            it.destination[0] = number(operands[0])
            it.source[: len(operands) - 1] = [number(operand) for operand in operands[1:]]
            _name(it, name.replace(".", "_"))


def _fill_parameter(it: Instruction, kind: str, operands: list[str], registers: _Registers) -> None:
    index = re.search(r"_param_(\d+)", operands[1])
    assert index is not None
    it.destination[0] = registers.number(operands[0])
    it.source[0] = registers.parameter(int(index[1]))
    is_wider = operands[0].startswith("%rd") and kind.endswith("32")
    if is_wider:
        _name(it, "cvt_s64_s32" if kind == "s32" else "cvt_u64_u32")
    else:
        _name(it, f"mov_b{kind[1:]}")


def _fill_access(
    it: Instruction, kind: str, parts: list[str], operands: list[str], registers: _Registers
) -> None:
    if set(parts[1:-1]) - {"v2", "v4"}:
        raise NotImplementedError(".".join(parts))
    values, address = operands if kind == "ld" else reversed(operands)
    found = [registers.number(register) for register in _list(values)]
    it.count, it.bytes = len(found), _BYTES[parts[-1][1:]]
    several = it.destination if kind == "ld" else it.source
    several[: len(found)] = found
    it.base, it.offset = _address(address, registers)
    _name(it, f"{kind}_{parts[0]}")


def _address(operand: str, registers: _Registers) -> tuple[int, int]:
    found = _ADDRESS.fullmatch(operand)
    if found is None:
        raise NotImplementedError(f"the address {operand}")
    return registers.number(found[1]), int(found[2] or 0)


def _name(it: Instruction, name: str) -> None:
    it.operation = operation_number(name.encode())
    if it.operation < 0:
        raise NotImplementedError(f"the instruction {name}")
