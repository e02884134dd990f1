"""`rolled`: a function whose repeated unrolled blocks run as one scan."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax.extend.core as jex

from jaxmem.jaxprs import body_of, retraced, rewritten
from jaxmem.remat.roll._plan import Plan, plan_of, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolledLayers:
    """Layers that run as one scan.

    Args:
      name: scopes of the first layer; "" where it has none.
      count: number of layers.
      num_equations: of one layer.
      stacked_bytes: by dtype, bytes of the values that are stacked for the scan, of all layers; modelled from global
        shapes. What is a stack already takes none.
    """

    name: str
    count: int
    num_equations: int
    stacked_bytes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rolled:
    """What was rolled in a program, and what repeats and was not, with the reason.

    Args:
      layers: in the order of their equations.
      refused: one sentence each.
    """

    layers: tuple[RolledLayers, ...]
    refused: tuple[str, ...]

    @property
    def stacked_bytes(self) -> dict[str, int]:
        """Bytes stacked, by dtype."""
        total: dict[str, int] = {}
        for each in self.layers:
            for dtype, size in each.stacked_bytes.items():
                total[dtype] = total.get(dtype, 0) + size
        return total


def roll(closed_jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, Rolled]:
    """A program with its repeated unrolled layers in scans, and what was rolled; the program itself if nothing was.

    Layers are rolled if they are alike, equation by equation, and each takes from others only what the one before
    made. What a layer reads of its own (parameters, keys, states, numbers) is stacked, after a cast to fewer bytes if
    there is one; what all read is shared; what is read of each outside is stacked and taken apart.

    Args:
      closed_jaxpr: e.g. from `jax.make_jaxpr`.

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> program, found = roll(jax.make_jaxpr(loss)([x] * 3, x))
    >>> [eqn.primitive.name for eqn in program.eqns][-2:], found.layers[0].count, found.stacked_bytes
    (['scan', 'reduce_sum'], 3, {'float32': 768})
    """
    plan = plan_of(closed_jaxpr)
    found = _told(plan)
    if not found.layers:
        return closed_jaxpr, found
    return retraced(functools.partial(run, plan, body_of(closed_jaxpr)[1]), closed_jaxpr), found


def rolled(fn: Callable) -> Callable:
    """`fn` with its repeated unrolled layers in scans, as by `roll`.

    Args:
      fn: function of pytrees of arrays, whose outputs are arrays, or Python numbers that stay what they are.

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> bool(jnp.allclose(rolled(loss)([x] * 3, x), loss([x] * 3, x), rtol=1e-6))
    True
    """

    def with_scans(program: jex.ClosedJaxpr) -> Callable[..., list]:
        plan = plan_of(program)
        if not any(plan.all_layers()):
            return jex.jaxpr_as_fun(program)
        return functools.partial(run, plan, body_of(program)[1])

    return rewritten(fn, with_scans)


def what_rolls(program: jex.ClosedJaxpr) -> Rolled:
    """What `roll` rolls in a program, which is not made."""
    return _told(plan_of(program))


def _told(plan: Plan) -> Rolled:
    layers = (
        RolledLayers(name=name, count=layers.count, num_equations=len(layers.eqns), stacked_bytes=stacked)
        for name, layers, stacked in plan.all_layers()
    )
    return Rolled(layers=tuple(layers), refused=tuple(plan.all_refused()))
