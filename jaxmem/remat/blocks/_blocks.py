"""`find_blocks`, `apply_at_blocks`, `at_blocks`, `tied`: the blocks of a jaxpr or function, looked at and wrapped."""

import dataclasses
import functools
from collections.abc import Callable

import jax.extend.core as jex

from jaxmem.errors import RematWithoutEffect
from jaxmem.jaxprs import Call, Facts, body_of, has_checkpoint, num_bytes, rewritten
from jaxmem.remat.blocks._apply import evaluate, plan_marked
from jaxmem.remat.blocks._find import find_plan
from jaxmem.remat.blocks._plan import parts


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
    plan = find_plan(closed_jaxpr)
    if plan is None:
        return ()
    return tuple(
        Block(
            kind=part.kind,
            name=part.name,
            count=part.times,
            num_equations=len(part.equations),
            input_bytes=part.facts.boundary_bytes(part.equations),
            output_bytes=sum(num_bytes(v.aval) for v in part.facts.outputs(part.equations)),
            inside_bytes=part.facts.inside_bytes(part.equations),
        )
        for part in parts(plan)
    )


def apply_at_blocks(closed_jaxpr: jex.ClosedJaxpr, wrap: Callable, order: str = "free") -> Callable[..., list]:
    """A function of the jaxpr's inputs that computes its outputs with `wrap` round each block.

    Args:
      closed_jaxpr: e.g. from `jax.make_jaxpr`.
      wrap: `wrap(fn, *, scanned, name) -> fn`. `fn` takes what the block reads from outside, weights included, and
        returns a list; `scanned` says that it is the body of a `lax.scan`.
      order: of the backward pass, as of `evaluate`.

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
    plan = find_plan(closed_jaxpr)
    if plan is None:
        return jex.jaxpr_as_fun(closed_jaxpr)
    consts = body_of(closed_jaxpr)[1]
    return lambda *args: evaluate(plan, consts, args, wrap, order=order)


def at_blocks(fn: Callable, wrap: Callable, results: Callable | None = None, order: str = "free") -> Callable:
    """`fn` with `wrap` round each block of its jaxpr, for functions that mark no blocks themselves.

    Args:
      fn: function of pytrees of arrays, whose outputs are arrays, or Python numbers that stay what they are.
      wrap: as in `apply_at_blocks`.
      results: `results(outs, jaxpr, wrapped)` gets the flat outputs, the jaxpr and what computed them, and returns the
        outputs.
      order: as in `apply_at_blocks`.

    Raises:
      RematWithoutEffect: when traced, if there are no blocks.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem.remat import checkpoint, residual_bytes
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(jnp.tanh(x) @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> full = at_blocks(loss, lambda fn, *, scanned, name: checkpoint(fn, "full", scanned=scanned))
    >>> residual_bytes(full, [x] * 3, x)  # x between the layers, 2 × 256
    512
    """

    @functools.wraps(fn)
    def with_blocks(*args, **kwargs):
        call = Call(fn, args, kwargs)
        jaxpr = call.traced()
        if not jaxpr.jaxpr.outvars:  # what is wrong with it is no matter of blocks
            return call.result([])
        wrapped = 0

        def counting(block, *, scanned, name):
            nonlocal wrapped
            wrapped += 1
            return wrap(block, scanned=scanned, name=name)

        program = apply_at_blocks(jaxpr, counting, order)
        outs = program(*call.leaves)
        if not wrapped:
            own = has_checkpoint(jaxpr.jaxpr)
            beside = "layers with checkpoints of their own, which are left as they are, and beside them " if own else ""
            do = "Take the checkpoints out, so that the remat setting decides, or declare" if own else "Declare"
            raise RematWithoutEffect(
                wanted="a loss with something to wrap: a scan over layers, or layers that repeat",
                got=f"{beside}{len(jaxpr.jaxpr.eqns)} equations with no scan of several steps that holds a matmul and "
                "something to recompute, no repeated Flax modules (Block_0, Block_1, …) and no repeated stretch of "
                "like operations",
                do=f"{do} `memory` in the loss and mark what is to be recomputed with memory.block(...), or in your "
                "own loop with remat.checkpoint(layer, policy).",
            )
        return call.result(outs if results is None else results(outs, jaxpr, program))

    return with_blocks


def tied(fn: Callable, order: str) -> Callable:
    """`fn` with ties at its blocks: the backward pass goes on when a block's weight gradients are made.

    Blocks are the checkpoints in the program of `fn`, which are there already or only mark a block (`MARK`); where
    there are none, they are found. Nothing else changes, in the gradient no bit.

    Args:
      fn: as of `at_blocks`.
      order: "tied", at each block and where the head begins, "head", there only, or "free".

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> [eqn.params["at"] for eqn in jax.make_jaxpr(tied(loss, "tied"))([x] * 3, x).eqns if "at" in eqn.params]
    ['loss[1/3]', 'loss[2/3]', 'loss[3/3]']
    """
    if order == "free":
        return fn

    def with_ties(program: jex.ClosedJaxpr) -> Callable[..., list]:
        plan = plan_marked(Facts.of(program)) or find_plan(program)
        if plan is None:
            return jex.jaxpr_as_fun(program)
        return lambda *args: evaluate(plan, body_of(program)[1], args, None, order=order)

    return rewritten(fn, with_ties)
