"""Counts the matrix-product and convolution FLOPs of a compiled module, loops multiplied out.

The compiler's own `cost_analysis` counts a loop body once, and is missing on some backends.
"""

import collections
import dataclasses
import math
import re

from jaxmem._product_flops import WindowDimension, convolution_flops, dot_flops
from jaxmem.analysis.hlo._loops import trip_count
from jaxmem.analysis.hlo._parse import Computation, Instruction, Module, computation_names, parse_hlo

# JAX puts this scope on what a checkpoint computes a second time.
REMAT_SCOPE = "rematted_computation"
# And this one on everything that the backward pass computes.
BACKWARD_SCOPE = "transpose("
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
class HloFlops:
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
    module = parse_hlo(text) if isinstance(text, str) else text
    if module.entry is None:
        raise ValueError("HLO text without an ENTRY computation")
    counter = FlopCounter(module)
    total = counter.computation(module.entry)
    forward = total.forward + total.unlabelled
    return HloFlops(flops=total.all, forward_flops=forward, recompute_flops=total.remat, notes=counter.notes())


@dataclasses.dataclass(slots=True)
class _Cost:
    all: int = 0
    forward: int = 0
    remat: int = 0
    unlabelled: int = 0

    def add(self, other: "_Cost", times: int = 1) -> None:
        self.all += other.all * times
        self.forward += other.forward * times
        self.remat += other.remat * times
        self.unlabelled += other.unlabelled * times


