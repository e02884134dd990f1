"""`checkpoint` round linen module classes: the same parameters, statistics, masks and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmem.errors import InputError
from jaxmem.remat import checkpoint, residual_bytes

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32))
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Block(nn.Module):
    """Dense, BatchNorm and Dropout, with a train flag and an optional mask."""

    width: int = 4

    @nn.compact
    def __call__(self, x, train=False, mask=None, *, scale=1.0):
        y = nn.BatchNorm(momentum=0.5, use_running_average=not train)(nn.Dense(self.width)(x))
        y = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(y)) * scale
        return x + (y if mask is None else y * mask)

    def doubled(self, x):
        return 2 * x


class Stack(nn.Module):
    block: type = Block
    layers: int = 2

    @nn.compact
    def __call__(self, x, call):
        for _ in range(self.layers):
            x = call(self.block(), x)
        return x


CALLS = {
    "positional": lambda block, x: block(x, True),
    "keyword": lambda block, x: block(x, train=True),
    "default": lambda block, x: block(x),
    "mask and traced scale": lambda block, x: block(x, train=True, mask=jnp.arange(4.0), scale=jnp.float32(0.5)),
}


@pytest.fixture(scope="module")
def variables():
    return jax.jit(lambda: Stack().init(RNGS, X, CALLS["default"]))()


def value_state_grads(model, variables, call):
    def loss(params, stats):
        y, state = model.apply(
            {"params": params, "batch_stats": stats},
            X,
            call,
            rngs={"dropout": RNGS["dropout"]},
            mutable=["batch_stats"],
        )
        return (y**2).sum(), state

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], variables["batch_stats"])


@pytest.mark.parametrize("call", CALLS)
def test_values_statistics_and_gradients_are_unchanged(call, variables):
    """Cases 6 and 26: BatchNorm with momentum 0.5 is updated once, and train= reaches Python by any road."""
    got = value_state_grads(Stack(checkpoint(Block, "full")), variables, CALLS[call])
    want = value_state_grads(Stack(), variables, CALLS[call])
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)
    (_, state), _ = want
    trained = call != "default"
    assert (state["batch_stats"]["Block_0"]["BatchNorm_0"]["mean"] != 0).any() == trained


def test_parameter_paths_are_unchanged_so_that_saved_parameters_fit(variables):
    remat = jax.jit(lambda: Stack(checkpoint(Block, "dots")).init(RNGS, X, CALLS["default"]))()
    assert jax.tree.structure(remat) == jax.tree.structure(variables)
    assert list(remat["params"]) == ["Block_0", "Block_1"]
    jax.tree.map(np.testing.assert_array_equal, remat, variables)


def test_blocks_keep_less(variables):
    def residuals(block):
        fn = lambda params: Stack(block).apply({**variables, "params": params}, X, CALLS["default"])  # noqa: E731
        return residual_bytes(fn, variables["params"])

    assert residuals(checkpoint(Block, "full")) == X.nbytes  # the second block's input; the first's is a constant
    assert residuals(checkpoint(Block, "dots")) == X.nbytes + 2 * X.nbytes  # and each block's one product
    assert residuals(Block) > residuals(checkpoint(Block, "dots"))


class Carried(nn.Module):
    """The body of `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        return nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(4)(x))), None


def test_the_body_of_nn_scan():
    def model(block):
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)
        return scan()

    def grads(block):
        loss = lambda v: model(block).apply(v, X, None, rngs={"dropout": RNGS["dropout"]})[0].sum()  # noqa: E731
        return jax.jit(jax.grad(loss))(variables)

    variables = jax.jit(lambda: model(Carried).init(RNGS, X, None))()
    got, want = grads(checkpoint(Carried, "full", scanned=True)), grads(Carried)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


class Tied(nn.Module):
    shared: nn.Module

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(self.shared(x)) + nn.Dense(4)(x)


class TiedStack(nn.Module):
    block: type = Tied

    @nn.compact
    def __call__(self, x):
        shared = nn.Dense(4, name="shared")
        for _ in range(2):
            x = self.block(shared)(x)
        return x.sum()


def test_a_module_shared_by_blocks_stays_shared():
    variables = jax.jit(lambda: TiedStack().init(RNGS, X))()
    assert sorted(variables["params"]) == ["Tied_0", "Tied_1", "shared"]
    got, want = (
        jax.jit(jax.grad(lambda v, block=block: TiedStack(block).apply(v, X)))(variables)
        for block in (checkpoint(Tied, "full"), Tied)
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_the_class_is_made_once_and_keeps_its_face():
    wrapped = checkpoint(Block, "full")
    assert checkpoint(Block, "full") is wrapped is not checkpoint(Block, "dots")
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__doc__) == ("Block", "Block", Block.__doc__)
    assert issubclass(wrapped, Block) and wrapped(3).width == 3
    assert wrapped(3) == checkpoint(Block, "full")(3)
    assert (wrapped().doubled(X) == 2 * X).all()
    assert checkpoint(Block, "none") is Block


class Coder(nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return jnp.tanh(self.dense(jnp.sin(x)))

    @staticmethod
    def shape():
        return (4,)


def test_methods_that_are_blocks():
    def kept(cls, method):
        model = cls()
        variables = model.init(jax.random.key(0), X)
        return residual_bytes(lambda v, x: model.apply(v, x, method=method), variables, X)

    assert kept(checkpoint(Coder, "full"), "encode") == kept(Coder, "encode") > 0
    assert kept(checkpoint(Coder, "full", methods="encode"), "encode") == 0
    both = checkpoint(Coder, "full", methods=("__call__", "encode"))
    assert kept(both, "encode") == kept(both, "__call__") == 0 and both is checkpoint(
        Coder, "full", methods=("__call__", "encode")
    )


def test_methods_that_are_none_are_refused():
    for name in ("decode", "shape"):
        with pytest.raises(InputError, match=rf"methods of Coder that are blocks; got '{name}'"):
            checkpoint(Coder, "full", methods=(name,))
    with pytest.raises(InputError, match="methods with a linen or nnx module class"):
        checkpoint(jnp.sin, "full", methods=("encode",))


def test_an_instance_is_refused_with_the_way_to_do_it():
    with pytest.raises(InputError, match=r"an instance of Block\. Wrap the class .*block\(Block\)"):
        checkpoint(Block(), "full")
    with pytest.raises(InputError, match="an instance of Block"):
        checkpoint(Block().__call__, "full")


class Takes(nn.Module):
    """A block that is given a module, which may have no parameters yet."""

    @nn.compact
    def __call__(self, x, dense, *, norm=None):
        x = jnp.tanh(dense(x))
        return x if norm is None else norm["norm"](x)


def of_module(module, x, dense=None):
    x = nn.Dense(4, name="inside")(x)
    return jnp.tanh(module.norm(x) if dense is None else dense(x))


class Parent(nn.Module):
    """Its modules are made, but bound to no parameters before a block uses them."""

    use: object
    wrap: object

    def setup(self):
        self.norm = nn.BatchNorm(use_running_average=False, momentum=0.5)

    @nn.compact
    def __call__(self, x):
        return self.use(self, self.wrap, x, nn.Dense(4, name="dense"))


def blocks(module, wrap, x, dense):
    return wrap(Takes)()(wrap(Takes)()(x, dense), dense, norm={"norm": module.norm})


MODULE_ARGUMENTS = {
    "to blocks, by keyword and in a dict": blocks,
    "function of a module": lambda module, wrap, x, dense: wrap(of_module)(module, x),
    "function of two modules": lambda module, wrap, x, dense: wrap(of_module)(module, x, dense=dense),
    "function of a variable": lambda module, wrap, x, dense: wrap(lambda v, x: jnp.sin(x * v.value))(
        module.variable("batch_stats", "scale", lambda: jnp.ones(4)), dense(x)
    ),
    "function of another module": lambda module, wrap, x, dense: wrap(lambda dense, x: dense(jnp.sin(x)))(dense, x),
}


@pytest.mark.parametrize("use", MODULE_ARGUMENTS)
def test_modules_among_the_arguments_get_their_parameters(use):
    """As nn.remat does, which takes the modules that a block is given into the checkpoint."""

    def run(wrap):
        model = Parent(MODULE_ARGUMENTS[use], wrap)
        variables = model.init(jax.random.key(0), X)
        rest = {name: value for name, value in variables.items() if name != "params"}

        def loss(params):
            y, state = model.apply({"params": params, **rest}, X, mutable=["batch_stats"])
            return (y**2).sum(), state

        return variables, jax.value_and_grad(loss, has_aux=True)(variables["params"])

    got, want = run(lambda block: checkpoint(block, "full")), run(lambda block: block)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda module, wrap, x, dense: wrap(lambda x: dense(x))(x), "Dense"),
        (lambda module, wrap, x, dense: wrap(lambda x: module.norm(x))(x), "Parent"),
    ],
    ids=["fresh", "statistics"],
)
def test_a_changed_module_in_a_closure_is_refused_with_the_way_to_do_it(use, name):
    """JAX would complain of an escaped tracer, and elsewhere."""
    with pytest.raises(InputError, match=rf"closes over {name}\. Pass the module .* as its first argument"):
        Parent(use, lambda block: checkpoint(block, "full")).init(jax.random.key(0), X)


def test_a_module_in_a_closure_is_read():
    def use(module, wrap, x, dense):
        dense(x)
        return wrap(lambda x: dense(jnp.sin(x)))(x)

    model = Parent(use, lambda block: checkpoint(block, "full"))
    variables = model.init(jax.random.key(0), X)
    want = Parent(use, lambda block: block).apply(variables, X)
    np.testing.assert_allclose(model.apply(variables, X), want, rtol=1e-6)
