"""What an HLO instruction computes, in seconds at a chip's peak rates."""

import math
import re
from typing import NamedTuple

from jaxmem.analysis.hlo._flops import ModuleFlops, operand_shape
from jaxmem.analysis.hlo._module import Computation, Instruction, Module
from jaxmem.analysis.hlo._types import arrays
from jaxmem.analysis.hlo._walk import Walk
from jaxmem.analysis.step_time._bytes import FREE, FUSIONS
from jaxmem.analysis.step_time._chip import ChipSpeed

_EXACT = re.compile(r'operand_precision(?:=\{|":\s*\[")(?:highest|HIGHEST)')
_COST_ESTIMATE = re.compile(r'"cost_estimate":\s*\{"flops":\s*"(\d+)"(?:[^{}]*?"bytes_accessed":\s*"(\d+)")?')
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^\[]*"dimensions":\s*\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type":\s*"\w*CAUSAL')
_MATMULS = frozenset(("dot", "convolution", "custom-call"))
# Their arithmetic is none, or far from the bound that their bytes set.
_NO_ARITHMETIC = FREE | frozenset(
    "broadcast copy reshape transpose slice dynamic-slice dynamic-update-slice concatenate pad gather reverse "
    "convert select fusion call while conditional copy-start copy-done rng-get-and-update-state".split()
)


def cost_estimate(instruction: Instruction) -> tuple[int, int] | None:
    """FLOPs and bytes that the author of a Pallas kernel states, where there are any."""
    found = _COST_ESTIMATE.search(instruction.rest) if instruction.opcode == "custom-call" else None
    return (int(found.group(1)), int(found.group(2) or 0)) if found else None


class Seconds(NamedTuple):
    """Seconds, by what bounds them; `filled` of them are not the compiler's."""

    compute: float = 0.0
    memory: float = 0.0
    collective: float = 0.0
    filled: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.memory + self.collective


class Work:
    """Seconds of arithmetic by instruction."""

    def __init__(self, module: Module, chip: ChipSpeed):
        self.chip = chip
        self._flops = ModuleFlops(module)
        self._fused = Walk(module, Seconds(), self._run, size=lambda cost: cost.seconds)

    def of(self, computation: Computation, instruction: Instruction) -> float:
        """Seconds that its products and its elementwise operations take, whichever is more."""
        if instruction.opcode in FUSIONS:
            return self._fused.called(computation, instruction).compute
        return max(self._matmul(computation, instruction), self._vector(computation, instruction))

    def _run(self, fused: Computation) -> Seconds:
        """Of a fused computation, the products of which overlap with the rest."""
        inside = fused.instructions.values()
        nested = sum(self._fused.called(fused, i).compute for i in inside if i.opcode == "fusion")
        matmul = sum(self._matmul(fused, i) for i in inside)
        vector = sum(self._vector(fused, i) for i in inside)
        return Seconds(compute=nested + max(matmul, vector))

    def _matmul(self, computation: Computation, instruction: Instruction) -> float:
        if instruction.opcode not in _MATMULS:
            return 0.0
        flops = self._product_flops(computation, instruction)
        if not flops:
            return 0.0
        multiplied = arrays((computation.operand(instruction, 0) or instruction).type)
        exact = _EXACT.search(instruction.rest) is not None
        return flops / self.chip.matmul_rate(multiplied[0].dtype if multiplied else "f32", exact=exact)

    def _product_flops(self, computation: Computation, instruction: Instruction) -> int:
        stated = cost_estimate(instruction)
        if stated is not None:
            return stated[0]
        attention = _ATTENTION.search(instruction.rest)
        if attention is not None:
            return _attention_flops(instruction, operand_shape(computation, instruction, 0))
        return self._flops.of(computation, instruction).all

    def _vector(self, computation: Computation, instruction: Instruction) -> float:
        rate = self.chip.vector_flops_per_second
        if rate is None or instruction.opcode in _NO_ARITHMETIC or instruction.opcode in _MATMULS:
            return 0.0
        shape = instruction.shape
        if instruction.opcode in ("reduce", "reduce-window", "sort"):
            shape = operand_shape(computation, instruction, 0)
        return math.prod(shape) / rate


def _attention_flops(instruction: Instruction, query: tuple[int, ...]) -> int:
    """Products of cuDNN's fused attention: two forward; backward the scores again and four gradients."""
    scores = _SCORES.search(instruction.rest)
    if scores is None or not query:
        return 0
    pairs = math.prod(int(n) for n in re.findall(r"\d+", scores.group(1)))
    if _CAUSAL.search(instruction.rest):  # what is masked is not computed
        pairs //= 2
    products = 5 if "Backward" in instruction.rest.partition("custom_call_target")[2][:60] else 2
    return products * 2 * pairs * query[-1]
