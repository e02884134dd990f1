"""What lies before and between blocks is chosen too."""

import jax
import jax.numpy as jnp

from jaxmem import remat

CHANNELS = 4


def loss(params, images):
    x = jnp.tanh(jnp.exp(-((images @ params["stem"]) ** 2)))
    x = x.reshape(len(x), -1, 8, CHANNELS).mean(2)
    for w in params["layers"]:
        x = x + jnp.sin(jnp.sin(x) @ w)
    return (x**2).mean()


def arguments():
    key = jax.random.key(0)
    params = {
        "stem": jax.random.normal(key, (3, CHANNELS)),
        "layers": [jax.random.normal(key, (CHANNELS, CHANNELS))] * 4,
    }
    return params, jax.random.normal(key, (2, 64, 3))


def test_the_first_layers_obey_the_budget():
    params, images = arguments()
    plain = remat.residual_bytes(loss, params, images)
    small = remat.auto(loss, 0.25)
    assert remat.residual_bytes(small, params, images) <= 0.25 * plain
    assert any(v.layer == "stem" and v.fate == "recompute" for v in small.solve(params, images).values)
    want, got = (jax.value_and_grad(fn)(params, images) for fn in (loss, small))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_end_is_left_alone():
    """A loss's large logits are gone when the blocks' backward passes start, so they take no share of a budget."""

    def ends(params, images):
        x = images @ params["stem"]
        for w in params["layers"]:
            x = x + jnp.sin(jnp.sin(x) @ w)
        return jax.nn.logsumexp(x[..., None] * jnp.ones(64), axis=-1).sum()

    names = {v.layer for v in remat.auto(ends, 1000_000).solve(*arguments()).values}
    assert names and all(name.startswith("loss[") for name in names)
