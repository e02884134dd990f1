"""MemoryConfig, Precision and the memory handle: values, validation, JSON."""

import dataclasses
import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem import MemoryConfig, Policy, Precision
from jaxmem.config import Memory
from jaxmem.errors import ConfigError, InputError, UnknownPolicyError
from jaxmem.loss_scale import DynamicLossScale

FLOATS = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
PRECISIONS = st.builds(
    Precision,
    params=st.none() | FLOATS,
    compute=FLOATS,
    output=st.just("float32"),
    accumulator=st.none() | FLOATS,
    optimizer=st.sampled_from([None, "float32", "bfloat16"]),
    loss_scale=st.sampled_from([None, "dynamic", 2.0**10, DynamicLossScale(initial=4, max=8)]),
)
POLICIES = [
    Policy(save=("re:(q|k)_proj", 'a "name"\\'), offload=("re:mlp.*",), recompute=("mlp_1",)),
    Policy(offload=("x",), rest="save"),
    Policy(save=("ü",), dots="no_batch"),
]
CONFIGS = st.builds(
    MemoryConfig,
    accumulation_steps=st.integers(1, 2**40),
    gradient_reduction=st.sampled_from(["auto", "once", "each"]),
    remat=st.sampled_from(
        ["none", "full", "dots", "dots_no_batch", "auto:0.25", "auto:6GiB", "auto:1000003", *POLICIES]
    ),
    precision=FLOATS | PRECISIONS,
) | st.builds(MemoryConfig, accumulator_dtype=FLOATS, precision=FLOATS)


@given(CONFIGS)
def test_json_round_trips(config):
    again = MemoryConfig.from_json(config.to_json())
    assert again == config and hash(again) == hash(config)
    assert again.dtypes == config.dtypes
    assert json.loads(config.to_json())["version"] == 1


@given(CONFIGS, CONFIGS)
def test_equal_by_value(one, other):
    assert (one == other) == (one.to_json() == other.to_json())
    assert one == dataclasses.replace(one) and len({one, dataclasses.replace(one)}) == 1


def test_the_default_is_the_plain_step():
    config = MemoryConfig()
    assert config.accumulation_steps == 1 and config.remat == "none"
    assert config.dtypes == Precision(compute="float32", accumulator="float32")


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype(jnp.bfloat16)])
def test_dtypes_are_kept_by_their_canonical_name(dtype):
    config = MemoryConfig(precision=dtype, accumulator_dtype=dtype)
    assert config == MemoryConfig(precision="bfloat16", accumulator_dtype="bfloat16")
    assert (config.precision, config.accumulator_dtype) == ("bfloat16", "bfloat16")
    assert Precision(params=dtype, compute=dtype) == Precision(params="bfloat16", compute="bfloat16")
    assert MemoryConfig(accumulator_dtype="f4").accumulator_dtype == "float32"


def test_numpy_integers_are_whole_numbers():
    config = MemoryConfig(accumulation_steps=np.int64(4))
    assert (
        config == MemoryConfig(accumulation_steps=4)
        and config.to_json() == MemoryConfig(accumulation_steps=4).to_json()
    )


