"""Looks at a compiled program for known faults of its compiler: wrong numbers that its own text proves."""

import math
import re
from collections.abc import Callable, Iterator

from jaxmem._miscompilations import MISCOMPILATIONS, Miscompilation
from jaxmem.analysis.hlo._loops import UNCHANGED, Loop, integer, loop_round, through
from jaxmem.analysis.hlo._module import Computation, Instruction, Module
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.analysis.hlo._types import Array, arrays
from jaxmem.errors import MiscompiledError
from jaxmem.targets import read_back

_HOST = 5  # the number of the host's memory
# JAX 0.12 writes the numbers into "linear", and 0 where they were before.
_NUMBERS = r'"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"'
_COPY = re.compile(rf'"dynamic_slice_config":\{{"loop_index":"(\d+)",{_NUMBERS}(?:\}}|,"linear":\{{{_NUMBERS}\}})')


def miscompiled(module: Module, platform: str) -> list[tuple[Miscompilation, tuple[str, ...]]]:
    """The known faults that a program shows, each with the places where it does.

    Each look finds a contradiction within the program. The compiler's version does not matter, and a right program is
    never named.
    """
    here = [fault for fault in MISCOMPILATIONS if fault.platform == platform]
    found = [(fault, tuple(_LOOKS[fault.name](module))) for fault in here]
    return [(fault, places) for fault, places in found if places]


def refusal(found: list[tuple[Miscompilation, tuple[str, ...]]], name: str) -> MiscompiledError:
    """What `miscompiled` found in a program, as an error."""
    fault, places = found[0]
    return MiscompiledError(
        wanted=f"a compiler that compiles {name!r} right",
        got=f"{fault.compiler}, which {fault.what} ({fault.name}): {places[0]}",
        do=fault.cure,
    )


def check_compiled(compiled, platform: str, name: str) -> None:
    """MiscompiledError where a compiled program shows a fault that the installed compiler is known to have.

    The programs of other compilers are not read, since a large one takes seconds.
    """
    if any(fault.platform == platform and fault.here for fault in MISCOMPILATIONS):
        found = miscompiled(parse_hlo(read_back(lambda: compiled.as_text())[0] or ""), platform)
        if found:
            raise refusal(found, name)


def host_copies_elsewhere(module: Module) -> Iterator[str]:
    """Slices of host memory in a loop that are annotated to be copied from, or to, another place than their indices."""
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            said = _COPY.search(instruction.rest)
            if said is None or instruction.opcode not in ("dynamic-slice", "dynamic-update-slice"):
                continue
            sliced = computation.operand(instruction, 0)
            array = arrays(sliced.type)[0] if sliced is not None and arrays(sliced.type) else None
            loop = loop_round(module, computation, int(said.group(1)))
            if array is None or array.memory_space != _HOST or loop is None:
                continue
            first, later = said.groups()[1:3], said.groups()[3:]
            offset, stride = (int(number) for number in (first if None in later else later))
            for trip in sorted({0, min(1, loop.trips - 1), loop.trips - 1}):
                right = _start_bytes(module, computation, instruction, array, loop, trip)
                if right is not None and right != offset + stride * trip:
                    yield (
                        f"{instruction.name} of {array.text}: trip {trip} of {loop.trips} is to start at byte {right}, "
                        f"and is annotated to start at {offset + stride * trip}"
                    )
                    break


def _start_bytes(
    module: Module, computation: Computation, slice_: Instruction, array: Array, loop: Loop, trip: int
) -> int | None:
    """Where a slice of an array without tiles starts in a trip of a loop; None where its indices are not known."""
    is_update = slice_.opcode == "dynamic-update-slice"
    piece = computation.operand(slice_, 1) if is_update else slice_
    order = [int(n) for n in array.layout.partition(":")[0].split(",") if n.isdigit()]
    starts = slice_.operands[2 if is_update else 1 :]
    if piece is None or "T(" in array.layout or len(order) != len(array.sizes) or len(starts) != len(array.sizes):
        return None
    place, stride = 0, array.size_bytes // max(1, math.prod(array.sizes))
    for axis in order:  # the fastest first
        start = integer(module, computation, starts[axis], loop, trip)
        if start is None:
            return None
        place += stride * min(max(start, 0), array.sizes[axis] - piece.shape[axis])
        stride *= array.sizes[axis]
    return place


def sums_left_out(module: Module) -> Iterator[str]:
    """Sums in a loop that a scatter of each device adds to, and of which each trip takes one device's part only.

    A partitioned scatter starts from the sum on one device and from zeros on the others, so that its results have to
    be reduced within the trip. Where the compiler puts that off until after the loop, a trip loses what the other
    devices added.
    """
    for computation in module.computations.values():
        for loop in computation.instructions.values():
            body = module.callee(loop, "body") if loop.opcode == "while" else None
            state = body.root.operands if body and body.root and body.root.opcode == "tuple" else []
            for index, name in enumerate(state):
                if body and _forgets(module, body, name, index):
                    yield f"element {index} of {loop.name}: a scatter adds to it on each device, and no trip reduces it"


def _forgets(module: Module, body: Computation, name: str, index: int) -> bool:
    """Whether an element of a loop's state is a scatter into itself on one device, and into zeros on others."""
    where, value, scattered, chosen = body, body.instructions.get(name), False, False
    while value is not None:
        if value.opcode == "get-tuple-element":
            return scattered and chosen and where is body and value.attribute("index") == str(index)
        if value.opcode in ("parameter", "fusion"):
            where, value = through(module, where, value) or (where, None)
            continue
        if value.opcode not in (*UNCHANGED, "scatter", "select"):
            return False  # such as the reduction
        scattered |= value.opcode == "scatter"
        after = value.operands[0]
        if value.opcode == "select":
            chosen |= _tells_devices_apart(module, where, value.operands[0])
            kept = [n for n in value.operands[1:] if where.instructions[n].opcode not in ("broadcast", "constant")]
            after = kept[0] if len(kept) == 1 else ""
        value = where.instructions.get(after)
    return False


def _tells_devices_apart(module: Module, where: Computation, name: str) -> bool:
    value = where.instructions.get(name)
    if value is None or value.opcode in ("partition-id", "replica-id"):
        return value is not None
    if value.opcode in ("parameter", "fusion"):
        source = through(module, where, value)
        return source is not None and _tells_devices_apart(module, source[0], source[1].name)
    plain = value.opcode in (*UNCHANGED, "compare", "and", "or", "not")
    return plain and any(_tells_devices_apart(module, where, operand) for operand in value.operands)


_LOOKS: dict[str, Callable[[Module], Iterator[str]]] = {
    "openxla/xla#46231": host_copies_elsewhere,
    "openxla/xla#49143": sums_left_out,
}
