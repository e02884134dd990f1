"""`nested_scan` is `lax.scan`: values, gradients, errors; and keeps and recomputes what its price says."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxmem.analysis import hlo_flops
from jaxmem.errors import InputError, UnknownPolicyError, UnmatchedNamesError
from jaxmem.remat import Policy, checkpoint, nested_scan, nested_scan_bytes, residual_bytes

# Gradients differ by the order of additions only, so by a few units in the last place of the dtype.
TOLERANCE = {"float32": 3e-6, "bfloat16": 3e-2}
ROWS, WIDTH = 3, 4


def problem(length: int, dtype="float32", dropout=True, seed=0):
    """A loss of a scan that holds all that a scan may: a closure, counts, labels, dropout keys, outputs."""
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(length, WIDTH, WIDTH)) / WIDTH, dtype),
        "b": jnp.asarray(rng.normal(size=(length, WIDTH)) / WIDTH, dtype),
    }
    shared = jnp.asarray(rng.normal(size=WIDTH), dtype)
    data = {"label": jnp.arange(length) % WIDTH}
    if dropout:
        data["key"] = jax.random.split(jax.random.key(seed), length)
    h = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), dtype)

    def loss(scan, params, h, shared):
        def body(carry, x):
            h = carry["h"]
            change = jnp.tanh(h @ x["w"] + x["b"]) * shared
            if dropout:
                change = change * jax.random.bernoulli(x["key"], 0.8, h.shape)
            out = {"logit": h[:, x["label"]], "count": carry["count"]}
            return {"h": h + change, "count": carry["count"] + x["label"]}, out

        carry, ys = scan(body, {"h": h, "count": jnp.int32(0)}, {**params, **data})
        value = jnp.sum(carry["h"].astype(jnp.float32) ** 2) + jnp.mean(jnp.sin(ys["logit"].astype(jnp.float32)))
        return value, (carry, ys)

    return loss, (params, h, shared)


def assert_close(got, want, dtype="float32"):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(b).max(initial=0)))


def value_and_grad(loss, scan):
    return jax.jit(jax.value_and_grad(functools.partial(loss, scan), argnums=(0, 1, 2), has_aux=True))


CUTS = st.one_of(
    st.builds(lambda k: {"segment": k}, st.integers(1, 9)),
    st.just({"segment": "sqrt"}),
    st.builds(lambda m: {"levels": m}, st.integers(1, 4)),
)


@settings(max_examples=10)
@given(
    length=st.integers(1, 9),
    cuts=CUTS,
    policy=st.sampled_from(["full", "none", "dots"]),
    reverse=st.booleans(),
    unroll=st.sampled_from([1, 2]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_values_and_gradients_are_those_of_lax_scan(length, cuts, policy, reverse, unroll, dtype):
    loss, args = problem(length, dtype, dropout=False)
    scan = functools.partial(nested_scan, **cuts, policy=policy, reverse=reverse, unroll=unroll)
    got = value_and_grad(loss, scan)(*args)
    want = value_and_grad(loss, functools.partial(lax.scan, reverse=reverse))(*args)
    assert_close(got, want, dtype)


# Of 8 steps: with and without steps left over.
VARIANTS = {
    "segment": functools.partial(nested_scan, segment=3),
    "levels": functools.partial(nested_scan, levels=3),
    "none": functools.partial(nested_scan, segment=4, policy="none"),
}


def test_every_step_keeps_its_dropout_mask():
    """A mask drawn anew when a step is recomputed would show in the gradient, not in the value."""
    loss, args = problem(8)
    want = value_and_grad(loss, lax.scan)(*args)
    for scan in VARIANTS.values():
        assert_close(value_and_grad(loss, scan)(*args), want)


def test_gradient_of_gradient():
    loss, (params, h, shared) = problem(8, dropout=False)

    def curvature(scan):
        def penalty(params, shared):
            inner = jax.grad(lambda params, shared: loss(scan, params, h, shared)[0], argnums=(0, 1))(params, shared)
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(inner))

        return jax.jit(jax.grad(penalty, argnums=(0, 1)))(params, shared)

    # Two rounds of differentiation sum in other orders, twice.
    want = curvature(lax.scan)
    for scan in VARIANTS.values():
        for a, b in zip(jax.tree.leaves(curvature(scan)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_hessian():
    def loss(scan, h):
        return jnp.sum(scan(lambda h, w: (jnp.sin(w * h), h[0]), h, jnp.linspace(0.5, 1.5, 7))[0])

    h = jnp.array([0.3, 0.7])
    want = jax.jit(jax.hessian(functools.partial(loss, lax.scan)))(h)
    got = jax.jit(jax.hessian(functools.partial(loss, functools.partial(nested_scan, segment=3))))(h)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_vmap_with_some_arguments_shared():
    loss, (params, h, shared) = problem(8, dropout=False)
    hs = jnp.stack([h, 2 * h])

    def per_example(scan):
        return jax.vmap(value_and_grad(loss, scan), in_axes=(None, 0, None))(params, hs, shared)

    want = per_example(lax.scan)
    for scan in VARIANTS.values():
        assert_close(per_example(scan), want)


@pytest.mark.parametrize(
    "cuts, reduced", [("segment", "inside"), ("segment", "outside"), ("levels", "inside"), ("none", "outside")]
)
def test_shard_map(cuts, reduced):
    """Rows over two devices, parameters on both: each body reduces its gradient, or one reduction does at the end."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    loss, (params, h, shared) = problem(8, dropout=False)
    rows = jnp.concatenate([h, -h])

    def gradient(scan):
        def local(params, rows, shared):
            if reduced == "outside":
                params, shared = jax.tree.map(lambda a: lax.pcast(a, "data", to="varying"), (params, shared))
            grads = jax.grad(lambda *args: loss(scan, *args)[0], argnums=(0, 1, 2))(params, rows, shared)
            if reduced == "outside":
                params, rows, shared = grads
                grads = (lax.psum(params, "data"), rows, lax.psum(shared, "data"))
            return grads

        specs = (PartitionSpec(), PartitionSpec("data"), PartitionSpec())
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))(params, rows, shared)

    got, want = gradient(VARIANTS[cuts]), gradient(lax.scan)
    assert_close(got, want)


