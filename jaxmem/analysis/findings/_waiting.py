"""What another form of a step may save: weight gradients that are made late, and layers that are unrolled."""

from collections.abc import Mapping, Sequence

from jaxmem.analysis._cures import Asked, roll, tie
from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.attribution._scopes import parse_scope
from jaxmem.analysis.findings._words import common, names, within
from jaxmem.analysis.hlo._module import Instruction, Module
from jaxmem.analysis.hlo._types import arrays, parse_shape

_PASSING = ("bitcast", "get-tuple-element", "copy", "tuple", "optimization-barrier", "opt-barrier")
_AT_HAND = ("parameter", "constant", "iota")
_FEW = 4  # unrolled layers, or less, are not worth a line
_CHAIN = 8  # values that only pass another on


def waiting_gradients(
    buffers: Sequence[Buffer], module: Module, schedule: Sequence[str], asked: Asked
) -> list[Finding]:
    """Values at the peak that nothing needs any more but weight gradients, which have all that they need by then.

    The bytes are those values, without the gradients that would be there instead.
    """
    if asked.config is None or asked.config.order != "auto" or not buffers:
        return []
    position = {name: at for at, name in enumerate(schedule)}
    peak = max(buffer.start for buffer in buffers)
    weights = {_sorted(parse_shape(b.layout or b.shape)) for b in buffers if b.kind == "parameters"}
    waiting: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        if buffer.kind != "activations" or buffer.start >= peak or buffer.end >= len(schedule):
            continue
        user = module.instruction(schedule[buffer.end])
        if (
            user is not None
            and buffer.end > peak
            and parse_scope(user.op_name).phase == "backward"
            and _is_gradient(user, weights)
            and all(_made_by(module, name, position, 0) < peak for name in user.operands)
        ):
            waiting.setdefault(user.name, []).append(buffer)
    if not waiting:
        return []
    users = [user for name in waiting if (user := module.instruction(name)) is not None]
    freed = [buffer for found in waiting.values() for buffer in found]
    size = sum(b.size_bytes for b in freed) - sum(a.size_bytes for user in users for a in arrays(user.type)[:1])
    if size <= 0:
        return []
    many = f"{len(waiting)} weight gradients wait" if len(waiting) > 1 else "a weight gradient waits"
    return [
        Finding(
            kind="waiting_gradients",
            size_bytes=size,
            estimated=True,
            title=f"{many} for the end of the backward pass, with what "
            f"{'they are' if len(waiting) > 1 else 'it is'} made of" + within(common([b.layer for b in freed])),
            evidence=names(sorted(freed, key=lambda b: -b.size_bytes)),
            **tie(asked).fields,
        )
    ]


def unrolled_layers(count: int, asked: Asked) -> list[Finding]:
    """Equal layers that are unrolled. What a scan of them saves in bytes and time, only a compile tells."""
    if count < _FEW:
        return []
    return [
        Finding(
            kind="unrolled",
            size_bytes=0,
            # Six layers of width 512 for an H100: compile half as long, peak 1.21 → 1.71 GiB, 2.6 → 4.4 ms a step.
            title=f"{count} equal layers are unrolled: as one scan they compile faster, and may take more or less of "
            "bytes and time",
            **roll(asked).fields,
        )
    ]


def _is_gradient(instruction: Instruction, weights: set[tuple[int, ...]]) -> bool:
    """Whether a result has the shape of a weight, transposed or in parts that are summed later."""
    for array in arrays(instruction.type)[:1]:
        sizes = tuple(array.sizes)
        if len(sizes) > 1 and (_sorted(sizes) in weights or (len(sizes) > 2 and _sorted(sizes[1:]) in weights)):
            return True
    return False


def _sorted(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in sizes if size > 1))


def _made_by(module: Module, name: str, position: Mapping[str, int], depth: int) -> int:
    """The position by which a value is made; what only passes another on is made with it."""
    made = module.instruction(name)
    if made is None or made.opcode in _AT_HAND:
        return -1
    if made.opcode in _PASSING and depth < _CHAIN and made.operands:
        return max(_made_by(module, each, position, depth + 1) for each in made.operands)
    return position.get(name, len(position))
