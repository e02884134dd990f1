"""The engine of `nested_scan`: a scan over flat lists of arrays, with its own reverse rule.

Every loop, however deep, runs over indices: it reads its slice of `xs` from the one stack, and writes the slice's
gradient into the one buffer that it carries, which XLA keeps in place. What else was tried, for the gradient of 100
layers with segments of 10 in bfloat16 (jax 0.10.2): 1600 MiB of parameters, carries of 16 MiB, so 320 MiB to keep.

    temporaries in MiB                                          H100     v5e
    this module                                                  392     320
    `lax.scan` in `lax.scan`, each body in a checkpoint          712     642
    the same, with layers read by index from a closure          2152    2081
    one scan, a checkpoint at every layer                       1664    1616
    two of these scans, of 50 layers                            3273    4017

Scan in scan copies a segment's slice of the parameters and of their gradients: 2·k/N of the stack at each level. By
index from a closure, JAX adds each step's gradient to a second whole stack. Slices of the stack for separate scans are
copies of all of it. The price of the custom rule is forward-mode differentiation.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxmem._scopes import REMAT_SCOPE
from jaxmem.jaxprs import is_float, segments_scope
from jaxmem.remat._checkpoint import checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """How a scan is cut.

    Args:
      body: `body(consts, carry, x) -> (carry, y)`, all of them lists of arrays.
      length: N.
      cuts: lengths of nested segments, outermost first; 1 last for the policy "full", where a step keeps
        no more than its start.
      policy: what is kept of the steps of an innermost segment.
      reverse, unroll: as of `lax.scan`.
    """

    body: Callable
    length: int
    cuts: tuple[int, ...]
    policy: Any
    reverse: bool
    unroll: int | bool

    def scan(self) -> Callable:
        """`scan(consts, init, xs) -> (carry, ys)`."""

        @jax.custom_vjp
        def scan(consts, init, xs):
            step = functools.partial(self.body, consts)
            with jax.named_scope(segments_scope(tuple(cut for cut in self.cuts if cut > 1) or (1,))):
                return lax.scan(step, init, xs, self.length, reverse=self.reverse, unroll=self.unroll)

        # Of outputs that the loss does not use, zeros of their whole stack would be read step by step.
        scan.defvjp(self._forward, self._backward, symbolic_zeros=True)
        return scan

    def _forward(self, *primals):
        consts, init, xs = jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=_is_primal)
        run = _Run(plan=self, consts=consts, xs=xs)
        size = self.cuts[0]
        count, rest, first, last = self.split(0, self.length, size)
        # Outputs are written in place as well: segments' outputs, put together afterwards, would be copies.
        _, y = jax.eval_shape(self.body, consts, init, _at(xs, 0))
        ys = [lax.full_like(leaf, 0, shape=(self.length, *leaf.shape)) for leaf in y]

        def segment(state, j):
            carry, ys = state
            return run.steps(carry, first + j * size, size, ys), carry

        (carry, ys), starts = lax.scan(segment, (init, ys), jnp.arange(count), reverse=self.reverse)
        rest_start = None
        if rest:
            rest_start = carry
            carry, ys = run.steps(carry, last, rest, ys)
        return (carry, ys), (consts, xs, starts, rest_start)

    def _backward(self, kept, cotangents):
        consts, xs, starts, rest_start = kept
        carry, ys = cotangents
        run = _Run(plan=self, consts=consts, xs=xs, ys_cotangent=[None if _is_zero(y) else y for y in ys])
        carry = [lax.full_like(c, 0) if _is_zero(c) else c for c in _floats(carry)]
        state = (carry, [jnp.zeros_like(c) for c in _floats(consts)], [jnp.zeros_like(x) for x in _floats(xs)])
        carry, consts_gradient, xs_gradient = run.back_segments(state, starts, rest_start, 0, self.length, self.cuts)
        # `starts` has the dtypes of `init`; what is not floating has no gradient.
        return _replace(consts, consts_gradient, None), _replace(starts, carry, None), _replace(xs, xs_gradient, None)

    def split(self, low, count: int, size: int):
        """Steps [low, low + count) by index: number of full segments, steps left over, where either begins."""
        segments, rest = divmod(count, size)
        if self.reverse:  # the scan starts at the highest index, so the lowest steps are left over
            return segments, rest, low + rest, low
        return segments, rest, low, low + segments * size


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """One pass over the steps, with what all of them read.

    `ys_cotangent` has a None for an output that the loss does not use; a `state` of the backward pass is the
    gradients so far of the carry, of consts and of xs, all of them of floating leaves only.
    """

    plan: Segments
    consts: list
    xs: list
    ys_cotangent: Sequence = ()

    def steps(self, carry, low, count: int, ys=None):
        """Runs steps [low, low + count), writing their outputs into `ys` if that is given: (carry, ys)."""

        def step(state, i):
            carry, ys = state
            carry, y = self.plan.body(self.consts, carry, _at(self.xs, i))
            return (carry, None if ys is None else _put(ys, y, i)), None

        if count == 1:
            return step((carry, ys), low)[0]
        return self._loop(step, (carry, ys), low + jnp.arange(count))[0]

    def back(self, state, carry, low, count: int, cuts):
        """Differentiates steps [low, low + count), which start from `carry`."""
        cuts = tuple(cut for cut in cuts if cut < count)
        if cuts:
            starts, rest_start = self._starts(carry, low, count, cuts[0])
            return self.back_segments(state, starts, rest_start, low, count, cuts)
        if count == 1:
            vjp, _ = self._linearize(carry, _at(self.xs, low))
            return self._pull_back(state, vjp, low)
        return self._back_saved(state, carry, low, count)

    def back_segments(self, state, starts, rest_start, low, count: int, cuts):
        """Differentiates steps whose segments' starts are known, last segment first."""
        size = cuts[0]
        segments, rest, first, last = self.plan.split(low, count, size)
        if rest:
            state = self.back(state, rest_start, last, rest, cuts[1:])

        def segment(state, j_start):
            j, start = j_start
            return self.back(state, start, first + j * size, size, cuts[1:]), None

        xs = (jnp.arange(segments), starts)
        return self._loop(segment, state, xs, back=True, unroll=size == 1)[0]

    @jax.named_scope(REMAT_SCOPE)
    def _starts(self, carry, low, count: int, size: int):
        """The carries that the segments of [low, low + count) start from, stacked, and the shorter rest's."""
        segments, rest, first, _ = self.plan.split(low, count, size)
        if rest:

            def segment(carry, j):
                return self.steps(carry, first + j * size, size)[0], carry

            carry, starts = self._loop(segment, carry, jnp.arange(segments), unroll=size == 1)
            return starts, carry

        # The last segment need not be run to know where it starts.
        def next_start(state, j):
            carry, starts = state
            carry, _ = self.steps(carry, first + j * size, size)
            return (carry, _put(starts, carry, j + (-1 if self.plan.reverse else 1))), None

        starts = [jnp.broadcast_to(leaf[None], (segments, *leaf.shape)) for leaf in carry]
        indices = jnp.arange(segments - 1) + (1 if self.plan.reverse else 0)
        (_, starts), _ = self._loop(next_start, (carry, starts), indices, unroll=size == 1)
        return starts, None

    def _back_saved(self, state, carry, low, count: int):
        """Runs an innermost segment once more, keeping what the policy says of each step, and differentiates it."""
        layout = {}

        def forward(carry, i):
            x = _at(self.xs, i)
            vjp, out = self._linearize(carry, x)
            leaves, layout["tree"] = jax.tree.flatten(vjp)  # a vjp function is a pytree of its residuals
            # What the step was given is not stacked: it can be read again from where it came.
            sources = enumerate((self.consts, x))
            given = {id(leaf): (source, n) for source, each in sources for n, leaf in enumerate(each)}
            layout["given"] = [given.get(id(leaf)) for leaf in leaves]
            return out, [leaf for leaf in leaves if id(leaf) not in given]

        def backward(state, i_saved):
            i, saved = i_saved
            sources, saved = (self.consts, _at(self.xs, i)), iter(saved)
            leaves = [sources[at[0]][at[1]] if at else next(saved) for at in layout["given"]]
            return self._pull_back(state, jax.tree.unflatten(layout["tree"], leaves), i), None

        indices = low + jnp.arange(count)
        with jax.named_scope(REMAT_SCOPE):
            _, saved = self._loop(forward, carry, indices)
        return self._loop(backward, state, (indices, saved), back=True)[0]

    def _linearize(self, carry, x):
        """One step under the policy: (the pull-back of its floating values, the carry it returns)."""

        def step(consts, floats, x_floats):
            out, y = self.plan.body(_replace(self.consts, consts), _replace(carry, floats), _replace(x, x_floats))
            used = [leaf for leaf, cotangent in zip(y, self.ys_cotangent, strict=True) if cotangent is not None]
            return (_floats(out), used), out

        kept = checkpoint(step, self.plan.policy, scanned=True)
        _, vjp, out = jax.vjp(kept, _floats(self.consts), _floats(carry), _floats(x), has_aux=True)
        return vjp, out

    def _pull_back(self, state, vjp, i):
        cotangent, consts_gradient, xs_gradient = state
        used = [leaf for leaf in self.ys_cotangent if leaf is not None]
        consts, cotangent, x = vjp((cotangent, _at(used, i)))
        return cotangent, [a + b for a, b in zip(consts_gradient, consts, strict=True)], _put(xs_gradient, x, i)

    def _loop(self, step, state, xs, *, back: bool = False, unroll: bool = True):
        """`lax.scan` in the order of the steps, or `back` through them."""
        return lax.scan(step, state, xs, reverse=self.plan.reverse != back, unroll=self.plan.unroll if unroll else 1)


def _at(stacks, i):
    return [lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False) for stack in stacks]


def _put(stacks, values, i):
    return [
        lax.dynamic_update_index_in_dim(stack, value, i, 0, allow_negative_indices=False)
        for stack, value in zip(stacks, values, strict=True)
    ]


def _is_primal(leaf) -> bool:
    return isinstance(leaf, CustomVJPPrimal)


def _is_zero(cotangent) -> bool:
    """Whether an output is not used; an integer output has a cotangent without values."""
    return isinstance(cotangent, SymbolicZero) or cotangent.dtype == jax.dtypes.float0


def _floats(leaves) -> list:
    return [leaf for leaf in leaves if is_float(leaf)]


def _replace(leaves, floats, *rest) -> list:
    """`leaves` with its floating ones taken from `floats`, and the others replaced by `rest` if that is given."""
    floats = iter(floats)
    return [next(floats) if is_float(leaf) else (rest[0] if rest else leaf) for leaf in leaves]