def test_length_without_xs_and_keys_in_the_carry():
    def body(carry, _):
        key, h = carry
        key, now = jax.random.split(key)
        return (key, jnp.sin(h + jax.random.normal(now))), None

    def loss(scan, h):
        (key, h), ys = scan(body, (jax.random.key(0), h), length=11)
        assert ys is None
        return h, jax.random.key_data(key)

    got, want = (
        jax.value_and_grad(functools.partial(loss, scan), has_aux=True)(0.5)
        for scan in (functools.partial(nested_scan, segment=4), lax.scan)
    )
    assert_close(got, want)


@pytest.mark.parametrize("used", ["carry", "first output", "second output"])
def test_results_that_the_loss_does_not_use(used):
    def loss(scan, h, ws):
        carry, ys = scan(lambda h, w: (jnp.sin(w * h), {"a": h * w, "b": jnp.cos(h)}), h, ws)
        return jnp.sum({"carry": carry, "first output": ys["a"], "second output": ys["b"]}[used])

    args = 0.5, jnp.linspace(0.5, 1.5, 7)
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, scan), argnums=(0, 1)))(*args)
        for scan in (functools.partial(nested_scan, segment=3), lax.scan)
    )
    assert_close(got, want)


@pytest.mark.parametrize("policy", ["full", Policy(save=("hidden",)), Policy(save=("re:hid.*",))], ids=str)
def test_policies_by_name(policy):
    def loss(scan, h, ws):
        def body(h, w):
            return h + jnp.sin(checkpoint_name(jnp.tanh(h * w), "hidden")), None

        return scan(body, h, ws)[0]

    args = 0.5, jnp.linspace(0.5, 1.5, 7)
    scan = functools.partial(nested_scan, segment=3, policy=policy)
    got, want = (jax.grad(functools.partial(loss, each), argnums=(0, 1))(*args) for each in (scan, lax.scan))
    assert_close(got, want)


def test_a_misspelt_name_is_refused():
    scan = functools.partial(nested_scan, segment=3, policy=Policy(save=("hiden",)))
    with pytest.raises(UnmatchedNamesError, match="hiden"):
        jax.grad(lambda h: scan(lambda h, w: (checkpoint_name(jnp.sin(h * w), "hidden"), None), h, jnp.ones(7))[0])(1.0)
    with pytest.raises(UnknownPolicyError):
        nested_scan(lambda h, w: (h, None), 1.0, jnp.ones(7), policy="everything")


