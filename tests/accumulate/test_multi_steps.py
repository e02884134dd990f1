"""`multi_steps`: exact windows, what stays untouched, what the inner optimizer sees, and what a state is good for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmem.accumulate import apply_updates as apply
from jaxmem.accumulate import flush, has_updated, multi_steps, steps_per_epoch, value_and_grad
from jaxmem.errors import ConfigError, StateError
from tests.accumulate.problems import assert_trees_close, token_batch, token_loss, token_mean, token_params

STEPS = {}  # the jitted step of an optimizer, so that calls of micro_steps for one compile once


def micro_steps(optimizer, params, grads, weights=None, state=None):
    """Parameters and state after one jitted update for each gradient."""

    def step(params, state, grad, weight):
        updates, state = optimizer.update(grad, state, params, weight=weight)
        return apply(params, updates), state

    _, step = STEPS.setdefault(id(optimizer), (optimizer, jax.jit(step)))
    state = jax.jit(optimizer.init)(params) if state is None else state
    for index, grad in enumerate(grads):
        weight = 1.0 if weights is None else weights[index]
        params, state = step(params, state, grad, jnp.float32(weight))
    return params, state


def plain_step(inner, grads, params):
    """Updates and state of the first step of an optimizer by itself."""
    return jax.jit(lambda grads, params: inner.update(grads, inner.init(params), params))(grads, params)


def bits(tree):
    """The bytes of every leaf, so that -0.0 and 0.0 differ and a NaN equals itself."""
    keys = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(leaf) if keys(leaf) else leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# -- windows and weights -------------------------------------------------------------------------------------------


def test_weighted_micro_steps_give_the_gradient_over_all_tokens():
    """Case A1: one token of loss 1 and seven of 0 make 0.125, not 0.5."""
    params, _ = micro_steps(multi_steps(optax.sgd(1.0), 2), jnp.zeros(()), jnp.array([1.0, 0.0]), [1, 7])
    assert float(params) == -0.125


def test_it_agrees_with_the_scan_loop_and_the_whole_batch():
    k = 8  # one row each, of which one has no tokens
    batch, params = token_batch([4, 0, 1, 3, 2, 4, 1, 1]), token_params()
    micro = jax.tree.map(lambda x: x.reshape(-1, k, *x.shape[1:]).swapaxes(0, 1), batch)  # rows i, i + K, …
    optimizer = multi_steps(optax.sgd(1.0), k)

    @jax.jit
    def mean_of_window(params, micro):
        def body(state, rows):
            tokens = jnp.sum(rows["labels"] >= 0)
            grads = jax.grad(token_mean)(params, rows)  # NaN where there are no tokens
            updates, state = optimizer.update(grads, state, params, weight=tokens)
            return state, updates

        return jax.tree.map(lambda updates: -updates[-1], jax.lax.scan(body, optimizer.init(params), micro)[1])

    mean = mean_of_window(params, micro)
    assert_trees_close(mean, jax.jit(jax.grad(token_mean))(params, batch))
    assert_trees_close(mean, jax.jit(value_and_grad(token_loss, k))(params, batch).grads)


def test_clipping_acts_on_the_mean_and_the_moments_see_one_step():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    grads, weights = [{"w": jnp.array([30.0, -3.0])}, {"w": jnp.array([-9.0, 2.0])}], [1, 3]
    params = {"w": jnp.ones(2)}
    got, state = micro_steps(multi_steps(inner, 2), params, grads, weights)
    mean = {"w": jnp.array([0.75, 0.75])}
    updates, inner_state = plain_step(inner, mean, params)
    assert_trees_close(got, optax.apply_updates(params, updates))
    assert_trees_close(state.inner_opt_state, inner_state)


def test_a_call_without_weight_is_ignored_even_where_its_mean_is_nan():
    optimizer, params = multi_steps(optax.sgd(1.0), 3), jnp.zeros(())
    params, state = micro_steps(optimizer, params, jnp.array([jnp.nan, 2.0, jnp.inf]), [0, 4, 0])
    assert float(params) == -2.0
    assert int(state.gradient_step) == 1


def test_a_window_of_no_weight_steps_on_a_gradient_of_zero():
    """As the plain step on a batch without tokens; what the window before left in the accumulators is gone."""
    optimizer = multi_steps(optax.sgd(1.0, momentum=0.5), 2)
    params, state = micro_steps(optimizer, jnp.zeros(()), jnp.array([4.0, 4.0]))
    params, state = micro_steps(optimizer, params, jnp.array([9.0, jnp.nan]), [0, 0], state)
    assert float(params) == -4.0 - 2.0
    assert int(state.gradient_step) == 2


def test_case_13_schedules_count_optimizer_steps():
    rates, schedule = [], optax.linear_schedule(1.0, 0.0, 4)
    optimizer = multi_steps(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule), 2)
    params, state = jnp.zeros(()), None
    for _ in range(6):
        before = params
        params, state = micro_steps(optimizer, params, jnp.ones(1), state=state)
        if has_updated(state):
            rates.append(float(before - params))
    assert rates == [1.0, 0.75, 0.5]
    assert float(state.inner_opt_state.hyperparams["learning_rate"]) == 0.5


def test_every_may_grow_with_the_optimizer_steps():
    optimizer = multi_steps(optax.sgd(1.0), lambda step: 1 + step)  # windows of 1, 2, 3 calls
    params, state, taken = jnp.zeros(()), None, []
    for grad in range(1, 7):
        params, state = micro_steps(optimizer, params, jnp.full(1, float(grad)), state=state)
        taken.append(bool(has_updated(state)))
    assert taken == [True, False, True, False, False, True]
    assert float(params) == -(1 + 2.5 + 5)


def test_flush_steps_on_a_short_window():
    optimizer, inner = multi_steps(optax.adam(0.1), 4), optax.adam(0.1)
    params = jnp.ones(3)
    _, state = micro_steps(optimizer, params, [jnp.full(3, 2.0), jnp.full(3, 6.0)], [1, 3])
    end = jax.jit(lambda state, params: flush(optimizer, state, params))
    updates, state = end(state, params)
    want, want_state = plain_step(inner, jnp.full(3, 5.0), params)
    assert_trees_close((updates, state.inner_opt_state), (want, want_state))
    assert (int(state.mini_step), int(state.gradient_step), bool(has_updated(state))) == (0, 1, True)
    again, after = end(state, params)  # nothing is left
    assert not np.any(again)
    assert not has_updated(after)
    assert bits((after.inner_opt_state, after.gradient_step)) == bits((state.inner_opt_state, state.gradient_step))
    with pytest.raises(ConfigError, match="outermost"):
        flush(optax.chain(optimizer), state, params)


def test_steps_per_epoch_counts_what_the_optimizer_counts():
    every = lambda step: 1 + step  # noqa: E731
    optimizer = multi_steps(optax.sgd(1.0), every)
    end = jax.jit(lambda state: flush(optimizer, state, jnp.zeros(()))[1])
    for examples in (0, 3, 24, 25):
        _, state = micro_steps(optimizer, jnp.zeros(()), jnp.ones(-(-examples // 4)))
        assert int(end(state).gradient_step) == steps_per_epoch(examples, 4, every)
    assert [steps_per_epoch(examples, 4, 2) for examples in (0, 3, 20, 21, 24, 25)] == [0, 1, 3, 3, 3, 4]
    assert steps_per_epoch(23, 4, 5, drop_last=True) == 1
    assert steps_per_epoch(24, 4, lambda step: 1 + step, first_step=2) == 2
    for bad in ((-1, 4, 2), (8, 0, 2), (8, 4, 0), (8.5, 4, 2)):
        with pytest.raises(ConfigError):
            steps_per_epoch(*bad)


# -- what is not finite --------------------------------------------------------------------------------------------

BAD = jnp.array([1.0, jnp.nan, 3.0, 5.0, 7.0, 9.0])  # three windows of 2


def test_skip_window_voids_the_window_and_no_other():
    optimizer, params = multi_steps(optax.adam(0.1), 2), jnp.ones(())
    start = optimizer.init(params)
    voided, state = micro_steps(optimizer, params, BAD[:2])
    assert bits((voided, state.inner_opt_state)) == bits((params, start.inner_opt_state))
    assert [int(n) for n in (state.mini_step, state.gradient_step, state.skip_state.skipped_windows)] == [0, 0, 1]
    assert not has_updated(state)
    got, state = micro_steps(optimizer, voided, BAD[2:], state=state)
    want, clean = micro_steps(optimizer, params, BAD[2:])
    assert bits((got, state.inner_opt_state)) == bits((want, clean.inner_opt_state))


def test_skip_micro_leaves_one_call_out_and_does_not_stretch_the_window():
    optimizer = multi_steps(optax.sgd(1.0), 3, nonfinite="skip_micro")
    params, state = micro_steps(optimizer, jnp.zeros(()), jnp.array([1.0, jnp.inf, 3.0, 8.0]), [1, 100, 3, 1])
    assert float(params) == -2.5
    assert int(state.mini_step) == 1
    params, state = micro_steps(optimizer, params, jnp.array([jnp.nan, 4.0]), state=state)
    assert float(params) == -2.5 - 6.0
    params, state = micro_steps(optimizer, params, jnp.full(3, jnp.nan), state=state)  # nothing is left of it
    assert float(params) == -8.5
    assert (int(state.gradient_step), int(state.skip_state.skipped_windows)) == (2, 1)


def test_propagate_hands_it_on_and_the_next_window_is_clean():
    optimizer = multi_steps(optax.sgd(1.0), 2, nonfinite="propagate")
    params, state = micro_steps(optimizer, jnp.zeros(()), BAD[:2])
    assert np.isnan(params)
    params, _ = micro_steps(optimizer, jnp.zeros(()), BAD[2:4], state=state)
    assert float(params) == -4.0


def test_a_weight_that_is_not_finite_counts_as_such():
    for nonfinite, weight, want in (("skip_window", jnp.nan, 0.0), ("skip_micro", jnp.inf, -2.0)):
        optimizer = multi_steps(optax.sgd(1.0), 2, nonfinite=nonfinite)
        params, _ = micro_steps(optimizer, jnp.zeros(()), jnp.array([2.0, 4.0]), [1.0, weight])
        assert float(params) == want


# -- leaves that are not trained -----------------------------------------------------------------------------------


def test_case_14_leaves_that_are_no_floats_stay_as_they_are():
    params = {
        "w": jnp.ones(2),
        "none": None,
        "steps": jnp.arange(3),
        "flag": jnp.array(True),
        "key": jax.random.key(7),
        "raw": jax.random.PRNGKey(3),
    }
    optimizer = multi_steps(optax.adamw(0.1), 2)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return apply(params, updates), state

    new = params
    for _ in range(4):
        new, state = step(new, state)
    assert new["none"] is None
    assert not np.array_equal(new["w"], params["w"])
    del new["w"], params["w"]
    assert bits(new) == bits(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.acc_grads)) == 2
    assert sum(leaf.size for leaf in jax.tree.leaves(state.inner_opt_state)) == 2 * 2 + 1  # moments and a count


FREEZERS = {
    "masked": (optax.masked(optax.adam(0.1), {"w": True, "frozen": False}), None),
    "set_to_zero": (
        optax.partition({"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "frozen": "b"}),
        None,
    ),
    "trainable": (optax.adamw(0.1), "^w$"),
}


@pytest.mark.parametrize("how", FREEZERS)
def test_case_15_frozen_leaves_are_left_alone_and_cost_nothing(how):
    inner, trainable = FREEZERS[how]
    optimizer = multi_steps(inner, 2, trainable=trainable)
    params = {"w": jnp.ones(2), "frozen": jnp.array([-0.0, 1.0, 1e-30])}
    grads = {"w": jnp.full(2, 7.0), "frozen": jnp.full(3, 7.0)}
    new, state = micro_steps(optimizer, params, [grads] * 4)
    assert bits(new["frozen"]) == bits(params["frozen"])
    assert int(state.gradient_step) == 2
    assert not np.array_equal(new["w"], params["w"])
    sizes = lambda tree: [leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim]  # noqa: E731
    assert sizes(state.acc_grads) == [2]
    assert sizes(state.inner_opt_state) == [2, 2]
    # A NaN where nothing is trained voids nothing.
    _, state = micro_steps(optimizer, new, [{**grads, "frozen": jnp.full(3, jnp.nan)}] * 2, state=state)
    assert int(state.gradient_step) == 3


def test_masks_that_freeze_nothing_are_let_be():
    """An optimizer each for two groups, and one that hands gradients through."""
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    first, second = {"a": True, "b": False}, {"a": False, "b": True}
    for inner in (
        optax.chain(optax.masked(optax.sgd(0.1), first), optax.masked(optax.sgd(0.5), second)),
        optax.identity(),
    ):
        got, _ = micro_steps(multi_steps(inner, 2), params, [params] * 2)
        updates, _ = plain_step(inner, params, params)
        assert_trees_close(got, optax.apply_updates(params, updates))


def test_it_may_be_one_of_several_optimizers():
    """Where the others' leaves are absent; each has windows of its own."""
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(())}
    each = {"a": multi_steps(optax.sgd(1.0), 2), "b": multi_steps(optax.sgd(1.0), 3), "c": optax.sgd(1.0)}
    ones = jax.tree.map(jnp.ones_like, params)
    got, _ = micro_steps(optax.partition(each, {"a": "a", "b": "b", "c": "c"}), params, [ones] * 4)
    assert jax.tree.map(lambda leaf: float(leaf.max()), got) == {"a": -2.0, "b": -1.0, "c": -4.0}


