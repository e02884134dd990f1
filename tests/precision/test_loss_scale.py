"""The loss scale by itself: what it may be, how it moves, and that its state is an honest pytree."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem import MemoryConfig, Precision
from jaxmem.errors import ConfigError
from jaxmem.precision import DynamicLossScale, LossScaleState, next_loss_scale, start_loss_scale

advance = jax.jit(next_loss_scale, static_argnums=1)


def run(spec, finite):
    """The scale of each window, and of the one after the last."""
    state = start_loss_scale(spec)
    scales = [float(state.scale)]
    for each in finite:
        state = advance(state, spec, jnp.array(each))
        scales.append(float(state.scale))
    return scales, state


# -- what it may be --------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_only_float16_brings_a_scale_of_its_own(compute):
    assert Precision(compute=compute).loss_scale is None
    assert Precision(compute="float16").loss_scale == DynamicLossScale()
    assert MemoryConfig(precision="float16").dtypes.loss_scale == DynamicLossScale()
    assert Precision(compute="float16", loss_scale=1).loss_scale == 1.0


def test_two_spellings_are_one_value():
    assert Precision(compute="float16", loss_scale="dynamic") == Precision(compute="float16")
    assert MemoryConfig(precision=Precision(compute="float16", loss_scale=DynamicLossScale())).precision == "float16"
    assert Precision(loss_scale=2**15) == Precision(loss_scale=np.float32(32768)) != Precision(loss_scale="dynamic")


@pytest.mark.parametrize("scale", [None, 1024, 0.5, "dynamic", DynamicLossScale(initial=8, min=2, max=64, factor=4)])
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_json_round_trips(scale, compute):
    config = MemoryConfig(precision=Precision(compute=compute, loss_scale=scale))
    again = MemoryConfig.from_json(config.to_json())
    assert again == config and hash(again) == hash(config) and again.dtypes == config.dtypes
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("bad", [0, -1.0, np.inf, np.nan, 1e39, 1e-50, True, "auto", [], 2 + 0j])
def test_a_scale_is_a_positive_number(bad):
    with pytest.raises(ConfigError, match="precision.loss_scale to be None, 'dynamic', a DynamicLossScale or a pos"):
        Precision(loss_scale=bad)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"initial": 0}, "DynamicLossScale.initial to be a positive number"),
        ({"max": np.inf}, "DynamicLossScale.max to be a positive number"),
        ({"min": "1"}, "DynamicLossScale.min to be a positive number"),
        ({"factor": 1}, "factor to be larger than 1"),
        ({"growth_interval": 0}, "growth_interval to be a whole number"),
        ({"growth_interval": 1.5}, "growth_interval to be a whole number"),
        ({"growth_interval": True}, "growth_interval to be a whole number"),
        ({"initial": 2.0**25}, "min <= initial <= max"),
        ({"initial": 1, "min": 2}, "min <= initial <= max"),
    ],
)
def test_what_a_dynamic_scale_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        DynamicLossScale(**fields)
    if np.inf not in fields.values():
        text = json.dumps({"precision": {"compute": "float16", "loss_scale": fields}})
        with pytest.raises(ConfigError, match=message):
            MemoryConfig.from_json(text)


def test_json_names_a_field_it_does_not_know():
    with pytest.raises(ConfigError, match="fields of DynamicLossScale: initial.*'backoff'"):
        MemoryConfig.from_json('{"precision": {"compute": "float16", "loss_scale": {"backoff": 2}}}')


# -- how it moves ----------------------------------------------------------------------------------


def test_case_22_a_growing_scale_stays_finite_and_recovers():
    """flax#2547: growth 10 at each of 70 windows reaches inf in float32, which halves to inf for good."""
    spec = DynamicLossScale(initial=1, growth_interval=1, factor=10)
    scales, state = run(spec, [True] * 70)
    assert scales[:4] == [1, 10, 100, 1000] and max(scales) == scales[-1] == spec.max == 2.0**24
    after = advance(state, spec, jnp.array(False))
    assert float(after.scale) == np.float32(2.0**24) * np.float32(0.1) and int(after.skipped_in_a_row) == 1
    broken = LossScaleState(**{**vars(after), "scale": jnp.float32(np.inf)})
    assert float(advance(broken, spec, jnp.array(False)).scale) == spec.max  # whatever was restored comes back


def test_it_falls_to_its_floor_and_grows_again():
    spec = DynamicLossScale(initial=8, growth_interval=2, min=2)
    scales, state = run(spec, [False] * 4 + [True] * 4)
    assert scales == [8, 4, 2, 2, 2, 2, 4, 4, 8]
    assert int(state.skipped_in_a_row) == 0


def test_an_overflow_starts_the_count_of_good_windows_anew():
    scales, _ = run(DynamicLossScale(initial=8, growth_interval=3), [True, True, False, True, True, True])
    assert scales == [8, 8, 8, 4, 4, 4, 8]


def test_a_static_scale_stays():
    scales, state = run(1000.0, [True, False, False])
    assert scales == [1000.0] * 4 and int(state.skipped_in_a_row) == 2
    assert float(advance(state, 8.0, jnp.array(True)).scale) == 8.0  # restored, and trained on with another


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), max_size=40))
def test_it_is_always_within_its_bounds(finite):
    spec = DynamicLossScale(initial=4, growth_interval=2, min=0.5, max=32)
    scales, _ = run(spec, finite)
    assert all(spec.min <= scale <= spec.max for scale in scales)
    recovered, _ = run(spec, [*finite, *[True] * 16])
    assert recovered[-1] == spec.max


# -- its state -------------------------------------------------------------------------------------


def signature(tree):
    return [(str(path), leaf.dtype, leaf.weak_type, leaf.shape, leaf.tolist()) for path, leaf in leaves(tree)]


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def test_case_24_every_field_survives(tmp_path):
    """jmp#44: a field that is lost when the pytree is put together again. tree_map, jit and orbax keep all three."""
    spec = DynamicLossScale(initial=512, growth_interval=1)
    state = advance(advance(start_loss_scale(spec), spec, jnp.array(True)), spec, jnp.array(False))
    want = signature(state)
    assert [dtype for _, dtype, *_ in want] == [jnp.float32, jnp.int32, jnp.int32]
    assert signature(jax.tree.map(lambda x: x, state)) == want
    assert signature(jax.jit(lambda s: s)(state)) == want
    assert signature(jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))) == want
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: start_loss_scale(spec)))
    assert isinstance(restored, LossScaleState) and signature(restored) == want
    again = [float(advance(each, spec, jnp.array(False)).scale) for each in (state, restored)]
    assert again[0] == again[1] == float(state.scale) / 2 == 256
    assert jax.tree.structure(advance(state, spec, jnp.array(True))) == jax.tree.structure(state)
