"""`MemoryConfig(order="tied")` in a step: the same numbers by the same work, and what its report says."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from jaxmem import MemoryConfig, Workload, make_train_step
from jaxmem._settled import Settled
from jaxmem.errors import SettingWarning
from jaxmem.jaxprs import TIE, equations_in
from jaxmem.targets import resolve_target
from jaxmem.train._decision import step_problem
from jaxmem.train._order import Ties, ties
from jaxmem.train._reduction import reduction
from jaxmem.train._settle import rivals, settled
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import TrainState
from tests.remat.blocks import models
from tests.remat.blocks.models import D, weights

PARAMS = {"layers": [weights(D, D) * i for i in (1.0, 0.5, -0.7)], "head": weights(D, 2)}
BATCH = weights(8, D)
CPU = resolve_target("cpu")
ONLY_HEAD = Settled(order="head")


def layer(x, w):
    return jnp.tanh(jax.nn.gelu(jnp.sin(x) @ w))


def found(params, batch):
    for w in params["layers"]:
        batch = layer(batch, w)
    return jnp.mean((batch @ params["head"]) ** 2)


def marking(params, batch, memory):
    for w in params["layers"]:
        batch = memory.block(layer)(batch, w)
    return jnp.mean((batch @ params["head"]) ** 2)


def scanning(params, batch, memory):
    block = memory.block(lambda x, w: (layer(x, w), None), scanned=True)
    return jnp.mean((jax.lax.scan(block, batch, jnp.stack(params["layers"]))[0] @ params["head"]) ** 2)


def reading_twice(params, batch, memory):
    for w in params["layers"]:
        batch = memory.block(models.layer)(batch, w)
    return jnp.mean((batch @ params["head"]) ** 2)


def step_of(loss=found, mesh=None, **config):
    return make_train_step(Workload(loss, PARAMS, BATCH, optax.adam(0.1)), MemoryConfig(**config), mesh=mesh)


def after_a_step(loss=found, **config):
    step = step_of(loss, **config)
    state, metrics = step(step.init(), BATCH)
    return jax.tree.leaves((state.params, metrics))


@pytest.mark.parametrize(
    "loss, config",
    [
        (found, {}),
        (found, {"remat": "full", "accumulation_steps": 2, "precision": "float16"}),  # with a loss scale
        (found, {"remat": "auto:0.5"}),
        (marking, {"accumulation_steps": 2}),
        (reading_twice, {"accumulation_steps": 2}),  # no tie: it would add up two terms before the accumulator's
    ],
)
def test_a_step_computes_the_same(loss, config):
    tied = step_of(loss, order="tied", **config)
    if config.get("remat") != "auto:0.5":
        assert ties(settled(tied.spec, CPU)) == Ties(0 if loss is reading_twice else 3, head=True)
    for a, b in zip(after_a_step(loss, order="tied", **config), after_a_step(loss, **config), strict=True):
        assert np.array_equal(a, b)


def test_donation_and_the_report():
    free, tied = step_of(remat="full").report(), step_of(remat="full", order="tied").report()
    assert tied.alias_bytes == free.alias_bytes > 0 and tied.flops == free.flops
    assert tied.saved_residual_bytes == free.saved_residual_bytes and tied.recompute_flops == free.recompute_flops
    assert any("of 3 blocks and the head are made before" in line for line in tied.notes)
    assert not any("tied" in line for line in (*free.notes, *free.warnings))


def test_gradients_are_added_in_place_all_the_same():
    notes = step_of(order="tied", accumulation_steps=2).report().notes
    assert "Gradients are added in place for 4 of 4 parameters." in notes


def test_shards_add_up_locally_all_the_same():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    spec = step_of(mesh=mesh, order="tied").spec
    assert reduction(settled(spec, CPU)).shards == 2


def test_blocks_are_found_in_a_loss_without_ties():
    spec = settled(step_of(order="tied", remat="auto:0.5").spec, CPU)
    assert spec.settled.order == "tied"
    program = step_problem(spec, CPU).program.closed
    assert TIE not in {eqn.primitive.name for eqn in equations_in(program.jaxpr)}


def test_a_form_may_tie_the_head_alone():
    """Where layers in a scan come before it, or it shares its weights."""
    for loss, head in ((found, False), (marking, False), (scanning, True)):
        assert ties(step_of(loss, remat="full").spec.in_form(ONLY_HEAD)) == Ties(0, head=head)


def test_auto_ties_the_head_of_a_step_that_recomputes_on_one_accelerator():
    def order(target, mesh=None, **config):
        spec = StepSpec.of(Workload(found, PARAMS, BATCH, optax.sgd(0.1)), MemoryConfig(**config), mesh)
        return settled(spec, resolve_target(target)).settled.order

    assert {order(chip, remat=remat) for chip in ("gpu-h100", "tpu-v5e") for remat in ("full", "dots")} == {"head"}
    assert order("gpu-h100", remat="auto:0.5") == "head"
    assert order("gpu-h100") == order("cpu", remat="full") == "free"
    two = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    assert order("gpu-h100:1x1x2", remat="full") == order("gpu-h100", two, remat="full") == "free"


def test_what_has_no_layers_is_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = make_train_step(
            Workload(lambda w, x: jnp.mean(jnp.tanh(x @ w)), jnp.eye(D), BATCH, optax.sgd(0.1)),
            MemoryConfig(order="tied"),
        )
    with pytest.warns(SettingWarning, match='order="tied" does nothing.*neither layers'):
        step(step.init(), BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the report traces the step anew
        assert any('order="tied" does nothing' in note for note in step.report().warnings)


def test_the_other_order_is_a_rival_where_none_was_asked_for():
    def orders(order):
        spec = step_of(order=order).spec
        default = settled(spec, CPU).settled.order
        return default, {form.order for form in rivals(spec, CPU)} - {default}

    assert orders("auto") == ("free", {"tied"})
    assert orders("tied")[0] == "tied" and orders("free")[0] == "free"


def test_what_comes_of_the_loss_is_returned_before_the_parameters():
    fields = [field.name for field in dataclasses.fields(TrainState)]
    assert fields.index("last_finite") < fields.index("params")  # XLA:GPU schedules in the order of outputs
