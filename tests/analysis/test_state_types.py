"""What arguments hold, told by the types of flax, optax, nnx and jaxmem; and what no type tells."""

import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import jaxmem
from jaxmem.accumulate import multi_steps
from jaxmem.analysis._state_types import recognise, recognise_arguments

PARAMS = {"b": jnp.ones(4), "w": jnp.ones((4, 4))}


class Normed(TrainState):
    batch_stats: Any


class Mine(NamedTuple):
    params: Any
    opt_state: Any
    ema: Any


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(linen.Dense(4)(x))


def kinds(tree) -> dict[str, str]:
    """Path → kind."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return dict(zip(paths, recognise(tree).kinds, strict=True))


def of_arguments(*args: Any, names: list[str]) -> list[set[str]]:
    """The kinds of each argument of a function."""
    info = jax.jit(lambda *args: args).trace(*args).args_info
    found = iter(recognise_arguments(info, names).kinds)
    return [{next(found) for _ in jax.tree.leaves(arg)} for arg in args]


def test_a_train_state_of_flax_and_its_subclasses():
    variables = Net().init(jax.random.key(0), jnp.ones((8, 4)))
    state = Normed.create(
        apply_fn=Net().apply,
        params=variables["params"],
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(1e-3)),
        batch_stats=variables["batch_stats"],
    )
    found = kinds(state)
    by_kind = {kind: {path.split("[")[0] for path, k in found.items() if k == kind} for kind in set(found.values())}
    assert by_kind == {
        "state": {".step", ".batch_stats"},
        "parameters": {".params"},
        "optimizer_state": {".opt_state"},
    }
    assert [each.type for each in recognise((jnp.ones(3), {"mine": state})).states] == [Normed]


@pytest.mark.parametrize("state", [Mine(PARAMS, {"m": PARAMS}, PARAMS), {"params": PARAMS, "opt_state": ()}])
def test_a_record_with_params_and_opt_state_is_a_state_and_a_dictionary_may_be_anything(state):
    found = kinds(state)
    if isinstance(state, dict):
        assert set(found.values()) == {"arguments"}
    else:
        assert found[".params['w']"] == "parameters" and found[".opt_state['m']['w']"] == "optimizer_state"
        assert found[".ema['w']"] == "state"


def test_a_dictionary_is_a_state_where_optax_made_part_of_it():
    state = {"params": PARAMS, "opt_state": optax.sgd(0.1, momentum=0.9).init(PARAMS), "key": jax.random.key(0)}
    found = kinds(state)
    assert found["['params']['w']"] == "parameters" and found["['key']"] == "state"
    assert found["['opt_state'][0].trace['w']"] == "optimizer_state"


def test_the_state_of_jaxmem():
    workload = jaxmem.Workload(
        lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2), PARAMS, jnp.ones((8, 4)), optax.adam(1)
    )
    found = kinds(jaxmem.make_train_step(workload).init())
    assert found[".params['w']"] == "parameters" and found[".rng"] == found[".step"] == "state"
    assert found[".opt_state[0].mu['w']"] == "optimizer_state"


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.masked(optax.adam(1e-3), {"b": False, "w": True}),
        optax.multi_transform({"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"b": "b", "w": "a"}),
        optax.apply_if_finite(optax.lion(1e-3), 3),
        optax.contrib.schedule_free_adamw(1e-3),
        optax.adafactor(1e-3),
    ],
)
def test_states_of_optax(optimizer):
    assert set(kinds((optimizer.init(PARAMS), 1.0)).values()) == {"optimizer_state", "arguments"}


@pytest.mark.parametrize(
    "wrap", [lambda o: optax.MultiSteps(o, 4).gradient_transformation(), lambda o: multi_steps(o, 4)]
)
def test_accumulators_of_an_optimizer_are_told_apart(wrap):
    found = kinds(wrap(optax.adam(1e-3)).init(PARAMS))
    sums = {path for path, kind in found.items() if kind == "accumulators"}
    assert sums == {".acc_grads['b']", ".acc_grads['w']"}
    assert set(found.values()) == {"accumulators", "optimizer_state"}


def test_look_ahead_keeps_parameters():
    assert set(kinds(optax.LookaheadParams.init_synced(PARAMS)).values()) == {"parameters"}


def test_variables_of_nnx_by_their_type():
    model = nnx.Sequential(
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1))
    )
    for tree in (model, nnx.state(model)):
        found = kinds(tree)
        by_kind = {
            kind: sorted(p.split(".value")[0][-4:] for p in found if found[p] == kind) for kind in set(found.values())
        }
        assert set(by_kind) == {"parameters", "state"}
        assert len(by_kind["parameters"]) == 4 and len(by_kind["state"]) == 4  # mean, var, key, count
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert set(kinds(optimizer).values()) == set(kinds(nnx.state(optimizer)).values()) == {"optimizer_state"}


@pytest.mark.parametrize("box", [dict, freeze])
def test_variables_of_linen(box):
    variables = box(Net().init(jax.random.key(0), jnp.ones((8, 4))))
    found = kinds(variables)
    assert {path.split("]")[0]: kind for path, kind in found.items()} == {
        "['params'": "parameters",
        "['batch_stats'": "state",
    }
    assert set(kinds({"params": 3.0, "cache": 1.0}).values()) == {"arguments"}  # a linen collection is a dictionary
    assert set(kinds({"params": PARAMS, "learning_rate": 1.0}).values()) == {"arguments"}


def test_parameters_are_what_the_optimizer_keeps_a_copy_of():
    state, x = optax.adam(1e-3).init(PARAMS), jnp.ones((8, 4))
    want = [{"parameters"}, {"optimizer_state"}, {"batch"}]
    assert of_arguments(PARAMS, state, x, names=["weights", "optimizer", "x"]) == want
    # Gradients have the same tree: only a name tells.
    assert of_arguments(PARAMS, PARAMS, state, names=["weights", "grads", "state"])[:2] == [{"arguments"}] * 2
    assert of_arguments(PARAMS, PARAMS, state, names=["params", "grads", "state"])[:2] == [
        {"parameters"},
        {"arguments"},
    ]
    # A learning rate has the shape of the optimizer's count.
    partial = optax.masked(optax.adam(1e-3), {"b": False, "w": True}).init(PARAMS)
    assert of_arguments(PARAMS, partial, jnp.float32(0.1), names=["weights", "s", "rate"])[::2] == [{"arguments"}] * 2
    # Without an optimizer's state nothing tells, whatever the name.
    assert of_arguments(PARAMS, x, names=["params", "x"]) == [{"arguments"}] * 2


def test_nobody_who_has_no_flax_gets_it():
    code = (
        "import sys, jax, jax.numpy as jnp, jaxmem\n"
        "assert 'flax' not in sys.modules\n"
        "jaxmem.analyze(lambda params, x: params['w'] @ x, {'w': jnp.ones((4, 4))}, jnp.ones(4), target='cpu')\n"
        "assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Named(NamedTuple):
    params: Any
    opt: Any
    step: Any


def test_a_state_of_ones_own_is_known_by_what_optax_keeps_whatever_the_field_is_called():
    kept = optax.adam(1e-3).init(PARAMS)
    found = recognise(Named(PARAMS, kept, jnp.int32(0)))
    assert set(found.kinds) == {"parameters", "optimizer_state", "state"} and found.kinds[-1] == "state"
    assert [state.type for state in found.states] == [Named]
    assert set(recognise(Named(PARAMS, 1.0, 0)).kinds) == {"arguments"}
