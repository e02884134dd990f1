"""Below one input a layer: scans in segments of about the root of their length."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import MemoryConfig, Workload, make_train_step, remat
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat import residual_bytes
from jaxmem.remat.auto import Rates, build_problem
from jaxmem.remat.auto._assignment import nested, repriced, smallest

LAYERS, ROWS, WIDTH = 36, 64, 8
CARRY = ROWS * WIDTH * 4


def loss(weights, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None), x, weights)[0] ** 2)


@pytest.fixture(scope="module")
def args():
    key = jax.random.key(0)
    weights = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) * 0.3
    return weights, jax.random.normal(jax.random.fold_in(key, 1), (ROWS, WIDTH))


def test_a_budget_below_one_input_a_layer(args):
    small = remat.auto(loss, 20 * CARRY)  # 36 inputs would be too much
    assert residual_bytes(small, *args) <= 8 * CARRY
    for want, got in zip(jax.grad(loss, (0, 1))(*args), jax.grad(small, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert small.decide(*args).assignment.segments == {"scan": (6,)}


def test_no_segments_where_the_inputs_fit(args):
    assert not remat.auto(loss, 60 * CARRY).decide(*args).assignment.segments


def test_too_little_even_for_segments(args):
    with pytest.raises(BudgetInfeasible, match="at least"):
        remat.auto(loss, 3 * CARRY).decide(*args)


def test_a_step_below_the_peak_of_full_remat(args):
    workload = Workload(loss, args[0], jnp.tile(args[1], (32, 1)), optax.sgd(0.1))
    full = make_train_step(workload, MemoryConfig(remat="full"), target="cpu").report().peak_bytes
    step = remat.fit_budget(make_train_step(workload), int(0.7 * full), "cpu")
    assert step.report().peak_bytes <= 0.7 * full
    assert step.decision.assignment.segments


def test_segments_keep_their_price_under_another_objective(args):
    problem = build_problem(loss, args, {}, Rates.of(None))
    least = {objective: smallest(problem, objective=objective) for objective in ("seconds", "flops")}
    seconds, flops = (nested(problem, each, objective=objective) for objective, each in least.items())
    again = repriced(problem, seconds, objective="flops")
    assert (again.price, again.segments, again.kept_bytes) == (flops.price, flops.segments, flops.kept_bytes)
    assert again.recompute_flops == flops.recompute_flops > smallest(problem).recompute_flops
