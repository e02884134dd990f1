"""Reads XLA's HLO text: computations, their instructions, and the shapes these produce.

Plain Python over lines; no device and no XLA is needed. An instruction is kept as its pieces of text
and looked into only when someone asks, so that a module of 100 000 instructions takes a second or two.
"""

import functools
import re
from typing import NamedTuple

# The line ends with its brace: the tables of source locations above the computations do not.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .*)?\{$")
# The type is one token, or a parenthesised tuple that ends before " opcode(".
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)$")
_SHAPE = re.compile(r"^[a-z]\w*\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([^\s,()]+)|(?<![\w.\-])([A-Za-z_][\w.\-]*)(?=[,)]|$)")


class Instruction(NamedTuple):
    """One line of HLO: `name = type opcode(rest`."""

    name: str
    type: str
    opcode: str
    rest: str
    is_root: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's dimensions; of a tuple, those of its first element."""
        return parse_shape(self.type)

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return [percent or plain for percent, plain in _OPERAND.findall(self.rest[: _closing(self.rest)])]

    @property
    def literal(self) -> str:
        """The text between the parentheses, for `constant` and `parameter`."""
        return self.rest[: _closing(self.rest)]

    def attribute(self, key: str) -> str | None:
        """The value of `key=` after the operands: a name, a number, or `{...}` without its braces."""
        match = _attribute(key).search(self.rest)
        return match and next(group for group in match.groups() if group is not None)

    def numbers(self, key: str) -> tuple[int, ...]:
        """An attribute such as `lhs_contracting_dims={1,2}` as numbers; empty where absent."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attribute(key) or ""))

    @property
    def op_name(self) -> str:
        """JAX's scope path of this instruction, or an empty string."""
        match = _OP_NAME.search(self.rest)
        return match.group(1) if match else ""


class Computation(NamedTuple):
    """A named list of instructions."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value the computation returns."""
        return next((i for i in reversed(self.instructions.values()) if i.is_root), None)


class Module(NamedTuple):
    """An HLO module: computations by name, and the name of the entry."""

    computations: dict[str, Computation]
    entry: str | None


def parse_hlo(text: str) -> Module:
    """The module in `text`, as printed by `Compiled.as_text()`; lines it does not know are passed over."""
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in text.splitlines():
        if current is None:
            head = _COMPUTATION.match(line)
            if head:
                current = computations.setdefault(head.group(2), Computation(head.group(2), {}))
                entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        else:
            found = _INSTRUCTION.match(line)
            if found:
                root, name, type_, opcode, rest = found.groups()
                if "#" in rest:
                    _add_elements(current.instructions, rest)
                current.instructions[name] = Instruction(name, type_, opcode, rest, bool(root))
    return Module(computations, entry)


def _add_elements(instructions: dict[str, Instruction], rest: str) -> None:
    """Some dumps write `%x#5` for an element of a tuple: instructions of that name, which the text leaves out."""
    for name, of, index in _ELEMENT.findall(rest[: _closing(rest)]):
        instructions.setdefault(name, Instruction(name, "", "get-tuple-element", f"%{of}), index={index}", False))


def parse_shape(type_text: str) -> tuple[int, ...]:
    """Dimensions in a type such as `f32[8,128]{1,0:T(8,128)}`; of a tuple, its first element's.

    >>> parse_shape("(bf16[4,8]{1,0}, u8[1024]{0})")
    (4, 8)
    """
    match = _SHAPE.match(type_text.lstrip("("))
    if not match or not match.group(1):
        return ()
    return tuple(int(d.lstrip("<=")) for d in match.group(1).split(","))


_ELEMENT = re.compile(r"%(([^\s,()#]+)#(\d+))")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@functools.cache
def _attribute(key: str) -> re.Pattern:
    return re.compile(rf"[, ]{key}=(?:\{{([^{{}}]*)\}}|\"([^\"]*)\"|%?([^\s,]+))")


def _closing(rest: str) -> int:
    """Where the operand list ends: the parenthesis that balances the one already open."""
    depth = 1
    for match in re.finditer(r"[()]", rest):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(rest)