def test_one_accumulator():
    assert MemoryConfig(precision=Precision(accumulator="bfloat16")).accumulator_dtype == "bfloat16"
    assert MemoryConfig(precision=Precision(compute="bfloat16"), accumulator_dtype="float16").dtypes == Precision(
        compute="bfloat16", accumulator="float16"
    )
    with pytest.raises(ConfigError, match="'float16' and 'bfloat16'. Set one"):
        MemoryConfig(accumulator_dtype="float16", precision=Precision(accumulator="bfloat16"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"accumulation_steps": 0}, "accumulation_steps .* got 0"),
        ({"accumulation_steps": -3}, "accumulation_steps .* got -3"),
        ({"accumulation_steps": 2.0}, "accumulation_steps .* got 2.0"),
        ({"accumulation_steps": "2"}, "accumulation_steps .* got '2'"),
        ({"accumulation_steps": True}, "accumulation_steps .* got True"),
        ({"accumulation_steps": None}, "accumulation_steps .* got None"),
        ({"accumulator_dtype": "bf16"}, "accumulator_dtype to be a floating dtype .* got 'bf16'"),
        ({"accumulator_dtype": "int32"}, "accumulator_dtype .* got 'int32'"),
        ({"accumulator_dtype": None}, "accumulator_dtype .* got None"),
        ({"accumulator_dtype": {}}, "accumulator_dtype"),
        ({"precision": "fp16"}, "precision .* got 'fp16'"),
        ({"precision": None}, "precision .* got None"),
        ({"precision": []}, "precision"),
        ({"gradient_reduction": "twice"}, "one of 'auto', 'once', 'each'; got 'twice'"),
        ({"gradient_reduction": None}, "one of 'auto', 'once', 'each'; got None"),
        ({"order": "tie"}, "order to be one of 'auto', 'tied', 'free'; got 'tie'"),
        ({"roll": 1}, "roll to be one of 'auto', True, False; got 1"),
        ({"random": True}, "random to be one of .*; got True"),
        ({"generator": "philox"}, "generator to be one of 'given', .*; got 'philox'"),
        ({"zero": 1}, "zero=0.* got 1. Leave"),
        ({"offload": ("optimizer",)}, r"offload=\(\).*got \('optimizer',\). Leave"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        MemoryConfig(**fields)
    if not fields.keys() & {"offload"}:
        with pytest.raises(ConfigError, match=message):
            MemoryConfig.from_json(json.dumps(fields))


@pytest.mark.parametrize("remat", ["Full", "everything", "", None, 3, []])
def test_an_unknown_remat_lists_the_presets(remat):
    with pytest.raises(UnknownPolicyError, match="none, full, dots, dots_no_batch"):
        MemoryConfig(remat=remat)


@pytest.mark.parametrize("name", ["params", "compute", "output", "accumulator"])
def test_precision_takes_floating_dtypes_only(name):
    for bad in ("int8", "complex64", "bf16", object()):
        with pytest.raises(ConfigError, match=f"precision.{name} to be a floating dtype"):
            Precision(**{name: bad})


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "invalid JSON"),
        ("", "invalid JSON"),
        (b"\xff", "invalid JSON"),
        ("[]", "a JSON list"),
        ("3", "a JSON int"),
        ('{"version": 2}', "version 2"),
        ('{"remt": "full"}', "'remt'"),
        ('{"tiles": "dense"}', "'tiles'.* Where a newer jaxmem wrote it"),
        ('{"remat": {"save": ["a"], "order": 1}}', "'order'.* Where a newer jaxmem wrote it"),
        ('{"precision": {"compute": "float32", "params_dtype": 1}}', "fields of Precision.*'params_dtype'"),
    ],
)
def test_json_that_is_not_a_config(text, message):
    with pytest.raises(ConfigError, match=message):
        MemoryConfig.from_json(text)


def test_json_written_by_hand():
    text = '{"accumulation_steps": 8, "remat": "full", "offload": [], "precision": {"compute": "bfloat16"}}'
    assert MemoryConfig.from_json(text) == MemoryConfig(
        accumulation_steps=8, remat="full", precision=Precision(compute="bfloat16")
    )


def test_configs_are_frozen_and_named():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MemoryConfig().remat = "full"
    with pytest.raises(TypeError):
        MemoryConfig(4)


def checkpoint(target, remat, **options):
    return target, remat, options


def test_the_memory_handle_is_a_value():
    """It is an argument of the loss: jit caches by it, so equal settings must be equal handles."""
    fields = {"remat": "full", "compute_dtype": jnp.dtype("bfloat16"), "checkpoint": checkpoint}
    assert Memory(**fields) == Memory(**fields) and hash(Memory(**fields)) == hash(Memory(**fields))
    assert Memory(**fields) != Memory(**{**fields, "remat": "dots"})
    assert Memory(**fields) != Memory(**{**fields, "compute_dtype": jnp.dtype("float32")})
    assert Memory().compute_dtype == jnp.float32


def test_block_passes_its_target_and_options_on():
    block = lambda x: x  # noqa: E731
    assert Memory().block(block, scanned=True) is block
    assert Memory(remat="dots", checkpoint=checkpoint).block(block, scanned=True) == (block, "dots", {"scanned": True})
    with pytest.raises(ConfigError, match="Memory made by make_train_step for remat='full'"):
        Memory(remat="full").block(block)


def test_errors_say_wanted_got_and_do():
    with pytest.raises(InputError) as caught:
        MemoryConfig(zero=3)
    error = caught.value
    assert str(error) == f"Wanted {error.wanted}; got {error.got}. {error.do}" and isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
