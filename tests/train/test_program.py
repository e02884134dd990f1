"""What a step's program is told of a target: shapes of its mesh, notes of its trace, the batch that it was made for."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem import MemoryConfig, Workload, analyze, make_train_step
from jaxmem.errors import BatchError, InputError
from jaxmem.remat.auto._assignment import plain
from jaxmem.targets import resolve_target
from jaxmem.train._budget import Trials, _Compiler
from jaxmem.train._decision import step_problem
from jaxmem.train._report import program
from jaxmem.train._spec import StepSpec

BATCH = jnp.ones((8, 8))


def mesh_of(*shape, explicit=False):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices()[: shape[0] * (shape[1] if len(shape) > 1 else 1)]
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], devices=devices, axis_types=(kind,) * len(shape))


def square(w, x):
    return jnp.mean((x @ w) ** 2)


def test_gradients_have_the_shapes_that_the_steps_mesh_gives_them():
    """Not those of the mesh on which the parameters lie now."""
    given = jax.make_mesh((4,), ("model",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    w = jax.device_put(jnp.ones((8, 8)), NamedSharding(given, PartitionSpec(None, "model")))
    spec = StepSpec.of(Workload(square, w, BATCH, optax.sgd(0.1)), MemoryConfig(accumulation_steps=2), mesh_of(2, 2))
    assert program(spec, "step", resolve_target("cpu")).gradients == ((8, 4),)


@pytest.mark.parametrize(("remat", "explicit"), [("none", False), ("full", False), ("full", True)])
def test_what_auto_finds_is_found_of_the_loss_as_configured(remat, explicit):
    def loss(w, x):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None), x, w)[0] ** 2)

    workload = Workload(loss, jnp.ones((3, 8, 8)), BATCH, optax.sgd(0.1))
    config = MemoryConfig(accumulation_steps=2, remat=remat)
    assert make_train_step(workload, config, mesh=mesh_of(4, explicit=explicit)).reduction().kind == "once"


def test_a_program_that_a_budget_compiled_keeps_the_notes_of_its_trace(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("jaxmem.train._report.compiled_program", lambda program, target: program)
    monkeypatch.setattr("jaxmem.train._report.peak_and_seconds", lambda program, target: (7, None))

    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(jnp.tanh(x @ w) @ w) if jax.default_backend() == "tpu" else x
        return jnp.mean(x**2)

    spec, target = StepSpec.of(Workload(loss, jnp.ones((8, 8)), BATCH, optax.sgd(0.1))), resolve_target("tpu-v5e:1x1")
    compiler = _Compiler(spec, 10**9, target, Trials(step_problem(spec, target)))
    compiler.measure(plain(compiler.trials.problem))
    decided = compiler.decided(compiler.trials.made[0])
    assert any("reads jax.default_backend()" in note for note in program(decided, "step", target).notes)


def test_init_refuses_an_example_batch_that_the_mesh_does_not_divide():
    step = make_train_step(Workload(square, jnp.ones((8, 8)), jnp.ones((7, 8)), optax.sgd(0.1)), mesh=mesh_of(4))
    with pytest.raises(BatchError, match="divided evenly"):
        step.init()


def test_a_config_may_be_named():
    workload = Workload(square, jnp.ones((8, 8)), BATCH, optax.sgd(0.1))
    config = MemoryConfig(accumulation_steps=2)
    assert analyze(workload, config=config, target="cpu") == analyze(workload, config, target="cpu")
    with pytest.raises(InputError, match="beside a Workload.*got 1 argument"):
        analyze(workload, config, config=config)
    with pytest.raises(InputError, match="beside a TrainStep"):
        analyze(make_train_step(workload), config)
    with pytest.raises(InputError, match="a Workload beside a config"):
        analyze(square, jnp.ones((8, 8)), BATCH, config=config)


def test_helpers_of_the_step_are_no_layers():
    """JAX names its own operations, such as those on keys, by the functions that call them."""

    def loss(w, x, *, rng):
        return jnp.mean(jnp.tanh(x @ w) ** 2) + 0 * jax.random.normal(rng, (8,)).mean()

    workload = Workload(loss, jnp.ones((8, 8)), BATCH, optax.adam(0.1))
    report = analyze(workload, MemoryConfig(accumulation_steps=2), target="cpu")
    parts = {part for buffer in report.buffers for part in buffer.layer.split("/")}
    assert parts and not {"_update", "update", "step"} & parts


def test_a_report_and_a_run_on_this_machine_share_one_compile():
    compiles = []

    def count(event, duration, **_):
        compiles.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        step = make_train_step(Workload(square, jnp.ones((8, 8)), BATCH, optax.adam(0.1)))
        state = step.init()
        compiles.clear()
        step.report()
        step(state, BATCH)
        assert len(compiles) == 1
        state, metrics = step.compile()(step.init(), BATCH)
        assert set(metrics) == {"loss"} and int(state.step) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
