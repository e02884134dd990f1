"""The abstract presets: the published parameter counts, built, traced and lowered without allocating anything."""

import math

import jax
import pytest

from examples import gpt, llama, resnet_batchnorm, vit_nnx
from jaxmem import MemoryConfig, make_train_step

COUNTS = {
    gpt.gpt2_124m: 124_439_808,
    llama.llama3_8b: 8_030_261_248,
    llama.llama3_70b: 70_553_706_496,
    vit_nnx.vit_b16: 86_567_656,
    resnet_batchnorm.resnet50: 25_557_032,
}
SCANNED = (gpt.gpt2_124m, llama.llama3_70b)


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("preset", COUNTS, ids=lambda fn: fn.__name__)
def test_parameter_count(preset):
    before = live_bytes()
    workload = preset()
    params = jax.eval_shape(workload.params, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == COUNTS[preset]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(workload.batch))
    assert live_bytes() - before < 2**16, "keys, not parameters"


@pytest.mark.parametrize("preset", SCANNED, ids=lambda fn: fn.__name__)
def test_step_of_an_abstract_preset_lowers(preset):
    before = live_bytes()
    config = MemoryConfig(accumulation_steps=2, remat="full", precision="bfloat16")
    step = make_train_step(preset(), config)
    text = step.lower().as_text()
    params = step.abstract_state().params
    assert f"tensor<{'x'.join(map(str, jax.tree.leaves(params)[0].shape))}xf32>" in text
    assert live_bytes() - before < 2**16, "keys, not parameters"


@pytest.mark.parametrize(
    "make, precision",
    [
        (gpt.gpt2_124m, "float32"),
        (llama.llama3_8b, "bfloat16"),
        (vit_nnx.workload, "bfloat16"),
        (resnet_batchnorm.workload, "float32"),
    ],
)
def test_full_remat_keeps_little(make, precision):
    workload = make()
    plain, full = (
        make_train_step(workload, MemoryConfig(remat=remat, precision=precision)).residual_bytes()
        for remat in ("none", "full")
    )
    # Outside the blocks stay the logits of the language models and the stem of ResNet, which no block can recompute.
    assert full < plain / 4


def test_presets_take_named_options():
    workload = llama.llama3_8b(layers=2, seq=128, batch=3)
    assert workload.batch["tokens"].shape == (3, 129)
    params = jax.eval_shape(workload.params, jax.random.key(0))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["blocks"])} == {2}
