"""TrainStep: donation, copies, abstract state, selection of parameters, keys, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import LossOutput, MemoryConfig, Sum, WeightedMean, Workload, compare, make_train_step
from jaxmem.accumulate import value_and_grad
from jaxmem.errors import (
    BatchError,
    ConfigError,
    IntegerParameterError,
    MetricError,
    RematWithoutEffect,
    StateError,
    WorkloadError,
)
from jaxmem.train._program import jitted
from jaxmem.train._update import make_update

BATCH = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))}


def params():
    return {"backbone": {"kernel": jnp.eye(4) + 0.1}, "head": {"kernel": jnp.ones((4, 1)), "bias": jnp.zeros(1)}}


def loss(params, batch):
    y = jnp.tanh(batch["x"] @ params["backbone"]["kernel"]) @ params["head"]["kernel"] + params["head"]["bias"]
    return WeightedMean(((y - 1) ** 2).sum(), y.size)


def make(loss_fn=loss, given=None, optimizer=None, config=None, **fields):
    given = params() if given is None else given
    workload = Workload(loss_fn, given, fields.pop("batch", BATCH), optimizer or optax.adam(1e-2), **fields)
    return make_train_step(workload, config or MemoryConfig())


def num_bytes(tree):
    def size(leaf):
        return jax.eval_shape(jax.random.key_data, leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return sum(size(leaf).size * size(leaf).dtype.itemsize for leaf in jax.tree.leaves(tree))


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MemoryConfig(), MemoryConfig(accumulation_steps=2, precision="bfloat16")])
def test_the_whole_state_is_donated(config):
    step = make(config=config)
    aliased = step.compile().memory_analysis().alias_size_in_bytes
    flag = step.abstract_state().last_finite  # the one leaf that is written and never read
    assert aliased == num_bytes(step.abstract_state()) - num_bytes(flag)
    state = step.init()
    new, _ = step(state, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf is not state.last_finite)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


def test_the_callers_arrays_survive():
    """Parameters, state and key are copied by `init`, tied leaves too; a second `init` starts from the same values."""
    tied, key = jnp.ones(4), jax.random.key(3)
    given = {"a": tied, "b": tied, "numpy": np.ones(4, np.float32), "python": 2.0}

    def tied_loss(p, batch, state):
        weights = p["a"] * p["b"] * p["numpy"] * p["python"]
        return LossOutput((batch["x"] @ weights).mean(), state=state)

    model_state = {"n": jnp.zeros(())}
    step = make(tied_loss, given, state=model_state, rng=key)
    first, again = step.init(), step.init()
    for state in (first, again):
        state, _ = step(state, BATCH)
        state, _ = step(state, BATCH)
    assert not tied.is_deleted() and not key.is_deleted() and not model_state["n"].is_deleted()
    assert not BATCH["x"].is_deleted()  # batches are not donated
    assert (tied == 1).all() and (given["numpy"] == 1).all()


def test_init_from_functions_of_a_key_allocates_each_array_once():
    def live():
        return sum(x.nbytes for x in jax.live_arrays() if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))

    made = []

    def create(key):
        made.append(key)
        return {"w": jax.random.normal(key, (256, 256))}

    step = make(lambda p, batch: (p["w"] ** 2).sum() * batch["x"].mean(), create, rng=jax.random.key(1))
    assert not made  # nothing is created by the workload or by the step
    abstract = step.abstract_state()
    before = live()
    state = step.init()
    assert live() - before <= num_bytes(state) == num_bytes(abstract)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, state)
    assert state.params["w"].std() > 0.5


def test_init_is_a_function_of_the_key():
    step = make(
        lambda p, b: p["w"].sum() * b["x"].mean(),
        lambda key: {"w": jax.random.normal(key, (3,))},
        rng=jax.random.key(1),
    )
    as_given, other = step.init(), step.init(jax.random.key(2))
    assert (step.init().params["w"] == as_given.params["w"]).all()
    assert (other.params["w"] != as_given.params["w"]).any()
    assert other.rng == jax.random.key(2)


def test_shapes_can_be_lowered_but_not_trained():
    abstract = jax.eval_shape(params)
    step = make(given=abstract, batch=jax.eval_shape(lambda: BATCH))
    assert "func.func" in step.lower().as_text()
    with pytest.raises(WorkloadError, match="only a shape at params/backbone/kernel"):
        step.init()
    with pytest.raises(WorkloadError, match="only a shape at state/n"):
        make(state={"n": jax.ShapeDtypeStruct((), jnp.int32)}).init()


def test_one_trace_over_many_steps():
    traces = []

    def counting(params, batch):
        traces.append(None)
        return loss(params, batch)

    step = make(counting, config=MemoryConfig(accumulation_steps=2))
    state = step.init()
    for _ in range(4):
        state, metrics = step(state, BATCH)
    assert len(traces) == 1 and jitted(step.spec)._cache_size() == 1
    assert int(state.step) == int(state.window) == 4 and int(state.skipped) == 0 and bool(state.last_finite)
    assert float(metrics["loss"]) < float(loss(params(), BATCH).total / 8)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd_schedule", "adafactor"])
def test_the_dtypes_of_the_state_are_stable_with_bfloat16_parameters(optimizer):
    optimizers = {
        "adam": optax.adam(1e-2),
        "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
        "sgd_schedule": optax.sgd(optax.linear_schedule(1.0, 0.0, 4), momentum=0.9),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    }
    given = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params())
    step = make(given=given, optimizer=optimizers[optimizer], config=MemoryConfig(accumulation_steps=2))
    before = step.abstract_state()
    after, metrics = jax.eval_shape(make_update(step.spec), before, BATCH)
    signature = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype), leaf.weak_type), tree)  # noqa: E731
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.leaves(signature(before)) == jax.tree.leaves(signature(after))
    assert metrics["loss"].dtype == jnp.float32


# -- what is trained -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trainable",
    ["^head/", lambda path, leaf: path.startswith("head/"), {"backbone": False, "head": True}],
    ids=["regex", "function", "prefix"],
)
def test_a_frozen_leaf_is_untouched_and_costs_nothing(trainable):
    """Case 15: bit-identical, with no moments, no accumulator, and no gradient in the program."""
    step = make(trainable=trainable, config=MemoryConfig(accumulation_steps=2), optimizer=optax.adam(1e-1))
    state = step.init()
    moments = [leaf.shape for leaf in jax.tree.leaves(state.opt_state)]
    assert sorted(moments) == sorted([(), (4, 1), (1,), (4, 1), (1,)])  # count, mu and nu of the head
    for _ in range(2):
        state, _ = step(state, BATCH)
    np.testing.assert_array_equal(state.params["backbone"]["kernel"], params()["backbone"]["kernel"])
    assert (state.params["head"]["kernel"] != params()["head"]["kernel"]).all()
    whole, part = make(config=step.config), step
    carried = [[aval.shape for aval in scan_carry(s)] for s in (whole, part)]
    assert (4, 4) in carried[0] and (4, 4) not in carried[1]


def scan_carry(step):
    jaxpr = jax.make_jaxpr(make_update(step.spec))(step.abstract_state(), step.abstract_batch())
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    return [v.aval for v in scan.outvars]  # it stacks nothing


def test_the_frozen_rest_trains_as_if_it_were_a_constant():
    frozen = params()["backbone"]
    step = make(trainable="^head/", optimizer=optax.sgd(0.1), config=MemoryConfig(accumulation_steps=4))
    state, _ = step(step.init(), BATCH)
    head_loss = lambda head, batch: loss({"backbone": frozen, "head": head}, batch)  # noqa: E731
    grads = jax.jit(value_and_grad(head_loss, 1))(params()["head"], BATCH).grads
    for name, grad in grads.items():
        np.testing.assert_allclose(state.params["head"][name], params()["head"][name] - 0.1 * grad, rtol=1e-6)


def test_none_integer_and_key_leaves_ride_along():
    """Case 14: they are left out by `trainable`, stay bit-identical, and None stays None."""
    given = {"w": jnp.ones(4), "none": None, "ids": jnp.arange(3), "key": jax.random.key(9), "flag": jnp.array(True)}
    uses_all = lambda p, batch: (batch["x"] @ p["w"] * p["ids"].sum()).mean() + jax.random.uniform(p["key"])  # noqa: E731
    step = make(uses_all, given, trainable="^w$", config=MemoryConfig(accumulation_steps=2))
    state, _ = step(step.init(), BATCH)
    assert state.params["none"] is None and (state.params["w"] != 1).all()
    assert state.params["ids"].dtype == jnp.int32 and (state.params["ids"] == jnp.arange(3)).all()
    assert state.params["key"] == jax.random.key(9) and bool(state.params["flag"])
    with pytest.raises(IntegerParameterError, match="bool at params/flag.*leave that leaf out with `trainable`"):
        make(uses_all, given).lower()


def test_a_selection_that_picks_nothing_lists_paths():
    with pytest.raises(WorkloadError, match="pick at least one parameter.*backbone/kernel"):
        make(trainable="decoder").init()
    with pytest.raises(WorkloadError, match="without parameters"):
        make(given={}).lower()


@pytest.mark.parametrize("depth", [1, 6])
def test_a_frozen_backbone_keeps_nothing_however_deep(depth):
    """Case 31: only the head's input is kept: 8 rows of 4 floats, whatever is below."""

    def deep(params, batch):
        x = batch["x"]
        for kernel in params["backbone"]:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x @ params["head"])

    given = {"backbone": [jnp.eye(4)] * depth, "head": jnp.ones(4)}
    frozen, whole = make(deep, given, trainable="head"), make(deep, given)
    assert frozen.residual_bytes() == 8 * 4 * 4
    assert whole.residual_bytes() >= depth * 8 * 4 * 4


