"""An HLO module: computations, their instructions, who calls a computation and what uses a value.

An instruction is kept as its pieces of text and looked into only when someone asks. What is found then, and each table,
is kept with the module, so that FLOPs, seconds, buffers and findings read the text once between them.
"""

import functools
import re
from typing import NamedTuple

from jaxmem.analysis.hlo._types import parse_shape

_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_OPERAND = re.compile(r"%([^\s,()]+)|(?<![\w.\-])([A-Za-z_][\w.\-]*)(?=[,)]|$)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"((?:\\[0-7]{3})+)|\\(.)")
# Attributes that name called computations, in the order of the operands' use.
_ROLES = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")

Index = tuple[int, ...]
"""Of an element in a tuple: (2,) for `while.7{2}`; () for all of a value."""


class Instruction:
    """One line of HLO: `name = type opcode(rest`."""

    __slots__ = ("_operands", "is_root", "name", "opcode", "rest", "type")

    def __init__(self, name: str, type: str, opcode: str, rest: str, is_root: bool):
        self.name, self.type, self.opcode, self.rest, self.is_root = name, type, opcode, rest, is_root
        self._operands: tuple[str, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's dimensions; of a tuple, those of its first element."""
        return parse_shape(self.type)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self._operands is None:
            text = self.literal
            names_alone = text.count(",") == text.count(" ") == text.count(", %")
            if names_alone and text[:1] == "%":  # nearly always
                self._operands = tuple(text[1:].split(", %"))
            else:
                self._operands = tuple(percent or plain for percent, plain in _OPERAND.findall(text))
        return self._operands

    @property
    def literal(self) -> str:
        """The text between the parentheses, for `constant` and `parameter`."""
        return self.rest[: closing(self.rest)]

    def attribute(self, key: str) -> str | None:
        """The value of `key=` after the operands: a name, a number, or `{...}` without its braces."""
        start = self.rest.find(f"{key}=")
        if start < 0:
            return None
        match = _attribute(key).search(self.rest, max(0, start - 1))
        return match and next(group for group in match.groups() if group is not None)

    def numbers(self, key: str) -> tuple[int, ...]:
        """An attribute such as `lhs_contracting_dims={1,2}` as numbers; empty where absent."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attribute(key) or ""))

    @property
    def op_name(self) -> str:
        """JAX's scope path of this instruction, or an empty string."""
        match = _OP_NAME.search(self.rest)
        return match.group(1) if match else ""

    @property
    def argument_path(self) -> str:
        """Of an entry's parameter: JAX's path of the argument, "state.params['w']"; its own name where it has none."""
        return _unescaped(self.op_name) or self.name

    @property
    def branches(self) -> list[str]:
        """Of a conditional: names of its computations, in the order of the operands that they are given."""
        sides = [self.attribute(f"{side}_computation") or "" for side in ("true", "false")]
        return computation_names(self.attribute("branch_computations") or ",".join(sides))

    @property
    def called(self) -> list[tuple[str, str]]:
        """(role, name) of the computations that it calls: ("body", "while_body.3")."""
        rest = self.rest  # of most instructions, which call nothing: hence no loop
        if "calls=" not in rest and "to_apply=" not in rest and "body=" not in rest and "computation" not in rest:
            return []
        return [(role, name) for role in _ROLES for name in computation_names(self.attribute(role) or "")]


class _Named(NamedTuple):
    name: str
    instructions: dict[str, Instruction]


class Computation(_Named):
    """A named list of instructions."""

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value the computation returns."""
        return next((i for i in reversed(self.instructions.values()) if i.is_root), None)

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        """Operand `number` of an instruction of this computation."""
        operands = instruction.operands
        return self.instructions.get(operands[number]) if number < len(operands) else None

    def maker(self, value: Instruction | None, passing: tuple[str, ...]) -> Instruction | None:
        """What made a value, before instructions of the opcodes `passing` handed it on."""
        while value is not None and value.opcode in passing and value.operands:
            value = self.instructions.get(value.operands[0])
        return value

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Name → (user, operand number) of what uses the value, within this computation."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for number, operand in enumerate(instruction.operands):
                found.setdefault(operand, []).append((instruction, number))
        return found


class Call(NamedTuple):
    """A place where a computation is called: the instruction that does, in which role, and where that stands."""

    caller: Instruction
    role: str
    outer: Computation


class _Parts(NamedTuple):
    computations: dict[str, Computation]
    entry: str | None
    header: str = ""


class Module(_Parts):
    """An HLO module: computations by name, the name of the entry, and the first line of the text."""

    @property
    def name(self) -> str:
        """The module's name, such as "jit_step"."""
        return re.split(r"[\s,]+", self.header.removeprefix("HloModule "), maxsplit=1)[0]

    @property
    def output_aliases(self) -> list[tuple[Index, int, Index]]:
        """(index of an output, number of the parameter whose buffer it takes, index in that): what donation came to."""
        _, _, aliases = self.header.partition("input_output_alias=")
        return parse_aliases(aliases.partition("entry_computation_layout")[0])

    @functools.cached_property
    def computation_of(self) -> dict[str, Computation]:
        """Instruction name → the computation it stands in; names are unique in a module."""
        return {name: c for c in self.computations.values() for name in c.instructions}

    @functools.cached_property
    def call_sites(self) -> dict[str, list[Call]]:
        """Computation name → where it is called, in the order of the text."""
        found: dict[str, list[Call]] = {}
        for outer in self.computations.values():
            for instruction in outer.instructions.values():
                for role, callee in instruction.called:
                    found.setdefault(callee, []).append(Call(instruction, role, outer))
        return found

    def first_call(self, computation: Computation) -> Call | None:
        """The first place where a computation is called."""
        return next(iter(self.call_sites.get(computation.name, ())), None)

    def callee(self, instruction: Instruction, *roles: str) -> Computation | None:
        """The computation that an instruction calls in the first of the roles that it has; `calls` by default."""
        names = (instruction.attribute(role) for role in roles or ("calls",))
        return self.computations.get(next(filter(None, names), ""))

    def users(self, name: str) -> list[tuple[Instruction, int]]:
        """(user, operand number) of an instruction, within its computation."""
        computation = self.computation_of.get(name)
        return computation.users.get(name, []) if computation else []

    def instruction(self, name: str) -> Instruction | None:
        """The instruction of that name, wherever it stands."""
        computation = self.computation_of.get(name)
        return computation.instructions.get(name) if computation else None

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        """Operand `number` of an instruction, wherever that stands."""
        operands = instruction.operands
        return self.instruction(operands[number]) if number < len(operands) else None


def parse_index(text: str | None) -> Index:
    """Numbers between commas.

    >>> parse_index("1, 0"), parse_index("")
    ((1, 0), ())
    """
    return tuple(int(n) for n in text.split(",")) if text and text.strip() else ()


def parse_aliases(text: str) -> list[tuple[Index, int, Index]]:
    """(index of a result, number of an operand or parameter, index in that) of those that are the same bytes.

    >>> parse_aliases("{0}: (1, {}, may-alias), {1, 2}: (0, {3})")
    [((0,), 1, ()), ((1, 2), 0, (3,))]
    """
    return [(parse_index(index), int(number), parse_index(at)) for index, number, at in _ALIAS.findall(text)]


def computation_names(text: str) -> list[str]:
    """The names in an attribute such as `branch_computations={%a, %b}`.

    >>> computation_names("%a, %b"), computation_names("")
    (['a', 'b'], [])
    """
    return [name.strip().lstrip("%") for name in text.split(",") if name.strip()]


def _unescaped(text: str) -> str:
    """Without the escapes of HLO strings: octal bytes of UTF-8, and a backslash before quotes and itself."""

    def plain(found: re.Match) -> str:
        octal, char = found.groups()
        if char is not None:
            return char
        return bytes(int(code, 8) for code in octal[1:].split("\\")).decode("utf-8", "replace")

    return _ESCAPE.sub(plain, text) if "\\" in text else text


@functools.cache
def _attribute(key: str) -> re.Pattern:
    return re.compile(rf"[, ]{key}=(?:\{{([^{{}}]*)\}}|\"([^\"]*)\"|%?([^\s,]+))")


def closing(rest: str) -> int:
    """Where the operand list ends: the parenthesis that balances the one already open."""
    end = rest.find(")")
    if end >= 0 and "(" not in rest[:end]:  # nearly always: types of operands with tiles in them are rare
        return end
    depth = 1
    for match in re.finditer(r"[()]", rest):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(rest)
