"""`apply`: a policy, or a budget, round a whole loss, module or method, whose layers are found in its jaxpr."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from jaxmem._flax import is_a, is_nnx
from jaxmem._units import format_bytes
from jaxmem.budget import Budget, is_auto, parse_budget
from jaxmem.errors import InputError, RematWithoutEffect
from jaxmem.jaxprs import Call, has_checkpoint, is_float, is_on_host, num_bytes, of_some, vjp_residuals
from jaxmem.policy import Policy, as_policy
from jaxmem.remat._arguments import carrying_state
from jaxmem.remat._checkpoint import checkpoint
from jaxmem.remat._queries import watched
from jaxmem.remat._wrap import CALL, wrap
from jaxmem.remat.auto import auto
from jaxmem.remat.blocks import at_blocks


def apply(
    target: Any, policy: str | Policy, *, static_argnames: tuple[str, ...] = (), methods: tuple[str, ...] = CALL
) -> Any:
    """`target` with a remat policy at each of its layers, which are found: nothing in it has to be marked.

    Layers are the bodies of scans, repeated modules (`Block_0`, `Block_1`, …) and repeated stretches of operations, as
    in `jaxmem.remat.blocks`. Results and gradients are those of `target`, under `jax.jit`, `jax.grad`,
    `jax.value_and_grad(has_aux=True)`, `nnx.value_and_grad`, `jax.vmap` and in `jax.shard_map`.

    Args:
      target: a loss or another function of arrays, nnx objects and Python values; a `flax.linen` module or module
        class, or its `apply`; a `flax.nnx` module, module class or bound method.
      policy: a preset ("none", "full", "dots", ...), a `Policy`, or a budget of residuals ("auto:0.25", "auto:2GiB"),
        which `remat.auto` spends value by value. A share is of what the derivative by all arguments keeps.
      static_argnames: array arguments to be passed by value.
      methods: of a module class or a linen module, those that are wrapped.

    Returns:
      The same kind of thing as `target`, except for an nnx module, which becomes a callable.

    Raises:
      RematWithoutEffect: when it is called, if there are no layers; when it is differentiated, if the policy changes
        nothing of what is kept.
      UnmatchedNamesError: when it is differentiated, if no layer offers a name of the policy.
      BudgetInfeasible: when it is called.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem.remat import residual_bytes
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(jnp.tanh(x) @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> lean = apply(loss, "full")
    >>> residual_bytes(loss, [x] * 3, x) > 4 * residual_bytes(lean, [x] * 3, x)  # x between the layers, 2 × 256
    True
    >>> bool(jnp.array_equal(jax.grad(lean)([x] * 3, x)[0], jax.grad(loss)([x] * 3, x)[0]))
    True
    """
    if isinstance(target, (str, Policy)):
        raise InputError(
            wanted="remat.apply(target, policy)",
            got=f"{target!r} as the target",
            do="Give the loss or the module first: remat.apply(loss_fn, 'dots').",
        )
    chosen = parse_budget(policy) if isinstance(policy, str) and is_auto(policy) else as_policy(policy)
    if isinstance(chosen, Policy) and chosen.keeps_everything:
        return target
    options: Any = _Layers(chosen)
    if is_a(type(target), "flax.linen", "Module"):
        made = wrap(type(target), options, static_argnames, methods)
        fields = [field.name for field in dataclasses.fields(target) if field.init and field.name != "parent"]
        return made(**{name: getattr(target, name) for name in fields})
    if is_a(type(getattr(target, "__self__", None)), "flax.linen", "Module") and target.__self__.scope is None:
        return wrap(_function(target), options, static_argnames, methods)  # `module.apply` is a function of arrays
    return wrap(target, options, static_argnames, methods)


class _Layers(NamedTuple):
    """Runs a function with its layers under a policy; equal by value, like the options of a checkpoint."""

    policy: Policy | Budget

    def run(self, call: Callable, leaves: list, module: Any) -> Any:
        """`call(*leaves)`, where leaves are arrays and Flax objects; `module` is the linen module among them."""
        holds_objects = any(map(is_nnx, leaves))
        if module is not None:
            if holds_objects:
                raise InputError(
                    wanted="linen or nnx modules as arguments",
                    got="both",
                    do="Apply the policy to one of them.",
                )
            return _lifted(self.over, call)(*leaves)
        return carrying_state(self.over, call, leaves) if holds_objects else self.over(call)(*leaves)

    def over(self, fn: Callable) -> Callable:
        """A function of pytrees of arrays with its layers under the policy."""
        policy = self.policy
        if isinstance(policy, Budget):
            return _traced_once(fn, lambda flat: auto(flat, policy))  # pyright: ignore[reportArgumentType]
        mark = lambda layer, *, scanned, name: checkpoint(layer, policy, scanned=scanned)  # noqa: E731
        return at_blocks(fn, mark, lambda outs, jaxpr, marked: watched(outs, _Effect(jaxpr, marked, policy)))


class _Effect:
    """Checks a policy when the results of a function are differentiated: does it change what is kept?"""

    def __init__(self, jaxpr: jex.ClosedJaxpr, marked: Callable[..., list], policy: Policy):
        self._jaxpr, self._marked, self._policy, self._checked = jaxpr, marked, policy, False

    def check(self) -> None:
        """RematWithoutEffect where the function keeps as many bytes with and without the policy."""
        if self._checked or has_checkpoint(self._jaxpr.jaxpr):  # within a checkpoint it shows in the peak only
            return
        self._checked = True
        try:
            plain, kept = map(self._kept_bytes, (jex.jaxpr_as_fun(self._jaxpr), self._marked))
        except Exception:  # it cannot be differentiated alone, as within a shard_map; the gradient itself was traced
            return
        if plain == kept:
            raise RematWithoutEffect(
                wanted=f"remat.apply(..., {str(self._policy)!r}) to change what is kept for the backward pass",
                got=f"{format_bytes(plain)} of residuals with and without it",
                do="Take another policy, such as full, or leave it out.",
            )

    def _kept_bytes(self, fn: Callable[..., list]) -> int:
        avals = [v.aval for v in self._jaxpr.jaxpr.invars]
        values = vjp_residuals(*of_some(fn, avals, list(map(is_float, avals))), argnums=0)[1]
        return sum(num_bytes(v.aval) for v in values if not is_on_host(v.aval))


def _traced_once(fn: Callable, around: Callable[[Callable], Callable]) -> Callable:
    """`around` a function's program: tracing a linen module twice would count its random numbers twice."""

    def traced(*args):
        call = Call(fn, args, {})
        program = jex.jaxpr_as_fun(jax.make_jaxpr(call)(*call.leaves))
        return call.result(around(program)(*call.leaves))

    return traced


def _function(method: Callable) -> Callable:
    @functools.wraps(method)
    def function(*args, **kwargs):
        return method(*args, **kwargs)

    return function


def _lifted(over: Callable, call: Callable) -> Callable:
    """`call`, of a linen module and arrays, with `over` round it as a function of the module's variables and keys."""
    from flax import linen as nn
    from flax.core import lift

    def transform(fn):
        def inner(scope_of, variables_of, variables, keys, *args):
            def pure(variables, keys, *args):
                scope = scope_of(variables, keys)
                return fn(scope, *args), variables_of(scope)

            pure.__name__ = call.__name__
            return over(pure)(variables, keys, *args)

        return lift.pack(inner, (True,), (True,), (True,), name="remat")

    return nn.transforms.lift_transform(transform, call)
