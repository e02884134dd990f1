"""Bytes of HLO types."""

import pytest

from jaxmem.analysis.assignment import logical_bytes, padded_bytes

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("text", "logical", "padded"),
    [
        ("f32[]", 4, 4),
        ("f32[50257,768]{1,0}", 154389504, 154389504),
        ("pred[3]{0}", 3, 3),
        ("s4[9]{0:E(4)}", 5, 5),
        ("f8e4m3fn[7]{0}", 7, 7),
        ("c64[2]{0}", 16, 16),
        ("bf16[1,1]{1,0:T(8,128)(2,1)}", 2, 2048),
        ("f32[12,768]{1,0:T(8,128)}", 36864, 49152),  # seen in a v5e's dump
        ("bf16[768]{0:T(1024)(128)(2,1)}", 1536, 2048),  # seen in a v5e's dump
        ("f32[8,1024,50257]{2,1,0:T(8,128)}", 8 * 1024 * 50257 * 4, 8 * 1024 * 50304 * 4),
        ("f32[100,8]{0,1:T(8,128)}", 3200, 8 * 128 * 4),  # tiles cover the minor dimensions, here 8 and 100
        ("f32[2,3]{1,0:T(8,128)S(1)}", 24, 4096),
        ("u32[]{:S(2)}", 4, 4),
        ("token[]", 0, 0),
        ("(f32[2], s32[])", 0, 0),
    ],
)
def test_bytes_with_and_without_padding(text, logical, padded):
    assert (logical_bytes(text), padded_bytes(text)) == (logical, padded)
