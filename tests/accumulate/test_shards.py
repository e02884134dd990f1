"""Shards that accumulate locally: equal to the one-batch step, or refused; one reduction; no row is moved."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import Last, LossOutput, Max, Sum, WeightedMean
from jaxmem.accumulate import value_and_grad
from jaxmem.analysis import hlo_flops
from jaxmem.errors import BatchError, ConfigError, MetricError, ObjectiveError, StateError
from tests.accumulate.problems import (
    IGNORED,
    accumulated,
    assert_trees_close,
    stack_loss,
    token_batch,
    token_loss,
    token_mean,
    token_params,
)

LENGTHS = [4, 0, 1, 2, 0, 3, 1, 4, 2, 1, 0, 0, 4, 4, 1, 3]
X = jnp.arange(1.0, 17.0)


@functools.cache
def mesh_of(*axes, kind=AxisType.Auto):
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(axes))


DATA = ("data", 4)


def rows(mesh, batch, *axes):
    return jax.device_put(batch, NamedSharding(mesh, P(axes or "data")))


def whole(mesh, tree):
    return jax.device_put(tree, NamedSharding(mesh, P()))


def by_rows():
    return NamedSharding(mesh_of(DATA), P("data"))


def sharded(loss, k, **options):
    return accumulated(loss, k, data_sharding=by_rows(), **options)


def collectives(compiled):
    """(opcode, types of the result, inside a loop) of what talks to other devices."""
    found = []
    for line in compiled.as_text().splitlines():
        seen = re.search(r" = (\(.*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)", line)
        if seen:
            found.append((seen.group(2), seen.group(1), "/while/body" in line))
    return found


@pytest.mark.parametrize("k, kind", [(1, AxisType.Auto), (2, AxisType.Explicit), (4, AxisType.Auto)])
def test_uneven_tokens_are_the_whole_batchs(k, kind):
    """Cases 1 and 3: denominators and metrics count all shards, whatever is padding on each of them."""
    mesh = mesh_of(DATA, kind=kind)
    batch, params = token_batch(LENGTHS), token_params()
    want = jax.jit(jax.value_and_grad(token_mean))(params, batch)
    with jax.set_mesh(mesh):
        out = accumulated(token_loss, k, data_sharding="data")(whole(mesh, params), rows(mesh, batch))
    assert_trees_close((out.value, out.grads), want)
    metrics = accumulated(token_loss, 1)(params, batch).metrics
    assert_trees_close(out.metrics, metrics)
    assert float(out.weights[0]) == sum(LENGTHS)
    assert bool(out.finite) and out.grads["w"].sharding.is_fully_replicated


def test_terms_scalars_and_sums():
    """Each term by its own rule; the weight of one is zero on three of the four shards."""

    def loss(w, x):
        rare = (x > 12).sum()
        terms = WeightedMean((w * x).sum(), x.size) + 0.5 * WeightedMean((w * x * (x > 12)).sum(), rare)
        return terms + (w * x**2).mean() * 1.0 + Sum((w * x).sum())

    mesh = mesh_of(DATA)
    for k in (1, 2):
        out = sharded(loss, k)(jnp.float32(2.0), rows(mesh, X))
        want = 8.5 + 0.5 * 14.5 + float((X**2).mean()) + 136
        np.testing.assert_allclose([out.grads, out.value], [want, 2 * want], rtol=1e-6)
    scaled = jax.jit(lambda: value_and_grad(loss, 2, data_sharding=NamedSharding(mesh, P("data")))(
        jnp.float32(2.0), rows(mesh, X), loss_scale=1024.0
    ))()  # fmt: skip
    np.testing.assert_allclose([scaled.grads, scaled.value], [want, 2 * want], rtol=1e-6)


def test_every_shard_pads_its_own_rows():
    """Three rows a shard and K=2: rows that count nothing are added on the spot."""
    batch, params = token_batch(LENGTHS[:12]), token_params()
    want = jax.jit(jax.value_and_grad(token_mean))(params, batch)
    run = sharded(token_loss, 2, pad={"x": 0.0, "labels": IGNORED})
    out = run(params, rows(mesh_of(DATA), batch))
    assert_trees_close((out.value, out.grads), want)


def test_axes_and_leaves_that_are_whole():
    batch = {"x": jnp.arange(32.0).reshape(2, 16), "table": jnp.arange(4.0), "temp": 2.0, "none": None}
    axes = {"x": 1, "table": None, "temp": None, "none": 0}

    def loss(w, batch):
        assert batch["x"].shape == (2, 2) and batch["table"].shape == (4,) and batch["none"] is None
        return (w * batch["temp"] * batch["x"].sum(0) * batch["table"].sum()).mean()

    with jax.set_mesh(mesh_of(DATA)):
        out = accumulated(loss, 2, batch_axes=axes, data_sharding=("data",))(jnp.float32(1.0), batch)
    np.testing.assert_allclose(out.grads, 2 * 6 * 31.0, rtol=1e-6)


def test_every_shard_and_micro_batch_draws_its_own_numbers():
    """Case 8: the key of micro-batch i on shard s is fold_in(fold_in(rng, s), i)."""
    key = jax.random.key(3)
    loss = lambda w, x, *, rng: LossOutput(WeightedMean(w * jax.random.uniform(rng), 1))  # noqa: E731
    for k in (1, 2):
        out = jax.jit(value_and_grad(loss, k, data_sharding=by_rows(), check_mean=False))(jnp.float32(1.0), X, rng=key)
        keys = [jax.random.fold_in(key, s) for s in range(4)]
        keys = keys if k == 1 else [jax.random.fold_in(key, i) for key in keys for i in range(k)]
        np.testing.assert_allclose(out.grads, np.mean([jax.random.uniform(key) for key in keys]), rtol=1e-6)


# -- state ------------------------------------------------------------------------------------------


def new_state(state, x):
    return {
        "ema": 0.5 * state["ema"] + 0.5 * x.mean(),
        "n": state["n"] + x.size,
        "amax": jnp.maximum(state["amax"], x.max()),
        "calls": state["calls"] + 1,
        "seen": state["seen"] | (x > 15).any(),
    }


START = {"ema": 8.0, "n": jnp.int32(10), "amax": jnp.float32(4), "calls": jnp.int32(0), "seen": jnp.bool_(False)}
NAMES = {"ema": "mean", "n": "sum", "amax": "max", "calls": "carry", "seen": "max"}


@pytest.mark.parametrize("k", [1, 2])
def test_state_is_combined_as_declared(k):
    """Counters add up, maxima are of all shards, and what every shard carries alike is carried."""
    loss = lambda w, x, *, state: LossOutput((w * x).mean(), state=new_state(state, x))  # noqa: E731
    run = jax.jit(value_and_grad(loss, k, data_sharding=by_rows(), state_reduction=NAMES))
    out = run(jnp.float32(1.0), X, state=START)
    got = {name: leaf.item() for name, leaf in out.state.items()}
    assert got == {"ema": 4 + 8.5 / 2, "n": 26, "amax": 16.0, "calls": k, "seen": True}


@pytest.mark.parametrize("name", ["carry", "last"])
def test_ambiguous_state_is_refused(name):
    """Which shard's statistics of its own rows are the step's? Nobody said."""
    loss = lambda w, x, *, state: LossOutput((w * x).mean(), state=new_state(state, x))  # noqa: E731
    run = value_and_grad(loss, 2, data_sharding=by_rows(), state_reduction=NAMES | {"ema": name})
    with pytest.raises(StateError, match=f"'{name}' for state/ema.*'mean', 'sum' or 'max'.*gradient_reduction='each'"):
        run(jnp.float32(1.0), X, state=START)


def test_what_state_depends_on_is_followed_through_other_state():
    def loss(w, x, *, state):
        new = {"a": state["b"], "b": state["c"] * 2, "c": x.mean()}
        return LossOutput((w * x).mean(), state=new)

    state = {name: jnp.float32(1) for name in "abc"}
    run = functools.partial(value_and_grad, loss, 2, data_sharding=by_rows())
    with pytest.raises(StateError, match="'carry' for state/a"):
        run(state_reduction={"a": "carry", "b": "carry", "c": "carry"})(jnp.float32(1.0), X, state=state)
    # A micro-batch sees a leaf that is not carried as it was at the start, on every shard.
    out = jax.jit(run(state_reduction={"a": "carry", "b": "carry", "c": "mean"}))(jnp.float32(1.0), X, state=state)
    assert {name: leaf.item() for name, leaf in out.state.items()} == {"a": 2, "b": 2, "c": 8.5}


def test_keys_in_the_state_differ_between_shards_and_stay():
    """As the streams of an nnx model: a key that stays, and a count that every shard carries alike."""

    def loss(w, x, *, state):
        number = jax.random.uniform(jax.random.fold_in(state["key"], state["count"]))
        return LossOutput(WeightedMean(w * number, 1), state={"key": state["key"], "count": state["count"] + 1})

    state = {"key": jax.random.key(5), "count": jnp.int32(7)}
    out = jax.jit(value_and_grad(loss, 2, data_sharding=by_rows(), check_mean=False))(jnp.float32(1.0), X, state=state)
    keys = [jax.random.fold_in(state["key"], s) for s in range(4)]
    numbers = [jax.random.uniform(jax.random.fold_in(key, i)) for key in keys for i in (7, 8)]
    np.testing.assert_allclose(out.grads, np.mean(numbers), rtol=1e-6)
    assert int(out.state["count"]) == 9
    assert (jax.random.key_data(out.state["key"]) == jax.random.key_data(state["key"])).all()
    splitting = lambda w, x, *, state: LossOutput((w * x).mean(), state=jax.random.split(state)[0])  # noqa: E731
    with pytest.raises(StateError, match="'carry' for state"):
        value_and_grad(splitting, 2, data_sharding=by_rows())(jnp.float32(1.0), X, state=jax.random.key(0))


def test_the_last_of_no_shard():
    constant = lambda w, x: LossOutput((w * x).mean(), {"rate": Last(0.1), "max": Max(x.max())})  # noqa: E731
    metrics = sharded(constant, 2)(jnp.float32(1.0), X).metrics
    assert_trees_close(metrics, {"rate": jnp.float32(0.1), "max": jnp.float32(16)})
    of_rows = lambda w, x: LossOutput((w * x).mean(), {"x": Last(x.mean())})  # noqa: E731
    with pytest.raises(MetricError, match="a Last of the rows at metrics/x"):
        sharded(of_rows, 2)(jnp.float32(1.0), X)


# -- refusals -----------------------------------------------------------------------------------------

mean_loss = lambda w, x: (w * x).mean()  # noqa: E731


@pytest.mark.parametrize(
    "sharding, message",
    [
        ("data", "axes of the mesh \\(none is set\\).*'data'"),
        (("data", 3), "NamedSharding of the batch, or names of mesh axes"),
        (P("data"), "NamedSharding of the batch, or names of mesh axes"),
        (lambda mesh: NamedSharding(mesh, P(None, "data")), "along its example axis"),
        (lambda mesh: NamedSharding(mesh, P()), "along its example axis"),
    ],
)
def test_shardings_that_name_no_shards(sharding, message):
    with pytest.raises(ConfigError, match=message):
        value_and_grad(mean_loss, 2, data_sharding=sharding(mesh_of(DATA)) if callable(sharding) else sharding)(
            jnp.float32(1.0), X
        )


def test_an_axis_that_the_mesh_lacks_is_named():
    with jax.set_mesh(mesh_of(DATA)), pytest.raises(ConfigError, match=r"axes of the mesh \(data\).*'rows'"):
        value_and_grad(mean_loss, 2, data_sharding="rows")(jnp.float32(1.0), X)


@pytest.mark.parametrize("size", [18, 20])
def test_rows_that_shards_and_micro_batches_do_not_divide(size):
    with pytest.raises(BatchError, match=rf"4 x 2\) divide; got B={size} rows.*multiple of 8"):
        value_and_grad(mean_loss, 2, data_sharding=by_rows())(jnp.float32(1.0), jnp.ones(size))


def test_parameters_sharded_over_the_rows_axes_are_refused():
    params = {"w": rows(mesh_of(DATA), jnp.ones(4))}
    loss = lambda params, x: (params["w"].sum() * x).mean()  # noqa: E731
    with pytest.raises(ConfigError, match="params/w sharded over 'data'.*gradient_reduction='each'"):
        value_and_grad(loss, 2, data_sharding=by_rows())(params, X)


def test_a_loss_that_speaks_with_the_other_shards_is_refused():
    speaking = lambda w, x: (w * (x - jax.lax.pmean(x.mean(), "data")) ** 2).mean()  # noqa: E731
    in_scan = lambda w, x: jax.lax.scan(lambda c, y: (c + speaking(w, y[None]), None), w, x)[0]  # noqa: E731
    for loss in (speaking, in_scan):
        with pytest.raises(ObjectiveError, match="psum.* over 'data' in the loss"):
            sharded(loss, 2)(jnp.float32(1.0), X)


def test_rows_that_know_of_one_another_are_refused_unless_it_is_said_how_shards_combine():
    """As BatchNorm, of which each shard would see statistics of its own."""

    def normed(w, x, *, state):
        mean = x.mean()
        return LossOutput((w * (x - mean) ** 2).mean(), state=0.5 * state + 0.5 * mean)

    with pytest.raises(ObjectiveError, match="sub of a row with a sum over rows in objective term 0.*state_reduction"):
        sharded(lambda w, x: (w * (x - x.mean()) ** 2).mean(), 2)(jnp.float32(1.0), X)
    out = jax.jit(value_and_grad(normed, 2, data_sharding=by_rows(), state_reduction="mean"))(
        jnp.float32(1.0), X, state=jnp.float32(0)
    )
    assert float(out.state) == 8.5 / 2
    assert float(out.grads) == 1.0  # of two rows 2 apart, in each micro-batch of each shard


@jax.custom_vjp
def scaled_by_the_largest(x):
    return x


scaled_by_the_largest.defvjp(lambda x: (x, None), lambda _, gradient: (gradient / jnp.abs(gradient).max(),))


@pytest.mark.parametrize(
    "loss, error, message",
    [
        (
            lambda w, x: (scaled_by_the_largest(w * x) ** 2).mean(),
            ObjectiveError,
            "reduce_max over rows in the gradient",
        ),
        (lambda w, x: (scaled_by_the_largest(w) * x).mean(), ObjectiveError, "in the gradient of the objective"),
        (lambda w, x: LossOutput((w * x).mean(), {"sd": WeightedMean(x.std(), 1)}), MetricError, "in metrics/sd"),
        (lambda w, x: LossOutput((w * x).mean(), {"l2": Sum(w**2)}), MetricError, "belongs to no row.* in metrics/l2"),
        (lambda w, x: (w * x).mean() + Sum(w**2), ObjectiveError, "belongs to no row.* in objective term"),
    ],
)
@pytest.mark.parametrize("k", [1, 2])
def test_derivative_rules_and_metrics_of_all_rows_are_refused(loss, error, message, k):
    with pytest.raises(error, match=f"{message}.*gradient_reduction='each'"):
        sharded(loss, k)(jnp.float32(2.0), X)


def test_a_rule_and_metrics_of_each_row_are_not():
    """Whatever cannot be followed passes too, such as a loss that takes so many rows and no others."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.clip(gradient, -0.1, 0.1),))

    def loss(w, x):
        return LossOutput((clipped(w * x.reshape(2, 1)) ** 2).mean(), {"n": Sum(x.size), "largest": Max(x.max())})

    out = sharded(loss, 2)(jnp.float32(1.0), X)
    want = sum(np.clip(2 * X / 16, -0.1, 0.1) * X)
    np.testing.assert_allclose(out.grads, want, rtol=1e-6)
    assert {name: leaf.item() for name, leaf in out.metrics.items()} == {"n": 16, "largest": 16.0}


