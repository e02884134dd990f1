"""Ties: where they lie, that they change no bit of a gradient, and that nothing is computed for them."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmem._jaxpr_costs import product_flops
from jaxmem.jaxprs import TIE, equations_in, tie
from jaxmem.remat import checkpoint, nested_scan
from jaxmem.remat.auto import auto
from jaxmem.remat.blocks import at_blocks, marked, tied
from tests.remat.blocks import models
from tests.remat.blocks.models import TOKENS, D, X, full, weights

WS, STACK, HEAD = [weights(D, D) * i for i in (1.0, 0.5, -0.7)], weights(3, D, D), weights(D, 2)


def layer(x, w):
    return jnp.tanh(jax.nn.gelu(jnp.sin(x) @ w))


def loop(ws, x):
    for w in ws:
        x = layer(x, w)
    return x


def scan(ws, x):
    return lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0]


def with_head(body):
    return lambda ws, head, x: jnp.sum((body(ws, x) @ head) ** 2)


def ties(fn, *args):
    """Name → number of values, of the ties in a program."""
    eqns = equations_in(jax.make_jaxpr(fn)(*args).jaxpr)
    return {eqn.params["at"]: len(eqn.invars) for eqn in eqns if eqn.primitive.name == TIE}


def count(fn, *args):
    return collections.Counter(eqn.primitive.name for eqn in equations_in(jax.make_jaxpr(fn)(*args).jaxpr))


def same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


def assert_same_gradients(got, want, *args):
    argnums = tuple(range(len(args)))
    same_bits(*(jax.jit(jax.value_and_grad(fn, argnums))(*args) for fn in (got, want)))


# -- the primitive ---------------------------------------------------------------------------------------


def product(w, x):
    w, x, _ = tie([w, x, 3], "product")
    return jnp.sin(w * x)


def test_all_transformations():
    plain = lambda w, x: jnp.sin(w * x)  # noqa: E731
    both = (0, 1)
    for transform in (
        lambda f: jax.grad(f, both),
        jax.hessian,  # forward over reverse
        lambda f: jax.grad(lambda w, x: sum(jax.grad(f, both)(w, x)), both),
        lambda f: jax.jacfwd(f, both),
        lambda f: jax.checkpoint(jax.grad(f, both)),
        lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
        lambda f: lambda w, x: jax.vmap(jax.grad(f, both), (None, 0))(w, jnp.arange(3.0) * x),
        lambda f: lambda w, x: jax.grad(lambda w: lax.scan(lambda c, x: (f(c, x), c), w, jnp.arange(3.0))[0])(w),
    ):
        same_bits(transform(product)(0.5, 0.3), transform(plain)(0.5, 0.3))


def test_one_barrier_round_the_gradients_that_there_are():
    assert count(jax.grad(product, (0, 1)), 1.0, 2.0)["optimization_barrier"] == 1
    assert count(jax.grad(product), 1.0, 2.0)["optimization_barrier"] == 0  # alone it waits for nothing
    assert TIE not in count(jax.grad(product, (0, 1)), 1.0, 2.0)


def test_values_that_vary_over_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))

    def over(fn):
        mean = lambda ws, head, x: lax.pmean(fn(ws, head, x), "data")  # noqa: E731
        return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())

    loss = with_head(loop)
    for got in (over(tied(loss, "tied")), tied(over(loss), "tied")):
        assert_same_gradients(got, over(loss), WS, HEAD, X)
        assert list(ties(got, WS, HEAD, X))[-1] == "head"


def test_unused_results_need_no_inputs():
    program = jax.make_jaxpr(lambda w, x: tie([w, x], "product")[1] + 1)(1.0, 2.0)
    assert count(jax.checkpoint(jax.grad(lambda x: tie([x, x], "")[0] ** 2)), 1.0)  # remat prunes its program
    assert len(program.eqns) == 2


# -- where they lie --------------------------------------------------------------------------------------


def test_at_blocks_and_where_the_head_begins():
    loss = with_head(loop)
    blocks = {"loss[1/3]": 2, "loss[2/3]": 2, "loss[3/3]": 2}
    assert ties(tied(loss, "tied"), WS, HEAD, X) == blocks | {"head": 2}
    assert ties(tied(loss, "head"), WS, HEAD, X) == {}  # it has weights of its own, after unrolled layers
    shared = lambda ws, head, x: jnp.sum((loop(ws, jnp.tanh(x @ head) @ head.T) @ head) ** 2)  # noqa: E731
    assert ties(tied(shared, "head"), WS, HEAD, X) == {"head": 2}
    assert ties(at_blocks(loss, full, order="tied"), WS, HEAD, X) == blocks | {"head": 2}
    assert tied(loss, "free") is loss
    assert ties(tied(loop, "tied"), WS, X) == blocks  # no matmul after the last


def test_the_head_is_tied_where_the_layers_are():
    loss = with_head(scan)
    assert ties(tied(jax.jit(loss), "head"), STACK, HEAD, X) == {"head": 2}
    assert ties(tied(lambda *args: jax.jit(loss)(*args) * 2, "tied"), STACK, HEAD, X) == {"head": 2}


def test_a_cast_weight_is_tied_in_the_dtype_that_it_is_cast_to():
    """Behind a barrier its gradient would be made in the wider one, which else is fused into the optimizer."""

    def loss(stack, head, x):
        return jnp.mean((scan(stack, x).astype(jnp.bfloat16) @ head.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    program = jax.make_jaxpr(tied(loss, "head"))(STACK, HEAD, X)
    (tie,) = [eqn for eqn in program.eqns if eqn.primitive.name == TIE]
    assert {(v.aval.shape, v.aval.dtype.name) for v in tie.invars} >= {(HEAD.shape, "bfloat16")}


def test_nothing_to_tie():
    assert ties(tied(lambda w, x: jnp.sum(jnp.tanh(x @ w)), "tied"), WS[0], X) == {}


def test_steps_of_a_scan_end_with_their_gradients_unless_several_are_unrolled():
    def unrolled(unroll):
        return with_head(lambda ws, x: lax.scan(lambda h, w: (layer(h, w), None), x, ws, unroll=unroll)[0])

    assert ties(tied(unrolled(1), "tied"), STACK, HEAD, X) == {"head": 2}
    assert ties(tied(unrolled(3), "tied"), STACK, HEAD, X) == {"scan": 2, "head": 2}
    assert_same_gradients(tied(unrolled(3), "tied"), unrolled(3), STACK, HEAD, X)


def test_a_tie_lies_on_one_layers_part_of_a_stack():
    """Behind a barrier a gradient of the whole stack would be made for each layer."""

    def loss(stack, head, x):
        return with_head(loop)([stack[i] for i in range(3)], head, x)

    got = at_blocks(loss, full, order="tied")
    program = jax.make_jaxpr(jax.grad(got, (0, 1, 2)))(STACK, HEAD, X)
    barriers = [eqn for eqn in equations_in(program.jaxpr) if eqn.primitive.name == "optimization_barrier"]
    gradients = [{v.aval.shape for v in eqn.outvars} for eqn in barriers]
    assert {(1, D, D), X.shape} in gradients and {STACK.shape, X.shape} not in gradients
    assert_same_gradients(got, at_blocks(loss, full), STACK, HEAD, X)


def test_a_mark_is_a_block_that_is_not_recomputed():
    def loss(mark):
        return with_head(lambda ws, x: loop(ws, x) if mark is None else [x := mark(layer)(x, w) for w in ws][-1])

    marks, own = loss(lambda fn: marked(fn, "none")), loss(jax.checkpoint)
    places = {"checkpoint 0": 2, "checkpoint 1": 2, "checkpoint 2": 2, "head": 2}
    for fn in (marks, own):
        assert ties(tied(fn, "tied"), WS, HEAD, X) == places
        assert_same_gradients(tied(fn, "tied"), fn, WS, HEAD, X)
    left = lambda fn: {"remat2", "remat", "checkpoint"} & set(count(fn, WS, HEAD, X))  # noqa: E731
    assert left(marks) and not left(tied(marks, "tied")) and left(tied(own, "tied"))


def test_checkpoints_beside_blocks_that_are_found():
    def loss(ws, head, x):
        x = loop(ws, x)
        x = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x) @ w))(x, 2 * head @ head.T)
        return jnp.sum((x @ head) ** 2)

    got = at_blocks(loss, full, order="tied")
    assert [name[:4] for name in ties(got, WS, HEAD, X)] == ["loss"] * 3 + ["chec", "head"]
    assert_same_gradients(got, at_blocks(loss, full), WS, HEAD, X)


# -- gradients -------------------------------------------------------------------------------------------


def nnx_loss():
    graph, state = nnx.split(models.NnxModel(2, nnx.Rngs(0)))
    params, rest = nnx.split_state(state, nnx.Param, ...)
    return lambda params, x: jnp.sum(nnx.merge(graph, params, rest, copy=True)(x) ** 2), params


def linen_loss(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)  # made by no program
    params = jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), shapes)
    return lambda v, x: jnp.sum(model.apply(v, x) ** 2), params


@pytest.mark.parametrize("kind", ["encoder and decoder", "nnx", "nested scan", "scan in scan"])
def test_no_bit_of_a_gradient_changes(kind):
    if kind == "encoder and decoder":
        loss, params = linen_loss(models.EncoderDecoder())
    elif kind == "nnx":
        loss, params = nnx_loss()
    elif kind == "nested scan":
        loss = lambda ws, x: nested_scan(lambda h, w: (layer(h, w), None), x, ws)[0].sum()  # noqa: E731
        params = weights(4, D, D)
    else:
        body = lambda h, ws: (loop([ws, 2 * ws], scan(jnp.stack([ws, ws]), h)), None)  # noqa: E731
        loss, params = lambda ws, x: jnp.sum(lax.scan(body, x, ws)[0] ** 2), STACK
    assert_same_gradients(tied(loss, "tied"), loss, params, TOKENS)


def test_the_terms_of_a_gradient_are_added_in_the_same_order():
    """Skips: each block reads twice what all later ones read, too; a tie on it would add up its two terms first."""
    w = [weights(D, D) * i for i in range(1, 4)]

    def loss(x, ws):
        y = x
        for w in ws:
            y = jnp.tanh(y @ w + jnp.sin(x @ w) + jnp.cos(3 * x))
        return jnp.sum(y)

    assert_same_gradients(tied(loss, "tied"), loss, X, w)
    assert sum(ties(tied(loss, "tied"), X, w).values()) < 3 * 3  # not on x


def test_frozen_weights_get_no_gradient():
    def lora(small, frozen, x):
        for (a, b), w in zip(small, frozen, strict=True):
            x = jnp.tanh(x @ w + (x @ a) @ b)
        return jnp.sum((x @ HEAD) ** 2)

    small = [(weights(D, 2), weights(2, D))] * 3
    flops = []
    for fn in (lora, tied(lora, "tied"), at_blocks(lora, full), at_blocks(lora, full, order="tied")):
        program = jax.make_jaxpr(jax.grad(fn))(small, WS, X)
        flops.append(sum(product_flops(eqn) or 0 for eqn in equations_in(program.jaxpr)))
    assert flops[0] == flops[1] > 0 and flops[2] == flops[3]
    assert len(ties(tied(lora, "tied"), small, WS, X)) == 4


def test_forward_mode_and_reverse_over_reverse():
    loss = with_head(loop)
    for got, want in ((tied(loss, "tied"), loss), (at_blocks(loss, full, order="tied"), at_blocks(loss, full))):

        def both(fn, *args):
            again = jax.grad(lambda x: jnp.sum(jax.grad(fn, 2)(*args[:2], x) ** 2))
            return jax.jvp(fn, args, args), again(args[2])

        same_bits(*(jax.jit(both, static_argnums=0)(fn, WS, HEAD, X) for fn in (got, want)))


def test_a_budget_has_the_same_ties():
    loss = with_head(loop)
    decided = auto(loss, 0.6).decide(WS, HEAD, X)
    assert ties(decided.apply(loss, "tied"), WS, HEAD, X).keys() >= {"loss[1/3]", "loss[2/3]", "loss[3/3]", "head"}
    assert ties(decided.apply(loss, "head"), WS, HEAD, X) == {}
    assert_same_gradients(decided.apply(loss, "tied"), decided.apply(loss), WS, HEAD, X)
    scanned = with_head(scan)
    decided = auto(scanned, 0.6).decide(STACK, HEAD, X)
    assert ties(decided.apply(scanned, "head"), STACK, HEAD, X) == {"head": 2}


@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_marked_modules(flax):
    if flax == "linen":
        Block = marked(models.Block, "none")

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(2)(Block()(Block()(x)))

        loss, params = linen_loss(Model())
    else:
        graph, params = nnx.split([nnx.Linear(D, D, rngs=nnx.Rngs(i)) for i in range(2)])

        def loss(params, x):
            for linear in nnx.merge(graph, params):
                x = marked(linear, "none")(x)
            return jnp.sum((x @ HEAD) ** 2)

    assert [name[:5] for name in ties(tied(loss, "tied"), params, TOKENS)] == ["check", "check", "head"]
    got, want = (jax.grad(fn)(params, TOKENS) for fn in (tied(loss, "tied"), loss))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)  # XLA:CPU may fuse otherwise round a barrier


def test_a_checkpoint_of_a_policy_is_no_mark():
    kept = checkpoint(layer, "dots")
    assert ties(tied(lambda w, x: kept(x, w).sum(), "tied"), WS[0], X) == {"checkpoint 0": 2}