def test_python_numbers_are_widened_as_in_lax_scan():
    def body(carry, x):
        return (carry[0] + x, carry[1] + 1), None

    for init in ((0, 0), (0.0, 1), (jnp.zeros(()), jnp.int32(0))):
        got, want = (scan(body, init, jnp.arange(5.0)) for scan in (nested_scan, lax.scan))
        assert_close(got, want)


def test_without_jit_and_with_jit_disabled():
    def gradient(scan):
        return jax.grad(lambda ws: scan(lambda h, w: (jnp.sin(w * h), None), 1.0, ws)[0])(jnp.arange(1.0, 4.0))

    scan = functools.partial(nested_scan, segment=2)
    assert_close(gradient(scan), gradient(lax.scan))
    with jax.disable_jit():
        assert_close(gradient(scan), gradient(lax.scan))


@pytest.mark.parametrize(
    "body, init, xs, length",
    [
        (lambda c, x: (c, x), 0.0, {"a": jnp.ones(3), "b": jnp.ones(4)}, None),
        (lambda c, x: (c, x), 0.0, jnp.ones(3), 4),
        (lambda c, x: (c, x), 0.0, None, None),
        (lambda c, x: (c, x), 0.0, 1.0, None),
        (lambda c, x: c, 0.0, jnp.ones(3), None),
        (lambda c, x: (c, x, x), 0.0, jnp.ones(3), None),
        (lambda c, x: ((c, c), x), 0.0, jnp.ones(3), None),
        (lambda c, x: (c.astype(jnp.int32), x), jnp.ones(()), jnp.ones(3), None),
        (lambda c, x: (jnp.stack([c, c]), x), jnp.ones(()), jnp.ones(3), None),
    ],
)
def test_misuse_raises_what_lax_scan_raises(body, init, xs, length):
    with pytest.raises((TypeError, ValueError)) as want:
        lax.scan(body, init, xs, length)
    with pytest.raises(type(want.value)) as got:
        nested_scan(body, init, xs, length)
    assert str(got.value) == str(want.value)


@pytest.mark.parametrize(
    "cuts, message",
    [
        ({"segment": 0}, "segment to be a whole number of at least 1 or 'sqrt'; got 0"),
        ({"segment": 2.0}, "got 2.0"),
        ({"segment": "third"}, "got 'third'"),
        ({"segment": True}, "got True"),
        ({"levels": 0}, "levels to be a whole number of at least 1; got 0"),
        ({"segment": 2, "levels": 2}, "segment or levels; got segment=2 and levels=2"),
    ],
)
def test_bad_cuts_are_refused(cuts, message):
    with pytest.raises(InputError, match=re.escape(message)):
        nested_scan(lambda c, x: (c, x), 0.0, jnp.ones(3), **cuts)


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2)])
def test_whole_numbers_of_numpy_are_whole_numbers(number):
    for cuts, same in (({"segment": number}, {"segment": 2}), ({"levels": number}, {"levels": 2})):
        price = nested_scan_bytes(np.int64(9), carry_bytes=1, **cuts)
        assert price == nested_scan_bytes(9, carry_bytes=1, **same) and type(price.segments[0]) is int


@pytest.mark.parametrize("length", [0, -1, 2.0])
def test_a_price_is_of_at_least_one_step(length):
    with pytest.raises(InputError, match="length to be a whole number of at least 1"):
        nested_scan_bytes(length, carry_bytes=1)


def test_an_empty_scan_returns_its_init():
    carry, ys = nested_scan(lambda c, x: (c + x, c), 1.0, jnp.ones(0))
    assert carry == 1.0 and ys.shape == (0,)


def test_forward_mode_is_refused_by_jax():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda h: nested_scan(lambda h, w: (h * w, None), h, jnp.ones(9))[0], (1.0,), (1.0,))


# -- what it keeps and recomputes ------------------------------------------------------------------


