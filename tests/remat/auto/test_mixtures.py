"""Blocks that are alike and share a budget that none of them alone would choose."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.remat.auto import Rates, build_problem
from jaxmem.remat.auto._assignment import plain, smallest
from jaxmem.remat.auto._candidates import Choice
from jaxmem.remat.auto._within import assign

LAYERS = 4


def block(x, weights):
    """Pre-norm attention of one head."""
    h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    query, key, value = (h @ w for w in weights)
    scores = jnp.where(jnp.tri(len(x), dtype=bool), query @ key.T / 8, -1e30)
    return x + jax.nn.softmax(scores) @ value


def stack(x, weights):
    x = 2 * x  # so that no layer's input is there anyway
    for each in weights:
        x = block(x, each)
    return x


@pytest.fixture(scope="module")
def problem():
    x, w = (jax.ShapeDtypeStruct((rows, 64), "float32") for rows in (128, 64))
    return build_problem(stack, (x, [[w] * 3] * LAYERS), {}, Rates.of(None))


@pytest.mark.parametrize("richer", [1, 2, 3])
def test_a_budget_divided_by_hand_is_divided_no_worse(problem, richer):
    """`richer` layers keep all products, the others all but their scores, and no byte is left over."""
    (group,) = problem.groups
    assert group.members == LAYERS
    made = lambda v: group.candidates.forward.made_at.get(v)  # noqa: E731  None for an input
    eqns = group.candidates.forward.jaxpr.eqns
    products = [
        i
        for i, v in enumerate(group.candidates.values)
        if made(v) is None or eqns[made(v)].primitive.name == "dot_general"
    ]
    *few, _ = products
    rich, poor = (group.candidates.kept_bytes(Choice(kept=tuple(kept))) for kept in (products, few))
    found = assign(problem, richer * rich + (LAYERS - richer) * poor, working=False, objective="flops")
    assert found is not None
    assert found.recompute_flops == (LAYERS - richer) * 2 * 128 * 128 * 64  # their scores


def test_what_is_no_solution_is_not_proposed_again(problem):
    room = 0.5 * plain(problem).total_bytes
    first = assign(problem, room, objective="flops")
    again = assign(problem, room, objective="flops", without=[first, smallest(problem, objective="flops")])
    assert again is not None
    assert again.price >= first.bound
