"""`find_blocks` and `apply_at_blocks`: the blocks of a jaxpr, looked at and wrapped."""

import dataclasses
from collections.abc import Callable

import jax.extend.core as jex

from jaxmem.remat._kept import num_bytes
from jaxmem.remat.blocks._apply import evaluate
from jaxmem.remat.blocks._facts import Facts, body_of
from jaxmem.remat.blocks._plan import Plan
from jaxmem.remat.blocks._search import intervals, plan_blocks, with_unique_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One block that the cutter found; bytes are modelled from shapes.

    Args:
      kind: "scan" (the body of a scan), "module" (a module called once of several alike) or "structure"
        (one of several alike stretches of equations).
      name: scope path for modules and scans, `scope[i/n]` for structure.
      count: how often it runs in one call of the loss: the length of the scans round it, else 1.
      num_equations: number of equations, not counting those of inner bodies.
      input_bytes: what must be kept to run it again, besides arguments of the loss.
      output_bytes: what the rest of the program reads of it.
      inside_bytes: what its backward pass needs and it makes itself, by a table of primitives.
    """

    kind: str
    name: str
    count: int
    num_equations: int
    input_bytes: int
    output_bytes: int
    inside_bytes: int


def find_blocks(closed_jaxpr: jex.ClosedJaxpr) -> tuple[Block, ...]:
    """The blocks of a jaxpr, in the order of its equations; () where nothing repeats.

    The body of each outermost scan is a block, and so are the steps of a `nested_scan` and of the outermost scans in
    a checkpoint of the user's own, for the memory that is needed while those are recomputed. Elsewhere, the outermost
    modules (by name stack) or stretches of equations (by structure) that come several times are, unless they consist
    of smaller repeated ones. A block has a matmul or convolution, or much to free, and no effect that must not happen
    twice.

    Stretches are looked for at equal distances. So layers that differ in their number of equations, as in a DenseNet
    that adds up all earlier outputs, are found in part only: call each in a `jax.named_scope(f"Layer_{i}")`, as
    Flax modules are, or mark it with `memory.block`.

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> [block.name for block in find_blocks(jax.make_jaxpr(loss)([x] * 3, x))]
    ['loss[1/3]', 'loss[2/3]', 'loss[3/3]']
    """
    plan = plan_of(closed_jaxpr)
    if plan is None:
        return ()
    return tuple(
        Block(
            kind=item.kind,
            name=name,
            count=count,
            num_equations=len(part),
            input_bytes=found.facts.boundary_bytes(part),
            output_bytes=sum(num_bytes(v.aval) for v in found.facts.outputs(part)),
            inside_bytes=found.facts.inside_bytes(part),
        )
        for found, item, count, _ in intervals(plan)
        for name, part in item.named_parts
    )


def apply_at_blocks(closed_jaxpr: jex.ClosedJaxpr, wrap: Callable) -> Callable[..., list]:
    """A function of the jaxpr's inputs that computes its outputs with `wrap` round each block.

    Args:
      closed_jaxpr: e.g. from `jax.make_jaxpr`.
      wrap: `wrap(fn, *, scanned, name) -> fn`. `fn` takes what the block reads from outside, weights included, and
        returns a list; `scanned` says that it is the body of a `lax.scan`.

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> jaxpr = jax.make_jaxpr(loss)([x] * 3, x)
    >>> new = apply_at_blocks(jaxpr, lambda fn, *, scanned, name: jax.checkpoint(fn))
    >>> [eqn.primitive.name for eqn in jax.make_jaxpr(new)(*[x] * 4).eqns]
    ['remat2', 'remat2', 'remat2', 'reduce_sum']
    """
    plan = plan_of(closed_jaxpr)
    if plan is None:
        return jex.jaxpr_as_fun(closed_jaxpr)
    consts = body_of(closed_jaxpr)[1]
    return lambda *args: evaluate(plan, consts, args, wrap)


def plan_of(closed_jaxpr: jex.ClosedJaxpr) -> Plan | None:
    """The jaxpr with its blocks marked, each under a name of its own; None where there are none."""
    jaxpr, _ = body_of(closed_jaxpr)
    plan = plan_blocks(Facts(jaxpr, frozenset(jaxpr.invars)))
    return plan and with_unique_names(plan)
