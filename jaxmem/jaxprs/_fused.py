"""`fused`: residuals that a TPU's compiler does not store, since what reads them computes them again for itself."""

from collections.abc import Collection, Mapping, Sequence

import jax.extend.core as jex

from jaxmem._compat import call_to_inline
from jaxmem._jaxpr_costs import rule_of
from jaxmem.jaxprs._equations import body_of, is_value, num_bytes

# Elementwise by its cost, but no part of a fusion: it moves memory, draws bits, or holds operations apart.
_APART = frozenset(
    "rng_bit_generator rng_uniform threefry2x32 optimization_barrier device_put tie concatenate pad stack tile".split()
)
_LARGE = 0.5  # of a value's bytes: what it follows from is much smaller otherwise, like the statistics of a row

Roots = Mapping[jex.Var, int]  # what a value is computed from, element by element: stored values with their bytes


def fused(jaxpr: jex.Jaxpr, kept: Collection[jex.Var]) -> frozenset[jex.Var]:
    """Those of a program's kept values that follow, element by element, from one other that is kept, or an input.

    XLA:TPU duplicates elementwise operations into what reads them, where that reads no more memory: of an unrolled
    attention stack without rematerialisation it so stores 65 of 495 MiB of residuals on a v5e. Where a scan stacks
    them it stores 469 of 499: nothing is fused through a loop. Nor is it through the barrier of `jax.checkpoint`, whose
    policy saves a value. A sum of two such values, as between the layers of a network, is stored.

    >>> import jax, jax.numpy as jnp
    >>> def f(x):
    ...     y = x @ x
    ...     return y, jnp.cos(y), jnp.cumsum(y), x + y
    >>> program = jax.make_jaxpr(f)(jnp.ones((4, 4))).jaxpr
    >>> [v in fused(program, program.outvars) for v in program.outvars]
    [False, True, False, False]
    """
    return frozenset(_fused(jaxpr, frozenset(kept), [{v: num_bytes(v.aval)} for v in jaxpr.invars])[0])


def _fused(jaxpr: jex.Jaxpr, kept: frozenset, given: Sequence[Roots | None]) -> tuple[set, list[Roots | None]]:
    """The kept values that are fused; and per output of the jaxpr its roots, None where it follows from none.

    `given`: those of the inputs.
    """
    left: set = set()
    known: dict = {v: {v: num_bytes(v.aval)} for v in jaxpr.constvars}
    known |= {v: roots for v, roots in zip(jaxpr.invars, given, strict=True) if roots is not None}
    roots_of = lambda v: known.get(v) if is_value(v) else {}  # noqa: E731
    for eqn in jaxpr.eqns:
        call, read = call_to_inline(eqn), [roots_of(v) for v in eqn.invars]
        if call is not None:
            inner, _ = body_of(call)
            names = {v: outer for v, outer in zip(inner.outvars, eqn.outvars, strict=True) if is_value(v)}
            saved = frozenset(v for v, outer in names.items() if outer in kept)
            outs = _fused(inner, saved, read)[1]
            made = [None if out is None else {names.get(v, v): size for v, size in out.items()} for out in outs]
        else:
            follows = _elementwise(eqn) and all(roots is not None for roots in read)
            made = [{v: n for roots in read for v, n in (roots or {}).items()} if follows else None] * len(eqn.outvars)
        for v, roots in zip(eqn.outvars, made, strict=True):
            size = num_bytes(v.aval)
            if roots is not None and v not in roots and sum(n >= _LARGE * size for n in roots.values()) <= 1:
                left.add(v)
                known[v] = roots
            elif v in kept:
                known[v] = {v: size}
            elif roots is not None:
                known[v] = roots
    return left & kept, [roots_of(v) for v in jaxpr.outvars]


def _elementwise(eqn) -> bool:
    rule = rule_of(eqn)
    return (
        rule is not None
        and rule.kind in ("elementwise", "view")
        and not rule.waits
        and not eqn.effects
        and eqn.primitive.name not in _APART
    )