@pytest.mark.parametrize("separable, traces", [(False, 5), (True, 1)])
def test_a_loss_known_to_be_separable_is_not_checked_again(separable, traces):
    found = []

    def loss(w, x):
        found.append(x.shape)
        return (w * x).mean()

    jax.eval_shape(value_and_grad(loss, 2, data_sharding=by_rows(), separable=separable), jnp.float32(1.0), X)
    assert len(found) == traces


def test_within_a_shard_map_there_is_nothing_to_shard():
    run = value_and_grad(mean_loss, 2, data_sharding="data")
    mapped = jax.shard_map(lambda w, x: run(w, x).grads, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh_of(DATA)), pytest.raises(ConfigError, match="'data' within a shard_map"):
        jax.jit(mapped)(jnp.float32(1.0), X)


# -- what the compiler makes of it --------------------------------------------------------------------

D, LAYERS = 16, 3


def stack_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"w": jax.random.normal(keys[0], (LAYERS, D, D)) / 4, "out": jax.random.normal(keys[1], (D, 4 * D)) / 4}


def compiled_on(mesh, k, *last_axis, **options):
    """The program and what it computes; parameters are sharded along their last axis."""
    put = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, P(*spec)))  # noqa: E731
    params = jax.tree.map(lambda leaf: put(leaf, *[None] * (leaf.ndim - 1), *last_axis), stack_params())
    x = put(jax.random.normal(jax.random.key(1), (16, D)), "data")
    with jax.set_mesh(mesh):
        compiled = jax.jit(value_and_grad(stack_loss, k, **options)).lower(params, x).compile()
        return compiled, compiled(params, x)


