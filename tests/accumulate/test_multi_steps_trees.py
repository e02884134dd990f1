"""`multi_steps` against arithmetic in float64, over random pytrees, weights, dtypes, windows and faults."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.accumulate import apply_updates, flush, multi_steps

FLOATS = ("float32", "bfloat16", "float16")
LEAVES = st.sampled_from((*FLOATS, *FLOATS, "complex64", "int32", "bool", "key", "none", "empty"))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(st.sampled_from((0, 1, 3, 1000)), st.sampled_from(("", "", "", "nan", "inf"))), max_size=7)


def leaf_of(kind: str, rng):
    if kind == "none":
        return None
    if kind == "key":
        return jax.random.key(int(rng.integers(9)))
    shape = (0, 2) if kind == "empty" else ((), (3,), (2, 2))[rng.integers(3)]
    if kind in ("int32", "bool"):
        return jnp.asarray(rng.integers(2, size=shape).astype(kind))
    return jnp.asarray(rng.normal(size=shape)).astype("float32" if kind == "empty" else kind)


def is_float(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def grads_of(params, rng, fault: str):
    def one(leaf):
        if not is_float(leaf):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        value = jnp.asarray(rng.normal(size=leaf.shape)).astype(leaf.dtype)
        return value * float(fault) if fault else value

    return jax.tree.map(one, params)


def expected_windows(calls, every, nonfinite):
    """For each window, the calls whose mean is stepped with, None where no step is taken."""
    for start in range(0, len(calls), every):
        window = [(weight, grads, bool(fault) and weight > 0) for weight, fault, grads in calls[start : start + every]]
        good = [(weight, grads) for weight, grads, bad in window if not bad]
        if nonfinite == "skip_window":
            yield good if len(good) == len(window) else None
        else:
            yield good or None


@settings(max_examples=10)
@given(TREES, CALLS, st.integers(1, 4), st.sampled_from(("skip_window", "skip_micro")), st.integers(0, 2**16))
def test_random_pytrees(kinds, calls, every, nonfinite, seed):
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda kind: leaf_of(kind, rng), kinds)
    floats = [leaf for leaf in jax.tree.leaves(params) if is_float(leaf)]
    if not any(leaf.size for leaf in floats):  # a fault needs somewhere to be
        calls = [(weight, "") for weight, _ in calls]
    calls = [(weight, fault, grads_of(params, rng, fault)) for weight, fault in calls]
    # The "optimizer" hands over the mean it got, and counts.
    inner = optax.chain(optax.trace(decay=0.0), optax.scale_by_schedule(lambda count: 1.0))
    optimizer = multi_steps(inner, every, nonfinite=nonfinite)
    state, steps = optimizer.init(params), []
    assert [a.dtype for a in jax.tree.leaves(state.acc_grads)] == [
        jnp.complex64 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else jnp.float32 for leaf in floats
    ]
    before = jax.tree.structure(state)
    update = jax.jit(optimizer.update)
    for weight, _, grads in calls:
        updates, state = update(grads, state, params, weight=weight)
        assert jax.tree.structure(state) == before
        check_untouched(params, updates, moved=bool(state.skip_state.updated))
        if state.mini_step == 0:
            steps.append(updates if state.skip_state.updated else None)
    if state.mini_step > 0:
        updates, state = flush(optimizer, state, params)
        steps.append(updates if state.skip_state.updated else None)
    wanted = list(expected_windows(calls, every, nonfinite))
    assert [step is None for step in steps] == [window is None for window in wanted]
    assert int(state.gradient_step) == sum(step is not None for step in steps)
    for updates, window in zip(steps, wanted, strict=True):
        if window is not None:
            check_mean(params, updates, window)


def check_untouched(params, updates, *, moved: bool):
    """Applied, the updates change no bit of what is no float, and of nothing while a window goes on."""
    new = apply_updates(params, updates)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    for old, now in zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True):
        assert (old.dtype, old.shape) == (now.dtype, now.shape)
        if not (moved and is_float(old)):
            if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
                old, now = jax.random.key_data(old), jax.random.key_data(now)
            assert np.asarray(old).tobytes() == np.asarray(now).tobytes()


def check_mean(params, updates, window):
    total = sum(weight for weight, _ in window)
    trees = [grads for weight, grads in window if weight]
    weights = [weight for weight, _ in window if weight]
    for index, (param, update) in enumerate(zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True)):
        if not is_float(param):
            continue
        assert update.dtype == param.dtype
        wide = np.complex128 if jnp.issubdtype(param.dtype, jnp.complexfloating) else np.float64
        terms = [w * np.asarray(jax.tree.leaves(t)[index]).astype(wide) for w, t in zip(weights, trees, strict=True)]
        mean = sum(terms) / total if terms else np.zeros(param.shape)
        scale = max(
            (np.abs(np.asarray(jax.tree.leaves(t)[index]).astype(wide)).max(initial=0) for t in trees), default=0
        )
        rounding = 2.0 * float(jnp.finfo(param.dtype).eps) + 1e-6
        np.testing.assert_allclose(np.asarray(update).astype(wide), mean, rtol=rounding, atol=rounding * scale)
