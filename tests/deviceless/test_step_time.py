"""Estimated step times of real programs, from the TPU's and the GPU's compiler."""

import functools
import time

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis import hlo_flops
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.analysis.step_time import ChipSpeed, forward_seconds, step_time
from jaxmem.targets import find_chip
from tests.deviceless.compiling import compile_on

ROWS, WIDTH = 4096, 2048  # each product of 34 GFLOP moves 42 MB: bound by arithmetic on both chips
CHIPS = {
    "tpu-v5e:1x1": ChipSpeed(
        name="tpu-v5e", flops_per_second=(("bfloat16", 197e12),), hbm_bytes_per_second=819e9, clock_hertz=1.5e9
    ),
    "gpu-h100": ChipSpeed(
        name="gpu-h100",
        flops_per_second=(("float32", 67e12), ("bfloat16", 989e12)),
        vector_flops_per_second=67e12,
        hbm_bytes_per_second=3.35e12,
    ),
}


def layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


@functools.cache
def text_of(target: str, depth: int) -> str:
    shapes = ((ROWS, WIDTH), (depth, WIDTH, WIDTH))
    return compile_on(target, layers, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).as_text()


@pytest.mark.parametrize("target", CHIPS)
def test_a_scan_of_products_takes_its_flops_at_near_peak_rate(target):
    text = text_of(target, 16)
    estimate = step_time(text, CHIPS[target])
    at_peak = hlo_flops(text).flops / dict(CHIPS[target].flops_per_second)["bfloat16"]
    assert at_peak <= estimate.seconds * 1.02 and estimate.seconds < 2.5 * at_peak
    assert estimate.method == ("compiler_cycles" if target.startswith("tpu") else "roofline")
    assert estimate.compute_seconds > 0.5 * estimate.seconds
    if target.startswith("tpu"):
        assert estimate.filled_share < 0.2


@pytest.mark.parametrize("target", CHIPS)
def test_four_times_the_layers_take_four_times_as_long(target):
    short, long = (step_time(text_of(target, depth), CHIPS[target]).seconds for depth in (16, 64))
    assert long / short == pytest.approx(4, rel=0.15)


def test_cycles_of_a_forward_pass_are_told_by_its_products():
    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((ROWS, WIDTH), (4, WIDTH, WIDTH)))
    gradient = jax.grad(lambda x, weights: layers(x, weights).astype(jnp.float32).sum(), argnums=1)
    found = dict(
        forward_seconds(parse_hlo(compile_on("tpu-v5e:1x1", gradient, *shapes).as_text()), find_chip("tpu-v5e"))
    )
    flops = 2 * ROWS * WIDTH**2
    assert flops / 197e12 <= found.pop(flops) * 1.02 < 2.5 * flops / 197e12
    assert list(found) == [0]  # whatever the backward pass multiplies


def test_a_megabyte_of_text_takes_no_time_to_read():
    """The computations repeated under other names, as an unrolled model would have them."""
    text = text_of("gpu-h100", 16)
    head, entry, tail = text.partition("ENTRY ")
    copies = "".join(head.partition("\n")[2].replace("%", f"%c{i}_") for i in range(2_000_000 // len(head)))
    start = time.process_time()
    assert step_time(head + copies + entry + tail, CHIPS["gpu-h100"]).seconds > 0
    assert time.process_time() - start < 3  # a third of that alone on a machine