@functools.cache
def wanted():
    return jax.jit(value_and_grad(stack_loss, 1))(stack_params(), jax.random.normal(jax.random.key(1), (16, D)))


MOVES = {"all-gather", "all-to-all", "collective-permute"}


def of_gradients(compiled, local=()):
    """The reductions of what is shaped as a parameter, or as a layer's."""
    shapes = {f"[{LAYERS},{D},{D}]", f"[{D},{4 * D}]", f"[{D},{D}]", *local}
    return [c for c in collectives(compiled) if c[0] == "all-reduce" and any(shape in c[1] for shape in shapes)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_reduction_after_the_loop(kind):
    compiled, out = compiled_on(mesh_of(DATA, kind=kind), 4, data_sharding="data")
    assert_trees_close((out.value, out.grads), (wanted().value, wanted().grads))
    assert not MOVES & {opcode for opcode, *_ in collectives(compiled)}
    reductions = of_gradients(compiled)
    assert sum(types.count(f"f32[{LAYERS},{D},{D}]") for _, types, _ in reductions) == 1
    assert sum(types.count(f"f32[{D},{4 * D}]") for _, types, _ in reductions) == 1
    assert not any(inside for *_, inside in collectives(compiled))


def test_parameters_sharded_over_another_axis_stay_so():
    """Tensor parallelism within a shard: that axis is left to the compiler, and takes part in the loop."""
    mesh = mesh_of(DATA, ("model", 2))
    compiled, out = compiled_on(mesh, 2, "model", data_sharding="data")
    assert_trees_close((out.value, out.grads), (wanted().value, wanted().grads))
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(out.grads)} == {P(None, None, "model"), P(None, "model")}
    reductions = of_gradients(compiled, local=(f"[{LAYERS},{D},{D // 2}]", f"[{D},{2 * D}]"))
    assert sum(types.count(f"f32[{LAYERS},{D},{D // 2}]") for _, types, _ in reductions) == 1
    assert not any(inside for *_, inside in reductions)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_data_sharding_no_row_is_moved_and_every_device_is_busy(kind):
    mesh = mesh_of(DATA, kind=kind)
    compiled, out = compiled_on(mesh, 4)
    assert_trees_close((out.value, out.grads), (wanted().value, wanted().grads))
    assert not MOVES & {opcode for opcode, *_ in collectives(compiled)}
    lone = jax.jit(value_and_grad(stack_loss, 1)).lower(stack_params(), jnp.ones((4, D))).compile()
    assert hlo_flops(compiled.as_text()).flops <= 1.05 * 4 * hlo_flops(lone.as_text()).flops / 4


@pytest.mark.parametrize("typed", [True, False])
def test_in_a_shard_map_of_the_users_own(typed):
    """Each shard accumulates what it is given; the caller reduces, or has JAX's types do it."""

    def loss(params, x):
        losses = jax.nn.logsumexp(jnp.tanh(x @ params["w"][0]) @ params["out"], -1)
        return LossOutput(WeightedMean(losses.sum(), losses.size), {"max": Max(losses.max())})

    def local(params, x):
        out = value_and_grad(loss, 2)(params, x)
        grads = out.grads if typed else jax.lax.psum(out.grads, "data")
        mean = jax.tree.map(lambda g: g / 4, grads), jax.lax.pmean(out.value, "data")
        return mean, jax.lax.pmax(out.metrics["max"], "data")

    mapped = jax.shard_map(local, mesh=mesh_of(DATA), in_specs=(P(), P("data")), out_specs=P(), check_vma=typed)
    x = jax.random.normal(jax.random.key(1), (16, D))
    (grads, value), largest = jax.jit(mapped)(stack_params(), x)
    want = accumulated(loss, 1)(stack_params(), x)
    assert_trees_close((value, grads, largest), (want.value, want.grads, want.metrics["max"]))
