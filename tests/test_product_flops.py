import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

from jaxmem._product_flops import WindowDimension
from jaxmem.analysis import hlo_flops, jaxpr_flops
from tests.analysis.programs import compiled_text


@given(
    st.fixed_dictionaries(
        {
            "input": st.integers(1, 9),
            "kernel": st.integers(1, 5),
            "output": st.integers(1, 12),
            "stride": st.integers(1, 4),
            "pad": st.integers(-2, 5),
            "lhs_dilation": st.integers(1, 4),
            "kernel_dilation": st.integers(1, 3),
        }
    )
)
def test_window_terms_are_those_that_meet_a_real_element(sizes):
    real = range(0, sizes["input"] * sizes["lhs_dilation"], sizes["lhs_dilation"])
    expected = sum(
        o * sizes["stride"] + k * sizes["kernel_dilation"] - sizes["pad"] in real
        for o, k in itertools.product(range(sizes["output"]), range(sizes["kernel"]))
    )
    assert WindowDimension(**sizes).terms() == expected


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_a_convolution_and_its_gradients_cost_the_same_thrice(groups, stride, padding):
    def loss(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=numbers, feature_group_count=groups
        )
        return jnp.sum(y**2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 9, 9, 8), (3, 3, 8 // groups, 16))]
    forward = jaxpr_flops(jax.make_jaxpr(loss)(*shapes)).forward
    if padding == "VALID":
        side = (9 - 3) // stride + 1
        assert forward == 2 * 2 * side**2 * 16 * 9 * 8 // groups
    gradient = jax.grad(loss, (0, 1))
    modelled = jaxpr_flops(jax.make_jaxpr(gradient)(*shapes))
    assert (modelled.forward, modelled.backward, modelled.recompute) == (forward, 2 * forward, 0)
    compiled = hlo_flops(compiled_text(gradient, *shapes))
    assert (compiled.flops, compiled.forward_flops) == (3 * forward, forward)
