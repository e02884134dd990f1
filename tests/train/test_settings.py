"""A setting that does nothing is said; a typo is refused, whether it would have done something or not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from jaxmem import MemoryConfig, Workload, accumulate, make_train_step, train_loop
from jaxmem.errors import ConfigError, RematWarning, SettingWarning, StateError, WorkloadError

BATCH = jnp.ones((8, 4))


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def work(loss=loss, **fields):
    return Workload(loss, {"w": jnp.eye(4), "b": jnp.ones(4)}, BATCH, optax.sgd(0.1), **fields)


@pytest.mark.parametrize(
    "fields, config, words",
    [
        ({}, {"gradient_reduction": "once"}, "gradient_reduction='once' does nothing, as the rows are not sharded"),
        ({}, {"accumulator_dtype": "bfloat16"}, "accumulator_dtype='bfloat16' does nothing, as one micro-batch"),
        ({"state_reduction": "mean"}, {}, "state_reduction does nothing, as the workload has no state"),
        ({"trainable": "w|b"}, {}, "trainable='w|b' picks every parameter"),
    ],
)
def test_what_does_nothing_is_said(fields, config, words):
    with pytest.warns(SettingWarning) as caught:
        step = make_train_step(work(**fields), MemoryConfig(**config))
    assert [str(w.message) for w in caught if words in str(w.message)] and len(caught) == 1
    assert any(words in note for note in step.report().warnings)


def test_what_does_something_is_not():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    make_train_step(work(), MemoryConfig(gradient_reduction="once", accumulator_dtype="bfloat16"), mesh=mesh)
    make_train_step(work(trainable="w"), MemoryConfig(accumulator_dtype="bfloat16", accumulation_steps=2))


def test_shards_that_repeat_one_anothers_work_are_said():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    workload = Workload(lambda w, x: jnp.mean((x @ w) ** 2), jnp.eye(4), jnp.ones((16, 4)), optax.sgd(0.1))
    flops = {}
    for count, repeated in ((1, 1), (2, 1), (4, 2), (8, 4)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SettingWarning)
            step = make_train_step(workload, MemoryConfig(accumulation_steps=count), mesh=mesh)
        said = [str(w.message) for w in caught]
        assert len(said) == (repeated > 1) and all(f"computed on {repeated} of them" in text for text in said)
        flops[count] = step.report().flops
    assert [flops[count] // flops[1] for count in flops] == [1, 1, 2, 4]


def test_names_of_state_reductions_are_checked_without_state():
    for names in ("meen", {"batch_stats": "meen"}):
        with pytest.raises(StateError, match="one of carry, mean, sum, max, last; got 'meen'"):
            work(state_reduction=names)
    with pytest.raises(StateError, match="got 'meen'"):
        accumulate.value_and_grad(loss, 1, state_reduction="meen")({"w": jnp.eye(4), "b": jnp.ones(4)}, BATCH)


@pytest.mark.parametrize("block", [lambda w, x: x @ w, lambda w, x: (x @ w).T + 1.0])
def test_blocks_with_nothing_to_recompute_are_said(block):
    def linear(params, batch, *, memory):
        return jnp.mean(memory.block(block)(params["w"], batch))

    step = make_train_step(work(linear), MemoryConfig(remat="full"))
    with pytest.warns(RematWarning, match="nothing to recompute"):
        step.lower()

    def tanh(params, batch, *, memory):
        return jnp.mean(memory.block(lambda w, x: jnp.tanh(block(w, x)))(params["w"], batch))

    assert not make_train_step(work(tanh), MemoryConfig(remat="full")).examine().warnings


def test_a_limit_of_skipped_windows_without_a_loss_scale_is_said():
    step = make_train_step(work())
    with pytest.warns(SettingWarning, match="max_skipped=3 does nothing") as caught:
        train_loop(step, step.init(), lambda window: BATCH, 1, progress=False, max_skipped=3)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("trainable", ["adaptor", lambda path, leaf: False, {"adapter": False, "base": False}])
def test_multi_steps_that_would_train_nothing_are_refused(trainable):
    optimizer = accumulate.multi_steps(optax.sgd(1.0), 1, trainable=trainable)
    with pytest.raises(WorkloadError, match="at least one parameter; got none. Its paths are.*adapter, base"):
        optimizer.init({"adapter": jnp.ones(2), "base": jnp.ones(2)})


@pytest.mark.parametrize("index", [-1, 4, 99, np.int64(4), 1.5, jnp.array(7)])
def test_an_index_of_no_micro_batch_is_refused(index):
    with pytest.raises(ConfigError, match="a whole number from 0 to 3"):
        accumulate.micro_batch(jnp.arange(8), index, 4)
    assert jax.jit(lambda i: accumulate.micro_batch(jnp.arange(8), i, 4))(3).tolist() == [3, 7]
