"""`fenced`: random masks are drawn once and fused into nothing. `drawn`: what a program draws.

A compiler may fuse the drawing of a mask into whatever reads it, and keep or repeat the random bits, four bytes an
element, wherever that is. Behind a `lax.optimization_barrier` only the mask is read, one byte an element.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from jaxmem._compat import called_jaxprs, scan_layout
from jaxmem.jaxprs import (
    body_key,
    body_of,
    body_params,
    equations_in,
    is_nested_scan,
    is_value,
    num_bytes,
    rewritten,
    with_body_params,
)

LEAST = 2**16
"""Elements of the smallest mask that gets a fence. The bits of a smaller one take less than 256 KiB, no share of any
peak, and less time than starting a kernel: those of stochastic depth, or of whole features and examples."""
_NARROW = (jnp.bfloat16, jnp.float16)
_DRAWING = frozenset("random_bits random_gamma threefry2x32 rng_bit_generator rng_uniform".split())
_SOURCES = _DRAWING | {"random_unwrap"}  # whoever makes numbers of a key's words draws by a generator of his own
# What passes random bits on, element by element or moved: from bits to the uniform numbers that are compared.
_PASSING = frozenset(
    """add sub mul div rem max min neg abs sign floor ceil round clamp and or xor not shift_left shift_right_logical
    shift_right_arithmetic convert_element_type bitcast_convert_type reduce_precision select_n exp exp2 log log1p sqrt
    rsqrt erf_inv integer_pow pow square copy copy_p reshape transpose squeeze expand_dims broadcast_in_dim slice
    concatenate rev pad dynamic_slice unstack split sharding_constraint name stop_gradient pvary pcast""".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """What one run of a program draws.

    Args:
      draws: whether it draws random bits at all.
      in_scans: whether it does so in scans.
      narrow: whether it computes in 16-bit floats.
      masks: how many random masks of at least `LEAST` elements; each step of a scan counts.
      mask_bytes: of all of them, a byte an element.
      most_axes: of a mask; those of attention weights have four.
    """

    draws: bool
    in_scans: bool
    narrow: bool
    masks: int
    mask_bytes: int
    most_axes: int


NOTHING = Drawn(draws=False, in_scans=False, narrow=False, masks=0, mask_bytes=0, most_axes=0)


def fenced(fn: Callable, *, least: int = LEAST) -> Callable:
    """`fn` with an `optimization_barrier` round each random mask that it draws; no number changes.

    A mask is what a comparison makes of random bits: what `jax.random.bernoulli` and its kin return, whoever calls
    them. It is fenced where it is made: in bodies of scans, branches, checkpoints and shard_maps, too. What a custom
    derivative draws in its own rule, that of `remat.nested_scan` too, and a `while` in its body, is left as it is; so
    are random floats, which are used as they are drawn.

    Args:
      fn: function of pytrees of arrays, such as a loss.
      least: elements of the smallest mask that gets a fence.

    >>> import jax, jax.numpy as jnp
    >>> def drop(key, x):
    ...     return jnp.where(jax.random.uniform(key, x.shape) < 0.9, x / 0.9, 0)
    >>> program = jax.make_jaxpr(fenced(drop))(jax.random.key(0), jnp.ones((256, 256)))
    >>> "optimization_barrier" in str(program)
    True
    """

    return rewritten(fn, lambda program: jex.jaxpr_as_fun(_Fences(least).of(program)))


def drawn(program: jex.ClosedJaxpr) -> Drawn:
    """What a program draws.

    >>> import jax
    >>> draw = lambda key: jax.random.bernoulli(key, shape=(512, 512))
    >>> drawn(jax.make_jaxpr(draw)(jax.random.key(0)))
    Drawn(draws=True, in_scans=False, narrow=False, masks=1, mask_bytes=262144, most_axes=2)
    """
    fences = _Fences(LEAST)
    fences.of(program)
    eqns = list(equations_in(body_of(program)[0]))
    return Drawn(
        draws=any(eqn.primitive.name in _DRAWING for eqn in eqns),
        in_scans=any(eqn.primitive.name == "scan" and any(map(_draws, called_jaxprs(eqn))) for eqn in eqns),
        narrow=any(getattr(v.aval, "dtype", None) in _NARROW for eqn in eqns for v in eqn.outvars),
        masks=fences.masks,
        mask_bytes=fences.mask_bytes,
        most_axes=fences.most_axes,
    )


def _draws(jaxpr) -> bool:
    return any(eqn.primitive.name in _DRAWING for eqn in equations_in(jaxpr))


class _Fences:
    """Programs with fences, each body edited once for each set of inputs that are drawn.

    Args:
      least: elements of the smallest mask that gets a fence.
    """

    def __init__(self, least: int):
        self._least, self._known = least, {}
        self.masks = self.mask_bytes = self.most_axes = 0

    def of(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """A whole program with fences, which are counted."""
        edited, _, (self.masks, self.mask_bytes) = self._edit(closed, [False] * len(body_of(closed)[0].invars))
        return edited

    def _edit(self, program, given: Sequence[bool]) -> tuple[Any, list[bool], tuple[int, int]]:
        """A program with fences, which of its outputs are random bits, and the number and bytes of its masks.

        Args:
          program: a jaxpr, closed or not.
          given: which of its inputs are random bits, or made of nothing else.
        """
        key = (id(program), tuple(given))
        if key not in self._known:  # jit gives the same jaxpr to every call of one function; kept, as ids come again
            self._known[key] = (program, self._edit_anew(program, given))
        return self._known[key][1]

    def _edit_anew(self, program, given):
        jaxpr, consts = body_of(program)
        bits = {v for v, yes in zip(jaxpr.invars, given, strict=True) if yes}
        even: set = set()  # the same for every element, or made from nothing: a rate, an iota
        masks = mask_bytes = 0
        eqns, by_hand = [], {v for eqn in jaxpr.eqns if eqn.primitive is _barrier() for v in eqn.invars if is_value(v)}
        for eqn in jaxpr.eqns:
            atoms = [v for v in eqn.invars if is_value(v)]
            if body_key(eqn) in eqn.params and not is_nested_scan(eqn):
                eqn, from_bodies, (more, more_bytes) = self._edit_bodies(eqn, bits)
                bits.update(v for v, yes in zip(eqn.outvars, from_bodies, strict=True) if yes)
                masks, mask_bytes = masks + more, mask_bytes + more_bytes
            elif eqn.primitive.name in _SOURCES:
                bits.update(eqn.outvars)
            elif bits.isdisjoint(atoms) or eqn.primitive is _barrier():
                if all(v in even or _is_single(v) for v in atoms):
                    even.update(eqn.outvars)
            elif self._is_mask(eqn) and by_hand.isdisjoint(eqn.outvars):
                masks, mask_bytes = masks + 1, mask_bytes + num_bytes(eqn.outvars[0].aval)
                self.most_axes = max(self.most_axes, len(getattr(eqn.outvars[0].aval, "shape", ())))
                eqns += _with_fence(eqn)
                continue
            elif eqn.primitive.name in _PASSING and all(v in bits or v in even or _is_single(v) for v in atoms):
                bits.update(eqn.outvars)
            eqns.append(eqn)
        returned = [is_value(v) and v in bits for v in jaxpr.outvars]
        if not masks:
            return program, returned, (0, 0)
        edited = jaxpr.replace(eqns=eqns)
        closed = edited if isinstance(program, jex.Jaxpr) else jex.ClosedJaxpr(edited, consts)
        return closed, returned, (masks, mask_bytes)

    def _edit_bodies(self, eqn, bits: set):
        """`_edit` of an equation with bodies."""
        name = eqn.primitive.name
        given = [is_value(v) and v in bits for v in eqn.invars[name == "cond" :]]  # a cond's first says which branch
        carries, times = 0, 1
        if name == "scan":  # what is carried is another value in each step
            consts, carries, _ = scan_layout(eqn)
            times = eqn.params["length"]
            given = [yes and not consts <= i < consts + carries for i, yes in enumerate(given)]
        edited = [self._edit(body, given) for body in body_params(eqn)]
        from_all = zip(*(returned for _, returned, _ in edited), strict=True)
        returned = [all(each) and i >= carries for i, each in enumerate(from_all)]
        masks, mask_bytes = max(found for *_, found in edited)  # one branch is taken
        if not masks:
            return eqn, returned, (0, 0)
        edited_eqn = with_body_params(eqn, [program for program, *_ in edited])
        return edited_eqn, returned, (masks * times, mask_bytes * times)

    def _is_mask(self, eqn) -> bool:
        """Whether an equation makes bools of random bits, enough for a fence."""
        out = eqn.outvars[0]
        if isinstance(out, jex.DropVar) or getattr(out.aval, "dtype", None) != jnp.bool_:
            return False
        return math.prod(out.aval.shape) >= self._least


def _with_fence(eqn) -> Iterator[jex.JaxprEqn]:
    """The equation, and a fence that makes its output: whoever read that reads what comes from the fence."""
    behind = [jex.Var(v.aval) for v in eqn.outvars]
    yield eqn.replace(outvars=behind)
    yield eqn.replace(primitive=_barrier(), params={}, invars=behind, outvars=eqn.outvars)


@functools.cache
def _barrier() -> jex.Primitive:
    return jax.make_jaxpr(lax.optimization_barrier)(False).eqns[0].primitive


def _is_single(v) -> bool:
    return math.prod(getattr(v.aval, "shape", ())) <= 1
