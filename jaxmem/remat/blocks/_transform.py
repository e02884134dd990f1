"""`at_blocks`: a function whose blocks are found and wrapped when it is traced."""

import functools
from collections.abc import Callable

import jax

from jaxmem.errors import RematWithoutEffect
from jaxmem.remat.blocks._blocks import apply_at_blocks
from jaxmem.remat.blocks._facts import has_checkpoint


def at_blocks(fn: Callable, wrap: Callable) -> Callable:
    """`fn` with `wrap` round each block of its jaxpr, for functions that mark no blocks themselves.

    Args:
      fn: function of pytrees of arrays, whose outputs are arrays, or Python numbers that stay what they are.
      wrap: as in `apply_at_blocks`.

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
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        out = {}

        def flat(*leaves):
            args, kwargs = in_tree.unflatten(leaves)
            outs, out["tree"] = jax.tree.flatten(fn(*args, **kwargs))
            out["numbers"] = [o if isinstance(o, (bool, int, float, complex)) else None for o in outs]
            return [o for o, number in zip(outs, out["numbers"], strict=True) if number is None]

        jaxpr = jax.make_jaxpr(flat)(*leaves)
        wrapped = 0

        def counting(block, *, scanned, name):
            nonlocal wrapped
            wrapped += 1
            return wrap(block, scanned=scanned, name=name)

        values = iter(apply_at_blocks(jaxpr, counting)(*leaves))
        if not wrapped:
            own = has_checkpoint(jaxpr.jaxpr)
            beside = "layers with checkpoints of their own, which are left as they are, and beside them " if own else ""
            do = "Take the checkpoints out, so that the remat setting decides, or declare" if own else "Declare"
            raise RematWithoutEffect(
                wanted="a loss with something to wrap: a scan over layers, or layers that repeat",
                got=f"{beside}{len(jaxpr.jaxpr.eqns)} equations with no scan of several steps that holds a matmul and "
                "something to recompute, no repeated Flax modules (Block_0, Block_1, …) and no repeated stretch of "
                "like operations",
                do=f"{do} `memory` in the loss and mark what is to be recomputed with memory.block(...).",
            )
        return out["tree"].unflatten([next(values) if n is None else n for n in out["numbers"]])

    return with_blocks
