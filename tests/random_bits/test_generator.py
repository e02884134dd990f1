"""Keys carried over to another generator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import LossOutput
from jaxmem.random_bits import drawing_by

SEED = 11


def key(impl):
    return jax.random.key(SEED, impl=impl)


def loss(params, batch, *, rng, state):
    return jax.random.uniform(rng, (4,))


@pytest.mark.parametrize(("given", "wanted"), [("threefry2x32", "rbg"), ("rbg", "threefry2x32"), ("rbg", "rbg")])
def test_a_key_becomes_that_of_its_seed_and_folds_and_splits_alike(given, wanted):
    draw = drawing_by(loss, wanted)
    for made in (lambda key: key, lambda key: jax.random.fold_in(key, 3), lambda key: jax.random.split(key)[1]):
        want = jax.random.uniform(made(key(wanted)), (4,))
        np.testing.assert_array_equal(draw(0, 0, rng=made(key(given)), state=None), want)
    assert draw(0, 0, rng=key(given), state=None).tolist() != draw(0, 0, rng=made(key(given)), state=None).tolist()


def test_a_raw_key_is_drawn_with_by_the_default_which_is_the_generator_in_the_loss_only():
    raw = jax.random.PRNGKey(SEED)
    got = jax.jit(lambda rng: drawing_by(loss, "rbg")(0, 0, rng=rng, state=None))(raw)
    np.testing.assert_array_equal(got, jax.random.uniform(key("rbg"), (4,)))
    assert jax.random.PRNGKey(SEED).shape == raw.shape == (2,)


def test_keys_in_the_state_come_back_as_they_came_and_new_ones_of_their_generator():
    given = {"kept": jax.random.split(key("threefry2x32"), 3), "used": key("threefry2x32"), "count": jnp.zeros((), int)}

    def with_state(params, batch, *, rng, state):
        next_key, now = jax.random.split(state["used"])
        return LossOutput(
            jax.random.uniform(now), state={"kept": state["kept"], "used": next_key, "count": state["count"] + 1}
        )

    out = jax.jit(lambda state: drawing_by(with_state, "rbg")(0, 0, rng=None, state=state))(given)
    now = jax.random.split(key("rbg"))[1]
    assert out.objective == jax.random.uniform(now)
    assert jax.tree.map(lambda leaf: leaf.dtype, out.state) == jax.tree.map(lambda leaf: leaf.dtype, given)
    np.testing.assert_array_equal(*map(jax.random.key_data, (out.state["kept"], given["kept"])))
    np.testing.assert_array_equal(
        *map(jax.random.key_data, (out.state["used"], jax.random.split(key("threefry2x32"))[0]))
    )
    assert out.state["count"] == 1


def test_given_leaves_the_loss_as_it_is():
    assert drawing_by(loss, "given") is loss
