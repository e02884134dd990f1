"""What is the same in two programs, and one equation that stands for like equations of several layers."""

import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem._compat import call_to_inline, prune, varying_axes, with_more_inputs
from jaxmem.jaxprs import (
    USER_CHECKPOINT,
    body_key,
    body_of,
    function_of,
    is_float,
    is_on_host,
    is_value,
    jaxpr_of,
)

_DEPTH = 12  # of what a closure may hold


class Different(Exception):
    """Why equations of several layers cannot be one."""


class Parallel(Different):
    """They are alike, and none reads what another makes: no layers."""


class Lifted(NamedTuple):
    """A literal that differs from layer to layer, as an input.

    Args:
      var: the input.
      values: one for each layer.
    """

    var: jex.Var
    values: tuple


def fresh(aval) -> jex.Var:
    """A new variable of a type."""
    return jex.Var(aval.strip_weak_type() if hasattr(aval, "strip_weak_type") else aval)


def same_type(a, b) -> bool:
    """Whether two atoms have one shape, dtype and place; their weak types, and meshes of automatic axes, may differ."""
    return _type(a.aval) == _type(b.aval)


def _type(aval) -> Any:
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return aval
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return aval.shape, aval.dtype, spec, is_on_host(aval), varying_axes(aval)


def as_one(eqns: Sequence[jex.JaxprEqn]) -> tuple[jex.JaxprEqn, list[Lifted]]:
    """One equation that stands for like ones, and literals of its bodies, which are inputs that it has besides.

    Raises:
      Different: they do not do the same.
    """
    first, name = eqns[0], eqns[0].primitive.name
    for other in eqns[1:]:
        atoms = zip((*first.invars, *first.outvars), (*other.invars, *other.outvars), strict=False)
        counts = [(len(e.invars), len(e.outvars)) for e in (first, other)]
        if other.primitive is not first.primitive or counts[0] != counts[1]:
            raise Different(f"one has {name} where another has {other.primitive.name}")
        if not all(same_type(a, b) for a, b in atoms):
            raise Different(f"the types of {name} differ")
    different = [e for e in eqns[1:] if not _same_params(first, e)]
    if not different:
        return first, []
    key = body_key(first)
    liftable = name in USER_CHECKPOINT or call_to_inline(first) is not None
    if not liftable or not key or not all(_same_params(first, e, besides=key) for e in different):
        raise Different(f"parameters of {name} differ")
    body, lifted = _bodies_as_one([body_of(e.params[key])[0] for e in eqns])
    given = first.params[key]
    closed = isinstance(given, jex.ClosedJaxpr) and not isinstance(given, jex.Jaxpr)
    if any(body_of(e.params[key])[1] for e in eqns) or (lifted and not first.invars):
        raise Different(f"constants of {name} differ")
    params = first.params if name in USER_CHECKPOINT else with_more_inputs(first, len(lifted))
    new = jex.ClosedJaxpr(body, ()) if closed else body
    return first.replace(params=params | {key: new}), [Lifted(fresh(v.aval), values) for v, values in lifted]


