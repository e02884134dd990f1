"""A step on a mesh: equal to the step on one device, its state where it was, its batches where they belong."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxmem import (
    Last,
    LossOutput,
    MemoryConfig,
    Sum,
    WeightedMean,
    Workload,
    assert_equivalent,
    make_train_step,
    verify,
)
from jaxmem.analysis import MemoryReport
from jaxmem.errors import ConfigError, StateError
from jaxmem.report import print_report
from jaxmem.train._program import jitted
from tests.accumulate.problems import assert_trees_close

D = 16


@functools.cache
def mesh_of(*axes, kind=AxisType.Auto):
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(axes))


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"w": jax.random.normal(keys[0], (D, D)) / 4, "out": jax.random.normal(keys[1], (D, 3)) / 4}


def batch(rows=16):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, D)).astype(np.float32), "y": rng.integers(-1, 3, rows)}


def loss(params, batch):
    valid = batch["y"] >= 0
    logits = jnp.tanh(batch["x"] @ params["w"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["y"], 0))
    return WeightedMean((losses * valid).sum(), valid.sum())


def step_of(mesh=None, own=params, batch=batch, optimizer=optax.adam, **config):
    config = MemoryConfig(**{"accumulation_steps": 2, **config})
    return make_train_step(Workload(loss, own(), batch(), optimizer(0.1)), config, mesh=mesh)


def two_steps(step, batch=batch):
    state, metrics = step(step.init(), batch())
    state, metrics = step(state, batch())
    assert jitted(step.spec)._cache_size() == 1
    return state, metrics


@functools.cache
def wanted():
    return numbers(two_steps(step_of(accumulation_steps=1)))


def numbers(got):
    state, metrics = got
    return jax.tree.map(np.asarray, (state.params, state.opt_state, metrics))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("reduction", ["once", "each"])
def test_steps_on_a_mesh_are_those_on_one_device(reduction, kind):
    mesh = mesh_of(("data", 8), kind=kind)
    got = two_steps(step_of(mesh, gradient_reduction=reduction))
    assert_trees_close(numbers(got), wanted(), rtol=1e-4, atol=1e-5)
    places = [leaf.sharding for leaf in jax.tree.leaves(got[0])]
    assert all(place.is_fully_replicated and place.device_set == set(mesh.devices.flat) for place in places)


def test_parameters_that_are_sharded_stay_so_and_their_moments_likewise():
    mesh = mesh_of(("data", 4), ("model", 2))
    own = lambda: jax.device_put(params(), NamedSharding(mesh, P("model")))  # noqa: E731
    for reduction in ("once", "each"):
        step = step_of(mesh, own, gradient_reduction=reduction, optimizer=lambda rate: optax.chain(optax.adam(rate)))
        got = two_steps(step)
        assert_trees_close(numbers(got)[0], wanted()[0], rtol=1e-4, atol=1e-5)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, got[0])
        assert set(specs.params.values()) == {P("model")}
        adam = specs.opt_state[0][0]
        assert (adam.mu, adam.nu, adam.count) == (specs.params, specs.params, P())


def rows_of(mesh, batch):
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def test_rows_lie_as_the_example_batch_does():
    """Whatever axis that is sharded over, and however the batch at hand came."""
    mesh = mesh_of(("model", 2), ("rows", 4))
    own = lambda: jax.device_put(batch(), NamedSharding(mesh, P("rows")))  # noqa: E731
    step = step_of(mesh, batch=own, gradient_reduction="once")
    assert step.spec.layout.rows == NamedSharding(mesh, P("rows"))
    assert_trees_close(numbers(two_steps(step))[0], wanted()[0], rtol=1e-4, atol=1e-5)
    by_batch = step_of(batch=own, gradient_reduction="once")  # no mesh: that of the batch
    state, _ = by_batch(by_batch.init(), own())
    first, _ = step(step.init(), batch())
    assert_trees_close(state.params, first.params)
    assert step_of(mesh).spec.layout.rows == NamedSharding(mesh, P("model"))  # the first axis, as none is "data"


def test_bare_specs_in_the_loss_mean_the_steps_mesh():
    def pinned(params, batch):
        params = jax.lax.with_sharding_constraint(params, P())
        return loss(params, batch)

    mesh = mesh_of(("data", 8))
    step = make_train_step(Workload(pinned, params(), batch(), optax.sgd(0.1)), mesh=mesh)
    assert step.compile().memory_analysis().argument_size_in_bytes > 0
    state, _ = jax.jit(lambda state, batch: step(state, batch))(step.init(), batch())
    assert int(state.step) == 1


def test_the_report_counts_reductions():
    """Once: all gradients; each: those of every micro-batch, unless XLA moves the sum out of the loop."""
    mesh = mesh_of(("data", 8))
    once = step_of(mesh, gradient_reduction="once").report()
    size = 4 * (D * D + D * 3)
    assert (once.gradient_reduction, once.gradient_reductions, once.gradient_reduction_bytes) == ("once", 1.0, size)
    assert "1 x, 1.2 KiB" in rendered(once)
    alone = step_of().report()
    assert (alone.gradient_reduction, alone.gradient_reductions) == (None, None)
    assert MemoryReport.from_dict(once.to_dict()) == once


def rendered(report):
    console = Console(width=100, file=io.StringIO())
    print_report(report, console)
    return console.file.getvalue()


def test_parameters_sharded_over_the_rows_are_reduced_each_time():
    mesh = mesh_of(("data", 8))
    own = lambda: jax.device_put(params(), NamedSharding(mesh, P("data")))  # noqa: E731
    with pytest.raises(ConfigError, match="params/out sharded over 'data'. Use gradient_reduction='each'"):
        step_of(mesh, own, gradient_reduction="once").reduction()
    assert step_of(mesh, own, gradient_reduction="each").reduction().kind == "each"


def test_state_of_shards_is_combined_as_the_workload_says():
    def counting(params, batch, *, state):
        seen = {"rows": state["rows"] + batch["y"].size, "amax": jnp.maximum(state["amax"], batch["x"].max())}
        return LossOutput(loss(params, batch), state=seen)

    names = {"rows": "sum", "amax": "max"}
    start = {"rows": jnp.int32(0), "amax": jnp.float32(-9)}
    by_path = lambda path, leaf: names[path]  # noqa: E731
    workload = Workload(counting, params(), batch(), optax.sgd(0.1), state=start, state_reduction=by_path)
    config = MemoryConfig(accumulation_steps=2, gradient_reduction="once")
    state, _ = two_steps(make_train_step(workload, config, mesh=mesh_of(("data", 8))))
    assert int(state.state["rows"]) == 32 and float(state.state["amax"]) == batch()["x"].max()
    by_leaf = dataclasses.replace(workload, state_reduction=names)
    assert assert_equivalent(by_leaf, MemoryConfig(accumulation_steps=2))
    carried = Workload(counting, params(), batch(), optax.sgd(0.1), state=start)
    step = make_train_step(carried, config, mesh=mesh_of(("data", 8)))
    with pytest.raises(StateError, match="'carry' for state/amax"):
        step(step.init(), batch())


def noisy(params, batch, *, rng):
    return loss(params, batch | {"x": batch["x"] + jax.random.normal(rng, batch["x"].shape)})


def logged(params, batch):
    return LossOutput(loss(params, batch), {"x": Last(batch["x"].mean())})


@pytest.mark.filterwarnings("ignore:.*8 shards cannot share:jaxmem.errors.SettingWarning")
@pytest.mark.parametrize(
    "loss_fn, steps, kind, why",
    [
        (loss, 2, "once", "the loss was found to be a sum or mean over rows"),
        (loss, 1, "each", "there is only one"),
        (noisy, 2, "each", "it draws random numbers"),
        (logged, 2, "each", "a Last of the rows at metrics/x"),
        (lambda p, b: loss(p, b | {"x": b["x"] - b["x"].mean(0)}), 2, "each", "a row with a sum over rows"),
        (lambda p, b: loss(p, jax.lax.with_sharding_constraint(b, P("data"))), 2, "each", "by themselves"),
        (loss, 4, "each", "8 shards do not divide 4 rows"),
    ],
)
def test_auto_is_once_only_where_it_is_the_same(loss_fn, steps, kind, why):
    workload = Workload(loss_fn, params(), batch(), optax.sgd(0.1))
    step = make_train_step(workload, MemoryConfig(accumulation_steps=steps), mesh=mesh_of(("data", 8)))
    assert step.reduction().kind == kind and why in step.reduction().why


def measured(params, batch):
    """With metrics of which one is no sum over rows."""
    y = jnp.tanh(batch["x"] @ params["w"])
    return LossOutput(loss(params, batch), {"sd": WeightedMean(y.std(), 1), "calls": Sum(1.0)})


@jax.custom_jvp
def centred(x):
    return x


centred.defjvp(lambda primals, tangents: (primals[0], tangents[0] - tangents[0].mean(0)))


def ruled(params, batch):
    return loss(params, batch | {"x": centred(batch["x"] @ params["w"])})


@pytest.mark.parametrize("loss_fn, why", [(measured, "belongs to no row"), (ruled, "a row with a sum over rows")])
def test_auto_gives_what_one_device_gives(loss_fn, why):
    """Where a metric or a derivative rule knows of all rows of a micro-batch."""
    alone, shared = (
        make_train_step(
            Workload(loss_fn, params(), batch(), optax.sgd(0.1)), MemoryConfig(accumulation_steps=2), mesh=m
        )
        for m in (None, mesh_of(("data", 4)))
    )
    assert shared.reduction().kind == "each" and why in shared.reduction().why
    got, want = (step(step.init(), batch()) for step in (shared, alone))
    assert_trees_close(numbers(got), numbers(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes, spec", [((2, 4), ("b", "a")), ((2, 4), ("b",)), ((2, 2, 2), ("a", "b", "c"))])
def test_rows_over_several_axes_are_reduced_once(kind, sizes, spec):
    mesh = mesh_of(*zip("abc", sizes, strict=False), kind=kind)
    own = lambda: jax.device_put(batch(), NamedSharding(mesh, P(spec)))  # noqa: E731
    step = step_of(mesh, batch=own)
    assert step.reduction().kind == "once", step.reduction().why
    assert_trees_close(numbers(two_steps(step, own)), wanted(), rtol=1e-4, atol=1e-5)


def test_the_report_says_what_was_chosen_and_why():
    report = step_of(mesh_of(("data", 8))).report()
    assert (report.gradient_reduction, report.gradient_reductions) == ("once", 1.0)
    said = " ".join(report.notes)
    assert "Gradients are reduced once, after the last micro-batch: the loss was found to be" in said


class Normed(nnx.Module):
    """BatchNorm, whose statistics shards must combine, and Dropout, whose key must differ between them."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(D, momentum=0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(D, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])

    def __call__(self, x, scale=None):
        linear, dropout = self.layers
        return dropout(linear(self.norm(x))) * (1.0 if scale is None else scale)


