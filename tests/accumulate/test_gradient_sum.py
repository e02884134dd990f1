"""Gradients that the backward pass adds to the accumulators itself equal those that are added as a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import LossOutput, Max, MemoryConfig, Sum, WeightedMean, Workload, make_train_step
from jaxmem.accumulate import value_and_grad
from jaxmem.errors import ConfigError
from jaxmem.targets import resolve_target
from jaxmem.train._program import trace_for
from tests.accumulate.problems import assert_trees_close, token_batch, token_loss, token_params

OLD = jax.__version_info__ < (0, 12)
WIDTH, LAYERS, STEPS = 4, 3, 5


def params():
    rng = np.random.default_rng(0)
    shapes = {"stack": (LAYERS, WIDTH, WIDTH), "matrix": (WIDTH, WIDTH), "scale": (WIDTH,), "unused": (3,)}
    return {name: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32) for name, shape in shapes.items()}


X = jnp.asarray(np.random.default_rng(1).normal(size=(2 * STEPS, WIDTH)), jnp.float32)


def layers(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])[0]


def tied(p, x):
    """The matrix comes before, within and, transposed, after a scan over layers."""
    h = lax.scan(lambda h, w: (jnp.tanh(h @ w @ p["matrix"]), None), x @ p["matrix"], p["stack"])[0]
    return h @ p["matrix"].T


def remat(p, x):
    block = jax.checkpoint(lambda h, w: (jnp.sin(jnp.tanh(h @ w * p["scale"]) @ p["matrix"]), None))
    return lax.scan(block, x, p["stack"])[0]


def nested_scans(p, x):
    """A recurrent loop within each layer: a matrix that is constant in one scan and scanned over in the other."""

    def layer(h, w):
        return lax.scan(lambda h, row: (jnp.tanh(h * row @ p["matrix"]), None), h, w)[0], None

    return lax.scan(layer, x, p["stack"])[0]


def cond(p, x):
    def layer(h, w):
        return lax.cond(h.sum() > 0, lambda: jnp.tanh(h @ w), lambda: jnp.sin(h @ w @ p["matrix"])), None

    return lax.scan(layer, x, p["stack"])[0]


@jax.custom_vjp
def product(x, w):
    return jnp.tanh(x @ w)


product.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda saved, g: (
        (g * (1 - product(*saved) ** 2)) @ saved[1].T,
        saved[0].T @ (g * (1 - product(*saved) ** 2)),
    ),
)


def custom_vjp(p, x):
    return product(lax.scan(lambda h, w: (product(h, w), None), x, p["stack"])[0], p["matrix"])


def bfloat16(p, x):
    """Computed in a narrow dtype: the cast's transpose adds to the float32 master in float32."""
    cast = lambda a: a.astype(jnp.bfloat16)  # noqa: E731
    h = lax.scan(lambda h, w: (jnp.tanh(h @ cast(w) @ cast(p["matrix"])), None), cast(x), p["stack"])[0]
    return (h @ cast(p["matrix"])).astype(jnp.float32)


def vmapped(p, x):
    return jax.vmap(lambda row: tied(p, row[None])[0])(x) + jax.vmap(lambda w: x @ w)(p["stack"]).sum(0)


def gathered(p, x):
    rows = p["matrix"][jnp.array([0, 1, 1, 3])] * p["scale"][jnp.array([0, 0, 2, 1])]
    return lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ p["stack"][i]), x) @ rows


def solved(p, x):
    return jnp.linalg.solve(p["matrix"] + 4 * jnp.eye(WIDTH), x.T).T


IN_PLACE = [tied, remat, nested_scans, cond, custom_vjp, bfloat16, vmapped, gathered, solved]


@jax.custom_jvp
def identity(x):
    return x


identity.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


# One array under two names in one call: JAX 0.10 added half of such a gradient, or raised.


def jitted_with_its_image(p, x):
    return jax.jit(lambda a, b: x @ a @ b)(p["matrix"], identity(p["matrix"]))


def cond_of_it_twice(p, x):
    return lax.cond(x.sum() > 0, lambda a, b: x @ a @ b, lambda a, b: x @ b, p["matrix"], p["matrix"])


def constant_and_scanned_over(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w @ p["stack"][0]), None), x, p["stack"])[0]