def deep(length, rows, width, **cuts):
    """The loss of a stack of square layers, and its arguments."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    def loss(h, ws):
        return jnp.sum(nested_scan(layer, h, ws, **cuts)[0])

    shapes = (rows, width), (length, width, width)
    return loss, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize("length", [24, 25])
@pytest.mark.parametrize(
    "cuts", [{"segment": 1}, {"segment": 5}, {"segment": 5, "policy": "none"}, {"levels": 3}, {"levels": 4}]
)
def test_the_compiled_step_recomputes_what_the_price_says(length, cuts):
    rows, width = 2, 4
    loss, args = deep(length, rows, width, **cuts)
    counted = hlo_flops(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*args).compile().as_text())
    keyword = {name: value for name, value in cuts.items() if name != "policy"}
    price = nested_scan_bytes(length, carry_bytes=1, saved_bytes=1 if "policy" in cuts else None, **keyword)
    forward = 2 * rows * width**2 * length
    # The derivative of a product is two products.
    assert counted.flops == pytest.approx(forward * (3 + price.recompute_factor), rel=0, abs=0.5)
    assert counted.recompute_flops == pytest.approx(forward * price.recompute_factor, rel=0, abs=0.5)


def test_outputs_that_the_loss_does_not_use_are_not_differentiated():
    """Their cotangents would be a stack of zeros as large as the outputs."""

    def temp_bytes(outputs: bool) -> int:
        def loss(h, ws):
            h, ys = nested_scan(lambda h, w: (jnp.tanh(h @ w), jnp.sin(h) if outputs else None), h, ws, segment=4)
            return jnp.sum(h), ys

        shapes = (256, 64), (16, 64, 64)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(True) - temp_bytes(False) < 2 * 256 * 64 * 4


def test_the_forward_pass_keeps_where_segments_start():
    for length, segment, starts in ((12, 3, 4), (13, 3, 5), (12, 12, 12), (9, "sqrt", 3)):
        loss, args = deep(length, 8, 16, segment=segment)
        assert residual_bytes(loss, *args) == starts * 8 * 16 * 4


@given(length=st.integers(1, 400), segment=st.integers(1, 50))
def test_price_of_segments(length, segment):
    price = nested_scan_bytes(length, carry_bytes=7, segment=segment)
    if segment < length:
        assert price.kept_carries == math.ceil(length / segment) + (segment if segment > 1 else 0)
        # Every step is differentiated after a run of its own, and every start but the last of a segment is found.
        lost = math.ceil(length / segment) if segment > 1 else length
        assert round(price.recompute_factor * length) == 2 * length - lost
    assert price.kept_bytes == 7 * price.kept_carries


@given(length=st.integers(2, 5000), levels=st.integers(1, 5))
def test_price_of_levels(length, levels):
    price = nested_scan_bytes(length, carry_bytes=1, levels=levels)
    base = next(b for b in range(1, length + 1) if b**levels >= length)
    assert price.kept_carries <= levels * base
    assert price.recompute_factor <= levels
    # Each run of r more can reach no further than Revolve's optimum with as many carries.
    assert length <= math.comb(price.kept_carries + levels, levels)


# -- case 29: loop-invariant broadcasts ------------------------------------------------------------


def _gradient_temp_bytes(recipe: str, length: int) -> int:
    """Temporaries of the gradient of carry + x·(y + z), where x and y are one number a step and z is an array."""

    def loss(x, y, z):
        def body(carry, xy):
            x, y = xy
            return carry + x * (y + z), None

        init = jnp.zeros_like(z)
        if recipe == "nested":
            return jnp.sum(nested_scan(body, init, (x, y))[0])
        step = checkpoint(body, "full", scanned=True) if recipe == "checkpoint" else body
        return jnp.sum(lax.scan(step, init, (x, y))[0])

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((length,), (length,), (300, 300))]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_loop_invariant_array_is_not_stacked_for_each_step():
    """Case 29 (jax#3186): the plain gradient keeps y + z of every step; the remat recipes are flat, to first order."""
    array_bytes = 300 * 300 * 4
    growth = {r: _gradient_temp_bytes(r, 32) - _gradient_temp_bytes(r, 4) for r in ("plain", "checkpoint", "nested")}
    assert growth["plain"] >= 28 * array_bytes
    assert growth["checkpoint"] <= 0.1 * array_bytes
    assert growth["nested"] <= 1.1 * array_bytes  # √N + √N carries at most; the compiler drops those not needed