# -- dtypes and transformations ------------------------------------------------------------------------------------


def test_case_16_bf16_parameters_and_a_factored_optimizer():
    params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    optimizer = multi_steps(optax.chain(optax.zero_nans(), optax.adafactor(0.01)), 2)
    state, traces = optimizer.init(params), []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = optimizer.update(grads, state, params)
        assert updates["w"].dtype == jnp.bfloat16
        return optax.apply_updates(params, updates), state

    dtypes = lambda tree: jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), tree)  # noqa: E731
    before = dtypes((params, state))
    for index in range(6):
        params, state = step(params, state, {"w": jnp.full((256, 256), 0.1 * index, jnp.bfloat16)})
        assert dtypes((params, state)) == before
    assert len(traces) == 1
    assert state.acc_grads["w"].dtype == jnp.float32


def test_the_inner_optimizer_gets_the_accumulators_dtype():
    """In bfloat16 a mean of 1 and 1 + 2**-7 rounds to one of them, and the update to 0 or 2."""
    seen = []
    spy = optax.stateless(lambda updates, params: seen.append(updates.dtype) or (updates - 1) * 2.0**8)
    params, grads = jnp.zeros((), jnp.bfloat16), jnp.array([1.0, 1.0 + 2**-7], jnp.bfloat16)
    got, _ = micro_steps(multi_steps(spy, 2), params, grads)
    assert float(got) == 1.0
    assert set(seen) == {jnp.dtype(jnp.float32)}
    _, state = micro_steps(multi_steps(optax.sgd(1.0), 2, accumulator_dtype="bfloat16"), params, grads)
    assert state.acc_grads.dtype == jnp.bfloat16
    _, state = micro_steps(multi_steps(optax.sgd(1.0), 2), jnp.zeros((), jnp.complex64), jnp.array([1j, 2.0]))
    assert complex(state.acc_grads) == 1 + 0.5j