def test_an_nnx_model_sees_the_state_of_all_shards_once():
    model = Normed(nnx.Rngs(0))
    count = lambda: int(model.layers[1].rngs.count[...])  # noqa: E731
    before, key = count(), jax.random.key_data(model.layers[1].rngs.key[...])
    how = lambda path, leaf: "mean" if path.endswith(("mean", "var")) else "carry"  # noqa: E731
    x = batch()["x"]

    def squares(model, x):
        y = model(x, None)
        return LossOutput((y**2).mean(), {"kept": Sum((y != 0).sum())})

    config = MemoryConfig(accumulation_steps=2, gradient_reduction="once")
    workload = Workload.from_nnx(model, squares, x, optax.sgd(0.1), state_reduction=how)
    step = make_train_step(workload, config, mesh=mesh_of(("data", 4)))
    state, metrics = step(step.init(), x)
    assert count() == before
    step.update(model, state)
    # Every micro-batch of every shard moved the mean of zero half of the way to its own.
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * x.mean(0), rtol=1e-5, atol=1e-6)
    assert count() == before + 2 and (jax.random.key_data(model.layers[1].rngs.key[...]) == key).all()
    # The same mask on all four shards would keep a number that 4 divides, which this seed's does not.
    assert int(metrics["kept"]) % 4 and 0 < int(metrics["kept"]) < 16 * 3
    undeclared = make_train_step(dataclasses.replace(workload, state_reduction="carry"), config, mesh=step.mesh)
    with pytest.raises(StateError, match="'carry' for state/norm/mean"):
        undeclared(undeclared.init(), x)


def test_a_step_on_a_mesh_is_verified():
    lying = Workload(loss, params(), rows_of(mesh_of(("data", 8)), batch()), optax.sgd(0.1))
    for reduction in ("once", "each"):
        config = MemoryConfig(accumulation_steps=2, gradient_reduction=reduction)
        assert assert_equivalent(lying, config)[0].relative_error < 1e-5
    found = verify(step_of(mesh_of(("data", 8)), gradient_reduction="once", remat="none"), target="cpu")
    assert found["gradients"].verdict == "pass" and found.reference == "the plain step on the whole batch"
    noise = Workload(noisy, params(), batch(), optax.sgd(0.1))
    config = MemoryConfig(accumulation_steps=2, gradient_reduction="once")
    found = verify(make_train_step(noise, config, mesh=mesh_of(("data", 8))), target="cpu")
    assert found["gradients"].verdict == "uncertain" and "numbers" in found["gradients"].detail
