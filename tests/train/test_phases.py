"""A report of a step counts what a run needs besides: the state made, restored and saved."""

import dataclasses
import functools

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


def step_of(params, target=CPU, **options):
    workload = jaxmem.Workload(loss, params, jnp.ones((8, WIDTH)), optax.adam(0.1), trainable="w")
    return jaxmem.make_train_step(workload, target=target, **options)


def peaks(report):
    return {phase.name: phase.peak_bytes for phase in report.phases}


def test_each_phase_is_the_state_and_what_it_needs_beside():
    report = step_of(arrays()).report()
    state = (17 + 2) * LEAF  # all parameters, and two moments of those that are trained
    most = {"init": state + 17 * LEAF, "restore": state + LEAF, "save": state}
    assert [phase.name for phase in report.phases] == ["init", "step", "restore", "save"]
    assert all(0 <= peaks(report)[name] - size < SMALL for name, size in most.items())
    assert peaks(report)["step"] == report.peak_bytes and report.most_bytes == peaks(report)["init"]
    assert [phase.provenance for phase in report.phases] == ["modelled", "compiled", "modelled", "modelled"]
    assert [phase.name for phase in report.phases if phase.host_bytes >= state] == ["restore", "save"]
    assert "4.2 MiB of the workload's own arrays" in report.phases[0].how


def test_on_a_mesh_bytes_are_of_one_device():
    mesh = jax.make_mesh((8,), ("data",))
    place = jax.NamedSharding(mesh, jax.P("data"))
    params = {"w": arrays()["w"], "frozen": jax.device_put(arrays()["frozen"], place)}
    report = step_of(params, target=None, mesh=mesh).report()
    assert 0 <= peaks(report)["restore"] - (1 + 2 + 2 + 1) * LEAF < SMALL


def test_a_verdict_counts_the_worst_phase_and_compiles_what_makes_the_state_only_where_that_could_change_it():
    step = step_of(arrays())
    capacity = 28 * LEAF  # the step takes about 20, the state and the arrays that are copied to it 36
    report = step_of(arrays(), target=dataclasses.replace(CPU, memory_bytes=capacity)).report()
    init, *_, save = report.phases
    assert (report.fits, report.fits_reason[:36]) == ("no", "the peak of init (compiled), 9.0 MiB")
    assert init.provenance == "compiled" and init.peak_bytes == compiled_init_bytes(step.spec, CPU)
    assert report.peak_bytes < save.peak_bytes + 4 * LEAF < capacity < init.peak_bytes
    table = jaxmem.analysis.Comparison(rows=(report,), target="cpu")
    assert table.choices[0].missing_bytes == init.peak_bytes - capacity


def test_a_bound_that_exceeds_the_device_is_no_verdict():
    made = step_of(lambda key: arrays(), target=dataclasses.replace(CPU, memory_bytes=25 * LEAF)).report()
    assert made.fits == "yes" and made.phases[0].provenance == "compiled"  # nothing is drawn: the bound is far off
    assert made.phases[0].peak_bytes < 20 * LEAF


def test_shapes_alone_are_taken_for_what_a_key_makes():
    report = step_of(jax.eval_shape(arrays)).report()
    assert "to draw its largest leaf" in report.phases[0].how and "own arrays" not in report.phases[0].how


def drawn_on_a_mesh():
    draw = functools.partial(jax.random.normal, shape=(WIDTH, WIDTH))
    made = step_of(lambda key: {"w": draw(key), "frozen": [draw(key)]}, mesh=jax.make_mesh((8,), ("data",)))
    return made, resolve_target(None)  # here XLA draws by shards, and gathers them


@pytest.mark.parametrize("make", [lambda: (jaxmem.make_train_step(gpt.workload()), CPU), drawn_on_a_mesh])
def test_what_draws_a_state_does_not_need_more_than_is_modelled(make):
    step, target = make()
    phases = run_phases(step.spec, trace_for(step.spec, target))
    needed = compiled_init_bytes(step.spec, target) or 0
    assert phases.state_bytes < needed <= phases.state_bytes + phases.needs[0].beside_bytes


def test_a_plain_function_has_no_phases():
    report = jaxmem.analyze(jnp.sin, jnp.ones(8), target="cpu")
    assert report.phases == () and report.most_bytes == report.peak_bytes