def test_a_long_window_does_not_stagnate():
    """Case E19 for calls: 1024 times 0.01 in bfloat16."""
    grads = jnp.full(1024, 0.01, jnp.bfloat16)
    optimizer, params = multi_steps(optax.sgd(1.0), 1024), jnp.zeros((), jnp.bfloat16)

    def body(carry, grad):
        updates, state = optimizer.update(grad, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (params, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, grads))((params, optimizer.init(params)))
    np.testing.assert_allclose(float(state.acc_grads), float(grads[0]), rtol=1e-5)
    assert float(params) == -float(grads[0])


def test_the_inner_optimizer_runs_only_at_the_end_of_windows():
    calls = []

    def update(updates, params):
        jax.debug.callback(lambda: calls.append(None))
        return updates

    optimizer = multi_steps(optax.stateless(update), 3)
    micro_steps(optimizer, jnp.zeros(()), jnp.ones(7))
    jax.effects_barrier()
    assert len(calls) == 2


def test_keywords_reach_the_inner_optimizer():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    optimizer, params = multi_steps(inner, 2), jnp.zeros(())
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for value in (1.0, 1.0, 1.0, 1.0, 2.0, 2.0):
        _, state = update(jnp.ones(()), state, params, value=value)
    assert float(optax.tree_utils.tree_get(state, "scale")) < 1.0


