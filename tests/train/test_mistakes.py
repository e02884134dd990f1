"""What the user gave a step and is wrong is said in one paragraph, with JAX's or optax's own error as its cause."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import MemoryConfig, Precision, Workload, accumulate, make_train_step, train_loop, verify
from jaxmem.errors import BatchError, ConfigError, InputError, StateError, WorkloadError
from jaxmem.train._leaves import first_difference
from jaxmem.train._program import jitted


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def work(loss=loss, optimizer=None, width=4, **fields):
    optimizer = optax.adam(0.1) if optimizer is None else optimizer
    fields = {"batch": {"x": jnp.ones((8, width))}, **fields}
    return Workload(loss, {"w": jnp.ones(width)}, optimizer=optimizer, **fields)


def returning(make):
    return optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: make(grads, state))


def raising(params):
    raise KeyError("no such label")


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (optax.lbfgs(), "update takes.*value_fn.*lbfgs"),
        (optax.multi_transform({"a": optax.sgd(0.1)}, "b"), "init takes the trainable parameters.*label"),
        (optax.GradientTransformation(raising, None), "init takes.*KeyError: 'no such label' .test_mistakes.py, line"),
        (returning(lambda grads, state: grads), "update (takes|returns)"),
        (returning(lambda grads, state: (grads["w"], state)), "updates with the structure.*no updates/w"),
        (returning(lambda grads, state: ({"w": jnp.ones(3)}, state)), r"shape \(3,\) instead of \(4,\) at updates/w"),
    ],
)
@pytest.mark.parametrize("stored", [None, "float32"])
def test_a_faulty_optimizer_is_named(optimizer, words, stored):
    if stored and "init" not in words:
        optimizer = optax.chain(optax.trace(0.9), optimizer)  # state that can be stored in another dtype
        words = words.split(".*")[0] if "/w" in words else words
    config = MemoryConfig(precision=Precision(optimizer=stored))
    with pytest.raises(WorkloadError, match=f"(?s){words}"):
        make_train_step(work(optimizer=optimizer), config).lower()


def test_the_state_of_an_optimizer_may_grow():
    norms = optax.monitor({"norm": lambda updates, **extra: optax.tree.norm(updates)})
    step = make_train_step(work(optimizer=optax.chain(optax.sgd(0.1), norms)))
    batch, state = {"x": jnp.ones((8, 4))}, step.init()
    for _ in range(3):
        state, _ = step(state, batch)
    assert int(state.step) == 3


def test_the_cause_is_kept():
    with pytest.raises(WorkloadError) as caught:
        make_train_step(work(optimizer=optax.GradientTransformation(raising, None))).init()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "wrong, got",
    [
        (lambda params: 0.0, "too many positional arguments"),
        (lambda params, batch, labels: 0.0, "missing a required argument: 'labels'"),
        (lambda params, batch, *, key: 0.0, "missing a required.* argument: 'key'"),
        (functools.partial(loss, batch={}), "."),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused(wrong, got):
    with pytest.raises(WorkloadError, match=rf"loss_fn\(params, batch\).*{got}"):
        work(wrong)


@pytest.mark.parametrize(
    "fields, form",
    [
        ({"trainable": lambda path: True}, r"trainable\(path, leaf\)"),
        ({"state": lambda: {"n": 0}}, r"state\(key\)"),
        ({"data": lambda: {"x": jnp.ones((8, 4))}}, r"data\(window_index\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(fields, form):
    with pytest.raises(WorkloadError, match=rf"{form}; got <lambda>.*functools.partial"):
        work(**fields)


def test_a_loss_that_jax_alone_refuses_is_the_users():
    def dynamic(params, batch):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x * 2, params["w"]).sum()

    with pytest.raises(
        WorkloadError, match="a loss that JAX can differentiate; got ValueError: Reverse-mode"
    ) as caught:
        make_train_step(work(dynamic)).lower()
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_in_the_users_own_code_stays_what_it_is():
    with pytest.raises(KeyError, match="weights"):
        make_train_step(work(lambda params, batch: params["weights"])).lower()


def test_a_fault_of_jaxmem_is_no_mistake_of_the_user(monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("wrong inside")

    monkeypatch.setattr(accumulate, "value_and_grad", fail)
    monkeypatch.setattr("jaxmem._blame.is_users", lambda path: False)  # `fail` stands for jaxmem's code
    with pytest.raises(TypeError, match="wrong inside"):
        make_train_step(work()).lower()


@pytest.mark.parametrize(
    "options, words",
    [
        (3, "to be a dict.*got 3"),
        ({"xla_dump_to": ["a"]}, r"got \{'xla_dump_to'"),
        ({"xla_foo": True}, "No such compile option: 'xla_foo'"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "'maybe' is not a valid bool"),
    ],
)
def test_compiler_options_that_xla_does_not_have(options, words):
    def train():
        step = make_train_step(work(compiler_options=options))
        step(step.init(), step.workload.batch)

    with pytest.raises(InputError, match=f"(?s)compiler_options.*{words}"):
        train()


def test_a_program_that_fails_when_it_runs_stays_what_it_is():
    """Whether its batch has other rows than the example, and though its state is gone."""

    def fail(state, batch):
        jax.tree.map(lambda leaf: leaf.delete(), state)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 8 bytes")

    step = make_train_step(work())
    state, step.spec.known[jitted] = step.init(), fail
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(state, {"x": jnp.ones((16, 4))})


def test_a_state_that_was_donated_is_named():
    step = make_train_step(work())
    state, batch = step.init(), step.workload.batch
    step(state, batch)
    for again in (
        lambda: step(state, batch),
        lambda: train_loop(step, state, lambda window: batch, 1, progress=False),
        lambda: verify(step, state=state),
    ):
        with pytest.raises(StateError, match="a step was given before, which donates it: state/.* is deleted"):
            again()


def test_a_state_of_another_workload_is_named():
    step = make_train_step(work())
    wider = make_train_step(work(width=5)).init()
    with pytest.raises(StateError, match=r"shape \(5,\) instead of \(4,\) at state/params/w"):
        step(wider, step.workload.batch)
    plain = make_train_step(work(optimizer=optax.sgd(0.1))).init()
    with pytest.raises(StateError, match="no state/opt_state/0"):
        step(plain, step.workload.batch)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), step.init().params)
    with pytest.raises(StateError, match="bfloat16 instead of float32 at state/params/w"):
        step(dataclasses.replace(step.init(), params=narrow), step.workload.batch)
    with pytest.raises(StateError, match="a TrainState, as step.init.. makes it; got a dict"):
        step({"w": jnp.ones(4)}, step.workload.batch)


def test_a_batch_that_is_not_like_the_example_is_named():
    step = make_train_step(work())
    with pytest.raises(BatchError, match="no batch/x; which ends in KeyError: 'x'"):
        step(step.init(), {"y": jnp.ones((8, 4))})
    with pytest.raises(BatchError, match=r"shape \(8, 5\) instead of \(8, 4\) at batch/x"):
        step(step.init(), {"x": jnp.ones((8, 5))})
    step(step.init(), {"x": np.ones((6, 4))})  # other rows, another width of float: both are fine


def test_a_batch_of_another_package_is_named():
    class Tensor(np.ndarray):
        dtype = type("dtype", (), {"__str__": lambda self: "torch.float32"})()

    assert first_difference({"x": np.ones(2)}, {"x": np.ones(2).view(Tensor)}, "batch", dtypes=True) == (
        "a Tensor of torch.float32 instead of float32 at batch/x"
    )


def test_batch_axes_that_do_not_match_the_batch():
    for axes in ({"y": 0}, (0, None)):
        with pytest.raises(BatchError, match="batch_axes to be a pytree prefix of the batch"):
            work(batch_axes=axes)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float128", "int8", "complex64", np.longdouble, jnp.float8_e5m2])
def test_dtypes_that_cannot_be_computed_with_are_refused(dtype):
    for make in (
        lambda: MemoryConfig(precision=dtype),
        lambda: MemoryConfig(accumulator_dtype=dtype),
        lambda: Precision(params=dtype),
        lambda: accumulate.value_and_grad(loss, 2, accumulator_dtype=dtype),
        lambda: accumulate.multi_steps(optax.sgd(0.1), 2, accumulator_dtype=dtype),
    ):
        with pytest.raises(ConfigError, match="float32, bfloat16, float16, float64"):
            make()
