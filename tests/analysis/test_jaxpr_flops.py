import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.analysis import jaxpr_flops

from .programs import BACKWARD, FORWARD, INPUTS, ONE, WEIGHTS, nested, scanned, unrolled


def parts(fn, *shapes):
    flops = jaxpr_flops(jax.make_jaxpr(fn)(*shapes))
    return flops.forward, flops.backward, flops.recompute


@pytest.mark.parametrize("remat", [False, True])
def test_scan_lengths_multiply(remat):
    assert parts(scanned(remat=remat), WEIGHTS, INPUTS) == (FORWARD, 0, 0)
    assert parts(jax.grad(scanned(remat=remat)), WEIGHTS, INPUTS) == (FORWARD, BACKWARD, remat * FORWARD)


def test_nested_checkpoints_recompute_twice():
    loss = nested(remat=True, remat_segments=True)
    assert parts(jax.grad(loss), WEIGHTS, INPUTS) == (FORWARD, BACKWARD, 2 * FORWARD)


def test_unrolled():
    assert parts(jax.grad(unrolled(remat=True)), WEIGHTS, INPUTS) == (FORWARD, BACKWARD - ONE, FORWARD)


def test_a_custom_rule_counts_by_the_pass_it_runs_in():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    w = jax.ShapeDtypeStruct((WEIGHTS.shape[1:]), jnp.float32)
    assert parts(jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), (0, 1)), INPUTS, w) == (ONE, 2 * ONE, 0)


def test_a_while_loop_counts_once_and_a_conditional_its_costliest_branch():
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    def fn(x):
        x = lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ x, x)
        return lax.cond(jnp.sum(x) > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    flops = jaxpr_flops(jax.make_jaxpr(fn)(square))
    assert flops.forward == 3 * 2 * 16**3
    assert len(flops.notes) == 2
    assert "count the body once" in flops.notes[0]
    assert "costliest branch" in flops.notes[1]


def test_a_static_loop_is_multiplied_out():
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    flops = jaxpr_flops(jax.make_jaxpr(lambda x: lax.fori_loop(0, 5, lambda i, x: x @ x, x))(square))
    assert (flops.forward, flops.notes) == (5 * 2 * 16**3, ())


def test_a_ragged_product_counts_each_row_once():
    x, w = jnp.ones((12, 8)), jnp.ones((3, 8, 4))
    assert parts(lambda x, w: lax.ragged_dot(x, w, jnp.array([4, 4, 4])), x, w) == (2 * 12 * 8 * 4, 0, 0)


def test_shards_count_for_all_devices():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    product = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec
    )
    assert parts(product, jnp.ones((8, 16)), jnp.ones((16, 4))) == (2 * 8 * 16 * 4, 0, 0)
