"""Adding gradients to their accumulators in place, by the backward pass itself, without a second buffer of their size.

`vjp.with_refs(refs)` adds each piece of a gradient to a mutable array as soon as it is computed: that of a scanned
layer to its slice, inside the backward scan. The mutable arrays live for one micro-batch. They are discharged from the
traced program, so it is pure: it may be vmapped, differentiated and scanned over.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem._scopes import ACCUMULATE_SCOPE
from jaxmem._shown import Brief
from jaxmem.accumulate._reduce import accumulator_dtype_of
from jaxmem.errors import ConfigError
from jaxmem.workload import path_string


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Added(Brief):
    """How the gradients of micro-batches were added up.

    Args:
      in_place: paths of the parameters whose gradients the backward pass adds to the accumulators itself.
      by_value: (path, why) of the parameters whose gradients are computed first, then added.

    >>> print(Added(in_place=("w", "b"), by_value=(("scale", "it is complex"),)))
    Gradients are added in place for 2 of 3 parameters; 1 by value: it is complex.
    """

    in_place: tuple[str, ...]
    by_value: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        count = len(self.in_place) + len(self.by_value)
        reasons = Counter(why for _, why in self.by_value)
        said = [f"Gradients are added in place for {len(self.in_place)} of {count} parameters"]
        return "; ".join([*said, *(f"{n} by value: {why}" for why, n in reasons.most_common())]) + "."


class GradientSum:
    """Adds the gradient of one micro-batch to the accumulators, by leaf in place or by value.

    Args:
      params: pytree of floating or complex parameters.
      dtype: of the accumulators, as in `accumulator_dtype_of`.
      in_place: None, wherever possible; False, nowhere; True, everywhere or ConfigError.
    """

    def __init__(self, params: Any, dtype: Any, in_place: bool | None):
        paths, self.tree = jax.tree_util.tree_flatten_with_path(params)
        self.leaves = [leaf for _, leaf in paths]
        self.paths = [path_string(path, root="params") for path, _ in paths]
        self.wanted = in_place
        self.reasons = [_reason(leaf, dtype) if in_place is not False else "in_place=False" for leaf in self.leaves]

    @property
    def added(self) -> Added:
        """Which leaves were added in place; known once `add` has been called."""
        found = list(zip(self.paths, self.reasons, strict=True))
        return Added(
            in_place=tuple(path for path, why in found if not why),
            by_value=tuple((path, why) for path, why in found if why),
        )

    def add(self, objective: Callable, accumulators: Any) -> tuple[Any, Any]:
        """The accumulators with one more gradient added, and aux.

        Args:
          objective: params -> (scalar to differentiate, aux).
          accumulators: pytree like `params`.

        Raises:
          ConfigError: `in_place` is True, and some leaf cannot be added in place.
        """
        accumulators = self.tree.flatten_up_to(accumulators)
        try:
            # Without mutable arrays there is nothing to discharge.
            sums, aux = self._add(objective, accumulators) if all(self.reasons) else self._pure(objective, accumulators)
        except Exception as error:  # an error of the loss is raised again below; one of adding in place is not
            if all(self.reasons):
                raise
            said = str(error).splitlines() or [type(error).__name__]
            self.reasons = [reason or f"JAX {jax.__version__} cannot: {said[0]}" for reason in self.reasons]
            sums, aux = self._add(objective, accumulators)
        self._check()
        return self.tree.unflatten(sums), aux

    def _add(self, objective: Callable, accumulators: list) -> tuple[list, Any]:
        differentiated, vjp, aux = jax.vjp(
            lambda *leaves: objective(self.tree.unflatten(leaves)), *self.leaves, has_aux=True
        )
        if not all(self.reasons):
            jaxpr, inputs = _compat.linear_program(vjp, len(self.leaves))
            found = _misused(jaxpr, set(inputs))
            self.reasons = [why or found.get(var, "") for var, why in zip(inputs, self.reasons, strict=True)]
        refs = [None if why else jax.new_ref(acc) for acc, why in zip(accumulators, self.reasons, strict=True)]
        gradients = _compat.transpose_into(vjp, refs, jnp.ones_like(differentiated))
        sums = []
        for acc, ref, gradient in zip(accumulators, refs, gradients, strict=True):
            with jax.named_scope(ACCUMULATE_SCOPE):
                sums.append(acc + gradient.astype(acc.dtype) if ref is None else jax.freeze(ref))
        return sums, aux

    def _pure(self, objective: Callable, accumulators: list) -> tuple[list, Any]:
        """`_add` as a program without mutable arrays."""
        add = lambda *accumulators: self._add(objective, list(accumulators))  # noqa: E731
        closed, shapes = jax.make_jaxpr(add, return_shape=True)(*accumulators)
        outs = jex.jaxpr_as_fun(_compat.discharge(closed, ACCUMULATE_SCOPE))(*accumulators)
        # Some outputs are Python numbers.
        return jax.tree.unflatten(jax.tree.structure(shapes), [jnp.asarray(out) for out in outs])

    def _check(self) -> None:
        if self.wanted and any(self.reasons):
            path, why = self.added.by_value[0]
            raise ConfigError(
                wanted="to add the gradient of every parameter in place, as in_place=True asks",
                got=f"one that can only be added by value, {path}: {why}",
                do="Leave in_place out, which adds in place wherever it can.",
            )


def _reason(leaf, dtype) -> str:
    """Why a leaf cannot be added in place, whatever the loss does with it; empty if it may."""
    own = jnp.result_type(leaf)
    if jnp.issubdtype(own, jnp.complexfloating):
        return "the parameter is complex"
    dtype = accumulator_dtype_of(leaf, dtype)
    if own != dtype:
        return f"the accumulator is {dtype} and the parameter {own}"
    return ""


def _misused(jaxpr: jex.Jaxpr, inputs: Collection) -> dict:
    """Linear inputs that cannot be added to in place -> why, told from how the linear program uses them.

    A call (jit, scan, cond, …) that takes one input twice has two names for one mutable array inside, to which JAX
    0.10 adds wrongly.
    """
    found: dict = {}
    for eqn in jaxpr.eqns:
        places: dict = {}
        for number, operand in enumerate(eqn.invars):
            if isinstance(operand, jex.Var) and operand in inputs:
                places.setdefault(operand, []).append(number)
        name = eqn.primitive.name.removeprefix("vjp_node[").removesuffix("]")
        for var, numbers in places.items():
            if not _compat.adds_in_place_through(eqn):
                found.setdefault(var, f"JAX {jax.__version__} cannot add in place through {name}")
            for called in _compat.called_jaxprs(eqn):
                inner = numbers[0] - (len(eqn.invars) - len(called.invars))  # a cond's first operand is the branch
                if inner < 0:
                    found.setdefault(var, f"{name} passes it on in an unknown way")
                elif len(numbers) > 1:
                    found.setdefault(var, f"{name} gets the parameter twice")
                elif why := _misused(called, {called.invars[inner]}):
                    found.setdefault(var, *why.values())
    return found
