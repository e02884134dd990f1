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
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_OPERAND = re.compile(r"%([^\s,()]+)|(?<![\w.\-])([A-Za-z_][\w.\-]*)(?=[,)]|$)")

Index = tuple[int, ...]
"""Of an element in a tuple: (2,) for `while.7{2}`; () for all of a value."""

# Opcodes that talk to other devices, without the `-start` and `-done` of their asynchronous forms.
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


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
        text = self.rest[: _closing(self.rest)]
        commas, spaces, both = (text.count(mark) for mark in (",", " ", ", %"))
        if text[:1] == "%" and commas == spaces == both:  # nearly always: names and nothing else
            return text[1:].split(", %")
        return [percent or plain for percent, plain in _OPERAND.findall(text)]

    @property
    def literal(self) -> str:
        """The text between the parentheses, for `constant` and `parameter`."""
        return self.rest[: _closing(self.rest)]

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


class Computation(NamedTuple):
    """A named list of instructions."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value the computation returns."""
        return next((i for i in reversed(self.instructions.values()) if i.is_root), None)


class Module(NamedTuple):
    """An HLO module: computations by name, the name of the entry, and the first line of the text."""

    computations: dict[str, Computation]
    entry: str | None
    header: str = ""

    @property
    def name(self) -> str:
        """The module's name, such as "jit_step"."""
        return re.split(r"[\s,]+", self.header.removeprefix("HloModule "), maxsplit=1)[0]

    @property
    def output_aliases(self) -> list[tuple[Index, int, Index]]:
        """(index of an output, number of the parameter whose buffer it takes, index in that): what donation came to."""
        _, _, aliases = self.header.partition("input_output_alias=")
        return parse_aliases(aliases.partition("entry_computation_layout")[0])


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
    return Module(computations, entry, text.partition("\n")[0])


def _add_elements(instructions: dict[str, Instruction], rest: str) -> None:
    """Some dumps write `%x#5` for an element of a tuple: instructions of that name, which the text leaves out."""
    for name, of, index in _ELEMENT.findall(rest[: _closing(rest)]):
        instructions.setdefault(name, Instruction(name, "", "get-tuple-element", f"%{of}), index={index}", False))


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


@functools.lru_cache(maxsize=65536)
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
_ESCAPE = re.compile(r"((?:\\[0-7]{3})+)|\\(.)")


def _unescaped(text: str) -> str:
    """Without the escapes of HLO strings: octal bytes of UTF-8, and a backslash before quotes and itself."""

    def plain(found: re.Match) -> str:
        octal, char = found.groups()
        if char is not None:
            return char
        return bytes(int(code, 8) for code in octal[1:].split("\\")).decode("utf-8", "replace")

    return _ESCAPE.sub(plain, text) if "\\" in text else text


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@functools.cache
def _attribute(key: str) -> re.Pattern:
    return re.compile(rf"[, ]{key}=(?:\{{([^{{}}]*)\}}|\"([^\"]*)\"|%?([^\s,]+))")


def _closing(rest: str) -> int:
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
