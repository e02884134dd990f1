"""`realise`: a block that keeps what was chosen, as a function with its own derivative.

`jax.checkpoint` chooses among values of the function before it is differentiated, by the operation that makes them;
here any value may be kept, also those that only the derivative has. Forward-mode differentiation of the block itself
is the price; gradients of gradients work, since both rules are programs.
"""

import collections
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxmem._compat import pull_back, varying_axes, without_tangents
from jaxmem.remat.auto._forward import Forward, is_float

# JAX's own label on what a checkpoint computes a second time; counts of a compiled step's FLOPs go by it.
_RECOMPUTED = "rematted_computation"


def realise(
    fn: Callable[..., Sequence],
    decide: Callable[[tuple[bool, ...], Sequence], tuple[Forward, Sequence, Sequence]],
    *,
    scanned: bool,
) -> Callable[..., list]:
    """The block `fn` of flat arrays, with values kept, offloaded and recomputed.

    Args:
      fn: the block; what runs where nothing is differentiated.
      decide: of which inputs get a gradient and of the inputs: the forward pass, its variables kept and offloaded.
      scanned: the block is the body of a scan, where nothing can merge the recomputation with the first computation.
    """
    decided = {}

    @jax.custom_vjp
    def block(*args):
        return list(fn(*args))

    def forward(*primals):
        inputs = [p.value for p in primals]
        differentiated = tuple(p.perturbed and is_float(jax.typeof(p.value)) for p in primals)
        if differentiated not in decided:  # once, so that one trace after another has the same backward pass
            decided[differentiated] = decide(differentiated, inputs)
        program, kept, offloaded = decided[differentiated]
        known = dict(zip(program.jaxpr.invars, inputs, strict=True))
        wanted = [*program.outputs, *kept, *offloaded]
        values = program.evaluate(wanted, known, effects=True)
        outs, values = values[: program.num_outputs], values[program.num_outputs :]
        used = [program.jaxpr.invars[i] for i in program.inputs_used({*kept, *offloaded})]
        device, host = values[: len(kept)], [to_host(value) for value in values[len(kept) :]]
        saved = _Backward(program, (*used, *kept), tuple(offloaded), scanned)
        return outs, jax.tree_util.Partial(saved, [known[v] for v in used] + device, host)

    def backward(saved, cotangents):
        return tuple(saved(cotangents))

    block.defvjp(forward, backward, symbolic_zeros=True)

    def realised(*args):
        return without_tangents(block(*args))

    realised.has_own_rule = True  # pyright: ignore[reportFunctionMemberAccess]  what `evaluate` asks
    return realised


class _Backward:
    """The backward pass of a block; equal to another of the same choice, so that traces can be compared."""

    def __init__(self, program: Forward, device: tuple, host: tuple, scanned: bool):
        self.key = (program, device, host, scanned)

    def __eq__(self, other):
        return isinstance(other, _Backward) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def __call__(self, device, host, cotangents):
        program, names, away, scanned = self.key
        known = {*names, *away}
        if not scanned and program.needed_for(program.residuals, known):
            # Cotangents are there only when the backward pass has come here: nothing is recomputed before.
            arrays = [c for c in cotangents if _is_array(c)]
            device, host, arrays = _together((device, host, arrays))
            arrays = iter(arrays)
            cotangents = [next(arrays) if _is_array(c) else c for c in cotangents]
        values = dict(zip((*names, *away), (*device, *map(to_device, host)), strict=True))
        with jax.named_scope(_RECOMPUTED):
            residuals = program.evaluate(program.residuals, values)
        gradients = iter(pull_back(jax.tree.unflatten(program.vjp_tree, residuals), list(cotangents)))
        return [next(gradients) if yes else None for yes in program.differentiated]


def _together(tree):
    """The values, none of which is there before all are; of those that vary over other axes of a mesh, separately.

    Since in JAX 0.10 the outputs of a barrier vary over all the axes of any of its inputs.
    """
    values, structure = jax.tree.flatten(tree)
    alike = collections.defaultdict(list)
    for i, value in enumerate(values):
        alike[varying_axes(value)].append(i)
    for indices in alike.values():
        for i, value in zip(indices, lax.optimization_barrier([values[i] for i in indices]), strict=True):
            values[i] = value
    return structure.unflatten(values)


def to_host(value):
    """The value in host memory."""
    return jax.device_put(value, jax.memory.Space.Host)


def to_device(value):
    """The value back in the device's memory."""
    return jax.device_put(value, jax.memory.Space.Device)


def _is_array(cotangent) -> bool:
    return not isinstance(cotangent, SymbolicZero) and cotangent.dtype != jax.dtypes.float0