def within(p, x):
    """Twice in a call inside a scan's body."""
    twice = jax.jit(lambda h, a, b: jnp.tanh(h @ a @ b))
    return lax.scan(lambda h, _: (twice(h, p["matrix"], p["matrix"]), None), x, None, length=2)[0]


TWICE = [jitted_with_its_image, cond_of_it_twice, constant_and_scanned_over, within]


def loss_of(model):
    def loss(p, x):
        y = model(p, x)
        valid = x[:, :1] > 0  # as many as chance has it: the micro-batches weigh differently
        return WeightedMean((valid * y**2).sum(), valid.sum())

    return loss


def both(loss, count=STEPS, **options):
    """A function that accumulates once by value and once in place."""
    fns = [value_and_grad(loss, count, in_place=in_place, **options) for in_place in (False, None)]
    return lambda *args, **keywords: tuple(fn(*args, **keywords) for fn in fns)


def assert_same(by_value, in_place, rtol=2e-5):
    for name in ("value", "metrics", "state", "weights"):
        assert_trees_close(getattr(in_place, name), getattr(by_value, name), rtol=1e-6)
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(by_value.grads), jax.tree.leaves(in_place.grads), strict=True
    ):
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-9)
        assert error <= rtol, f"{jax.tree_util.keystr(path)}: {error}"


@pytest.mark.parametrize("model", IN_PLACE)
def test_added_in_place_equals_added_by_value(model):
    by_value, in_place = jax.jit(both(loss_of(model)))(params(), X)
    assert_same(by_value, in_place)
    assert len(in_place.added.in_place) == 4 and not in_place.added.by_value
    assert not by_value.added.in_place
    assert not np.any(in_place.grads["unused"])


@pytest.mark.parametrize("model", TWICE)
def test_a_parameter_under_two_names_in_one_call_is_added_by_value(model):
    by_value, in_place = jax.jit(both(loss_of(model)))(params(), X)
    assert_same(by_value, in_place, rtol=1e-6)
    ((path, why),) = in_place.added.by_value
    assert path == ("params/stack" if model is constant_and_scanned_over else "params/matrix")
    assert "gets the parameter twice" in why


@pytest.mark.parametrize("model", [lambda p, x: layers({"stack": p["stack"][:2]}, x), lambda p, x: x @ p["stack"][1]])
def test_through_a_slice(model):
    """When this fails on a newer JAX, `_compat.adds_in_place_through` no longer needs the version."""
    by_value, in_place = jax.jit(both(loss_of(model)))(params(), X)
    assert_same(by_value, in_place)
    assert [path for path, _ in in_place.added.by_value] == (["params/stack"] if OLD else [])


def test_through_a_barrier():
    loss = loss_of(lambda p, x: tied(lax.optimization_barrier(p), x))
    by_value, in_place = jax.jit(both(loss))(params(), X)
    assert_same(by_value, in_place)
    assert len(in_place.added.by_value) == (0 if OLD else 4)


def test_case_41_an_inner_scan_five_micro_batches_and_a_frozen_leaf():
    """jax#32411: gradients of mutable arrays were wrong there."""

    def model(p, x):
        frozen = lax.stop_gradient(p["matrix"])
        return lax.scan(lambda h, w: (jnp.tanh(h @ w @ frozen + p["scale"]), None), x, p["stack"])[0] @ p["matrix"]

    by_value, in_place = jax.jit(both(loss_of(model), 5))(params(), X)
    assert_same(by_value, in_place)
    assert len(in_place.added.in_place) == 4

    def loss(p, x):
        return jnp.mean(model(p, x) ** 2)

    work = Workload(loss, params(), X, optax.sgd(0.1), trainable=lambda path, leaf: "matrix" not in path)
    plain, step = (make_train_step(work, MemoryConfig(accumulation_steps=k)) for k in (1, 5))
    want, got = (one(one.init(), X)[0].params for one in (plain, step))
    added = trace_for(step.spec, resolve_target("cpu")).added
    assert added is not None and added.in_place == ("params/scale", "params/stack", "params/unused")
    assert_trees_close(got, want, rtol=1e-5)
    np.testing.assert_array_equal(got["matrix"], work.params["matrix"])


# ---------------------------------------------------------------- dtypes


