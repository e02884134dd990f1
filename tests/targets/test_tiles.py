"""Bytes of arrays in a TPU's tiles, against the layouts that its compiler gives to arguments."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis.hlo._types import arrays, padded_bytes
from jaxmem.targets import Tiles, compile_on, resolve_target

SHAPES = [
    *[((size,), kind) for size in (5, 100, 1000, 3000) for kind in ("float32", "bfloat16", "int8", "bool")],
    *[((rows, 200), kind) for rows in (1, 2, 3, 4, 5, 8, 9, 17) for kind in ("float32", "bfloat16", "int8", "bool")],
    *[((64, 8, 32, 8, 32), "float32"), ((8, 32, 32, 3), "float32"), ((2, 512, 256, 16), "bfloat16")],
    *[((4, 8, 200, 1), "float32"), ((7, 3, 5, 2), "float32"), ((4, 2, 200), "bfloat16"), ((8, 3), "float32")],
]


@pytest.mark.parametrize("name", ["tpu-v5e", "tpu-v3"])
def test_the_rule_is_the_layout_of_arguments(name):
    tiles = resolve_target(name).tiles
    assert tiles is not None
    args = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in SHAPES]
    flip = lambda x: jnp.logical_not(x) if x.dtype == jnp.bool_ else x + 1  # noqa: E731
    text = compile_on(name, lambda *xs: list(map(flip, xs)), *args).as_text()
    assert text is not None
    given = arrays(text.split("entry_computation_layout={(")[1].split(")->")[0])
    got = [padded_bytes(array.text) for array in given]
    assert [tiles.stored_bytes(shape, jnp.dtype(kind).itemsize) for shape, kind in SHAPES] == got


def test_only_a_tpu_has_tiles():
    assert resolve_target("cpu").tiles is resolve_target("gpu-h100").tiles is None
    assert resolve_target("tpu-v6e").tiles == Tiles() != resolve_target("tpu-v2").tiles


def test_nothing_takes_nothing_and_a_whole_tile_no_padding():
    assert Tiles().stored_bytes((0, 8), 4) == 0
    assert Tiles().stored_bytes((16, 256), 4) == 4 * 16 * 256
    assert Tiles().stored_bytes((), 4) == 4 * 128
