"""Fences and generators as settings of a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import MemoryConfig, Workload, make_train_step, verify
from jaxmem.targets import resolve_target
from jaxmem.train import _random
from jaxmem.train._settle import settled
from jaxmem.train._spec import StepSpec
from jaxmem.train._update import idle_settings

WIDTH, ROWS = 64, 2048  # a mask of half the rows has as many elements as get a fence
CPU, V5E, H100 = map(resolve_target, ("cpu", "tpu-v5e", "gpu-h100"))


def loss(params, x, *, rng):
    for i, w in enumerate(params):
        h = jnp.tanh(x @ w)
        x = x + jnp.where(jax.random.bernoulli(jax.random.fold_in(rng, i), 0.9, h.shape), h / 0.9, 0)
    return jnp.mean(x**2)


def scanned(params, x, *, rng):
    def layer(x, w_key):
        w, key = w_key
        return x + jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype), None

    return jnp.mean(jax.lax.scan(layer, x, (jnp.stack(params), jax.random.split(rng, 3)))[0] ** 2)


def workload(rng=None, loss=loss, **fields):
    params = [0.1 * jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(3)]
    x = jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    return Workload(loss, params, x, optax.sgd(0.1), rng=rng, **fields)


def after(workload, steps=2, **config):
    """Parameters after two steps of two micro-batches."""
    step = make_train_step(workload, MemoryConfig(accumulation_steps=2, **config))
    state = step.init()
    for _ in range(steps):
        state, _ = step(state, workload.batch)
    return state


def told(workload, target=CPU, **config):
    spec = settled(StepSpec.of(workload, MemoryConfig(**config)), target)
    return _random.LEVER.told(spec, target)


@pytest.mark.parametrize("remat", ["none", "full", "auto:0.4"])
def test_fences_change_no_bit(remat):
    given, fences = (after(workload(), remat=remat, random=random).params for random in ("free", "fenced"))
    jax.tree.map(np.testing.assert_array_equal, given, fences)


def test_a_generator_draws_as_a_step_with_a_key_of_it_and_the_state_keeps_its_own_key():
    typed, raw = jax.random.key(3), jax.random.PRNGKey(3)
    want = after(workload(jax.random.key(3, impl="rbg"))).params
    got = after(workload(typed), generator="rbg")
    jax.tree.map(np.testing.assert_array_equal, got.params, want)
    assert got.rng == typed
    jax.tree.map(np.testing.assert_array_equal, after(workload(raw), generator="rbg").params, want)
    again = after(workload(typed), generator="rbg", remat="full").params  # recomputed, from the same bits
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), again, want)


def test_verify_refers_to_a_step_that_draws_the_same():
    step = make_train_step(workload(), MemoryConfig(accumulation_steps=2, generator="rbg", random="fenced"))
    assert verify(step, target="cpu").passed


def test_auto_is_what_was_never_seen_to_be_worse_on_the_chip():
    spec = StepSpec.of(workload(), MemoryConfig(remat="full"))
    forms = {target.name: settled(spec, target).settled.random for target in (V5E, H100, CPU)}
    assert forms == {"tpu-v5e": "fenced", "gpu-h100": "free", "cpu": "free"}
    by_hardware = workload(jax.random.key(0, impl="rbg"))
    wide, broken = workload(loss=scanned), workload(loss=lambda params, x, *, rng: jnp.dot(x, x))
    free = [(by_hardware, {}), (workload(), {"generator": "rbg"}), (wide, {}), (broken, {})]
    fences = [(by_hardware, {"generator": "threefry2x32"}), (wide, {"precision": "bfloat16"})]
    for each, fields in [*free, *fences]:
        form = settled(StepSpec.of(each, MemoryConfig(remat="full", **fields)), V5E).settled
        assert form.random == ("fenced" if (each, fields) in fences else "free")
    assert settled(StepSpec.of(workload()), V5E).settled.random == "free"  # nothing is recomputed
    asked = StepSpec.of(workload(), MemoryConfig(remat="full", random="free"))
    assert settled(asked, V5E).settled.random == "free" and not list(_random.LEVER.rivals(asked, V5E))


def test_the_other_form_is_a_rival_where_there_are_masks():
    for remat, target, rival in (("full", H100, "fenced"), ("none", V5E, "fenced"), ("full", V5E, "free")):
        spec = StepSpec.of(workload(), MemoryConfig(remat=remat))
        assert list(_random.LEVER.rivals(spec, target)) == [{"random": rival}]
    plain = lambda params, x: jnp.mean((x @ params[0]) ** 2)  # noqa: E731
    noisy = lambda params, x, *, rng: jnp.mean((x @ params[0] + jax.random.normal(rng, x.shape)) ** 2)  # noqa: E731
    for fn in (plain, noisy):
        assert not list(_random.LEVER.rivals(StepSpec.of(workload(loss=fn)), H100))


def test_a_report_says_what_is_fenced_and_what_does_nothing():
    assert told(workload(), V5E, remat="full").news == (
        "3 random masks are fenced, 384.0 KiB a micro-batch at a byte an element: each is drawn by itself, and not "
        "with what reads it.",
    )
    assert told(workload()).news == told(workload()).notes == ()
    plain = workload(loss=lambda params, x, *, rng: jnp.mean((x @ params[0]) ** 2))
    (note,) = told(plain, random="fenced").notes
    assert "draws no mask" in note
    (note,) = told(plain, generator="rbg").notes
    assert "draws no random numbers" in note


@pytest.mark.parametrize(
    ("fields", "generator", "words"),
    [
        ({}, "threefry2x32", "the step's key is of that generator"),
        ({"rng": jax.random.key(0, impl="rbg")}, "rbg", "of that generator"),
        ({"rng": jax.random.PRNGKey(0)}, "threefry2x32", "of that generator"),
        (
            {"loss": lambda params, x: jnp.mean(x @ params[0])},
            "rbg",
            "neither the loss nor the model state takes a key",
        ),
    ],
)
def test_a_generator_that_does_nothing_is_said(fields, generator, words):
    (sentence,) = idle_settings(StepSpec.of(workload(**fields), MemoryConfig(generator=generator)))
    assert words in sentence
    assert idle_settings(StepSpec.of(workload(), MemoryConfig(generator="rbg"))) == ()


def test_keys_of_an_nnx_model_are_carried_over_and_kept():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.drop = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.linear(x))

    def states(impl, generator):
        net = Net(nnx.Rngs(params=jax.random.key(0), dropout=jax.random.key(1, impl=impl)))
        made = Workload.from_nnx(net, lambda model, x: jnp.mean(model(x) ** 2), jnp.ones((8, WIDTH)), optax.sgd(0.1))
        step = make_train_step(made, MemoryConfig(generator=generator))
        return step.init(), step(step.init(), made.batch)[0]

    start, got = states("threefry2x32", "rbg")
    _, want = states("rbg", "given")
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    before, later = (jax.tree.leaves(each.state) for each in (start, got))
    assert [leaf.dtype for leaf in later] == [leaf.dtype for leaf in before]
    changed = [bool(jnp.any(a != b)) for a, b in zip(before, later, strict=True)]
    assert changed.count(True) == 1  # the count of the stream that drew
