"""What an HLO instruction computes, in seconds at a chip's peak rates."""

import math
import re

from jaxmem.analysis.hlo._flops import FlopCounter
from jaxmem.analysis.hlo._parse import Computation, Instruction, Module
from jaxmem.analysis.hlo._types import arrays
from jaxmem.analysis.step_time._bytes import FREE
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


class Work:
    """Seconds of arithmetic by instruction; each fused computation is looked at once."""

    def __init__(self, module: Module, chip: ChipSpeed):
        self.module, self.chip = module, chip
        self.counter = FlopCounter(module)
        self._inside: dict[str, float] = {}

    def of(self, computation: Computation, instruction: Instruction) -> float:
        """Seconds that its products and its elementwise operations take, whichever is more."""
        if instruction.opcode in ("fusion", "fusion-start"):
            return self._computation(instruction.attribute("calls") or "")
        return max(self._matmul(computation, instruction), self._vector(computation, instruction))

    def _computation(self, name: str) -> float:
        known = self._inside.get(name)
        if known is not None:
            return known
        self._inside[name] = 0.0
        fused = self.module.computations.get(name)
        if fused is None:
            return 0.0
        instructions = fused.instructions.values()
        nested = sum(self._computation(i.attribute("calls") or "") for i in instructions if i.opcode == "fusion")
        matmul = sum(self._matmul(fused, i) for i in instructions)
        vector = sum(self._vector(fused, i) for i in instructions)
        self._inside[name] = nested + max(matmul, vector)
        return self._inside[name]

    def _matmul(self, computation: Computation, instruction: Instruction) -> float:
        if instruction.opcode not in _MATMULS:
            return 0.0
        flops = self._product_flops(computation, instruction)
        if not flops:
            return 0.0
        operands = instruction.operands
        first = computation.instructions.get(operands[0]) if operands else None
        multiplied = arrays((first or instruction).type)
        exact = _EXACT.search(instruction.rest) is not None
        return flops / self.chip.matmul_rate(multiplied[0].dtype if multiplied else "f32", exact=exact)

    def _product_flops(self, computation: Computation, instruction: Instruction) -> int:
        stated = cost_estimate(instruction)
        if stated is not None:
            return stated[0]
        attention = _ATTENTION.search(instruction.rest)
        if attention is not None:
            return _attention_flops(instruction, self.counter.shape(computation, instruction, 0))
        cost = self.counter.instruction(computation, instruction)
        return cost.all if cost is not None else 0

    def _vector(self, computation: Computation, instruction: Instruction) -> float:
        rate = self.chip.vector_flops_per_second
        if rate is None or instruction.opcode in _NO_ARITHMETIC or instruction.opcode in _MATMULS:
            return 0.0
        shape = instruction.shape
        if instruction.opcode in ("reduce", "reduce-window", "sort"):
            shape = self.counter.shape(computation, instruction, 0)
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
