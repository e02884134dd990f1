"""A step that a TPU's compiler refuses for lack of memory is told what makes it fit."""

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from jaxmem.analysis import analyze
from tests.deviceless.compiling import require

WIDTH = 30_000  # parameters and two moments take 10 GiB, and as much again where they are not donated
X = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
PARAMS = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}


def step(state, x):
    return state.apply_gradients(grads=jax.grad(lambda params: jnp.mean((x @ params["w"]) ** 2))(state.params))


def test_the_cure_of_a_refused_step_makes_it_fit():
    require("libtpu", "tpu-aot")
    create = lambda params: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))  # noqa: E731
    state = jax.eval_shape(create, PARAMS)
    refused, cured = (analyze(step, state, X, target="tpu-v5e", donate_argnums=numbers) for numbers in ((), (0,)))
    (finding,) = [f for f in refused.findings if f.kind == "not_donated"]
    assert (refused.fits, cured.fits) == ("no", "yes")
    assert finding.cure.startswith("jax.jit(step, donate_argnums=(0,)):")
    assert finding.size_bytes >= 3 * 4 * WIDTH**2
    assert abs(refused.peak_bytes - cured.peak_bytes - finding.size_bytes) < 0.01 * finding.size_bytes
