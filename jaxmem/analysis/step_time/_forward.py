"""`forward_seconds`: what the kernels of a compiled forward pass take, by the compiler's own cycles."""

from typing import NamedTuple

from jaxmem._scopes import BACKWARD_SCOPE, FORWARD_SCOPE, REMAT_SCOPE
from jaxmem.analysis.hlo._flops import ModuleFlops
from jaxmem.analysis.hlo._module import Computation, Module
from jaxmem.analysis.hlo._walk import CALLS, Walk, plus
from jaxmem.analysis.step_time._bytes import FREE, FUSIONS
from jaxmem.analysis.step_time._chip import ChipSpeed
from jaxmem.analysis.step_time._estimate import estimated_cycles
from jaxmem.targets import Chip

# It writes what is kept into a stack, which is no part of what computes it.
_KEEPS = "dynamic_update_slice"


class _Rest(NamedTuple):
    """Seconds of what multiplies no matrices."""

    seconds: float = 0.0


def forward_seconds(module: Module, chip: Chip | ChipSpeed) -> tuple[tuple[float, float], ...]:
    """Of kernels with products, by their FLOPs, the mean seconds of one run; and of all else, under 0, its seconds.

    Args:
      module: of a differentiated program, optimised.
      chip: what it is compiled for.

    Returns:
      (FLOPs, seconds), the fewest FLOPs first, on one device; the seconds under 0 are of all runs in one call of the
      program. Empty where the compiler counts no cycles.

    >>> from jaxmem.analysis.hlo._parse import parse_hlo
    >>> from jaxmem.targets import find_chip
    >>> text = '''HloModule m, is_scheduled=true
    ...
    ... ENTRY %main (x: f32[8,8]) -> f32[8,8] {
    ...   %x = f32[8,8]{1,0} parameter(0)
    ...   %y = f32[8,8]{1,0} tanh(%x), metadata={op_name="jvp()/tanh"}, backend_config={"estimated_cycles":"3000"}
    ...   ROOT %z = f32[8,8]{1,0} negate(%y), metadata={op_name="neg"}, backend_config={"estimated_cycles":"1000"}
    ... }
    ... '''
    >>> forward_seconds(parse_hlo(text), find_chip("tpu-v5e"))
    ((0, 2e-06),)
    """
    clock, flops = ChipSpeed.of(chip).clock_hertz, ModuleFlops(module)
    if not clock:
        return ()
    products: dict[float, list[float]] = {}

    def run(computation: Computation) -> _Rest:
        total = _Rest()
        for instruction in computation.instructions.values():
            opcode, name = instruction.opcode, instruction.op_name
            if opcode in CALLS and opcode not in FUSIONS:
                total = plus(total, walk.called(computation, instruction))
            elif opcode not in FREE and FORWARD_SCOPE in name and not (BACKWARD_SCOPE in name or REMAT_SCOPE in name):
                seconds = (estimated_cycles(instruction) or 0) / clock
                multiplied = flops.of(computation, instruction).all
                if multiplied:
                    products.setdefault(multiplied, []).append(seconds)
                elif not name.endswith(_KEEPS):
                    total = plus(total, _Rest(seconds))
        return total

    walk = Walk(module, _Rest(), run, size=lambda rest: rest.seconds)
    rest = walk.entry().seconds
    seen = {of: sum(each) / len(each) for of, each in products.items() if any(each)}
    return () if not (rest or seen) else ((0, rest), *sorted(seen.items()))
