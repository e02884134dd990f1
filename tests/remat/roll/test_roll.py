"""Layers in a scan compute what unrolled ones do: values, gradients, states, keys and prints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jaxmem.remat.roll import roll, rolled

D, LAYERS = 8, 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, D))


def layer_params(i):
    up, down, bias = jax.random.split(jax.random.key(i), 3)
    return {
        "up": jax.random.normal(up, (D, 2 * D)) / D**0.5,
        "down": jax.random.normal(down, (2 * D, D)) / D,
        "bias": jax.random.normal(bias, (2 * D,)),
    }


PARAMS = [layer_params(i) for i in range(LAYERS)]
STACKED = jax.tree.map(lambda *leaves: jnp.stack(leaves), *PARAMS)


def block(x, w, key=None):
    h = jax.nn.relu(x @ w["up"] + w["bias"]) @ w["down"]
    return x + (h if key is None else jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0))


def row(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


# -- losses of (params, x, key) and the counts of their layers -----------------------------------------


def plain(params, x, key):
    for w in params:
        x = block(x, w)
    return jnp.mean(x**2)


def folded_keys(params, x, key):
    for i, w in enumerate(params):
        x = block(x, w, jax.random.fold_in(key, i))
    return jnp.mean(x**2)


def chained_keys(params, x, key):
    for w in params:
        key, own = jax.random.split(key)
        x = block(x, w, own)
    return jnp.mean(x**2)


def split_keys(params, x, key):
    for w, own in zip(params, jax.random.split(key, LAYERS), strict=True):
        x = block(x, w, own)
    return jnp.mean(x**2)


def marked(params, x, key):
    for i, w in enumerate(params):
        x = jax.checkpoint(block)(x, w, jax.random.fold_in(key, i))
    return jnp.mean(x**2)


def closing_over_its_number(params, x, key):
    for i, w in enumerate(params):
        x = jax.checkpoint(lambda x, w, i=i: block(x * (i + 1.0), w, jax.random.fold_in(key, i)))(x, w)
    return jnp.mean(x**2)


def jitted_layers(params, x, key):
    for i, w in enumerate(params):
        x = jax.jit(lambda x, w, i=i: block(x, w, jax.random.fold_in(key, i)) / (i + 2))(x, w)
    return jnp.mean(x**2)


def in_jit(params, x, key):
    return jax.jit(plain)(params, x, key)


def in_a_checkpoint(params, x, key):
    return jax.checkpoint(plain)(params, x, key)


def in_a_branch(params, x, key):
    return jax.lax.cond(x[0, 0] < 9, lambda: plain(params, x, key), lambda: 1.0)


def in_an_outer_scan(params, x, key):
    step = lambda total, x: (total + plain(params, x[None], key), None)  # noqa: E731
    return jax.lax.scan(step, 0.0, x)[0]


def low_precision(params, x, key):
    x = x.astype(jnp.bfloat16)
    for w in params:
        x = block(x, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def shared_weight(params, x, key):
    for w in params:
        x = block(x, w) @ params[0]["up"][:, :D]
    return jnp.mean(x**2)


def read_elsewhere(params, x, key):
    penalty, means = 0.0, []
    for w in params:
        x = block(x, w)
        penalty += jnp.sum(x**2)
        means.append(x.mean(0))
    return jnp.mean(x**2) + penalty + jnp.stack(means).std()


def one_read_elsewhere(params, x, key):
    kept = None
    for i, w in enumerate(params):
        x = block(x, w)
        kept = x if i == 1 else kept
    return jnp.mean(x * kept)


def two_streams(params, x, key):
    y = 2 * x
    for w in params:
        x, y = y, block(y, w) - x
    return jnp.mean(x * y)


def another_first(params, x, key):
    x = jnp.sin(x) @ params[0]["up"] @ params[0]["down"]
    for w in params[1:]:
        x = block(x, w)
    return jnp.mean(x @ params[0]["up"])


def another_last(params, x, key):
    for w in params[:-1]:
        x = block(x, w)
    return jnp.mean(jnp.tanh(x @ params[-1]["up"]) @ params[-1]["down"])


def stages(params, x, key):
    for w in params[:2]:
        x = block(x, w)
    x = jnp.concatenate([x, x], 0)
    for w in params[2:]:
        x = block(x, w)
    return jnp.mean(x**2)


def two_calls(params, x, key):
    return plain(params, x, key) * plain(params, 2 * x, key)


def scans_inside(params, x, key):
    for w in params:
        x = jax.lax.fori_loop(0, 3, lambda _, c, w=w: jnp.sin(c @ w["up"]) @ w["down"] + c, x)
    return jnp.mean(x)


def two_layers_back(params, x, key):
    """Each layer reads what two more before it made: several carries."""
    outs = [x, x, x, x]
    for w in params:
        outs.append(block(outs[-1], w) + outs[-4])
    return jnp.mean(outs[-1] ** 2)


LOSSES = {
    plain: [4],
    folded_keys: [4],
    chained_keys: [4],
    split_keys: [4],
    marked: [4],
    closing_over_its_number: [4],
    jitted_layers: [4],
    in_jit: [4],
    in_a_checkpoint: [4],
    in_a_branch: [4],
    in_an_outer_scan: [4],
    low_precision: [4],
    shared_weight: [4],
    read_elsewhere: [4],
    one_read_elsewhere: [4],
    two_streams: [4],
    another_first: [3],
    another_last: [3],
    stages: [2, 2],
    two_calls: [4, 4],
    two_layers_back: [4],
    scans_inside: [4],
}


def check(loss, *args, counts, within=1e-6, argnums=0):
    """Values and gradients of `rolled(loss)` are those of the loss; `counts` layers roll."""
    _, found = roll(jax.make_jaxpr(loss)(*args))
    assert [each.count for each in found.layers] == counts, found
    want, got = (jax.jit(jax.value_and_grad(f, argnums, has_aux=False))(*args) for f in (loss, rolled(loss)))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=within * max(float(jnp.abs(a).max()), 1e-3))
    return found


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_it_computes_the_same(loss):
    check(loss, PARAMS, X, KEY, counts=LOSSES[loss], within=2e-2 if loss is low_precision else 1e-6)


def test_rows_of_a_stack_are_not_stacked_again():
    def loss(stacked, x, key, dtype=jnp.float32):
        keys = jax.random.split(key, LAYERS)
        x = x.astype(dtype)
        for i in range(LAYERS):
            x = block(x, jax.tree.map(lambda leaf: leaf.astype(dtype), row(stacked, i)), keys[i])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    found = check(loss, STACKED, X, KEY, counts=[4])
    assert found.stacked_bytes == {}
    cast = functools.partial(loss, dtype=jnp.bfloat16)
    size = sum(leaf.size for leaf in jax.tree.leaves(STACKED))
    assert check(cast, STACKED, X, KEY, counts=[4], within=2e-2).stacked_bytes == {"bfloat16": 2 * size}
    eqns = roll(jax.make_jaxpr(loss)(STACKED, X, KEY))[0].eqns
    assert not any(eqn.primitive.name in ("stack", "concatenate") for eqn in eqns)


def test_casts_to_fewer_bytes_come_before_the_stack():
    found = check(low_precision, PARAMS, X, KEY, counts=[4], within=2e-2)
    size = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert found.stacked_bytes == {"bfloat16": 2 * size}
    assert [each.num_equations for each in found.layers] == [6]


def test_keys_draw_the_very_same_numbers():
    def drawn(params, x, key):
        bits = []
        for i, w in enumerate(params):
            x = block(x, w)
            bits.append(jax.random.bits(jax.random.fold_in(key, 7 * i), (3,)))
            x = x * (1 + 0 * bits[-1].sum())
        return jnp.stack(bits), x

    want, got = (jax.jit(f)(PARAMS, X, KEY)[0] for f in (drawn, rolled(drawn)))
    assert roll(jax.make_jaxpr(drawn)(PARAMS, X, KEY))[1].layers[0].count == LAYERS
    assert (want == got).all()


@pytest.mark.parametrize("ordered", [False, True])
def test_prints_come_once_a_layer_in_order(ordered, capsys):
    def loss(params, x, key):
        for w in params:
            x = block(x, w)
            jax.debug.print("mean {x:.5f}", x=x.mean(), ordered=ordered)
        return jnp.mean(x**2)

    printed = []
    for f in (loss, rolled(loss)):
        jax.block_until_ready(jax.jit(f)(PARAMS, X, KEY))
        jax.effects_barrier()
        printed.append(capsys.readouterr().out)
    assert printed[0].count("mean") == LAYERS
    assert sorted(printed[0].split("\n")) == sorted(printed[1].split("\n"))
    assert printed[0] == printed[1] or not ordered
    assert roll(jax.make_jaxpr(loss)(PARAMS, X, KEY))[1].layers


# -- what is not rolled -------------------------------------------------------------------------------


def reading_any_before(params, x, key):
    outs = [x]
    for i, w in enumerate(params):
        outs.append(block(outs[-1], w) + outs[-1 if i % 2 else 0])
    return jnp.mean(outs[-1] ** 2)


def printing_its_name(params, x, key):
    for i, w in enumerate(params):
        x = block(x, w)
        jax.debug.print(f"layer {i}: {{x}}", x=x.mean())
    return jnp.mean(x**2)


def with_rules_of_their_own(params, x, key):
    for i, w in enumerate(params):
        x = block(_scaled_gradient(x, i + 1.0), w)
    return jnp.mean(x**2)


def _scaled_gradient(x, factor):
    @jax.custom_vjp
    def same(x):
        return 1.0 * x

    same.defvjp(lambda x: (1.0 * x, None), lambda _, ct: (factor * ct,))
    return same(x)


@pytest.mark.parametrize(
    "loss, why",
    [
        (reading_any_before, "reads what another than the one before makes"),
        (printing_its_name, "parameters of debug_print differ"),
        (with_rules_of_their_own, "parameters of custom_vjp_call"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_differs_stays_unrolled_with_the_reason(loss, why):
    found = check(loss, PARAMS, X, KEY, counts=[])
    assert why in found.refused[0]


def test_rules_that_do_the_same_are_rolled():
    def loss(params, x, key):
        for w in params:
            x = block(_scaled_gradient(x, 3.0), w)
        return jnp.mean(x**2)

    check(loss, PARAMS, X, KEY, counts=[4])


def test_layers_of_unequal_shapes_and_parallel_ones_stay():
    def widths(params, x, key):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    weights = [jnp.ones((D * (i + 1), D * (i + 2))) / D for i in range(3)]
    check(widths, weights, X, KEY, counts=[])

    def heads(params, x, key):
        return sum(jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"]) for w in params)

    assert check(heads, PARAMS, X, KEY, counts=[]).refused == ()


# -- modules ------------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False)(x)
        h = nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(h)))
        return x + nn.Dropout(0.3, deterministic=False)(h)


class Net(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(D)(x)
        for i in range(LAYERS):
            x = self.block(name=f"Block_{i}")(x)
        return nn.Dense(3)(x)


@pytest.mark.parametrize("kind", [Block, nn.remat(Block)])
def test_linen(kind):
    model = Net(kind)
    variables = model.init({"params": KEY, "dropout": KEY}, X)

    def loss(params, stats, x, key):
        y, new = model.apply(
            {"params": params, "batch_stats": stats}, x, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return jnp.mean(y**2), new

    args = variables["params"], variables["batch_stats"], X, KEY
    _, found = roll(jax.make_jaxpr(loss)(*args))
    assert [each.count for each in found.layers] == [LAYERS]
    want, got = (jax.jit(jax.value_and_grad(f, has_aux=True))(*args) for f in (loss, rolled(loss)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), want, got)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(D, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_nnx():
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        y = model(x)
        return jnp.mean(y**2), nnx.state(model, nnx.Not(nnx.Param))

    _, found = roll(jax.make_jaxpr(loss)(params, rest, X))
    assert [each.count for each in found.layers] == [LAYERS]
    want, got = (jax.jit(jax.value_and_grad(f, has_aux=True))(params, rest, X) for f in (loss, rolled(loss)))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- meshes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vma", [True, False])
def test_in_shard_map(vma):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))

    def loss(params, x, key):
        def local(params, x):
            for w in params:
                x = block(x, w)
                x = x - jax.lax.pmean(x, "data")
            return jax.lax.pmean(jnp.mean(x**2), "data")

        data = PartitionSpec("data")
        specs = {"in_specs": (PartitionSpec(), data), "out_specs": PartitionSpec()}
        return jax.shard_map(local, mesh=mesh, check_vma=vma, **specs)(params, x)

    check(loss, PARAMS, X, KEY, counts=[LAYERS])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters(kind):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(kind,))

    def place(leaf):
        return jax.device_put(leaf, jax.NamedSharding(mesh, PartitionSpec("data")))

    with jax.set_mesh(mesh):
        if kind == AxisType.Auto:
            check(plain, jax.tree.map(place, PARAMS), place(X), KEY, counts=[LAYERS])
        else:

            def loss(params, x, key):
                for w in params:
                    w = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, PartitionSpec()), w)
                    x = block(x, w)
                return jnp.mean(x**2)

            check(loss, jax.tree.map(place, PARAMS), place(X), KEY, counts=[LAYERS])


def test_frozen_and_trained_layers_in_one_stack():
    def loss(trained, frozen, x, key):
        return plain([trained[0], frozen[0], trained[1], frozen[1]], x, key)

    found = check(loss, PARAMS[:2], PARAMS[2:], X, KEY, counts=[4])
    assert found.refused == ()
