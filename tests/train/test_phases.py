"""A report of a step counts what a run needs besides: the state made, restored and saved."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from examples import gpt
from jaxmem.targets import resolve_target
from jaxmem.train._phases import compiled_init_bytes, run_phases
from jaxmem.train._program import trace_for

CPU = resolve_target("cpu")
WIDTH = 256
LEAF = 4 * WIDTH**2
SMALL = 2**21  # of scalars, keys and what a program has of its own


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(params["frozen"][0])


def arrays(key=None):
    return {"w": jnp.ones((WIDTH, WIDTH)), "frozen": [jnp.ones((WIDTH, WIDTH)) for _ in range(16)]}


def step_of(params, target: Any = CPU, **options):
    workload = jaxmem.Workload(loss, params, jnp.ones((8, WIDTH)), optax.adam(0.1), trainable="w")
    return jaxmem.make_train_step(workload, target=target, **options)


def peaks(report) -> dict[str, Any]:
    return {phase.name: phase.peak_bytes for phase in report.phases}


def test_each_phase_is_the_state_and_what_it_needs_beside():
    report = step_of(arrays()).report()
    state = (17 + 2) * LEAF  # all parameters, and two moments of those that are trained
    # A CPU's memory is the host's, and a save there holds the state from which the next step was taken.
    most = {"init": state + 17 * LEAF, "restore": 2 * state + LEAF, "save": (report.peak_bytes or 0) + state}
    assert [phase.name for phase in report.phases] == ["init", "step", "restore", "save"]
    assert all(0 <= peaks(report)[name] - size < SMALL for name, size in most.items())
    assert peaks(report)["step"] == report.peak_bytes and report.most_bytes == max(peaks(report).values())
    assert [phase.provenance for phase in report.phases] == ["modelled", "compiled", "modelled", "modelled"]
    assert [phase.name for phase in report.phases if phase.host_bytes >= state] == ["restore", "save"]
    assert "4.2 MiB of the workload's own arrays" in report.phases[0].how


def test_what_the_host_holds_is_not_a_devices():
    spec = step_of(arrays()).spec
    gpu = run_phases(spec, dataclasses.replace(trace_for(spec, CPU), target=dataclasses.replace(CPU, platform="gpu")))
    found = [(need.beside_bytes, need.host_bytes, need.with_steps) for need in gpu.needs[1:]]
    assert found == [(LEAF, gpu.state_bytes, False), (0, gpu.state_bytes, False)]


def test_on_a_mesh_bytes_are_of_one_device():
    mesh = jax.make_mesh((8,), ("data",))
    place = jax.NamedSharding(mesh, jax.P("data"))
    params = {"w": arrays()["w"], "frozen": jax.device_put(arrays()["frozen"], place)}
    report = step_of(params, target=None, mesh=mesh).report()
    assert 0 <= peaks(report)["restore"] - (2 * (1 + 2 + 2) + 1) * LEAF < SMALL


def test_shapes_alone_are_taken_for_what_a_key_makes():
    report = step_of(jax.eval_shape(arrays)).report()
    assert "to draw its leaves" in report.phases[0].how and "own arrays" not in report.phases[0].how


def drawn_on_a_mesh():
    draw = functools.partial(jax.random.normal, shape=(WIDTH, WIDTH))
    made = step_of(lambda key: {"w": draw(key), "frozen": [draw(key)]}, mesh=jax.make_mesh((8,), ("data",)))
    return made, resolve_target(None)  # here XLA draws by shards, and gathers them


def drawn_by(draw):
    return lambda: (step_of(lambda key: {"w": draw(key), "frozen": [draw(key)]}), CPU)


SQUARE = (WIDTH, WIDTH)
CREATORS = (
    lambda key: sum(jax.random.normal(jax.random.fold_in(key, i), SQUARE) for i in range(16)),
    lambda key: jax.random.normal(key, (16, *SQUARE)).mean(0),
    lambda key: jax.random.gamma(key, 2.0, SQUARE),
)


@pytest.mark.parametrize(
    "make",
    [lambda: (jaxmem.make_train_step(gpt.workload()), CPU), drawn_on_a_mesh, *map(drawn_by, CREATORS)],
)
def test_what_draws_a_state_does_not_need_more_than_is_modelled(make):
    step, target = make()
    phases = run_phases(step.spec, trace_for(step.spec, target))
    needed = compiled_init_bytes(step.spec, target) or 0
    assert phases.state_bytes < needed <= phases.state_bytes + phases.needs[0].beside_bytes


def test_a_plain_function_has_no_phases():
    report = jaxmem.analyze(jnp.sin, jnp.ones(8), target="cpu")
    assert report.phases == () and report.most_bytes == report.peak_bytes
