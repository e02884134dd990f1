"""A state saved under one mesh, dtype or optimizer comes back under another: the same bits, and then a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import MemoryConfig, Precision, WeightedMean, Workload, checkpoint, make_train_step
from jaxmem.accumulate import multi_steps
from jaxmem.checkpoint._windows import window_facts
from jaxmem.errors import CheckpointMismatchError
from tests.accumulate.problems import assert_trees_close
from tests.checkpoint.test_trees import assert_same

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
MESHES = {8: ((8,), ("data",), P("data")), 4: ((2, 2), ("model", "data"), P(None, "model")), 1: ((), (), P())}
ADAM = optax.adam(0.1)
WINDOW = multi_steps(ADAM, 3)


def loss(params, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.7, batch.shape)
    rows = jnp.sum((jnp.where(kept, batch, 0) @ params["w"]) ** 2 + params["b"] ** 2, 1)
    return WeightedMean(rows.sum(), rows.size)


@functools.cache
def step_on(devices, optimizer=ADAM, moments=None, accumulation_steps=1):
    """A step whose parameters and rows are sharded over some of the devices."""
    sizes, names, spec = MESHES[devices]
    mesh = jax.make_mesh(sizes, names, devices=jax.devices()[:devices]) if devices > 1 else None
    params = {"w": jnp.ones((8, 4)) / 3, "b": jnp.ones(4)}
    if mesh is not None:
        params["w"] = jax.device_put(params["w"], NamedSharding(mesh, spec))
        params["b"] = jax.device_put(params["b"], NamedSharding(mesh, P()))
    workload = Workload(loss, params, X, optimizer, rng=jax.random.key(3))
    config = MemoryConfig(accumulation_steps=accumulation_steps, precision=Precision(optimizer=moments))
    return make_train_step(workload, config, mesh=mesh)


def trained(step, windows):
    state = step.init()
    for _ in range(windows):
        state, _ = step(state, X)
    return state


def on_host(state):
    key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if key(x) else x), state)


def shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def save(folder, state, step, number=0):
    checkpoint.save(folder, state, number=number, optimizer=step.spec.workload.optimizer)


@pytest.mark.parametrize("optimizer", [ADAM, WINDOW], ids=["plain", "mid-window"])
def test_case_38_across_8_4_and_1_devices_and_back(tmp_path, optimizer):
    """orbax#648: a restore on another mesh failed, or kept the sharding it was saved with."""
    state = trained(step_on(8, optimizer), 4)
    if optimizer is WINDOW:
        assert int(state.opt_state.mini_step) == 1
    wanted, after = on_host(state), []
    for number, devices in enumerate((4, 1, 8)):
        save(tmp_path, state, step_on(8, optimizer), number)
        step = step_on(devices, optimizer)
        state = checkpoint.restore(tmp_path, step)
        assert_same(on_host(state), wanted)
        same = jax.jit(lambda state: state)
        assert shardings(same(state)) == shardings(same(step.init()))
        assert same._cache_size() == 1  # a step that is compiled for a new state takes a restored one
        assert len(state.params["w"].sharding.device_set) == devices
        again = checkpoint.restore(tmp_path, step)
        after.append(on_host(step(again, X)[0]))
        assert shardings(checkpoint.restore(tmp_path, state)) == shardings(state)  # arrays say it as well
    uninterrupted = on_host(trained(step_on(8, optimizer), 5))
    assert_same(after[-1], uninterrupted)  # on the mesh that it came from, bit for bit
    for other in after:
        assert_trees_close(other, uninterrupted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "old", "new"), [(ADAM, None, "bfloat16"), (WINDOW, "bfloat16", None)])
def test_the_optimizers_state_in_another_dtype(tmp_path, optimizer, old, new):
    state = trained(step_on(8, optimizer, old), 4)
    save(tmp_path, state, step_on(8, optimizer, old))
    step = step_on(1, optimizer, new)
    with pytest.raises(CheckpointMismatchError, match="4 leaves of another dtype: opt_state/.*cast='opt_state'"):
        checkpoint.restore(tmp_path, step)
    got = checkpoint.restore(tmp_path, step, cast="opt_state")
    assert_same(on_host(got), jax.tree.map(lambda x, to: x.astype(to.dtype), on_host(state), on_host(step.init())))
    step(got, X)


def test_a_window_is_turned_on_made_longer_and_turned_off_at_its_end(tmp_path):
    plain, window, longer = step_on(8), step_on(4, WINDOW), step_on(8, multi_steps(ADAM, 2))
    state = trained(plain, 2)
    moments, params = on_host(state.opt_state), on_host(state.params)
    save(tmp_path, state, plain)
    state = checkpoint.restore(tmp_path, window)
    assert_same(on_host(state.opt_state.inner_opt_state), moments)
    assert int(state.opt_state.gradient_step) == 2 and int(state.opt_state.mini_step) == 0
    assert state.opt_state.gradient_step is not state.step  # XLA crashes on an array that is donated twice
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(on_host(state.opt_state.acc_grads)))
    assert shardings(state) == shardings(window.abstract_arguments()[0])
    state, _ = window(state, X)
    assert_same(on_host(state.params), params)  # its window has begun

    save(tmp_path, state, window, 1)
    for other, words in ((plain, "an optimizer without windows"), (longer, "every changes from 3 to 2")):
        with pytest.raises(CheckpointMismatchError, match=f"{words}.*1 of 3 micro-steps.*2 more micro-steps"):
            checkpoint.restore(tmp_path, other)
    for _ in range(2):
        state, _ = window(state, X)
    moments = on_host(state.opt_state.inner_opt_state)
    save(tmp_path, state, window, 2)
    state = checkpoint.restore(tmp_path, longer)
    assert_same(on_host(state.opt_state.inner_opt_state), moments)
    longer(state, X)
    state = checkpoint.restore(tmp_path, plain)
    assert_same(on_host(state.opt_state), moments)
    plain(state, X)


def test_windows_of_optax_and_ours_are_one_anothers_at_their_end(tmp_path):
    """In ours the accumulator of a window that has ended is not zero, which optax would add to."""
    params = {"w": jnp.arange(6.0)}
    makers = [optax.MultiSteps(ADAM, 2).gradient_transformation(), multi_steps(ADAM, 2)]
    for number, (old, new) in enumerate([makers, makers[::-1]]):

        @functools.partial(jax.jit, static_argnums=0)
        def update(optimizer, state):
            return optimizer.update({"w": jnp.ones(6)}, state, params)

        state = old.init(params)
        for _ in range(2):
            _, state = update(old, state)
        checkpoint.save(tmp_path, {"opt_state": state}, number=number)
        got = checkpoint.restore(tmp_path, {"opt_state": new.init(params)}, optimizer=new)["opt_state"]
        assert window_facts(got) == window_facts(state) == {"": {"mini_step": 0, "gradient_step": 1}}
        for _ in range(2):
            (one, state), (other, got) = update(old, state), update(new, got)
            assert_trees_close(one, other, rtol=1e-6, atol=1e-7)
        assert_same(got.inner_opt_state, state.inner_opt_state)