class FlopCounter:
    """One walk over a module; each computation is costed once, however often it is called."""

    def __init__(self, module: Module):
        self.module = module
        self.costs: dict[str, _Cost] = {}
        self.user_labels: dict[str, dict[str, str]] = {}
        self.custom_calls: collections.Counter[str] = collections.Counter()
        self.unknown_loops = self.conditionals = 0

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.custom_calls:
            names = ", ".join(f"{name} ({n}x)" for name, n in sorted(self.custom_calls.items()))
            notes.append(f"FLOPs inside custom calls are not counted: {names}.")
        if self.unknown_loops:
            notes.append(f"{self.unknown_loops} loop(s) with an unknown trip count: compiled FLOPs count them once.")
        if self.conditionals:
            notes.append(f"{self.conditionals} conditional(s): compiled FLOPs take the costliest branch.")
        return tuple(notes)

    def computation(self, name: str) -> _Cost:
        known = self.costs.get(name)
        if known is not None:
            return known
        total = self.costs[name] = _Cost()
        computation = self.module.computations.get(name)
        if computation is None:
            return total
        for instruction in computation.instructions.values():
            cost = self.instruction(computation, instruction)
            if cost is not None:
                total.add(self.with_label(computation, instruction, cost))
        return total

    def instruction(self, computation: Computation, instruction: Instruction) -> _Cost | None:
        """What an instruction of `computation` costs, with all that it calls; None where its opcode never does."""
        visit = _VISITS.get(instruction.opcode)
        return visit(self, computation, instruction) if visit is not None else None

    def with_label(self, computation: Computation, instruction: Instruction, cost: _Cost) -> _Cost:
        """What has no label of its own takes that of the instruction round it, or of what uses its value.

        XLA:CPU leaves the gradient of a convolution's kernel, and the fusion round it, without one.
        """
        if not cost.unlabelled:
            return cost
        scope = instruction.op_name
        if not scope:
            if computation.name not in self.user_labels:
                self.user_labels[computation.name] = {
                    operand: user.op_name
                    for user in computation.instructions.values()
                    if user.op_name
                    for operand in user.operands
                }
            scope = self.user_labels[computation.name].get(instruction.name, "")
        labelled = _labelled(scope, cost.unlabelled)
        labelled.add(_Cost(cost.all - cost.unlabelled, cost.forward, cost.remat))
        return labelled

    def called(self, _: Computation, instruction: Instruction) -> _Cost:
        name = instruction.attribute("calls") or instruction.attribute("to_apply")
        return self.computation(name) if name else _Cost()

    def loop(self, computation: Computation, instruction: Instruction) -> _Cost:
        trips = trip_count(self.module, computation, instruction)
        once = _Cost()
        for part in ("condition", "body"):
            once.add(self.computation(instruction.attribute(part) or ""))
        if trips is None:
            self.unknown_loops += once.all > 0
            return once
        total = _Cost()
        total.add(once, trips)
        return total

    def conditional(self, _: Computation, instruction: Instruction) -> _Cost:
        branches = [self.computation(name) for name in instruction.branches]
        self.conditionals += any(branch.all for branch in branches)
        return max(branches, key=lambda branch: branch.all, default=_Cost())

    def dot(self, computation: Computation, instruction: Instruction) -> _Cost:
        lhs = self.shape(computation, instruction, 0)
        return _labelled(
            instruction.op_name, dot_flops(instruction.shape, lhs, instruction.numbers("lhs_contracting_dims"))
        )

    def reduce(self, computation: Computation, instruction: Instruction) -> _Cost:
        """A dot that the compiler wrote as a product and a sum, as it does for vectors: op_name tells."""
        if not instruction.op_name.endswith(_DOT_NAME) or not instruction.operands:
            return _Cost()
        summed = computation.instructions.get(instruction.operands[0])
        if summed is None or summed.opcode != "multiply" or summed.op_name.endswith(_DOT_NAME):
            return _Cost()  # not a dot, or one that is counted at its product
        return _labelled(instruction.op_name, 2 * math.prod(summed.shape))

    def multiply(self, _: Computation, instruction: Instruction) -> _Cost:
        """A dot that sums over nothing, or that has its name on the product and not on the sum."""
        if not instruction.op_name.endswith(_DOT_NAME):
            return _Cost()
        return _labelled(instruction.op_name, 2 * math.prod(instruction.shape))

    def convolution(self, computation: Computation, instruction: Instruction) -> _Cost:
        shapes = (self.shape(computation, instruction, 0), self.shape(computation, instruction, 1), instruction.shape)
        return _labelled(instruction.op_name, _convolution(instruction, *shapes))

    def custom_call(self, computation: Computation, instruction: Instruction) -> _Cost:
        target = instruction.attribute("custom_call_target") or ""
        operands = [self.shape(computation, instruction, i) for i in range(2)]
        result = instruction.shape
        if target.startswith(_GEMM_TARGETS):
            contracting = _GEMM_CONTRACTING.search(instruction.rest)
            if contracting:
                dims = [int(d) for d in re.findall(r"\d+", contracting.group(1))]
                return _labelled(instruction.op_name, dot_flops(result, operands[0], dims))
        # The labels of a gradient call are those of the forward convolution.
        if target in _CONV_TARGETS:
            return _labelled(instruction.op_name, _convolution(instruction, operands[0], operands[1], result))
        if target == _CONV_INPUT_GRADIENT:
            return _labelled(instruction.op_name, _convolution(instruction, result, operands[1], operands[0]))
        if target == _CONV_KERNEL_GRADIENT:
            return _labelled(instruction.op_name, _convolution(instruction, operands[0], result, operands[1]))
        inside = _Cost()
        for name in computation_names(instruction.attribute("called_computations") or ""):
            inside.add(self.computation(name))
        if not inside.all and not _NO_MATMUL.search(target):
            self.custom_calls[target] += 1
        return inside

    def shape(self, computation: Computation, instruction: Instruction, index: int) -> tuple[int, ...]:
        operands = instruction.operands
        if index >= len(operands):
            return ()
        operand = computation.instructions.get(operands[index])
        return operand.shape if operand else ()


_VISITS = {
    "dot": FlopCounter.dot,
    "reduce": FlopCounter.reduce,
    "multiply": FlopCounter.multiply,
    "convolution": FlopCounter.convolution,
    "custom-call": FlopCounter.custom_call,
    "fusion": FlopCounter.called,
    "call": FlopCounter.called,
    "async-start": FlopCounter.called,
    "while": FlopCounter.loop,
    "conditional": FlopCounter.conditional,
}


def _labelled(scope: str, flops: int) -> _Cost:
    if not scope:
        return _Cost(flops, unlabelled=flops)
    if REMAT_SCOPE in scope:
        return _Cost(flops, remat=flops)
    return _Cost(flops, forward=0 if BACKWARD_SCOPE in scope else flops)


def _convolution(instruction: Instruction, lhs, rhs, out) -> int:
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
