"""The mesh of a sharded example batch is entered by all that takes one, whatever the type of its axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import (
    LossOutput,
    MemoryConfig,
    WeightedMean,
    Workload,
    accumulate,
    analyze,
    assert_equivalent,
    compare,
    make_train_step,
    remat,
    train_loop,
    verify,
)
from jaxmem.errors import BatchError, MeshError, RetargetError
from jaxmem.train._program import jitted
from tests.accumulate.problems import assert_trees_close

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
TWO = MemoryConfig(accumulation_steps=2)


def mesh_of(kind, devices=4, **axes):
    axes = axes or {"data": devices}
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=jax.devices()[:devices]
    )


def rows(count=16):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(count, 4)).astype(np.float32), "y": rng.normal(size=count).astype(np.float32)}


def on(mesh, tree, *spec):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def loss(params, batch):
    """Its gradient contracts the rows, which explicit axes refuse where their mesh is not set."""
    error = (jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2
    return WeightedMean(jnp.sum(error), error.size)


def pinned(params, batch):
    return loss(jax.lax.with_sharding_constraint(params, P()), batch)


def counting(params, batch, *, state):
    return LossOutput(loss(params, batch), state={"seen": state["seen"] + 1.0})


def workload(batch, loss=loss, params=None, **fields):
    return Workload(loss, {"w": jnp.ones(4)} if params is None else params, batch, optax.adam(0.1), **fields)


def trained(step, batch):
    """Parameters and loss after two steps, which are one program."""
    state, _ = step(step.init(), batch)
    state, metrics = step(state, batch)
    assert jitted(step.spec)._cache_size() == 1
    return jax.tree.map(np.asarray, (state.params, metrics["loss"]))


@KINDS
@pytest.mark.parametrize("axes, spec", [({}, ("data",)), ({"a": 2, "b": 2}, (("a", "b"),))])
def test_a_step_lies_where_its_example_batch_does(kind, axes, spec):
    lying = on(mesh_of(kind, **axes), rows(), *spec)
    wanted = trained(make_train_step(workload(rows()), TWO), rows())
    step = make_train_step(workload(lying), TWO)
    assert_trees_close(trained(step, lying), wanted, rtol=1e-4, atol=1e-5)
    assert verify(step)["gradients"].verdict == "pass"
    assert assert_equivalent(workload(lying), TWO)[0].relative_error < 1e-5
    state = train_loop(step, step.init(), lambda window: rows(), 1, progress=False)
    assert state.params["w"].sharding.device_set == lying["x"].sharding.device_set


@KINDS
def test_names_of_its_axes_in_the_loss_are_known(kind):
    lying = on(mesh_of(kind), rows(), "data")
    step = make_train_step(workload(lying, pinned), TWO)
    assert verify(step)["gradients"].verdict == "pass"
    assert [row.name for row in compare({"plain": MemoryConfig(), "two": TWO}, workload(lying, pinned)).rows]
    assert step.residuals().total_bytes > 0


@pytest.mark.filterwarnings("ignore:.*4 shards cannot share:jaxmem.errors.SettingWarning")
@KINDS
def test_micro_batches_one_by_one_lie_there_too(kind):
    """Of 8 rows on 4 devices, each of 4 micro-batches has fewer rows than there are devices."""
    lying = on(mesh_of(kind), rows(8), "data")
    counted = workload(lying, counting, state={"seen": jnp.zeros(())})
    assert assert_equivalent(counted, MemoryConfig(accumulation_steps=4))[0].relative_error < 1e-5
    micro = accumulate.micro_batch(lying, 1, 4)
    np.testing.assert_array_equal(micro["x"], rows(8)["x"][1::4])


@KINDS
def test_parameters_may_be_all_that_is_sharded(kind):
    mesh = mesh_of(kind)
    params = on(mesh, {"w": jnp.ones(4)}, "data")
    wanted = trained(make_train_step(workload(rows()), TWO), rows())
    assert_trees_close(trained(make_train_step(workload(rows(), params=params), TWO), rows()), wanted, rtol=1e-4)


def test_one_device_has_a_mesh_as_well():
    lying = on(mesh_of(AxisType.Explicit, 1), rows(), "data")
    wanted = trained(make_train_step(workload(rows()), TWO), rows())
    assert_trees_close(trained(make_train_step(workload(lying), TWO), lying), wanted, rtol=1e-4)


def test_a_mesh_may_be_given_to_be_compared_on():
    for kind in (AxisType.Auto, AxisType.Explicit):
        assert assert_equivalent(workload(rows(), pinned), TWO, mesh=mesh_of(kind))[0].relative_error < 1e-5


@KINDS
def test_functions_are_traced_in_the_mesh_of_their_arguments(kind):
    lying, params = on(mesh_of(kind), rows(), "data"), {"w": jnp.ones(4)}

    def mean(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

    assert analyze(jax.jit(jax.grad(mean)), params, lying).peak_bytes > 0
    assert remat.residuals(mean, params, lying).total_bytes > 0
    assert remat.auto(mean, 0.5).solve(params, lying).kept_bytes >= 0
    assert remat.frontier(mean)(params, lying).points


@KINDS
def test_meshes_that_contradict_are_named(kind):
    mesh, other = mesh_of(kind), mesh_of(kind, r=2, c=2)
    lying = on(mesh, rows(), "data")
    with pytest.raises(MeshError, match=r"(?s)batch/\w .*data=4.*batch/\w .*r=2, c=2.*jax.device_put"):
        make_train_step(workload(lying | {"y": on(other, rows()["y"], "r")}))
    with pytest.raises(MeshError, match=r"params/w on a mesh \(r=2, c=2"):
        make_train_step(workload(lying, params=on(other, {"w": jnp.ones(4)}, "r")))
    with pytest.raises(MeshError, match=r"batch/x sharded over .*'data'.*Leave mesh= out"):
        make_train_step(workload(lying), mesh=other)
    step = make_train_step(workload(lying), TWO)
    with jax.set_mesh(other), pytest.raises(MeshError, match=r"data=4.*r=2, c=2.*set by jax.set_mesh"):
        step.compile()
    with jax.set_mesh(mesh):
        assert verify(step)["gradients"].verdict == "pass"


def test_a_loss_with_a_mesh_of_its_own_is_named():
    own = mesh_of(AxisType.Auto, r=2, c=2)

    def mapped(params, batch):
        x = jax.shard_map(lambda x: x * 2, mesh=own, in_specs=P("r"), out_specs=P("r"))(batch["x"])
        return loss(params, batch | {"x": x})

    lying = on(mesh_of(AxisType.Auto), rows(), "data")
    with pytest.raises(MeshError, match=r"code for the mesh of its arrays, .*data=4"):
        make_train_step(workload(lying, mapped), TWO).compile()


@KINDS
def test_a_mesh_without_devices_is_for_targets_only(kind):
    """Gradients are then compared on one device, to which the names of the axes mean nothing."""
    at = NamedSharding(mesh_of(kind).abstract_mesh, P("data"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), rows())
    step = make_train_step(workload(shapes, pinned), TWO)
    assert verify(step)["gradients"].verdict == "pass"
    with pytest.raises(RetargetError, match="data=4.*which has none. Name a target of 4 devices"):
        step.report()


def test_rows_that_the_shards_do_not_divide_are_refused():
    step = make_train_step(workload(on(mesh_of(AxisType.Auto), rows(), "data")), TWO)
    with pytest.raises(BatchError, match=r"\(6,( 4)?\).*rows of weight 0"):
        step(step.init(), rows(6))
