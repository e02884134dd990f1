"""Reads XLA's HLO text: plain Python over lines; no device and no XLA is needed.

A module of 100 000 instructions takes a second or two.
"""

import re

from jaxmem.analysis.hlo._module import Computation, Instruction, Module, closing

# The line ends with its brace: the tables of source locations above the computations do not.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .*)?\{$")
# The type is one token, or a parenthesised tuple that ends before " opcode(".
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)$")
_ELEMENT = re.compile(r"%(([^\s,()#]+)#(\d+))")


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
    for name, of, index in _ELEMENT.findall(rest[: closing(rest)]):
        instructions.setdefault(name, Instruction(name, "", "get-tuple-element", f"%{of}), index={index}", False))
