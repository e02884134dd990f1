"""`capture`: the forward pass of a block as it is after differentiation, with the values that its backward pass reads.

Which value is the residual is decided by differentiation rules (a softmax keeps what it made, not what it was given),
so it is looked up there: `jax.vjp` is traced, and what its result holds are the residuals.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxmem._compat import called_jaxprs, effect_names
from jaxmem.jaxprs import function_of, inlined, inputs_of, is_float, is_value, num_bytes, of_some
from jaxmem.remat.auto._costs import COLLECTIVES


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """The forward pass of a block whose backward pass reads `residuals`.

    Args:
      jaxpr: from the block's inputs to its outputs, then its residuals.
      consts: of the jaxpr.
      num_outputs: how many of the jaxpr's outputs are the block's.
      differentiated: per input, whether it gets a gradient.
      vjp_tree: makes of the residuals the function that pulls cotangents back.
    """

    jaxpr: jex.Jaxpr
    consts: tuple
    num_outputs: int
    differentiated: tuple[bool, ...]
    vjp_tree: Any

    @property
    def outputs(self) -> list:
        """Variables of the block's outputs."""
        return self.jaxpr.outvars[: self.num_outputs]

    @property
    def residuals(self) -> list:
        """What the pull-back is made of, in its order; the same variable may come twice, and literals do."""
        return self.jaxpr.outvars[self.num_outputs :]

    @functools.cached_property
    def made_at(self) -> dict:
        """The equation, by its index, that makes a variable."""
        return {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}

    def read_by(self, equations: Sequence[int]) -> set:
        """Variables that are residuals, or that these equations read."""
        read = {v for e in equations for v in self.jaxpr.eqns[e].invars if is_value(v)}
        return read | {v for v in self.residuals if is_value(v)}

    def inputs_used(self, known: Collection = ()) -> list[int]:
        """Positions of the inputs that the pull-back reads, by itself or to make residuals that are not known."""
        read = self.read_by(self.needed_for(self.residuals, known))
        return [i for i, v in enumerate(self.jaxpr.invars) if v in read and v not in known]

    def needed_for(self, wanted, known: Collection, *, effects: bool = False) -> list[int]:
        """Indices of the equations that make the wanted atoms out of known variables and inputs, in order.

        With `effects` also of those that print or call back.
        """
        needed, chosen = {v for v in wanted if is_value(v)}, []
        for i in range(len(self.jaxpr.eqns) - 1, -1, -1):
            eqn = self.jaxpr.eqns[i]
            if any(v in needed and v not in known for v in eqn.outvars) or (effects and happens_once(eqn)):
                chosen.append(i)
                needed.update(v for v in eqn.invars if is_value(v))
        return chosen[::-1]

    def evaluate(self, wanted, known: dict, *, effects: bool = False) -> list:
        """The wanted atoms, made out of known values of variables; with `effects` what prints does so."""
        eqns = [self.jaxpr.eqns[i] for i in self.needed_for(wanted, known.keys(), effects=effects)]
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True)) | known
        made = {v for eqn in eqns for v in eqn.outvars} - env.keys()
        outputs = list(dict.fromkeys(v for v in wanted if is_value(v) and v in made))
        if eqns:
            eqns = [_beside_known(eqn, env) for eqn in eqns]
            read = inputs_of(eqns)
            env.update(zip(outputs, function_of(eqns, read, outputs)(*[env[v] for v in read]), strict=True))
        return [env[v] if is_value(v) else v.val for v in wanted]


def capture(fn: Callable[..., Sequence], inputs: Sequence, differentiated: Sequence[bool]) -> Forward:
    """Traces the differentiation of a function of flat arrays that returns a list of arrays.

    Args:
      fn: the block.
      inputs: its inputs, or their shapes and dtypes.
      differentiated: which inputs get a gradient; those must be floating.

    >>> import jax.numpy as jnp
    >>> forward = capture(lambda x: [jnp.sin(x)], [jax.ShapeDtypeStruct((8,), jnp.float32)], [True])
    >>> [eqn.primitive.name for eqn in forward.jaxpr.eqns], len(forward.residuals)
    (['sin', 'cos'], 1)
    """
    trees = {}

    def forward(*args):
        of, given, rest = of_some(fn, args, differentiated)
        outs, pull_back = jax.vjp(lambda *given: list(of(given, rest)), *given)
        residuals, trees["vjp"] = jax.tree.flatten(pull_back)  # a vjp function is a pytree of its residuals
        trees["outputs"] = len(outs)
        return [*outs, *residuals]

    closed = inlined(jax.make_jaxpr(forward)(*inputs))
    return Forward(
        jaxpr=closed.jaxpr,
        consts=tuple(closed.consts),
        num_outputs=trees["outputs"],
        differentiated=tuple(differentiated),
        vjp_tree=trees["vjp"],
    )


def happens_once(eqn) -> bool:
    """Whether an equation does something besides its outputs, like a print."""
    return bool(effect_names(eqn) - {"NamedAxisEffect"})


def _beside_known(eqn, known):
    """The equation with new variables for outputs that are known already, so that only the others are set."""
    if not any(v in known for v in eqn.outvars):
        return eqn
    return eqn.replace(outvars=[_new_variable(v.aval) if v in known else v for v in eqn.outvars])


def _new_variable(aval):
    return jax.make_jaxpr(lambda x: x)(aval).jaxpr.invars[0]


def to_name(forward: Forward, v):
    """The variable to name so that `v` is kept, or is a cheap operation away from what is.

    The derivative of an operation like tanh reads the operation's result, before any name is on it. So there the
    operand is named, unless it has more bytes than `v`.
    """
    made = forward.made_at.get(v)
    if made is None or not _reads_own_output(forward.jaxpr.eqns[made]):
        return v
    operands = [u for u in forward.jaxpr.eqns[made].invars if is_value(u) and is_float(u.aval)]
    largest = max(operands, key=lambda u: num_bytes(u.aval), default=v)
    return largest if num_bytes(largest.aval) <= num_bytes(v.aval) else v


def _reads_own_output(eqn) -> bool:
    """Whether an operation's derivative is made of its result."""
    floats = [is_value(u) and is_float(u.aval) for u in eqn.invars]
    if any(called_jaxprs(eqn)) or eqn.primitive.multiple_results or not any(floats):
        return False
    if eqn.primitive.name in COLLECTIVES:  # which want the axes of a mesh round them
        return False

    def differentiated(*values):
        outs, pull_back = jax.vjp(functools.partial(eqn.primitive.bind, **eqn.params), *values)
        return [outs, *jax.tree.leaves(pull_back)]

    try:
        jaxpr = jax.make_jaxpr(differentiated)(*[u.aval if is_value(u) else u.val for u in eqn.invars]).jaxpr
    except (TypeError, ValueError, NameError, NotImplementedError):  # what has no derivative, or not by itself
        return False
    out, *residuals = jaxpr.outvars
    reached = {out}
    for each in jaxpr.eqns:
        if any(u in reached for u in each.invars if is_value(u)):
            reached.update(each.outvars)
    return any(u in reached for u in residuals if is_value(u))
