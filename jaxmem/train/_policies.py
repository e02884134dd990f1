"""A loss of a loop of the user's own under several remat policies: the programs of its value and gradient."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import remat
from jaxmem._flax import is_nnx_object
from jaxmem.analysis import Program, as_program, kinds_by_path
from jaxmem.analysis._call import Called
from jaxmem.budget import is_auto, parse_budget
from jaxmem.errors import InputError
from jaxmem.objective import LossOutput, Objective, WeightedMean, terms_of
from jaxmem.policy import Policy, as_policy
from jaxmem.targets import Target, on_target


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyVariant:
    """A loss, called with the arguments of a comparison, under a remat policy or budget."""

    loss_fn: Callable
    policy: str | Policy

    def program(self, *args: Any, name: str, target: Target) -> Program:
        """The program of the loss's value and gradient, with what it keeps under the policy and without.

        Raises:
          InputError: what is compared is no loss of `args`.
        """
        Called.of(self.loss_fn, args, {}, getattr(self.loss_fn, "__name__", "loss"))  # refuses what does not fit
        loss_fn, args = _without_static(self.loss_fn, args)
        with on_target(target):
            has_aux = _has_aux(loss_fn, args, self.loss_fn)
        under = remat.apply(loss_fn, self.policy)
        program = as_program(_gradient(under, has_aux, args), *args, name=name, target=target)
        budget = isinstance(self.policy, str) and is_auto(self.policy)
        kinds = None if is_nnx_object(args[0]) else ["parameters", *["batch"] * (len(args) - 1)]

        def kept_bytes(loss: Callable, *, plain: bool = False) -> int:
            with on_target(target):
                if target.tiles is None:
                    return remat.residual_bytes(*_differentiated(loss, has_aux, args), argnums=0)
                table = remat.residuals(*_differentiated(loss, has_aux, args), argnums=0)
            return table.stored_in(target.tiles, plain=plain).stored_bytes

        return dataclasses.replace(
            program,
            kind_of=kinds_by_path(kinds, loss_fn),
            remat=str(self.policy),
            saved_residual_bytes=lambda: kept_bytes(under, plain=str(self.policy) == "none"),
            # A budget may be enough to keep everything.
            plain_residual_bytes=None if budget else lambda: kept_bytes(loss_fn),
        )


def policy_variants(loss_fn: Callable, policies: Any) -> dict[str, PolicyVariant]:
    """Name → variant, of a list of presets, budgets and policies, or of a mapping from names to such."""
    named = isinstance(policies, Mapping)
    listed = [policies] if isinstance(policies, (str, Policy)) else policies
    if not isinstance(listed, Iterable) or (isinstance(listed, (Mapping, list, tuple)) and not listed):
        raise InputError(
            wanted="policies to be a list of remat presets, budgets or policies, or a mapping from names to such",
            got=repr(policies),
            do='For example policies=["none", "full", "dots"].',
        )
    found: dict[str, Any] = dict(policies) if named else {str(policy): policy for policy in listed}
    for policy in found.values():  # one that is misspelt is no variant that was refused
        parse_budget(policy) if isinstance(policy, str) and is_auto(policy) else as_policy(policy)
    return {name: PolicyVariant(loss_fn=loss_fn, policy=policy) for name, policy in found.items()}


def _gradient(loss_fn: Callable, has_aux: bool, args: tuple) -> Callable:
    def value(*args):
        out = loss_fn(*args)
        return (_scalar(out[0]), out[1]) if has_aux else _scalar(out)

    value.__name__ = getattr(loss_fn, "__name__", "loss")
    value.__wrapped__ = loss_fn  # pyright: ignore[reportFunctionMemberAccess]  for the names of arguments
    if not is_nnx_object(args[0]):
        return jax.value_and_grad(value, has_aux=has_aux)
    from flax import nnx

    return nnx.value_and_grad(value, has_aux=has_aux)


def _differentiated(loss_fn: Callable, has_aux: bool, args: tuple) -> tuple:
    """The value of a loss as a function of what is differentiated and of the rest, and both."""

    def value(*args):
        out = loss_fn(*args)
        return _scalar(out[0] if has_aux else out)

    if not is_nnx_object(args[0]):
        return value, *args
    from flax import nnx

    objects = [x for x in args[1:] if is_nnx_object(x)]
    graph, params, rest = nnx.split([args[0], *objects], nnx.Param, ...)

    def of_state(params, rest, arrays):
        model, *others = nnx.merge(graph, params, rest, copy=True)  # else of an outer trace
        given, left = iter(others), iter(arrays)
        return value(model, *[next(given if is_nnx_object(x) else left) for x in args[1:]])

    return of_state, params, rest, [x for x in args[1:] if not is_nnx_object(x)]


def _has_aux(loss_fn: Callable, args: tuple, shown: Callable) -> bool:
    """Whether a loss returns (loss, aux); InputError where it is no loss."""
    name = getattr(shown, "__name__", type(shown).__name__)
    do = (
        "Give the loss and what it is called with: jaxmem.compare(loss_fn, policies=[...], args=(params, batch)). Or "
        "compare whole steps, each made with remat.apply(loss_fn, policy): jaxmem.compare({'none': step, 'full': "
        "lean_step}, state, batch)."
    )
    wanted = "a loss of (params, ...), since a policy acts where gradients are taken"
    if not args:
        raise InputError(wanted=wanted, got=f"no arguments of {name}", do=do)
    if not is_nnx_object(args[0]):
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[0]):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                where = jax.tree_util.keystr(path)
                kind = f"a {type(args[0]).__name__}"
                raise InputError(wanted=wanted, got=f"{kind} as the first argument, with integers at {where}", do=do)
        out = jax.eval_shape(loss_fn, *args)
    else:
        from flax import nnx

        out = nnx.eval_shape(loss_fn, *args)
    head: Any = out[0] if isinstance(out, tuple) and len(out) == 2 else out
    dtype: Any = getattr(head, "dtype", None)
    dims = getattr(head, "shape", None)
    if not isinstance(head, (Objective, LossOutput)) and (dims != () or not jnp.issubdtype(dtype, jnp.floating)):
        kinds = ", ".join(type(x).__name__ for x in out) if isinstance(out, tuple) else type(out).__name__
        returned = kinds if dims is None else f"{dtype}{list(dims)}"
        raise InputError(wanted=wanted, got=f"{name}, which returns {returned}", do=do)
    return head is not out


def _scalar(output: Any) -> Any:
    """The value of an objective of one batch."""
    if not isinstance(output, (Objective, LossOutput)):
        return output
    return sum(
        factor * (term.total / term.weight if isinstance(term, WeightedMean) else getattr(term, "value", term))
        for factor, term in terms_of(output)
    )


def _without_static(fn: Callable, args: tuple) -> tuple[Callable, tuple]:
    """The function of the arguments that are arrays, and these: Python values and functions stay what they are."""
    static = [isinstance(x, (bool, int, float, str, type(None))) or _is_function(x) for x in args]
    if not any(static):
        return fn, args

    def of_arrays(*arrays):
        given = iter(arrays)
        return fn(*[x if fixed else next(given) for x, fixed in zip(args, static, strict=True)])

    of_arrays.__name__ = getattr(fn, "__name__", "loss")
    return of_arrays, tuple(x for x, fixed in zip(args, static, strict=True) if not fixed)


def _is_function(x: Any) -> bool:
    return callable(x) and jax.tree_util.all_leaves([x])
