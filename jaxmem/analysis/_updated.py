"""Which outputs of a traced program are arguments with something added: what an optimizer makes of parameters."""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxmem._compat import called_jaxprs, scan_layout

# What passes its operands on.
_PASSING = ("convert_element_type", "copy", "copy_p", "optimization_barrier", "reshape", "sharding_constraint")
_SUMS = ("add", "add_any", "sub")
_CALLS = ("closed_call", "core_call", "jit", "pjit", "custom_jvp_call", "custom_vjp_call")


def updated_arguments(jaxpr: ClosedJaxpr) -> dict[int, int]:
    """Number of an argument → number of the first output that is this argument with something added or subtracted.

    >>> import jax
    >>> updated_arguments(jax.make_jaxpr(lambda w, x: (w * x, w - 0.1 * x))(1.0, 2.0))
    {0: 1}
    """
    found: dict[int, int] = {}
    for output, (_, sums) in enumerate(_origins(jaxpr.jaxpr)):
        for number in sums:
            found.setdefault(number, output)
    return found


def unchanged_outputs(jaxpr: ClosedJaxpr) -> dict[int, int]:
    """Number of an output that is an argument as it came → number of that argument."""
    numbers = {var: number for number, var in enumerate(jaxpr.jaxpr.invars)}
    outputs = enumerate(jaxpr.jaxpr.outvars)
    return {n: numbers[var] for n, var in outputs if not isinstance(var, Literal) and var in numbers}


def _origins(jaxpr: Jaxpr) -> list[tuple[set[int], set[int]]]:
    """For each output, the inputs that it may be as they came, and those that it may be with something added."""
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    known: dict[Any, tuple[set[int], set[int]]] = {var: ({n}, set()) for n, var in enumerate(jaxpr.invars)}

    def of(var: Any) -> tuple[set[int], set[int]]:
        if isinstance(var, Literal) or (var not in known and var not in made_by):
            return set(), set()
        if var not in known:
            known[var] = made(made_by[var], made_by[var].outvars.index(var))
        return known[var]

    def made(eqn: Any, at: int) -> tuple[set[int], set[int]]:
        name, inputs = eqn.primitive.name, eqn.invars
        if name in _PASSING:
            return of(inputs[at])
        if name in _SUMS:
            return set(), _union(of(operand)[0] for operand in inputs[: 1 if name == "sub" else 2])
        if name == "select_n":
            return _union(of(case)[0] for case in inputs[1:]), _union(of(case)[1] for case in inputs[1:])
        if name == "cond" or name in _CALLS:
            operands = inputs[1:] if name == "cond" else inputs
            bodies = [_origins(body)[at] for body in called_jaxprs(eqn)]
            came, added = _union(same for same, _ in bodies), _union(sums for _, sums in bodies)
            through = _union(of(operands[n])[1] for n in came)
            return _union(of(operands[n])[0] for n in came), through | _union(of(operands[n])[0] for n in added)
        if name == "scan":  # what goes round a loop is updated by it
            consts, carried, _ = scan_layout(eqn)
            return set(), of(inputs[consts + at])[0] if at < carried else set()
        if name == "while":
            return set(), of(inputs[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] + at])[0]
        return set(), set()

    return [of(var) for var in jaxpr.outvars]


def _union(sets: Iterable[set[int]]) -> set[int]:
    return set().union(*sets)
