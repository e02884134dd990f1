"""Values and gradients of a function under a budget against those of the function, equation by equation."""

import jax
import numpy as np

from benchmarks._interpret import interpret
from benchmarks.budget_fuzz import relative_error
from jaxmem._compat import called_jaxprs
from jaxmem.remat.auto import auto

BUDGETS = (0.0, 0.5, 0.95)


def gradient_jaxpr(fn, *args, argnums=0):
    """The traced gradient of the sum of a function's floating outputs."""
    return jax.make_jaxpr(jax.grad(lambda *args: total(fn(*args)), argnums))(*args)


def total(out):
    """The sum of all floating leaves."""
    leaves = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array) and is_float(x)]
    return sum(x.astype(np.float32).sum() for x in leaves)


def is_float(x) -> bool:
    return jax.numpy.issubdtype(x.dtype, np.inexact)


def gradients(fn, *args, argnums=0):
    """(outputs, gradients), computed without compiling."""
    trees = {}

    def flat(*args):
        def loss(*args):
            outs = fn(*args)
            return total(outs), [x for x in jax.tree.leaves(outs) if isinstance(x, jax.Array)]

        (_, outs), grads = jax.value_and_grad(loss, argnums, has_aux=True)(*args)
        flat, trees["out"] = jax.tree.flatten((outs, grads))
        return flat

    closed = jax.make_jaxpr(flat)(*args)
    return jax.tree.unflatten(trees["out"], interpret(closed, *jax.tree.leaves(args)))


def assert_same(fn, *args, argnums=0, budgets=BUDGETS, **options):
    """Equal outputs and gradients under all budgets; those of 16 bits to their rounding."""
    want = gradients(fn, *args, argnums=argnums)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(want) if is_float(x))
    for budget in budgets:
        got = gradients(auto(fn, budget, **options), *args, argnums=argnums)
        error = relative_error(got, want)
        assert error < 1e-6, f"{error} under a budget of {budget}"


def count(jaxpr, name: str) -> int:
    """Equations of a primitive at any depth, each once however often its loop turns."""
    inner = [body for eqn in jaxpr.eqns for body in called_jaxprs(eqn)]
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(count(body, name) for body in inner)
