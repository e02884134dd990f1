"""Runs a program with its like layers in scans."""

from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.jaxprs import STACKED, Facts, function_of, is_value, reader
from jaxmem.remat.roll._layers import Layers


def run_layers(facts: Facts, layers: Layers, env: dict) -> None:
    """Runs layers as one scan; what is read of them elsewhere is put into `env`."""
    read = reader(env)
    if layers.hoisted:
        eqns = [facts.eqns[i] for i in layers.hoisted]
        inputs = facts.inputs(layers.hoisted)
        made = [v for eqn in eqns for v in eqn.outvars]
        env.update(zip(made, function_of(eqns, inputs, made)(*map(read, inputs)), strict=True))
    given = [var for var, _ in layers.shared]
    stacked = [var for var, _ in layers.stacked]
    carried = [carry.var for carry in layers.carries]
    ends = {carry.following for carry in layers.carries}
    results = [(v, outs) for v, outs in layers.results if v not in ends or any(o is not None for o in outs[:-1])]
    outputs = [carry.following for carry in layers.carries] + [v for v, _ in results]
    body = function_of(layers.eqns, [*given, *carried, *stacked], outputs)
    values = [read(atom) for _, atom in layers.shared]
    start = [_start(read(carry.start), carry.var) for carry in layers.carries]
    each = [stack(facts, var, atoms, env) for var, atoms in layers.stacked]

    def step(carry, xs):
        outs = body(*values, *carry, *xs)
        return tuple(outs[: len(carried)]), tuple(outs[len(carried) :])

    last, stacks = lax.scan(step, tuple(start), tuple(each), length=layers.count)
    for (_, outs), values in zip(results, stacks, strict=True):
        env.update((v, values[i]) for i, v in enumerate(outs) if v is not None)
    final = dict(zip((carry.following for carry in layers.carries), last, strict=True))
    for v, outs in layers.results:
        if v in final and outs[-1] is not None:
            env[outs[-1]] = final[v]


def _start(value, var: jex.Var) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value, _dtype(var))


def _dtype(var: jex.Var) -> Any:
    aval: Any = var.aval
    return aval.dtype


def stack(facts: Facts, var: jex.Var, atoms: tuple, env: dict):
    """The values of all layers, one behind the other along a new first axis."""
    found = array_of(facts, atoms)
    if found is not None:
        value = env[found.array]
        if found.first or value.shape[0] != len(atoms):
            value = lax.slice_in_dim(value, found.first, found.first + len(atoms))
        for dtype in found.casts:
            value = value.astype(dtype)
        return value
    if not any(isinstance(a, (jex.Var, jex.Literal)) for a in atoms):
        return jnp.asarray(np.stack([np.asarray(a, _dtype(var)) for a in atoms]))
    read = reader(env)
    with jax.named_scope(STACKED):
        return jnp.stack([_start(read(atom), var) for atom in atoms])


class Rows(NamedTuple):
    """Rows of an array, in order: from the first on, cast to dtypes one after the other."""

    array: jex.Var
    first: int
    casts: tuple[Any, ...] = ()


def array_of(facts: Facts, atoms: tuple) -> Rows | None:
    """The array of which values are the rows in order, cast or not; None where they must be stacked."""
    if not all(isinstance(a, jex.Var) and a in facts.made_at for a in atoms):
        return None
    eqns = [facts.eqns[facts.made_at[a]] for a in atoms]
    name, params = eqns[0].primitive.name, eqns[0].params
    if name == "convert_element_type" and all(e.primitive.name == name and e.params == params for e in eqns):
        inner = array_of(facts, tuple(e.invars[0] for e in eqns))
        return inner and inner._replace(casts=(*inner.casts, params["new_dtype"]))
    rows = [_row(facts, a) for a in atoms]
    array, first = rows[0]
    if array is None or any(row != (array, first + i) for i, row in enumerate(rows)):
        return None
    return Rows(array, first)


def _row(facts: Facts, var: jex.Var) -> tuple:
    """(array, index) where a value is a row of an array along its first axis; (None, 0) for others."""
    eqn = facts.eqns[facts.made_at[var]]
    if eqn.primitive.name == "unstack" and eqn.params.get("axis") == 0:
        return eqn.invars[0], list(eqn.outvars).index(var)
    source = eqn.invars[0] if eqn.invars else None
    if eqn.primitive.name != "squeeze" or tuple(eqn.params["dimensions"]) != (0,) or source not in facts.made_at:
        return None, 0
    cut = facts.eqns[facts.made_at[source]]
    array = cut.invars[0]
    if cut.primitive.name != "slice" or not is_value(array):
        return None, 0
    first, *rest = cut.params["start_indices"]
    shapes: list[Any] = [v.aval for v in (source, array)]
    whole = not any(rest) and len({aval.shape[1:] for aval in shapes}) == 1
    return (array, first) if whole and set(cut.params["strides"] or (1,)) == {1} else (None, 0)
