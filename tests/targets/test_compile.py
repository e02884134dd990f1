"""Real compiles, of tiny programs, for chips that are not here."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.errors import UnsupportedByChip
from jaxmem.targets import (
    compile_noting,
    compile_on,
    find_chip,
    place,
    resolve_target,
    unknown_scratch_bytes,
)
from tests.deviceless.test_blocks import vit

TARGETS = ["tpu-v5e:1x1", "tpu-v4:2x2x1", "gpu-h100", "gpu-t4", "gpu-a100-40g", "gpu-h100:1x1x8"]


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def loss(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return jnp.mean(x**2)


@pytest.mark.parametrize("target", TARGETS)
def test_a_gradient_compiles_and_its_bytes_are_told(target):
    weights, x = shape(4, 128, 128), shape(512, 128)
    compiled = compile_on(target, jax.grad(loss), weights, x)
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == 4 * (4 * 128 * 128 + 512 * 128)
    assert memory.output_size_in_bytes == 4 * 4 * 128 * 128
    report = jaxmem.analyze(jax.grad(loss), weights, x, target=target)
    assert (report.target, report.fits, report.devices) == (target, "yes", resolve_target(target).device_count)
    assert report.temp_bytes == memory.temp_size_in_bytes
    assert report.flops == 3 * 2 * 4 * 512 * 128 * 128


def test_a_step_with_a_target_lowers_and_compiles_for_it():
    work = jaxmem.Workload(loss, jnp.ones((2, 64, 64)), jnp.ones((8, 64)), optax.sgd(0.1))
    step = jaxmem.make_train_step(work, target="gpu-t4")
    (device,) = jax.tree.leaves(step.compile().input_shardings)[0].device_set
    assert device.device_kind == "Tesla T4"
    assert step.report().target == "gpu-t4"
    state, metrics = step(step.init(), work.batch)  # and still runs here
    assert metrics["loss"].devices() == {jax.devices()[0]} and state.step == 1


def test_without_tiles_for_triton_products_go_to_cublas_and_the_report_says_so():
    """A ViT of 17 tokens: jax 0.10.2 finds no tiles for its rows; where a newer one does, there is nothing to say."""
    target = resolve_target("gpu-h100")
    lowered = jaxmem.make_train_step(vit(layers=1), target=target).lower()
    _, notes = compile_noting(lowered, target)
    try:
        compile_noting(lowered, target, {"xla_gpu_enable_triton_gemm": True})  # given, so nothing else is tried
        found_tiles = True
    except Exception as error:  # of jaxlib's making
        assert "output tile sizes" in str(error)  # noqa: PT017
        found_tiles = False
    assert any("xla_gpu_enable_triton_gemm=false" in note for note in notes) is not found_tiles
    assert jax.__version__ != "0.10.2" or not found_tiles


def test_cudnn_attention_is_refused_below_sm_80_where_the_compiler_lets_it_pass():
    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    args = [shape(2, 128, 4, 64, dtype=jnp.float16)] * 3
    assert "__cudnn$fmha" in compile_on("gpu-a100-40g", attention, *args).as_text()
    for target in ("gpu-t4", "gpu-v100"):
        with pytest.raises(UnsupportedByChip, match=r"sm_7[05]\) can run; got cuDNN flash attention"):
            compile_on(target, attention, *args)
        with pytest.raises(UnsupportedByChip, match="needs sm_80 or newer"):
            jaxmem.analyze(attention, *args, target=target)


def test_what_a_chip_does_badly_is_a_note():
    def product(a, b):
        return jax.lax.dot(a, b, preferred_element_type=jnp.float32)

    def notes(target, dtype):
        return " ".join(jaxmem.analyze(product, *[shape(256, 256, dtype=dtype)] * 2, target=target).warnings)

    assert "bfloat16 is not native on Tesla T4" in notes("gpu-t4", jnp.bfloat16)
    assert "not native" not in notes("gpu-t4", jnp.float16) + notes("gpu-a100-40g", jnp.bfloat16)
    assert "float8 products are not native on NVIDIA A100" in notes("gpu-a100-40g", jnp.float8_e4m3fn)
    assert "not native" not in notes("gpu-h100", jnp.float8_e4m3fn)


def test_convolutions_make_the_verdict_uncertain_within_the_scratch_they_may_take():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def judge(rows, target="gpu-t4"):
        report = jaxmem.analyze(convolve, shape(rows, 64, 64, 64), shape(3, 3, 64, 64), target=target)
        return report.fits, report.fits_reason

    assert judge(8)[0] == "yes"
    fits, reason = judge(3500)  # 3.4 GiB in, 3.4 GiB out, of 11
    assert fits == "uncertain" and "4.00 GiB for the scratch of cuDNN convolutions" in reason
    assert judge(8, "tpu-v5e")[1].endswith("reserve of 15.75 GiB")
    compiled = compile_on("gpu-t4", jnp.dot, shape(64, 64), shape(64, 64))
    assert unknown_scratch_bytes(compiled.as_text(), find_chip("gpu-t4")) == 0


def test_on_this_machine_arguments_stay_where_they_are():
    args = (jnp.ones(3), shape(2))
    placed = place(args, resolve_target("cpu"))
    assert placed.args is args and placed.notes == ()
