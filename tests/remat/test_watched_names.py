"""Names of blocks outside a train step: a name that exists nowhere raises, whatever kind of block; no other does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmem.errors import UnmatchedNamesError
from jaxmem.policy import Policy
from jaxmem.remat import checkpoint, checkpoint_unchecked

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32))


def act(x, name="hidden"):
    return jnp.sin(checkpoint_name(jnp.sin(x), name))


class Linen(nn.Module):
    name_of_value: str = "hidden"

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(4)(x)
        return (act(x, self.name_of_value) if train else x), None


class Nnx(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.eye(4))

    def __call__(self, x):
        return act(x @ self.w[...])


def linen(policy, wrap=checkpoint):
    model = wrap(Linen, policy)()
    return lambda x: model.apply(model.init(jax.random.key(0), x), x)[0].sum()


def linen_scan(policy, wrap=checkpoint):
    stack = nn.scan(
        wrap(Linen, policy, scanned=True),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=3,
    )
    return lambda x: stack().apply(stack().init(jax.random.key(0), x, True), x, True)[0].sum()


def nnx_class(policy, wrap=checkpoint):
    return lambda x: wrap(Nnx, policy)()(x).sum()


def nnx_instance(policy, wrap=checkpoint):
    return lambda x: wrap(Nnx(), policy)(x).sum()


def nnx_method(policy, wrap=checkpoint):
    return lambda x: wrap(Nnx().__call__, policy)(x).sum()


def function(policy, wrap=checkpoint):
    return lambda x: wrap(act, policy)(x).sum()


KINDS = [function, linen, linen_scan, nnx_class, nnx_instance, nnx_method]


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_name_raises_once_a_gradient_is_taken(kind):
    policy = Policy(save=(f"{kind.__name__}_hiden",))  # equal policies share what they were offered
    loss = kind(policy)
    assert jnp.isfinite(loss(X))  # nothing is recomputed, so nothing can be wrong
    for differentiate in (jax.grad, lambda loss: jax.jit(jax.value_and_grad(loss))):
        with pytest.raises(UnmatchedNamesError, match="got the names hidden. ") as error:
            differentiate(loss)(X)
        assert error.value.wanted.startswith(f"save='{kind.__name__}_hiden' to match")


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_name_passes_and_leaves_nothing_to_run(kind):
    policy = Policy(save=("hidden", "re:hid.*"))
    compiled = [jax.jit(jax.grad(kind(policy, wrap))).lower(X).compile() for wrap in (checkpoint, checkpoint_unchecked)]
    np.testing.assert_array_equal(compiled[0](X), compiled[1](X))
    watched, unwatched = (each.as_text().count(" = ") for each in compiled)
    assert watched == unwatched


def test_under_transformations():
    good, bad = (checkpoint(act, Policy(save=(name,)), scanned=True) for name in ("hidden", "transformed"))

    def losses(block):
        stack = lambda x: jax.lax.scan(lambda x, _: (block(x), None), x, length=2)[0]  # noqa: E731
        yield lambda x: stack(x).sum()
        yield lambda x: jax.vmap(block)(x).sum()
        yield lambda x: jax.jit(block)(x).sum()
        yield lambda x: jax.lax.cond(x[0, 0] > 0, block, lambda x: x, x).sum()
        yield lambda x: (jax.grad(lambda x: block(x).sum())(x) ** 2).sum()
        yield lambda x: jax.checkpoint(block)(x).sum()

    for right, wrong in zip(losses(good), losses(bad), strict=True):
        np.testing.assert_allclose(jax.grad(right)(X), jax.grad(right)(X))
        with pytest.raises(UnmatchedNamesError):
            jax.grad(wrong)(X)
    np.testing.assert_allclose(jax.jvp(good, (X,), (X,))[1], jax.jvp(act, (X,), (X,))[1], rtol=1e-6)
    assert jax.hessian(lambda x: good(x).sum())(X[0]).shape == (4, 4)


def test_each_name_may_be_in_another_layer():
    policy = Policy(save=("odd", "even"))

    class Stack(nn.Module):
        layers: int

        @nn.compact
        def __call__(self, x):
            for i in range(self.layers):
                x, _ = checkpoint(Linen, policy)(name_of_value=("even", "odd")[i % 2])(x)
            return x.sum()

    def gradient(layers):
        model = Stack(layers)
        return jax.grad(lambda x: model.apply(model.init(jax.random.key(0), x), x))(X)

    with pytest.raises(UnmatchedNamesError, match="save='odd' to match.*got the names even"):
        gradient(1)
    gradient(2)


def test_a_name_of_a_nested_block_counts_for_both():
    inner = checkpoint(lambda x: act(x, "in_both"), Policy(save=("in_both",)))
    outer = checkpoint(lambda x: jnp.sin(inner(jnp.sin(x))), Policy(save=("in_both",)))
    jax.grad(lambda x: outer(x).sum())(X)


def test_what_is_not_differentiated_is_not_asked_about():
    """An evaluation without the layer's training branch, a frozen block, a linear block that is transposed."""
    model = checkpoint(Linen, Policy(save=("hidden",)))()
    variables = model.init(jax.random.key(0), X)
    assert model.apply(variables, X, train=False)[0].shape == X.shape
    frozen = checkpoint(jnp.tanh, Policy(save=("absent",)))
    jax.grad(lambda x: (x * jax.lax.stop_gradient(frozen(x))).sum())(X)
    linear = checkpoint(lambda x: 2 * x, Policy(save=("absent",)))
    np.testing.assert_array_equal(jax.linear_transpose(linear, X)(X)[0], 2 * X)
