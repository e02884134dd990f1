"""Workloads of linen modules and nnx models: state, RNG streams, and the caller's object."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem import LossOutput, Max, Memory, MemoryConfig, Sum, WeightedMean, Workload, make_train_step
from jaxmem.accumulate import micro_batch
from jaxmem.errors import StateError, WorkloadError
from jaxmem.workload import path_string

X = jnp.asarray(np.random.default_rng(0).normal(1.0, 2.0, (8, 3)).astype(np.float32))
SGD = optax.sgd(0.1)
KEY = jax.random.key(5)


def run(work, steps=1, batch=X, **config):
    step = make_train_step(work, MemoryConfig(**config))
    state = step.init()
    for _ in range(steps):
        state, metrics = step(state, batch)
    return step, state, metrics


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


# -- linen -----------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A block with BatchNorm, and perhaps Dropout."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        y = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(3)(x))
        return x + nn.Dropout(self.rate, deterministic=not train)(jnp.tanh(y))


class Model(nn.Module):
    block: type = Normed
    rate: float = 0.0

    def setup(self):
        self.blocks = [self.block(self.rate, name=f"block_{i}") for i in range(2)]
        self.head = nn.Dense(1)

    def __call__(self, x, *, train):
        return self.head(self.features(x, train=train))

    def features(self, x, *, train):
        for block in self.blocks:
            x = block(x, train)
        return x


def linen_loss(model, batch):
    y = model(batch, train=True)
    return WeightedMean((y**2).sum(), y.size)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_batch_statistics_are_those_of_a_loop_of_micro_batches(remat):
    """Cases 6 and 7: K=4 against four mutable applies in a row; recomputation updates nothing twice."""
    work = Workload.from_linen(
        lambda memory: Model(memory.block(Normed)), lambda m, b, *, memory: linen_loss(m, b), X, SGD, rng=KEY
    )
    step, state, _ = run(work, accumulation_steps=4, remat=remat)
    start = make_train_step(work, step.config).init()
    stats = start.state
    apply = jax.jit(functools.partial(Model().apply, train=True, mutable=["batch_stats"]))
    for i in range(4):
        _, stats = apply({"params": start.params, **stats}, micro_batch(X, i, 4))
    assert_same(state.state, stats)


def test_dropout_streams_come_from_the_steps_key():
    """The first stream is the micro-batch's key itself, as a plain apply would be given; others are folded from it."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, ())
            return w * x, self.make_rng("dropout"), self.make_rng("noise")

    def loss(model, batch):
        y, dropout, noise = model(batch)
        draws = {"dropout": Sum(jax.random.uniform(dropout)), "noise": Sum(jax.random.uniform(noise))}
        return LossOutput(y.mean(), draws)

    work = Workload.from_linen(Noisy(), loss, X, SGD, rng=KEY, rng_streams=("dropout", "noise"))
    _, _, metrics = run(work, accumulation_steps=2)
    want = {"dropout": 0.0, "noise": 0.0}
    for i in range(2):
        key = jax.random.fold_in(jax.random.fold_in(KEY, 0), i)
        rngs = {"dropout": key, "noise": jax.random.fold_in(key, 1)}
        _, *keys = Noisy().apply({"params": {"w": 1.0}}, X, rngs=rngs)
        want = {name: want[name] + float(jax.random.uniform(k)) for name, k in zip(want, keys, strict=True)}
    np.testing.assert_allclose([metrics["dropout"], metrics["noise"]], [want["dropout"], want["noise"]], rtol=1e-6)


def test_any_method_of_the_module_can_be_the_loss():
    """Parameters are created by the loss, so those of a head that it never calls do not exist."""
    loss = lambda model, batch: (model.features(batch, train=True) ** 2).mean()  # noqa: E731
    work = Workload.from_linen(Model(), loss, X, SGD, rng=KEY)
    _, state, _ = run(work)
    assert sorted(state.params) == ["block_0", "block_1"] and sorted(state.state) == ["batch_stats"]


def test_linen_parameters_have_modules_own_paths_and_no_memory_is_allocated_before_init():
    wide = jax.ShapeDtypeStruct((4, 1 << 12), jnp.float32)
    work = Workload.from_linen(nn.Dense(1 << 20), lambda model, x: model(x).mean(), wide, SGD)  # 16 GiB of parameters
    abstract = make_train_step(work).abstract_state()
    assert abstract.params["kernel"].shape == (1 << 12, 1 << 20) and abstract.state == {}
    frozen = Workload.from_linen(Model(), linen_loss, X, SGD, rng=KEY, trainable="^head/")
    step = make_train_step(frozen)
    assert jax.tree.leaves(step.abstract_state().opt_state) == []
    start, (_, state, _) = step.init(), run(frozen)
    assert_same(state.params["block_0"], start.params["block_0"])
    assert (state.params["head"]["kernel"] != start.params["head"]["kernel"]).all()


