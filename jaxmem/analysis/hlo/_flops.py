"""Counts the matrix-product and convolution FLOPs of a compiled module, loops multiplied out.

The compiler's own `cost_analysis` counts a loop body once, and is missing on some backends.
"""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

from jaxmem._product_flops import WindowDimension, convolution_flops, dot_flops
from jaxmem._scopes import BACKWARD_SCOPE, REMAT_SCOPE
from jaxmem._shown import Brief
from jaxmem.analysis.hlo._module import Computation, Instruction, Module, computation_names
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.analysis.hlo._walk import CALLS, Walk, plus

# The last part of the op_name of whatever a dot was compiled into.
_DOT_NAME = "/dot_general"

_GEMM_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_GEMM_TARGETS = ("__cublas$", "__triton_gemm")
_CONV_TARGETS = ("__cudnn$convForward", "__cudnn$convBiasActivationForward", "__cudnn$convForwardGraph")
_CONV_INPUT_GRADIENT = "__cudnn$convBackwardInput"
_CONV_KERNEL_GRADIENT = "__cudnn$convBackwardFilter"
# Custom calls that multiply no matrices.
_NO_MATMUL = re.compile(
    r"sharding|shape$|placement|moveto|callback|threefry|topk|allocatebuffer|padtostatic|slicetodynamic"
    r"|barrier|assume|print|infeed|outfeed|sort|layout|pin$",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloFlops(Brief):
    """What a module computes in dots and convolutions, per device.

    Args:
      flops: all of them.
      forward_flops: those outside the backward pass.
      recompute_flops: those that JAX labels as recomputed by a checkpoint. Where the compiler merged a
        recomputation with its first computation, the survivor may carry either label.
      notes: sentences on what could not be counted exactly.
    """

    flops: int
    forward_flops: int
    recompute_flops: int
    notes: tuple[str, ...] = ()


def hlo_flops(text: str | Module) -> HloFlops:
    """FLOPs of the optimised HLO in `text` (`Compiled.as_text()`, or parsed); a pure function, linear in its length.

    Of a conditional the costliest branch counts, and a loop whose trip count depends on data counts once:
    `notes` says so, and names custom calls that are not counted.

    Raises:
      ValueError: the text has no entry computation.
    """
    flops = ModuleFlops(parse_hlo(text) if isinstance(text, str) else text)
    total = flops.walk.entry()
    forward = total.forward + total.unlabelled
    return HloFlops(flops=total.all, forward_flops=forward, recompute_flops=total.recompute, notes=flops.notes())


class Flops(NamedTuple):
    """FLOPs by the label of what computes them: all, the forward pass's, recomputed ones, and those without one."""

    all: int = 0
    forward: int = 0
    recompute: int = 0
    unlabelled: int = 0


_NONE = Flops()


class ModuleFlops:
    """FLOPs of a module's instructions, with all that they call."""

    def __init__(self, module: Module):
        self.walk = Walk(module, _NONE, self._run, size=lambda flops: flops.all)
        self._custom_calls: collections.Counter[str] = collections.Counter()

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self._custom_calls:
            names = ", ".join(f"{name} ({n}x)" for name, n in sorted(self._custom_calls.items()))
            notes.append(f"FLOPs inside custom calls are not counted: {names}.")
        if loops := sum(flops.all > 0 for flops in self.walk.endless):
            notes.append(f"{loops} loop(s) with an unknown trip count: compiled FLOPs count them once.")
        if conditionals := sum(flops.all > 0 for flops in self.walk.chosen):
            notes.append(f"{conditionals} conditional(s): compiled FLOPs take the costliest branch.")
        return tuple(notes)

    def _run(self, computation: Computation) -> Flops:
        total = _NONE
        for instruction in computation.instructions.values():
            if instruction.opcode in _COUNTED and (flops := self.of(computation, instruction)).all:
                total = plus(total, _with_label(computation, instruction, flops))
        return total

    def of(self, computation: Computation, instruction: Instruction) -> Flops:
        """FLOPs of one instruction."""
        if instruction.opcode in CALLS:
            return self.walk.called(computation, instruction)
        if instruction.opcode == "custom-call":
            return self._custom_call(computation, instruction)
        product = _PRODUCTS.get(instruction.opcode)
        flops = product(computation, instruction) if product else 0
        return _labelled(instruction.op_name, flops) if flops else _NONE

    def _custom_call(self, computation: Computation, instruction: Instruction) -> Flops:
        product = _library_product(computation, instruction)
        if product is not None:
            return _labelled(instruction.op_name, product)
        inside = _NONE
        for name in computation_names(instruction.attribute("called_computations") or ""):
            inside = plus(inside, self.walk.computation(name))
        target = instruction.attribute("custom_call_target") or ""
        if not inside.all and not _NO_MATMUL.search(target):
            self._custom_calls[target] += 1
        return inside


def _with_label(computation: Computation, instruction: Instruction, flops: Flops) -> Flops:
    """What has no label of its own takes that of the instruction round it, or of the last that uses its value.

    XLA:CPU leaves the gradient of a convolution's kernel, and the fusion round it, without one.
    """
    if not flops.unlabelled:
        return flops
    scope = instruction.op_name
    if not scope:
        users = [user.op_name for user, _ in computation.users.get(instruction.name, ())]
        scope = next(filter(None, reversed(users)), "")
    return plus(_labelled(scope, flops.unlabelled), flops._replace(all=flops.all - flops.unlabelled, unlabelled=0))


def _labelled(scope: str, flops: int) -> Flops:
    if not scope:
        return Flops(flops, unlabelled=flops)
    if REMAT_SCOPE in scope:
        return Flops(flops, recompute=flops)
    return Flops(flops, forward=0 if BACKWARD_SCOPE in scope else flops)


def _dot(computation: Computation, instruction: Instruction) -> int:
    lhs = operand_shape(computation, instruction, 0)
    return dot_flops(instruction.shape, lhs, instruction.numbers("lhs_contracting_dims"))


def _reduce(computation: Computation, instruction: Instruction) -> int:
    """A dot that the compiler wrote as a product and a sum, as it does for vectors: op_name tells."""
    if not instruction.op_name.endswith(_DOT_NAME):
        return 0
    summed = computation.operand(instruction, 0)
    if summed is None or summed.opcode != "multiply" or summed.op_name.endswith(_DOT_NAME):
        return 0  # not a dot, or one that is counted at its product
    return 2 * math.prod(summed.shape)


def _multiply(_: Computation, instruction: Instruction) -> int:
    """A dot that sums over nothing, or that has its name on the product and not on the sum."""
    return 2 * math.prod(instruction.shape) if instruction.op_name.endswith(_DOT_NAME) else 0


def _convolution(computation: Computation, instruction: Instruction) -> int:
    lhs, rhs = (operand_shape(computation, instruction, i) for i in range(2))
    return _window_flops(instruction, lhs, rhs, instruction.shape)


_PRODUCTS = {"dot": _dot, "reduce": _reduce, "multiply": _multiply, "convolution": _convolution}
_COUNTED = CALLS | _PRODUCTS.keys() | {"custom-call"}


def _library_product(computation: Computation, instruction: Instruction) -> int | None:
    """FLOPs of a library's matrix product or convolution; None of any other custom call."""
    target = instruction.attribute("custom_call_target") or ""
    lhs, rhs = (operand_shape(computation, instruction, i) for i in range(2))
    result = instruction.shape
    contracting = _GEMM_CONTRACTING.search(instruction.rest) if target.startswith(_GEMM_TARGETS) else None
    if contracting:
        return dot_flops(result, lhs, [int(d) for d in re.findall(r"\d+", contracting.group(1))])
    # The labels of a gradient call are those of the forward convolution.
    if target in _CONV_TARGETS:
        return _window_flops(instruction, lhs, rhs, result)
    if target == _CONV_INPUT_GRADIENT:
        return _window_flops(instruction, result, rhs, lhs)
    if target == _CONV_KERNEL_GRADIENT:
        return _window_flops(instruction, lhs, result, rhs)
    return None


def operand_shape(computation: Computation, instruction: Instruction, number: int) -> tuple[int, ...]:
    """Dimensions of an operand; () where it is not to be seen."""
    operand = computation.operand(instruction, number)
    return operand.shape if operand else ()


def _window_flops(instruction: Instruction, lhs, rhs, out) -> int:
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if not labels or not (len(lhs) == len(rhs) == len(out) == len(labels.group(1))):
        return 0
    lhs_labels, rhs_labels, out_labels = labels.groups()
    window = _window(instruction.attribute("window") or "")
    spatial = [label for label in out_labels if label.isdigit()]
    dimensions = [
        WindowDimension(
            input=lhs[lhs_labels.index(label)],
            kernel=rhs[rhs_labels.index(label)],
            output=out[out_labels.index(label)],
            **{key: values[int(label)] for key, values in window.items()},
        )
        for label in spatial
    ]
    return convolution_flops(
        batch=lhs[lhs_labels.index("b")],
        kernel_input_features=rhs[rhs_labels.index("i")],
        output_features=out[out_labels.index("f")],
        window=dimensions,
        batch_groups=int(instruction.attribute("batch_group_count") or 1),
    )


def _window(text: str) -> dict[str, list[int]]:
    """`size=3x3 stride=2x2 pad=0_1x0_1` as keyword lists of `WindowDimension`."""
    names = {"stride": "stride", "pad": "pad", "lhs_dilate": "lhs_dilation", "rhs_dilate": "kernel_dilation"}
    fields = dict(field.split("=", 1) for field in text.split())
    # Only the padding below matters: the output size already says where the window stops.
    return {
        names[key]: [int(part.split("_")[0]) for part in value.split("x")]
        for key, value in fields.items()
        if key in names
    }
