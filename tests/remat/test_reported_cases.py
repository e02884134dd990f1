"""Reports of users of JAX and its peers on rematerialisation that no other file here holds against the package.

Cases 25 and 28 are in test_functions.py, 26 in test_linen.py, 27 in test_examine.py and test_residuals.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxmem import MemoryConfig, Workload, analyze, make_train_step
from jaxmem.remat import checkpoint, residuals


def test_case_27_the_report_says_that_a_policy_kept_nothing():
    def loss(params, batch):
        return jax.lax.scan(lambda x, w: (jnp.sin(jnp.einsum("bij,bjk->bik", x, w)), None), batch, params)[0].mean()

    work = Workload(loss, jnp.ones((3, 2, 4, 4)), jnp.ones((2, 4, 4)), optax.sgd(0.1), batch_axes=0)
    report = analyze(work, MemoryConfig(remat="dots_no_batch"), target="cpu")
    assert any(warning.startswith("The dots rule of dots_no_batch kept nothing") for warning in report.warnings)
    table = make_train_step(work, MemoryConfig(remat="dots")).residuals()
    assert ("dot_general", 3) in [(row.op, row.count) for row in table.rows]  # what was kept, by operation


def test_case_29_the_table_names_what_a_scan_stacks_and_remat_of_its_body_does_not():
    """carry + x·(y + z): y + z is as large as z, and is kept for each of the steps."""

    def body(carry, xy):
        x, y = xy
        return carry + x * (y + z), None

    z, length = jnp.ones((30, 30)), 32
    xs = jnp.ones(length), jnp.ones(length)

    def kept(step):
        return residuals(lambda *xs: jax.lax.scan(step, jnp.zeros_like(z), xs)[0], *xs)

    (row,) = (row for row in kept(body).rows if row.size_bytes > 1000)
    assert (row.op, row.count, row.shape, row.size_bytes) == ("add", length, (length, 30, 30), length * z.nbytes)
    assert row.source.split(":")[0].endswith("test_reported_cases.py")
    assert all(row.size_bytes < z.nbytes for row in kept(checkpoint(body, "full", scanned=True)).rows)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_case_30_an_ensemble_of_checkpointed_shard_maps(policy):
    """vmap(grad(remat(shard_map))) with spmd_axis_name: gradients are those of a loop over members on one device."""
    mesh = jax.make_mesh((2, 2), ("member", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.normal(size=(2, 4, 4)).astype(np.float32))
    xs = jnp.asarray(rng.normal(size=(2, 8, 4)).astype(np.float32))

    def layer(w, x, mean=lambda value: value):
        hidden = jnp.tanh(jnp.tanh(x @ w) @ w)
        return mean((hidden**2).mean())

    def sharded(w, x):
        inner = lambda w, x: layer(w, x, lambda value: jax.lax.psum(value, "data") / 2)  # noqa: E731
        specs = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(w, x)

    gradient = jax.grad(checkpoint(sharded, policy), argnums=(0, 1))
    got = jax.jit(jax.vmap(gradient, spmd_axis_name="member"))(ws, xs)
    want = [jax.grad(layer, argnums=(0, 1))(w, x) for w, x in zip(ws, xs, strict=True)]
    for member, expected in enumerate(want):
        for each, right in zip(got, expected, strict=True):
            np.testing.assert_allclose(each[member], right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("frozen_by", ["trainable", "stop_gradient"])
def test_case_31_residuals_do_not_grow_with_a_frozen_backbone(frozen_by, remat):
    """Unrolled and scanned, plain and marked: the head's input is kept, and nothing below."""

    def residual_bytes(depth, scanned):
        def loss(params, batch, *, memory):
            layer = memory.block(lambda x, w: jnp.tanh(x @ w), scanned=scanned)
            backbone = params["backbone"]
            if frozen_by == "stop_gradient":
                backbone = jax.lax.stop_gradient(backbone)
            x = batch
            if scanned:
                x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, backbone)
            else:
                for w in backbone:
                    x = layer(x, w)
            return jnp.mean(jnp.sin(x @ params["head"]))

        params = {"backbone": jnp.ones((depth, 4, 4)), "head": jnp.ones(4)}
        trainable = "^head$" if frozen_by == "trainable" else None
        work = Workload(loss, params, jnp.ones((8, 4)), optax.sgd(0.1), trainable=trainable)
        return make_train_step(work, MemoryConfig(remat=remat)).residual_bytes()

    head_bytes = 8 * 4 * 4 + 8 * 4  # its input, and the cosine of its output
    for scanned in (False, True):
        assert residual_bytes(1, scanned) == residual_bytes(6, scanned) == head_bytes