def test_each_leaf_goes_its_own_way():
    mixed = {"half": jnp.ones(4, jnp.bfloat16), "single": jnp.ones(4), "wave": jnp.ones(4, jnp.complex64)}

    def loss(p, x):
        return (jnp.abs(p["wave"] * x) * p["single"] * p["half"]).mean()

    by_value, in_place = jax.jit(both(loss))(mixed, X)
    assert_same(by_value, in_place)
    assert in_place.added.in_place == ("params/single",)
    assert dict(in_place.added.by_value) == {
        "params/half": "the accumulator is float32 and the parameter bfloat16",
        "params/wave": "the parameter is complex",
    }
    assert str(in_place.added).startswith("Gradients are added in place for 1 of 3 parameters; 1 by value: ")
    same = jax.jit(value_and_grad(loss, STEPS, accumulator_dtype="bfloat16"))(mixed, X)
    assert same.added.in_place == ("params/half",) and same.grads["half"].dtype == jnp.bfloat16


def test_in_place_can_be_demanded_and_forbidden():
    out = jax.jit(value_and_grad(loss_of(tied), STEPS, in_place=True))(params(), X)
    assert len(out.added.in_place) == 4
    with pytest.raises(ConfigError, match="params/matrix: jit gets the parameter twice"):
        jax.jit(value_and_grad(loss_of(jitted_with_its_image), STEPS, in_place=True))(params(), X)
    with pytest.raises(ConfigError, match="in_place to be None, True or False"):
        value_and_grad(loss_of(tied), STEPS, in_place="auto")
    assert value_and_grad(loss_of(tied), 1)(params(), X).added is None  # there is no accumulator


def test_what_jax_cannot_add_in_place_is_added_by_value(monkeypatch):
    """Whatever it raises; an error of the loss's own is not hidden by that."""

    def refuse(*_):
        raise NotImplementedError("not supported yet")

    with monkeypatch.context() as patched:
        patched.setattr("jaxmem._compat.discharge", refuse)
        by_value, in_place = jax.jit(both(loss_of(tied)))(params(), X)
        assert_same(by_value, in_place, rtol=0)
        assert {why for _, why in in_place.added.by_value} == {f"JAX {jax.__version__} cannot: not supported yet"}

    @jax.custom_vjp
    def broken(w):
        return w

    broken.defvjp(lambda w: (w, None), lambda saved, g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        value_and_grad(lambda p, x: (broken(p["scale"]).sum() * x).mean(), 2)(params(), X)


# ---------------------------------------------------------------- transformed


def once(p, in_place):
    return value_and_grad(loss_of(tied), STEPS, in_place=in_place)(p, X)


OUTER = {
    "vmap of jit": lambda fn, p: jax.vmap(jax.jit(fn))(jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), p)),
    "scan": lambda fn, p: lax.scan(
        lambda p, _: (jax.tree.map(lambda w, g: w - 0.1 * g, p, fn(p).grads), None), p, None, length=2
    )[0],
    "jvp": lambda fn, p: jax.jvp(lambda p: fn(p).grads, (p,), (p,))[1],
}


@pytest.mark.parametrize("outer", OUTER)
def test_inside(outer):
    got, want = jax.jit(
        lambda p: [OUTER[outer](functools.partial(once, in_place=in_place), p) for in_place in (True, False)]
    )(params())
    pick = (lambda out: out.grads) if outer.startswith("vmap") else lambda out: out
    assert_trees_close(pick(got), pick(want), rtol=1e-4, atol=1e-5)


def test_with_a_loss_scale_and_donated_parameters():
    fn = jax.jit(both(token_loss, 2), donate_argnums=0)
    by_value, in_place = fn(token_params(), token_batch([4, 0, 1, 2]), loss_scale=jnp.float32(2.0**12))
    assert_same(by_value, in_place, rtol=1e-6)


def test_several_terms_metrics_and_state_that_is_carried():
    def loss(p, x, *, state):
        y, valid = tied(p, x) * state["scale"], x[:, :1] > 0
        objective = WeightedMean((valid * y**2).sum(), valid.sum()) + 0.3 * WeightedMean(y.sum(), x.size)
        metrics = {"n": Sum(1), "max": Max(y.max())}
        return LossOutput(objective + 1e-2 * Sum(y.sum()), metrics, state={"scale": state["scale"] + 1.0})

    by_value, in_place = jax.jit(both(loss))(params(), X, state={"scale": jnp.float32(1.0)})
    assert_same(by_value, in_place)
    assert int(in_place.metrics["n"]) == STEPS and float(in_place.state["scale"]) == 1.0 + STEPS