# -- the state -----------------------------------------------------------------------------------------------------


def test_the_state_reads_like_that_of_optax():
    optimizer, params = multi_steps(optax.adam(0.1), 2), {"w": jnp.ones(2), "steps": jnp.arange(2)}
    state = optimizer.init(params)
    assert isinstance(state, optax.MultiStepsState)
    get = optax.tree_utils.tree_get
    assert (int(get(state, "mini_step")), int(get(state, "count"))) == (0, 0)
    specs = optax.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        state,
        {"w": "spec of w", "steps": "spec of steps"},
        transform_non_params=lambda _: None,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    assert specs.acc_grads["w"] == specs.inner_opt_state[0].mu["w"] == "spec of w"


def test_training_that_resumes_in_mid_window_goes_on_bit_for_bit(tmp_path):
    import orbax.checkpoint as ocp

    inner = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.adam(0.1))
    optimizer = multi_steps(inner, 3, nonfinite="skip_micro")
    params = {"w": jnp.ones(4), "half": jnp.ones(2, jnp.bfloat16), "steps": jnp.arange(2)}
    grads = [
        {"w": jnp.arange(4.0) * i - 1, "half": jnp.ones(2, jnp.bfloat16) * (jnp.nan if i == 1 else i), "steps": None}
        for i in range(7)
    ]
    weights = [1, 2, 3, 4, 5, 6, 7]
    whole = micro_steps(optimizer, params, grads, weights)
    half = micro_steps(optimizer, params, grads[:2], weights[:2])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", half)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "half", jax.eval_shape(lambda: half))
    assert jax.tree.structure(restored) == jax.tree.structure(half)
    assert bits(restored) == bits(half)
    rest = micro_steps(optimizer, restored[0], grads[2:], weights[2:], restored[1])
    assert bits(rest) == bits(whole)