def test_a_linen_batch_may_hold_keys_none_and_numbers():
    batch = {"x": X, "key": jax.random.key(0), "none": None, "scale": 2.0}
    loss = lambda model, b: (model(b["x"]) * b["scale"] + jax.random.uniform(b["key"])).mean()  # noqa: E731
    axes = {"x": 0, "key": None, "none": None, "scale": None}
    work = Workload.from_linen(nn.Dense(1), loss, batch, SGD, rng=KEY, batch_axes=axes)
    _, _, metrics = run(work, batch=batch, accumulation_steps=2)
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("module", [Model, 3, "dense", nnx.Linear(3, 1, rngs=nnx.Rngs(0))])
def test_what_is_not_a_linen_module(module):
    with pytest.raises(WorkloadError, match="Instantiate the module|Use Workload.from_nnx"):
        Workload.from_linen(module, linen_loss, X, SGD)


def test_a_module_class_with_a_field_memory_is_a_function_of_memory():
    class Marked(nn.Module):
        memory: Memory = Memory()

        @nn.compact
        def __call__(self, x):
            block = self.memory.block(nn.Dense)
            return block(3)(nn.tanh(block(3)(x)))

    work = Workload.from_linen(Marked, lambda model, x: model(x).mean(), X, SGD)
    assert make_train_step(work, MemoryConfig(remat="full")).residual_bytes() > 0


def test_a_flax_loss_keeps_its_state_in_the_module():
    loss = lambda model, x: LossOutput(model(x).mean(), state={"n": 1})  # noqa: E731
    with pytest.raises(WorkloadError, match="state is tracked for it"):
        make_train_step(Workload.from_linen(nn.Dense(1), loss, X, SGD)).lower()


# -- nnx -------------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, mask=None):
        y = self.dropout(jnp.tanh(self.norm(self.linear(x))))
        return x + (y if mask is None else y * mask)


class NnxModel(nnx.Module):
    """Case 11: Dropout, BatchNorm, nnx.List, and an optional argument that is None."""

    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x, mask=None, block=lambda layer: layer):
        for layer in self.blocks:
            x = block(layer)(x, mask)
        return self.head(x)


def nnx_loss(model, batch, *, memory):
    y = model(batch, None, memory.block)
    return LossOutput(WeightedMean((y**2).sum(), y.size), {"max": Max(y.max())})