# ---------------------------------------------------------------- flax, meshes, reports


class Stack(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, WIDTH, name="embed")
        layer = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)(
            name="layers"
        )
        return embed.attend(layer(embed(tokens), None)[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None


def linen():
    tokens = np.arange(10 * 3).reshape(10, 3) % 7

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["t"]), batch["t"]).mean()

    return Workload.from_linen(Stack(), loss, {"t": tokens}, optax.sgd(0.1), rng=jax.random.key(0))


def nnx_model():
    def loss(model, batch):
        return jnp.mean(model(batch) ** 2)

    make = lambda key: nnx.Sequential(nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(key)), nnx.Linear(8, 2, rngs=nnx.Rngs(key)))  # noqa: E731
    return Workload.from_nnx(make, loss, X, optax.sgd(0.1), rng=jax.random.key(0))


@pytest.mark.parametrize("make", [linen, nnx_model])
def test_flax_models(make):
    work = make()
    step = make_train_step(work, MemoryConfig(accumulation_steps=5))
    state = step.init()
    by_value, in_place = jax.jit(both(step.spec.loss()))(state.params, work.batch, rng=state.rng, state=state.state)
    assert_same(by_value, in_place, rtol=1e-4)
    assert len(in_place.added.in_place) == len(jax.tree.leaves(state.params))


def test_sharded_over_eight_devices():
    """The accumulators are sharded as their parameters are, and the only buffers of that size."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    own = NamedSharding(mesh, PartitionSpec(None, None, "data"))
    p = jax.device_put({"stack": jnp.asarray(np.random.default_rng(0).normal(size=(8, 64, 64)) / 8, jnp.float32)}, own)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(32, 64)), jnp.float32)
    batch = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    loss = lambda p, x: WeightedMean((layers(p, x) ** 2).sum(), x.shape[0])  # noqa: E731

    def step(in_place, p, x):
        out = value_and_grad(loss, 4, in_place=in_place)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, out.grads), out.added

    compiled = {
        in_place: jax.jit(functools.partial(step, in_place), out_shardings=own).lower(p, batch).compile()
        for in_place in (False, True)
    }
    (want, _), (got, added) = compiled[False](p, batch), compiled[True](p, batch)
    assert_trees_close(got, want)
    assert added.in_place == ("params/stack",)
    temps = {key: one.memory_analysis().temp_size_in_bytes for key, one in compiled.items()}
    assert temps[True] <= temps[False] - 0.8 * p["stack"].nbytes / 8  # a layer's slice aside


def test_explicit_shardings():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        p = jax.device_put({"w": jnp.ones((8, 4)) / 8}, PartitionSpec())
        x = jax.device_put(jnp.arange(16.0 * 8).reshape(16, 8), PartitionSpec("data"))
        loss = lambda p, x: WeightedMean(jnp.tanh(x @ p["w"]).sum(), x.shape[0])  # noqa: E731
        by_value, in_place = jax.jit(both(loss, 2))(p, x)
    assert_same(by_value, in_place)


def test_the_report_says_which_way_and_whose_the_bytes_are():
    def loss(p, x):
        return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0] ** 2)

    work = Workload(loss, {"w": jnp.zeros((4, 64, 64))}, jax.ShapeDtypeStruct((8, 64), jnp.float32), optax.sgd(0.1))
    config = MemoryConfig(accumulation_steps=4)
    report = jaxmem.analyze(work, config, target="cpu")
    assert "Gradients are added in place for 1 of 1 parameters." in report.notes
    kinds, size = dict(report.by_kind), 4 * 64 * 64 * 4
    assert kinds["accumulators"] >= size and kinds.get("gradients", 0) < size
    (finding,) = [finding for finding in report.findings if finding.kind == "accumulators"]
    assert "bfloat16" not in finding.cure  # which would make a second buffer

    narrow = Workload(loss, {"w": jnp.zeros((4, 64, 64), jnp.bfloat16)}, work.batch, optax.sgd(0.1))
    report = jaxmem.analyze(narrow, config, target="cpu")
    assert any("1 by value: the accumulator is float32 and the parameter bfloat16" in note for note in report.warnings)
