"""Every leaf finds its source before anything is read, or what does not fit is told by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.accumulate import multi_steps
from jaxmem.checkpoint._leaves import Leaf, described, named_leaves
from jaxmem.checkpoint._match import match
from jaxmem.checkpoint._windows import window_facts
from jaxmem.errors import CheckpointError, CheckpointMismatchError


def leaves_of(tree):
    return {name: described(leaf) for name, leaf in named_leaves(tree).items()}


def shape(*sizes, dtype=np.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def model(layers=3, width=4, dtype=np.float32):
    return {f"layer_{i}": {"kernel": shape(width, width, dtype=dtype), "bias": shape(width)} for i in range(layers)}


def state(params=None, optimizer=None, **more):
    params = model() if params is None else params
    made = jax.eval_shape((optimizer or optax.adam(0.1)).init, params)
    return {"step": shape(dtype=np.int32), "params": params, "opt_state": made, **more}


def told(saved, like, **options) -> str:
    with pytest.raises(CheckpointMismatchError) as error:
        match(leaves_of(saved), like, where="runs/40", **options)
    assert "\n" not in str(error.value) and "runs/40" in str(error.value)
    return str(error.value)


def test_equal_trees_are_read_as_they_are():
    reading = match(leaves_of(state()), state())
    assert all(name == source for name, source in reading.sources.items())
    assert reading.sources.keys() == named_leaves(state()).keys() and not reading.zeros and not reading.notes


SCALE = {"scale": shape(), "good_windows": shape(dtype=np.int32)}
STACKED = {"layers": {"kernel": shape(3, 4, 4), "bias": shape(3, 4)}}
BF16 = optax.adam(0.1, mu_dtype=jnp.bfloat16)
CAUSES = {
    "another model": (
        state(),
        state({"encoder": {"w": shape(5, 5)}, "decoder": {"w": shape(6, 6)}}),
        ["decoder/w float32[6, 6]", "and 3 more", "probably of another model"],
    ),
    "another width": (
        state(),
        state(model(width=5)),
        [
            "18 leaves of another shape",
            "layer_0/bias float32[4] instead of float32[5]",
            "and 15 more",
            "another model",
        ],
    ),
    "another optimizer": (
        state(),
        state(optimizer=optax.sgd(0.1, momentum=0.9)),
        ["opt_state/0/trace/layer_0/bias float32[4]", "Only the optimizer's state differs"],
    ),
    "a loss scale on": (state(), state(loss_scale=SCALE), ["2 leaves that it lacks", "A loss scale was turned on"]),
    "a loss scale off": (state(loss_scale=SCALE), state(), ["2 leaves that the tree lacks", "scale was turned off"]),
    "bf16 moments": (
        state(),
        state(optimizer=BF16),
        ["6 leaves of another dtype", "float32[4] instead of bfloat16[4]", "cast='opt_state'"],
    ),
    "bf16 everywhere": (
        state(),
        state(model(dtype=jnp.bfloat16)),
        ["params/layer_2/kernel float32[4, 4] instead of bfloat16[4, 4]", "cast=('opt_state', 'params')"],
    ),
    "scanned": (
        state(),
        state(STACKED),
        ["of an unrolled model", "layers/bias holds 3 arrays such as", "layer_0/bias"],
    ),
    "unrolled": (state(STACKED), state(), ["checkpoint is of a scanned model", "params/layers/bias holds 3 arrays"]),
    "renamed": (
        state({"Dense_0": {"w": shape(4, 4)}, "Dense_1": {"w": shape(4, 4)}}),
        state({"dense_0": {"w": shape(4, 4)}, "dense_1": {"w": shape(4, 4)}}),
        [
            "params/dense_0/w may be what was saved as params/Dense_0/w, "
            "params/dense_1/w may be what was saved as params/Dense_1/w:"
        ],
    ),
    "another key": (
        {"rng": jax.random.key(0)},
        {"rng": jax.random.key(0, impl="rbg")},
        ["rng a threefry2x32 key instead of a rbg key", "impl="],
    ),
    "a raw key": (
        {"rng": jax.random.key(0)},
        {"rng": jax.random.PRNGKey(0)},
        ["rng a threefry2x32 key instead of uint32[2]"],
    ),
    "int and float": ({"n": shape(dtype=np.int32)}, {"n": shape()}, ["int32[] instead of float32[]", "convert after"]),
    "an empty checkpoint": ({}, {"w": shape(2)}, ["1 leaf that it lacks: w float32[2]"]),
}


@pytest.mark.parametrize("name", CAUSES)
def test_what_does_not_fit_is_named_with_its_likely_cause(name):
    saved, like, words = CAUSES[name]
    text = told(saved, like)
    assert [word for word in words if word not in text] == [], text
    assert len(text) < 1200


def test_floats_are_cast_by_request_only():
    saved, like = leaves_of(state()), state(model(dtype=jnp.bfloat16), BF16)
    reading = match(saved, like, cast=("opt_state", r"params/layer_\d/kernel"))
    assert reading.leaves["opt_state/0/mu/layer_0/bias"].dtype == "float32"
    for name in ("opt_state/0/mu/layer_0/bias", "params/layer_1/kernel"):
        assert str(named_leaves(like)[name].dtype) == "bfloat16"
    match(saved, like, cast=".*")
    text = told(state(), like, cast=(".*/mu/.*", "opt_state/0/nu"))
    assert "3 leaves of another dtype: params/layer_0/kernel" in text and "cast='params'" in text
    for like in ({"n": shape(dtype=np.int32)}, {"n": shape(dtype=np.complex64)}):
        assert "instead of" in told({"n": shape()}, {"m": shape(), **like}, cast=".*")


@pytest.mark.parametrize("pattern", ["optstate", "mu", "layer_(", "step"])
def test_a_pattern_that_matches_no_float_is_an_error(pattern):
    with pytest.raises(CheckpointError, match=f"{pattern!r}".replace("(", r"\(")):
        match(leaves_of(state()), state(), cast=pattern)


def test_a_python_number_takes_any_of_its_kind():
    saved = leaves_of({"n": np.int64(3), "x": np.float32(3)})
    assert match(saved, {"n": 0, "x": 0.0}).sources == {"n": "n", "x": "x"}
    assert "int64[] instead of float64[]" in told({"n": np.int64(3)}, {"n": 0.0})


# --- windows of multi_steps

PLAIN = optax.chain(optax.clip(1.0), optax.adam(0.1))
OURS, OPTAX = multi_steps(PLAIN, 4), optax.MultiSteps(PLAIN, 4).gradient_transformation()
OPTIMIZERS = {"plain": PLAIN, "multi_steps": OURS, "optax.MultiSteps": OPTAX}


def facts(mini_step, at="opt_state", **more):
    return {at: {"mini_step": mini_step, "gradient_step": 7, **more}}


@pytest.mark.parametrize("new", OPTIMIZERS)
@pytest.mark.parametrize("old", OPTIMIZERS)
def test_windows_change_at_their_end(old, new):
    saved, like = state(optimizer=OPTIMIZERS[old]), state(optimizer=OPTIMIZERS[new])
    reading = match(leaves_of(saved), like, mid_window=facts(0, every=4))
    inner = {"plain": ""}
    moment = "opt_state/{}1/0/mu/layer_0/bias"
    at = {name: moment.format(inner.get(name, "inner_opt_state/")) for name in OPTIMIZERS}
    assert reading.sources[at[new]] == at[old]
    if new == old:
        assert not reading.zeros and set(reading.sources.values()) == set(leaves_of(saved))
    elif new != "plain":
        assert reading.sources["opt_state/gradient_step"] == ("step" if old == "plain" else "opt_state/gradient_step")
        emptied = {name for name in named_leaves(like) if "acc_grads" in name or "skip_state" in name}
        assert emptied and emptied <= reading.zeros
    assert bool(reading.notes) == (new != old)


@pytest.mark.parametrize(("old", "new"), [(o, n) for o in list(OPTIMIZERS)[1:] for n in OPTIMIZERS if o != n])
def test_windows_do_not_change_before_their_end(old, new):
    saved, like = state(optimizer=OPTIMIZERS[old]), state(optimizer=OPTIMIZERS[new])
    text = told(saved, like, mid_window=facts(3, every=4))
    for words in (old, "at opt_state", "mid-window", "3 of 4 micro-steps", "take 1 more micro-step, which ends"):
        assert words in text
    assert "2 micro-steps" in told(saved, like, mid_window=facts(2))  # where K is not known
    assert "does not say how far" in told(saved, like)
    # What else does not fit is more urgent.
    assert "another model" in told(saved, state({"x": shape(9)}, OPTIMIZERS[new]), mid_window=facts(3, every=4))


def test_another_k():
    saved = state(optimizer=OURS)
    six = (6, lambda steps: 6 if steps == 7 else 4)
    for optimizer in [*(multi_steps(PLAIN, every) for every in six), optax.MultiSteps(PLAIN, 6)]:
        match(leaves_of(saved), saved, mid_window=facts(0, every=4), optimizer=optimizer)
        text = told(saved, saved, mid_window=facts(2, every=4), optimizer=optimizer)
        assert "every changes from 4 to 6" in text and "2 more micro-steps, which end the window" in text
    reading = match(leaves_of(saved), saved, mid_window=facts(2, every=4), optimizer=OURS)
    assert not reading.zeros and not reading.notes
    chained = {"opt_state": (optax.EmptyState(), saved["opt_state"])}
    six = optax.chain(optax.clip(1.0), multi_steps(PLAIN, 6))
    text = told(chained, chained, mid_window=facts(2, at="opt_state/1", every=4), optimizer=six)
    assert "every changes from 4 to 6" in text


def test_an_accumulator_of_another_dtype_is_new_at_a_windows_end_only():
    narrow = state(optimizer=multi_steps(PLAIN, 4, accumulator_dtype=jnp.bfloat16))
    saved = state(optimizer=OURS)
    assert "opt_state/acc_grads/layer_0/bias" in match(leaves_of(saved), narrow, mid_window=facts(0)).zeros
    assert "cast='opt_state'" in told(saved, narrow, mid_window=facts(1))
    assert not match(leaves_of(saved), narrow, mid_window=facts(1), cast="opt_state").zeros


@pytest.mark.parametrize(
    ("wrap", "at", "counter"),
    [
        (lambda made: made, "", "1/0/count"),
        (lambda made: {"train": {"step": shape(dtype=np.int32), "opt_state": made}}, "train/opt_state", "train/step"),
        (lambda made: {"opt_state": (optax.EmptyState(), made)}, "opt_state/1", "opt_state/1/1/0/count"),
    ],
)
def test_windows_at_any_depth(wrap, at, counter):
    make = {name: wrap(jax.eval_shape(optimizer.init, model())) for name, optimizer in OPTIMIZERS.items()}
    prefix = at + "/" if at else ""
    reading = match(leaves_of(make["plain"]), make["multi_steps"])
    assert reading.sources[prefix + "inner_opt_state/1/0/nu/layer_1/bias"] == prefix + "1/0/nu/layer_1/bias"
    assert reading.sources[prefix + "gradient_step"] == counter
    back = match(leaves_of(make["multi_steps"]), make["plain"], mid_window=facts(0, at=at))
    assert back.sources[prefix + "1/0/nu/layer_1/bias"] == prefix + "inner_opt_state/1/0/nu/layer_1/bias"
    assert "mid-window" in told(make["multi_steps"], make["plain"], mid_window=facts(1, at=at))


def test_facts_of_windows():
    params = {"w": jnp.ones(2)}
    inner = OURS.init(params)._replace(mini_step=jnp.int32(3), gradient_step=jnp.int32(7))
    known = {"mini_step": 3, "gradient_step": 7}
    assert window_facts({"opt_state": inner}, OURS) == {"opt_state": {**known, "every": 4}}
    by_step = multi_steps(PLAIN, lambda steps: jnp.where(steps < 7, 1, 5))
    assert window_facts(inner, by_step) == {"": {**known, "every": 5}}
    parts = (optax.chain(optax.clip(1.0), OURS), optax.masked(OURS, {"w": True}), optax.apply_if_finite(OURS, 3))
    for optimizer in parts:  # K is found where it is closed over
        assert [fact["every"] for fact in window_facts(optimizer.init(params), optimizer).values()] == [4]
    several = optax.chain(OURS, multi_steps(optax.sgd(0.1), 2))
    assert not any("every" in fact for fact in window_facts(several.init(params), several).values())
    assert window_facts({"opt_state": PLAIN.init(params)}, PLAIN) == {}


@pytest.mark.parametrize("name", ["w(1)", "a+b", "w[", "*"])
def test_a_name_is_cast_by_itself_where_it_is_no_regular_expression_or_another_one(name):
    saved = {name: Leaf(shape=(), dtype="float32")}
    assert match(saved, {name: jnp.zeros((), jnp.bfloat16)}, cast=name).sources == {name: name}


@pytest.mark.parametrize("cast", [None, 3, [b"w"], lambda name: True])
def test_what_is_no_pattern_is_named(cast):
    with pytest.raises(CheckpointError, match=f"got a {type(cast[0] if isinstance(cast, list) else cast).__name__}"):
        match({"w": Leaf(shape=(), dtype="float32")}, {"w": jnp.zeros(())}, cast=cast)


def test_64_bits_are_not_halved_without_a_word():
    saved = {"n": Leaf(shape=(), dtype="int64")}
    match(saved, {"n": np.int64(0)})
    with pytest.raises(CheckpointError, match=r"to restore n as int64\[\]; got JAX without 64 bits"):
        match(saved, {"n": jax.ShapeDtypeStruct((), np.int64)})
    with jax.enable_x64(True):
        match(saved, {"n": jax.ShapeDtypeStruct((), np.int64)})


def test_a_sharding_that_cannot_hold_an_array_is_named():
    mesh = jax.sharding.AbstractMesh((3,), ("x",))
    like = jax.ShapeDtypeStruct(
        (6,), np.float32, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    with pytest.raises(CheckpointError, match=r"a sharding that can hold w float32\[6\]; got NamedSharding"):
        match({"w": Leaf(shape=(6,), dtype="float32")}, {"w": like})
