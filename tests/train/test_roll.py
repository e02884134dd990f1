"""`MemoryConfig(roll=True)`: a step's numbers stay, its report says what was rolled, and remat finds the layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import MemoryConfig, WeightedMean, Workload, make_train_step
from jaxmem.remat.blocks import find_blocks
from jaxmem.remat.roll import rolled
from jaxmem.targets import resolve_target
from jaxmem.train._roll import what_is_rolled
from jaxmem.train._settle import rivals, settled

D, LAYERS, ROWS = 8, 4, 16


def params():
    keys = jax.random.split(jax.random.key(0), (LAYERS, 2))
    return [
        {"up": jax.random.normal(up, (D, 4 * D)) / D**0.5, "down": jax.random.normal(down, (4 * D, D)) / D}
        for up, down in keys
    ]


def layer(x, w, key):
    h = jnp.tanh(x @ w["up"]) @ w["down"]
    return x + jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)


def unmarked(params, x, *, rng):
    for i, w in enumerate(params):
        x = layer(x, w, jax.random.fold_in(rng, i))
    return WeightedMean((x**2).sum(), x.size)


def marked(params, x, *, rng, memory):
    x = x.astype(memory.compute_dtype)
    for i, w in enumerate(params):
        w = jax.tree.map(lambda leaf: leaf.astype(memory.compute_dtype), w)
        x = memory.block(layer)(x, w, jax.random.fold_in(rng, i))
    return WeightedMean((x.astype(jnp.float32) ** 2).sum(), x.size)


def workload(loss, **options):
    batch = jax.random.normal(jax.random.key(1), (ROWS, D))
    return Workload(loss, params(), batch, optax.adam(1e-2), rng=jax.random.key(2), **options)


@pytest.mark.parametrize(
    "loss, options, config",
    [
        (marked, {}, {"remat": "full", "accumulation_steps": 2}),
        (marked, {"trainable": lambda path, leaf: path[:3] != "[1]"}, {"remat": "full"}),
        (unmarked, {}, {"remat": "auto:0.5", "precision": {"loss_scale": 128.0}}),
    ],
)
def test_a_step_computes_the_same(loss, options, config):
    given = workload(loss, **options)
    ends = []
    for roll in (False, True):
        fields = {**config, **({"precision": _scaled()} if "precision" in config else {})}
        step = make_train_step(given, MemoryConfig(roll=roll, **fields))
        ends.append(step(step.init(), given.batch))
    (one, first), (other, second) = ends
    for a, b in zip(jax.tree.leaves((one.params, first)), jax.tree.leaves((other.params, second)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


def _scaled():
    from jaxmem import Precision

    return Precision(loss_scale=128.0)


def test_the_report_says_what_was_rolled_and_remat_finds_it():
    step = make_train_step(workload(marked), MemoryConfig(remat="full", roll=True, precision="bfloat16"), target="cpu")
    report = step.report()
    size = 2 * sum(leaf.size for leaf in jax.tree.leaves(params()))
    assert size == 4096 == LAYERS * 2 * D * 4 * D * 2
    (said,) = [line for line in report.notes if "equal layers" in line]
    assert said == "4 equal layers run as one scan; what is stacked for it takes 4.0 KiB in bfloat16 (modelled)."
    steps = [
        make_train_step(workload(unmarked), MemoryConfig(remat=r, roll=True), target="cpu") for r in ("full", "none")
    ]
    full, none = (step.report().saved_residual_bytes for step in steps)
    assert full is not None and none is not None and full < none


def test_the_cutter_finds_the_body_as_one_block():
    given = workload(unmarked)
    loss = rolled(lambda params, x, rng: jax.tree.leaves(unmarked(params, x, rng=rng)))
    (block,) = find_blocks(jax.make_jaxpr(loss)(given.params, given.batch, given.rng))
    assert (block.kind, block.count) == ("scan", LAYERS)
    # The stack is there for both passes, so that the carry, the key and nothing else is kept to run a layer again.
    assert block.input_bytes < 2 * ROWS * D * 4


def test_nothing_to_roll_is_said():
    loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    given = Workload(loss, jnp.ones((D, D)), jnp.ones((ROWS, D)), optax.sgd(0.1))
    (said,) = [
        w for w in make_train_step(given, MemoryConfig(roll=True), target="cpu").report().warnings if "roll" in w
    ]
    assert said == "roll=True does nothing: no layers repeat outside of scans."


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("loss", [unmarked, marked])
def test_ties_which_come_later_hide_no_layers(loss, remat):
    target = resolve_target("cpu")
    spec = settled(make_train_step(workload(loss), MemoryConfig(order="tied", remat=remat)).spec, target)
    assert [layers.count for layers in what_is_rolled(spec).layers] == [LAYERS]
    assert True in [form.roll for form in rivals(spec, target)]


def test_rolling_is_a_rival_where_there_is_something_to_roll():
    target = resolve_target("cpu")
    for given, config, expected in (
        (workload(unmarked), MemoryConfig(), [True]),
        (workload(unmarked), MemoryConfig(order="tied"), [True]),
        (workload(unmarked), MemoryConfig(roll=False), []),
        (
            Workload(lambda w, x: jnp.mean(x @ w), jnp.ones((D, D)), jnp.ones((2, D)), optax.sgd(0.1)),
            MemoryConfig(),
            [],
        ),
    ):
        spec = settled(make_train_step(given, config).spec, target)
        assert [form.roll for form in rivals(spec, target) if form.roll] == expected
