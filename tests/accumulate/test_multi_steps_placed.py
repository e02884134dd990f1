"""`multi_steps` over devices, in scans and in host memory, and what a report says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.accumulate import multi_steps
from tests.accumulate.problems import assert_trees_close

SPECS = {"w": PartitionSpec("x", "y"), "b": PartitionSpec()}
OPTIMIZER = multi_steps(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 2)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def params_on(mesh, specs):
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4), "b": jnp.ones(4)}
    return jax.device_put(params, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)


def train_step(params, state, x):
    updates, state = OPTIMIZER.update(jax.grad(loss)(params, x), state, params, weight=2)
    return optax.apply_updates(params, updates), state


def rows(count=4):
    return jnp.sin(jnp.arange(count * 16 * 8.0)).reshape(count, 16, 8)


@pytest.fixture(scope="module")
def on_one_device():
    """Parameters after two windows, step by step."""
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4), "b": jnp.ones(4)}
    state, step = OPTIMIZER.init(params), jax.jit(train_step)
    for x in rows():
        params, state = step(params, state, x)
    return params


def test_accumulators_made_inside_jit_are_sharded_as_the_parameters(on_one_device):
    mesh = mesh_of()
    params = params_on(mesh, SPECS)
    state = jax.jit(OPTIMIZER.init)(params)
    assert state.acc_grads["w"].sharding.spec == SPECS["w"]
    assert not np.any(state.acc_grads["w"])
    assert jax.jit(lambda p: OPTIMIZER.init({"w": p / 0}).acc_grads["w"].sum())(params["w"]) == 0.0  # NaN, infinities
    step = jax.jit(train_step, donate_argnums=(0, 1))
    text = step.lower(params, state, rows()[0]).compile().as_text()
    assert "all-to-all" not in text and "collective-permute" not in text
    for x in rows():
        params, state = step(params, state, x)
        assert state.acc_grads["w"].sharding.spec == params["w"].sharding.spec == SPECS["w"]
    assert_trees_close(jax.device_get(params), jax.device_get(on_one_device))


def test_on_a_mesh_of_explicit_axes(on_one_device):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        params = params_on(mesh, {"w": PartitionSpec(None, "y"), "b": PartitionSpec("y")})
        state, step = jax.jit(OPTIMIZER.init)(params), jax.jit(train_step)
        for x in rows():
            params, state = step(params, state, x)
        assert jax.typeof(state.acc_grads["w"]).sharding.spec == PartitionSpec(None, "y")
    assert_trees_close(jax.device_get(params), jax.device_get(on_one_device))


def test_case_17_in_shard_map_with_pmean(on_one_device):
    """With JAX's check of replication on, init inside and outside, and a step with donation."""
    mesh = mesh_of()
    replicated = PartitionSpec()

    def local(params, state, x):
        grads = jax.grad(lambda params: jax.lax.pmean(loss(params, x), ("x", "y")))(params)
        updates, state = OPTIMIZER.update(grads, state, params, weight=2)
        return optax.apply_updates(params, updates), state

    specs = (replicated, replicated, PartitionSpec(("x", "y")))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=replicated), donate_argnums=(0, 1))
    params = params_on(mesh, dict.fromkeys(SPECS, replicated))
    state = jax.jit(jax.shard_map(OPTIMIZER.init, mesh=mesh, in_specs=replicated, out_specs=replicated))(params)
    for x in rows():
        params, state = step(params, state, x)
    assert_trees_close(jax.device_get(params), jax.device_get(on_one_device))


def test_in_a_scan(on_one_device):
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4), "b": jnp.ones(4)}

    @jax.jit
    def train(params, xs):
        body = lambda carry, x: (train_step(*carry, x), None)  # noqa: E731
        return jax.lax.scan(body, (params, OPTIMIZER.init(params)), xs)[0]

    assert_trees_close(train(params, rows())[0], on_one_device)


def test_an_inner_state_in_host_memory_stays_there_and_works(on_one_device):
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4), "b": jnp.ones(4)}
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = OPTIMIZER.init(params)
    state = state._replace(inner_opt_state=jax.device_put(state.inner_opt_state, host))
    where = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    step = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=where)
    for x in rows():
        params, state = step(params, state, x)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == where[1]
    assert_trees_close(params, on_one_device)


@pytest.mark.parametrize("declared", [None, {"params": "parameters", "opt_state": "optimizer_state"}])
def test_case_18_the_report_has_a_line_of_accumulators(declared):
    count = 256 * 256
    params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)}

    def step(params, opt_state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"]).astype(jnp.float32) ** 2))(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    state = jax.eval_shape(OPTIMIZER.init, params)
    report = jaxmem.analyze(step, params, state, x, donate_argnums=(0, 1), arg_kinds=declared, target="cpu")
    kept = [b for b in report.buffers if b.kind == "accumulators" and b.size_bytes > 1024]
    assert [(b.path, b.size_bytes) for b in kept] == [("opt_state.acc_grads['w']", 4 * count)]
    assert 4 * count <= dict(report.by_kind)["accumulators"] < 4 * count + 1024
    (finding,) = [f for f in report.findings if f.kind == "accumulators"]
    assert "split no batch" in finding.cure
    assert report.alias_bytes > 4 * count + 3 * 2 * count  # accumulators, parameters and moments in place