def plain_state(model):
    """The leaves of an nnx model by path, keys as numbers."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {
        path_string(path): np.asarray(jax.random.key_data(x) if is_key(x) else x)
        for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(model))
    }


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_callers_model_sees_the_new_state_once(remat):
    """Case 11: statistics and RNG counts of two windows of four micro-batches, against a plain nnx loop."""
    model, loop = NnxModel(nnx.Rngs(0)), NnxModel(nnx.Rngs(0))
    before = plain_state(model)
    work = Workload.from_nnx(model, nnx_loss, X, optax.sgd(0.0), rng=KEY)
    step, state, _ = run(work, steps=2, accumulation_steps=4, remat=remat)
    assert_same(plain_state(model), before)  # nothing leaks into the caller's object before update
    call = nnx.jit(lambda model, x: model(x))
    for _ in range(2):
        for i in range(4):
            call(loop, micro_batch(X, i, 4))
    step.update(model, state)
    got, want = plain_state(model), plain_state(loop)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
    counts = [int(value) for name, value in got.items() if "count" in name]
    assert counts == [8, 8]  # each block's dropout: once a micro-batch, not once more for the recomputation
    step(state, X)  # update copied: neither the state nor the model is donated away with the other
    assert np.isfinite(plain_state(model)["head/kernel"]).all()


def test_a_model_made_from_a_key_is_the_model_itself():
    """Nothing is allocated before init, and init makes what the function makes."""
    make = lambda key: NnxModel(nnx.Rngs(key))  # noqa: E731
    work = Workload.from_nnx(make, nnx_loss, X, SGD, rng=KEY)
    assert callable(work.params) and callable(work.state)
    step, state, metrics = run(work, accumulation_steps=2)
    assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["max"])
    model = make(jax.random.key(99))
    step.update(model, state)
    np.testing.assert_array_equal(model.head.kernel[...], state.params["head"]["kernel"][...])


def test_wrt_selects_what_is_differentiated():
    class Adapter(nnx.Param):
        pass

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 1, rngs=rngs)
            self.scale = Adapter(jnp.ones(()))

    model = Adapted(nnx.Rngs(0))
    loss = lambda model, x: (model.linear(x) * model.scale[...]).mean()  # noqa: E731
    step, state, _ = run(Workload.from_nnx(model, loss, X, optax.adam(0.1), wrt=Adapter))
    assert [leaf.shape for leaf in jax.tree.leaves(state.params)] == [()]
    before = np.asarray(model.linear.kernel[...])
    step.update(model, state)
    np.testing.assert_array_equal(model.linear.kernel[...], before)
    assert float(model.scale[...]) != 1.0


def test_trainable_goes_by_the_paths_of_the_model():
    model = NnxModel(nnx.Rngs(0))
    work = Workload.from_nnx(model, nnx_loss, X, optax.adam(0.1), trainable="^head/")
    step, state, _ = run(work)
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * 2  # count; mu and nu of kernel and bias
    before = plain_state(model)
    step.update(model, state)
    after = plain_state(model)
    for name, value in before.items():
        if name.startswith("head/"):
            assert (after[name] != value).all(), name
        elif "linear" in name:
            np.testing.assert_array_equal(after[name], value)


@pytest.mark.parametrize("model", [NnxModel, 3, nn.Dense(3)])
def test_what_is_not_an_nnx_model(model):
    with pytest.raises(WorkloadError, match="Instantiate the module|Use Workload.from_linen"):
        Workload.from_nnx(model, nnx_loss, X, SGD)


def test_a_module_that_grows_its_state_is_refused():
    """A variable that appears in the first call cannot be carried to the next micro-batch."""

    class Growing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            self.mean = nnx.BatchStat(x.mean())
            return self.linear(x)

    work = Workload.from_nnx(Growing(nnx.Rngs(0)), lambda model, x: model(x).mean(), X, SGD)
    with pytest.raises(StateError, match="a new state of the structure passed in"):
        make_train_step(work).lower()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_an_nnx_model_sows_is_not_state():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.sow(nnx.Intermediate, "seen", x)
            return x

    model = Sowing(nnx.Rngs(0))
    for calls_before in range(2):  # the second workload is made of a model that has sown already
        _, state, _ = run(Workload.from_nnx(model, lambda model, x: model(x).mean(), X, SGD), accumulation_steps=2)
        assert jax.tree.leaves(state.state) == []
        assert len(nnx.state(model, nnx.Intermediate)) == calls_before
        model(X)


def test_a_linen_collection_that_grows_is_named():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(1)(x)
            self.sow("losses", "size", jnp.mean(x**2))
            self.sow("intermediates", "seen", x)
            return x

    with pytest.raises(StateError, match="linen collection 'losses' .* sow"):
        run(Workload.from_linen(Sowing(), lambda model, x: model(x).mean(), X, SGD))


def test_a_linen_module_without_parameters_says_so():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x

    with pytest.raises(WorkloadError, match="a workload without parameters"):
        run(Workload.from_linen(Plain(), lambda model, x: model(x).mean(), X, SGD))


def test_one_rng_stream_may_be_given_by_name():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x) + jax.random.normal(self.make_rng("noise"))

    run(Workload.from_linen(Noisy(), lambda model, x: model(x).mean(), X, SGD, rng_streams="noise"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 2])
def test_int64_labels_from_numpy_do_not_warn(steps):
    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, batch):
            logits = nn.Dense(4)(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    batch = {"x": np.ones((8, 3), np.float64), "y": np.arange(8, dtype=np.int64) % 4}
    work = Workload.from_linen(Classifier(), lambda model, batch: model(batch), batch, SGD, rng=KEY)
    run(work, batch=batch, accumulation_steps=steps)


def test_random_keys_in_a_batch_are_allowed():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, batch):
            return nn.Dense(1)(batch["x"] + jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["key"]))

    batch = {"x": X, "key": jax.random.split(KEY, 8)}
    run(Workload.from_linen(Noisy(), lambda model, batch: model(batch).mean(), batch, SGD), batch=batch)


def test_a_function_that_takes_no_memory_is_no_maker_of_modules():
    with pytest.raises(WorkloadError, match="memory -> module"):
        Workload.from_linen(lambda: nn.Dense(3), lambda model, x: model(x).mean(), X, SGD)


def test_a_workload_calls_the_loss_as_its_user_does():
    def squares(model, batch):
        return jnp.mean(model(batch) ** 2)

    def remembering(model, batch, *, memory):
        return squares(model, batch)

    network = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    for loss, name in ((squares, "squares"), (remembering, "remembering"), (functools.partial(squares), "partial")):
        assert f"loss={name} " in repr(Workload.from_nnx(network, loss, X, SGD))
        assert f"loss={name} " in repr(Workload.from_linen(nn.Dense(3), loss, X, SGD))


def test_the_state_of_an_nnx_step_is_told_by_its_shapes():
    network = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(0)))
    state = make_train_step(Workload.from_nnx(network, lambda model, x: jnp.mean(model(x)), X, SGD)).init()
    assert "params=2 arrays of 12 numbers, 48 B" in repr(state) and "<State>" not in repr(state)