# -- optimizer steps and keys ----------------------------------------------------------------------


def test_schedules_count_optimizer_steps():
    """Case 13: linear 1 → 0 over 4 with K=2: three windows of two micro-batches see the rates 1, 0.75, 0.5."""
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    step = make(
        lambda w, batch: (w * batch["x"][:, 0] * 0).mean() + w,  # gradient 1
        jnp.float32(0),
        optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
        MemoryConfig(accumulation_steps=2),
    )
    state, seen, rates = step.init(), [], []
    for _ in range(3):
        before = float(state.params)
        state, _ = step(state, BATCH)
        seen.append(before - float(state.params))
        rates.append(float(state.opt_state.hyperparams["learning_rate"]))
    assert seen == rates == [1.0, 0.75, 0.5]
    assert int(state.step) == 3 and int(state.opt_state.count) == 3


def random_loss(params, batch, *, rng):
    return LossOutput((params * batch["x"]).mean(), {"drawn": Sum(jax.random.uniform(rng))})


def test_each_window_has_its_own_reproducible_key():
    """Window w has fold_in(rng, w), its micro-batch i fold_in of that with i; a state that was set back repeats it."""
    key = jax.random.key(11)
    step = make(random_loss, jnp.float32(1), rng=key, config=MemoryConfig(accumulation_steps=2))
    state, drawn = step.init(), []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        drawn.append(float(metrics["drawn"]))
    micro = lambda w, i: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, w), i))  # noqa: E731
    np.testing.assert_allclose(drawn, [micro(w, 0) + micro(w, 1) for w in range(3)], rtol=1e-6)
    resumed = make(random_loss, jnp.float32(1), rng=key, config=step.config)
    state = resumed.init()
    state = type(state)(**{**vars(state), "window": jnp.int32(2)})
    assert float(resumed(state, BATCH)[1]["drawn"]) == drawn[2]