def _bodies_as_one(programs: Sequence[jex.Jaxpr]) -> tuple[jex.Jaxpr, list[Lifted]]:
    """One program for like ones; literals that differ are inputs behind the others."""
    first = programs[0]
    seen = [dict(zip((*p.constvars, *p.invars), (*first.constvars, *first.invars), strict=True)) for p in programs]
    eqns, lifted = [], []
    if len({len(p.eqns) for p in programs}) > 1:
        raise Different("their programs differ")

    def atom(atoms):
        if not any(map(is_value, atoms)):
            if all(same_literal(atoms[0], other) for other in atoms[1:]):
                return atoms[0]
            lifted.append(Lifted(fresh(atoms[0].aval), tuple(a.val for a in atoms)))
            return lifted[-1].var
        if all(is_value(a) and known.get(a) is atoms[0] for a, known in zip(atoms, seen, strict=True)):
            return atoms[0]
        raise Different("they are wired differently")

    for column in zip(*(p.eqns for p in programs), strict=True):
        eqn, inner = as_one(column)
        lifted += inner
        invars = [atom(atoms) for atoms in zip(*(e.invars for e in column), strict=True)]
        eqns.append(eqn.replace(invars=[*invars, *(v for v, _ in inner)]))
        for known, each in zip(seen, column, strict=True):
            known.update(zip(each.outvars, column[0].outvars, strict=True))
    outvars = [atom(atoms) for atoms in zip(*(p.outvars for p in programs), strict=True)]
    return jaxpr_of(eqns, [*first.invars, *(v for v, _ in lifted)], outvars, frozenset(first.effects)), lifted


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals are one number, bit by bit."""
    first, second = (np.asarray(x.val, x.aval.dtype) for x in (a, b))
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


def _same_params(a: jex.JaxprEqn, b: jex.JaxprEqn, besides: str = "") -> bool:
    """Whether two equations of one primitive have the same parameters.

    Rules of custom derivatives are new objects for each call. Where they cannot be told to be the same, their
    derivatives are traced and held against each other.
    """
    if a.params.keys() != b.params.keys():
        return False
    skip = (besides, "name") if call_to_inline(a) is not None else (besides,)  # a function's name says nothing
    keys = [k for k in a.params if k not in skip and not same(a.params[k], b.params[k])]
    if not keys:
        return True
    rules = a.primitive.name.startswith("custom_") and not any(is_program(a.params[k]) for k in keys)
    return rules and _same_derivative(a, b)


def is_program(value: Any) -> bool:
    return isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))


def _same_derivative(a: jex.JaxprEqn, b: jex.JaxprEqn) -> bool:
    def derivative(eqn):
        inputs = list(dict.fromkeys(v for v in eqn.invars if is_value(v)))
        fn = function_of([eqn], inputs, eqn.outvars)
        floats = [is_float(v.aval) for v in inputs]

        def pull_back(*args):
            def of(*some):
                some = iter(some)
                outs = fn(*[next(some) if yes else x for x, yes in zip(args, floats, strict=True)])
                return [out for out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]

            outs, vjp = jax.vjp(of, *[x for x, yes in zip(args, floats, strict=True) if yes])
            return outs, vjp(outs)

        made = jax.make_jaxpr(pull_back)(*[v.aval for v in inputs])
        return prune(made, [True] * len(made.jaxpr.outvars))[0]  # a rule may call the function that it is a rule of

    try:
        return same(derivative(a), derivative(b))
    except Exception:  # a rule may need the axes of a mesh, which are not there
        return False


def same(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether two parameters of equations are the same, by value, at every depth; False where that is not known.

    >>> same({"a": (1, len)}, {"a": (1, len)}), same(jax.make_jaxpr(jnp.sin)(1.0), jax.make_jaxpr(jnp.cos)(1.0))
    (True, False)
    """
    if a is b:
        return True
    if depth > _DEPTH or isinstance(a, Tracer) or isinstance(b, Tracer):
        return False
    again = functools.partial(same, depth=depth + 1)
    if is_program(a):
        return is_program(b) and _same_program(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(again, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(again(a[k], b[k]) for k in a)
    if isinstance(a, (np.ndarray, jax.Array)):
        plain = not jnp.issubdtype(a.dtype, jax.dtypes.extended)
        return (
            a.shape == b.shape and a.dtype == b.dtype and plain and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        )
    if isinstance(a, functools.partial):
        return again((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, types.MethodType):
        return again((a.__func__, a.__self__), (b.__func__, b.__self__))
    if isinstance(a, types.FunctionType):
        cells = [tuple(c.cell_contents for c in f.__closure__ or ()) for f in (a, b)]
        defaults = [(f.__defaults__, f.__kwdefaults__) for f in (a, b)]
        return a.__code__ is b.__code__ and again(cells[0], cells[1]) and again(defaults[0], defaults[1])
    if dataclasses.is_dataclass(a):
        return all(again(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    try:
        return bool(a == b)
    except Exception:
        return False


def _same_program(a, b) -> bool:
    (first, consts), (second, other_consts) = body_of(a), body_of(b)
    if not same(consts, other_consts) or len(first.eqns) != len(second.eqns):
        return False
    if (len(first.invars), len(first.outvars)) != (len(second.invars), len(second.outvars)):
        return False
    seen: dict = {}

    def atoms(these, those) -> bool:
        pairs = zip(these, those, strict=True)
        return all(
            same_type(x, y) and is_value(x) == is_value(y) and (seen.get(x) is y if is_value(x) else same_literal(x, y))
            for x, y in pairs
        )

    def inputs(these, those) -> bool:
        seen.update(zip(these, those, strict=True))
        return all(map(same_type, these, those))

    if len(first.constvars) != len(second.constvars) or not inputs(
        [*first.constvars, *first.invars], [*second.constvars, *second.invars]
    ):
        return False
    for x, y in zip(first.eqns, second.eqns, strict=True):
        counts = [(len(e.invars), len(e.outvars)) for e in (x, y)]
        if x.primitive is not y.primitive or counts[0] != counts[1]:
            return False
        if not (atoms(x.invars, y.invars) and _same_params(x, y) and inputs(x.outvars, y.outvars)):
            return False
    return atoms(first.outvars, second.outvars)