def test_an_nnx_optimizer_takes_it():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, multi_steps(optax.sgd(0.1), 2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model), weight=x.shape[0])

    kernels = [model.kernel[...]]
    for _ in range(2):
        step(model, optimizer, jnp.ones((4, 3)))
        kernels.append(model.kernel[...])
    assert bits(kernels[0]) == bits(kernels[1]) != bits(kernels[2])


def test_it_goes_on_where_optax_stopped():
    """Window for window as `optax.MultiSteps`, from its state too."""
    theirs, ours = optax.MultiSteps(optax.adam(0.1), 2), multi_steps(optax.adam(0.1), 2)
    grads, params = jnp.arange(1.0, 7.0), jnp.ones(())
    whole, _ = micro_steps(ours, params, grads)
    state, update = jax.jit(theirs.init)(params), jax.jit(theirs.update)
    for grad in grads[:2]:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    with pytest.raises(StateError, match="made by optax"):
        ours.update(grads[0], state, params)
    taken = {"inner_opt_state": state.inner_opt_state, "gradient_step": state.gradient_step}
    params, state = micro_steps(ours, params, grads[2:], state=ours.init(params)._replace(**taken))
    np.testing.assert_allclose(params, whole, rtol=1e-6)
    assert int(state.gradient_step) == 3


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, match",
    [
        ({"every": 0}, "every to be a whole number"),
        ({"every": 2.0}, "every to be a whole number"),
        ({"every": True}, "every to be a whole number"),
        ({"optimizer": "adam"}, "GradientTransformation"),
        ({"nonfinite": "skip"}, "skip_window, skip_micro, propagate"),
        ({"accumulator_dtype": "int32"}, "accumulator_dtype"),
    ],
)
def test_arguments_that_cannot_be_honoured(options, match):
    options = {"optimizer": optax.sgd(1.0), "every": 2} | options
    with pytest.raises(ConfigError, match=match):
        multi_steps(options.pop("optimizer"), options.pop("every"), **options)


@pytest.mark.parametrize("weight", [jnp.ones(2), "1", -1.0, 1j])
def test_weights_that_are_none(weight):
    optimizer = multi_steps(optax.sgd(1.0), 2)
    with pytest.raises(ConfigError, match="weight"):
        optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())), weight=weight)


@pytest.mark.parametrize(
    "grads, match",
    [
        ({"a": jnp.ones(2)}, "parameters' structure"),
        ({"a": jnp.ones(2), "b": None}, "params/b; got None"),
        ({"a": jnp.ones(2), "b": jnp.ones(2)}, r"\[3\] at params/b; got float32\[2\]"),
    ],
)
def test_gradients_of_something_else(grads, match):
    params, optimizer = {"a": jnp.ones(2), "b": jnp.ones(3)}, multi_steps(optax.sgd(1.0), 2)
    with pytest.raises(StateError, match=match):
        optimizer.update(grads, optimizer.init(params), params)
