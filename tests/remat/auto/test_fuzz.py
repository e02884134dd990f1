"""Random programs under random budgets; `benchmarks/budget_fuzz.py` runs many more."""

import jax
import jax.numpy as jnp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks._interpret import interpret
from benchmarks.budget_fuzz import one, relative_error


@settings(max_examples=6)
@given(st.integers(0, 10**6))
@example(588)  # a gradient of a nested scan among repeated things, which the block cutter once took apart wrongly
@example(196)  # an integer of a block is a cond's index
@example(214)  # a program that keeps nothing
@example(255)  # a block has no gradient for what a scan stacked
def test_random_programs_are_equal_or_refused(seed):
    outcome, error, kind = one(seed)
    assert outcome in ("equal", "refused"), f"seed {seed}: {kind}, {error}"


def test_a_difference_would_be_seen():
    assert relative_error([jnp.ones(3)], [jnp.ones(3).at[0].set(1.001)]) > 1e-4
    assert relative_error(jnp.float32(jnp.nan), jnp.float32(1)) == float("inf")
    assert relative_error([1.0], (1.0,)) == float("inf")


def test_equation_by_equation_is_as_compiled():
    def program(x, turns):
        x, ys = jax.lax.scan(lambda h, i: (jnp.sin(h) * i, h.sum()), x, jnp.arange(3.0), reverse=True)
        x = jax.lax.cond(x.sum() > 0, jnp.cos, jnp.tanh, x)
        return jax.lax.while_loop(lambda s: s[0] < turns, lambda s: (s[0] + 1, s[1] * 1.5), (0, x))[1], ys

    args = jnp.ones(4), 2
    for got, want in zip(interpret(jax.make_jaxpr(program)(*args), *args), jax.jit(program)(*args), strict=True):
        assert jnp.allclose(got, want, rtol=1e-6)