@pytest.mark.parametrize("impl", ["rbg", None])
def test_other_keys(impl):
    key = jax.random.key(1, impl=impl) if impl else jax.random.PRNGKey(1)
    step = make(random_loss, jnp.float32(1), rng=key, config=MemoryConfig(accumulation_steps=2))
    state, metrics = step(step.init(), BATCH)
    assert np.isfinite(metrics["drawn"]) and state.rng.dtype == key.dtype


# -- settings and refusals -------------------------------------------------------------------------


def test_compiler_options_reach_the_compiler(tmp_path):
    step = make(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
    step.compile()
    assert any("after_optimizations" in path.name for path in tmp_path.iterdir())
    with pytest.raises(Exception, match="xla_no_such_option"):
        make(compiler_options={"xla_no_such_option": True}).compile()


def test_batch_axes_reach_the_accumulation():
    batch = {"x": BATCH["x"].T, "scale": jnp.float32(2)}
    transposed = lambda p, b: loss(p, {"x": b["x"].T * b["scale"]})  # noqa: E731
    axes = {"x": 1, "scale": None}
    got = []
    for k in (1, 4):
        step = make(transposed, batch=batch, batch_axes=axes, config=MemoryConfig(accumulation_steps=k))
        got.append(step(step.init(), batch)[0].params["backbone"]["kernel"])
    np.testing.assert_allclose(*got, rtol=1e-6)


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: make_train_step(loss), WorkloadError, "jaxmem.Workload; got function"),
        (lambda: make_train_step(make().workload, {"remat": "full"}), ConfigError, "MemoryConfig"),
        (lambda: make_train_step(make().workload, mesh=1), ConfigError, "a jax.sharding.Mesh; got 1"),
        (lambda: make(config=MemoryConfig(remat="full")).lower(), RematWithoutEffect, "layers that repeat"),
        (lambda: make(config=MemoryConfig(accumulation_steps=3)).lower(), BatchError, "K=3.*B=8 rows at batch/x"),
        (lambda: make(lambda p, b: LossOutput(loss(p, b), {"loss": Sum(1)})).lower(), MetricError, "'loss'"),
        (
            lambda: make(lambda p, b: LossOutput(loss(p, b), state={"n": 1})).lower(),
            StateError,
            "Pass the initial state",
        ),
        (lambda: make().update(None, make().init()), WorkloadError, "Workload.from_nnx"),
    ],
)
def test_refusals(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_a_remat_setting_that_marks_no_block_is_an_error_in_compare():
    """It declares `memory` and wraps nothing, so the residuals are those of the plain step."""
    work = make(lambda p, b, *, memory: loss(p, b)).workload
    with pytest.raises(RematWithoutEffect):
        compare({"none": MemoryConfig(), "full": MemoryConfig(remat="full")}, work)


def test_a_loss_that_is_not_finite_is_told():
    step = make(lambda w, b: jnp.log(w) * b["x"].mean() ** 2, jnp.float32(0.0))
    state, metrics = step(step.init(), BATCH)
    assert not bool(state.last_finite) and not np.isfinite(metrics["loss"]) and int(state.step) == 1


def test_parameters_may_be_a_callable_pytree():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Line:
        slope: jax.Array

        def __call__(self, x):
            return x * self.slope

    workload = Workload(lambda line, x: jnp.mean(line(x) ** 2), Line(jnp.ones(())), jnp.ones(4), optax.sgd(0.1))
    step = make_train_step(workload)
    state, metrics = step(step.init(), workload.batch)
    assert isinstance(state.params, Line) and metrics["loss"] == 1.0


def test_an_optimizer_may_ask_for_the_loss():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0))
    workload = Workload(lambda w, x: jnp.mean((w * x) ** 2), jnp.ones(()), jnp.ones(4), optimizer)
    step = make_train_step(workload, MemoryConfig(accumulation_steps=2))
    state = step.init()
    for _ in range(4):
        state, _ = step(state, workload.batch)
    assert state.opt_state[-1].scale < 1.0


def test_init_wants_a_key():
    workload = Workload(lambda w, x: jnp.mean(w * x), jnp.ones(()), jnp.ones(4), optax.sgd(0.1))
    with pytest.raises(WorkloadError, match="PRNG key"):
        make_train_step(workload).init(0)
