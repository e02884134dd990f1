"""What kind of bytes a buffer holds: parameters, gradients, activations, …"""

import dataclasses
import re
from collections.abc import Callable

from jaxmem._scopes import ACCUMULATE_SCOPE
from jaxmem.analysis.attribution._origin import Origin, origin
from jaxmem.analysis.attribution._scopes import Scope
from jaxmem.analysis.hlo._collectives import COLLECTIVES
from jaxmem.analysis.hlo._module import Instruction, Module
from jaxmem.analysis.hlo._types import parse_shape

_FLOATS = re.compile(r"^(bf16|f16|f32|f64|f8\w*)\[")
_SCRATCH = re.compile(r"^[us]8\[\d*\]")
_STATE = ("parameters", "optimizer_state")
COPIES = ("parameter_copies", "argument_copies")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """One parameter of the compiled program.

    Args:
      path: as JAX names it, "state.params['embed']['embedding']"; the HLO name where it has none.
      kind: one of `KINDS`.
      type: the HLO type, per device.
    """

    path: str
    kind: str
    type: str


def program_arguments(module: Module, kind_of: Callable[[str], str]) -> dict[int, Argument]:
    """The parameters of the module's entry by their number; `kind_of` tells a path's kind."""
    entry = module.computations.get(module.entry or "")
    found = {}
    for instruction in entry.instructions.values() if entry else ():
        if instruction.opcode == "parameter" and instruction.literal.isdigit():
            path = instruction.argument_path
            found[int(instruction.literal)] = Argument(path=path, kind=kind_of(path), type=instruction.type)
    return found


class Kinds:
    """Tells the kind of a temporary from where it was computed and from its shape.

    A value of the backward pass that has a parameter's shape, or that of one layer's slice of it, is a
    gradient. Where no argument is declared as a parameter, floating-point arguments are taken for that.
    """

    def __init__(self, arguments: dict[int, Argument], module: Module):
        self.module = module
        declared = [a for a in arguments.values() if a.kind == "parameters"]
        floats = [a for a in arguments.values() if a.kind == "arguments" and _FLOATS.match(a.type)]
        self.paths: dict[tuple[int, ...], list[str]] = {}
        for argument in declared or floats:
            shape = parse_shape(argument.type)
            if len(shape) >= 1:
                self.paths.setdefault(shape, []).append(argument.path)
        self._keys: dict[tuple[tuple[int, ...], str], frozenset[int]] = {}
        self.slices = {shape[1:] for shape in self.paths if len(shape) > 2}
        self.arguments = {argument.path: argument for argument in arguments.values()}

    def of(self, instruction: Instruction | None, found: Origin | None, scope: Scope | None, type_: str) -> str:
        """Kind of a temporary: its own instruction, its origin and scope, and its HLO type."""
        if instruction is not None and self._is_workspace(instruction, type_):
            return "workspace"
        if instruction is not None and self._is_sent(instruction):
            return "collectives"
        if found is None or scope is None:
            return "unattributed"
        made = found.instruction
        argument = self.copied(found)
        if argument is not None:
            return COPIES[argument.kind != "parameters"]
        if made.opcode == "parameter":
            return "unattributed"
        if ACCUMULATE_SCOPE in made.op_name:
            return "accumulators"
        shape = parse_shape(type_)
        if made.opcode.startswith(COLLECTIVES) and not (
            made.opcode.startswith("all-reduce") and self.is_parameter_shape(shape)
        ):
            return "collectives"
        if scope.phase in ("backward", "update") and self.is_parameter_shape(shape):
            return "gradients"
        return "activations"

    def copied(self, found: Origin) -> Argument | None:
        """The argument that a temporary is a copy of, whole or in part; or a cast of, where that is state."""
        made = found.instruction
        cast = origin(self.module, made.operands[0]) if made.opcode == "convert" and made.operands else None
        held = cast.instruction if cast else made
        if held.opcode != "parameter":
            return None
        argument = self.arguments.get(held.argument_path)
        return argument if argument is not None and (cast is None or argument.kind in _STATE) else None

    def _is_workspace(self, instruction: Instruction, type_: str) -> bool:
        """Scratch of a library call, or the partial sums of a matrix product that is split along its contraction."""
        if instruction.opcode == "custom-call":
            return bool(_SCRATCH.match(type_))
        if "__triton" not in instruction.rest or not instruction.op_name:
            return False
        users = [user for user, _ in self.module.users(instruction.name)]
        return bool(users) and all(
            user.op_name == instruction.op_name and len(parse_shape(user.type)) < len(parse_shape(type_))
            for user in users
        )

    def _is_sent(self, instruction: Instruction) -> bool:
        """Whether a buffer only gathers what a collective sends."""
        if "concatenate" not in instruction.name:
            return False
        users = [user for user, _ in self.module.users(instruction.name)]
        return bool(users) and all(user.opcode.startswith(COLLECTIVES) for user in users)

    def is_parameter_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be a gradient: a parameter's shape, or one layer's slice of it."""
        return shape in self.paths or (len(shape) >= 2 and shape in self.slices)

    def parameter_path(self, shape: tuple[int, ...], layer: str) -> str:
        """The parameter that a gradient of this shape in this layer belongs to; empty where several fit."""
        paths = self.paths.get(shape, [])
        holding = [self._holding(shape, name) for name in layer.split("/") if name]
        for first in range(len(holding)):
            fitting = frozenset.intersection(*holding[first:])
            if fitting:
                return paths[min(fitting)] if len(fitting) == 1 else ""
        return paths[0] if len(paths) == 1 else ""

    def _holding(self, shape: tuple[int, ...], name: str) -> frozenset[int]:
        """Which of the parameters of a shape have a key in their path; looked for once."""
        found = self._keys.get((shape, name))
        if found is None:
            paths = self.paths.get(shape, ())
            found = frozenset(number for number, path in enumerate(paths) if f"'{name}'" in path)
            self._keys[shape, name] = found
        return found
