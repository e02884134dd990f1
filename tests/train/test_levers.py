"""A lever is one entry: what it does to state, shardings, update and report comes by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem import Workload, analyze, make_train_step
from jaxmem.errors import MetricError, SettingWarning
from jaxmem.train import _report, _update
from jaxmem.train._lever import Lever, Told, with_own_metrics


def _around(spec, update):
    def halved(state, batch, **options):
        new, out, metrics = update(state, batch, **options)
        params = jax.tree.map(lambda old, new: (old + new) / 2, state.params, new.params)
        return dataclasses.replace(new, params=params), out, with_own_metrics(metrics, halved=jnp.float32(1))

    return halved


def _shardings(spec, shardings):
    spread = NamedSharding(spec.layout.mesh, PartitionSpec("data"))
    return dataclasses.replace(shardings, opt_state=jax.tree.map(lambda at: spread, shardings.opt_state))


HALVED = Lever(
    idle=lambda spec: ["halved does nothing."],
    state=lambda spec, state: dataclasses.replace(state, skipped=state.skipped + 7),
    shardings=_shardings,
    around=_around,
    told=lambda spec, target: Told(notes=("Steps are halved.",), fields={"remat": "halved"}),
)


@pytest.fixture
def workload(monkeypatch):
    levers = (*_update.LEVERS, HALVED)
    monkeypatch.setattr(_update, "LEVERS", levers)
    monkeypatch.setattr(_report, "LEVERS", levers)
    return Workload(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((8, 4)), jnp.ones((8, 8)), optax.sgd(0.1, 0.9))


def test_it_changes_state_update_and_metrics(workload):
    plain = optax.apply_updates(workload.params, -0.1 * jax.grad(workload.loss_fn)(workload.params, workload.batch))
    with pytest.warns(SettingWarning, match="halved does nothing"):
        step = make_train_step(workload)
    state, metrics = step(step.init(), workload.batch)
    assert (int(state.skipped), float(metrics["halved"])) == (7, 1)
    assert jnp.allclose(state.params, (workload.params + plain) / 2)


def test_it_says_where_leaves_lie(workload):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    with pytest.warns(SettingWarning):
        step = make_train_step(workload, mesh=mesh)
    for state in (step.init(), step(step.init(), workload.batch)[0]):
        (trace,) = jax.tree.leaves(state.opt_state)
        assert trace.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data")), trace.ndim)
        assert state.params.sharding.is_fully_replicated


def test_it_speaks_in_the_report(workload):
    found = analyze(workload, target="cpu")
    assert found.remat == "halved" and {"Steps are halved.", "halved does nothing."} <= set(found.warnings)


def test_metrics_of_the_loss_keep_their_names():
    with pytest.raises(MetricError, match="named otherwise than 'halved'"):
        with_own_metrics({"halved": 1}, halved=2)
