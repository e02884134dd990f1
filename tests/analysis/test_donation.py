"""State that is returned anew and not donated, its cure in the user's words, and what must not be advised."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from jaxmem.analysis import analyze

WIDTH = 256
X = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
ADAM = optax.adam(1e-3)
PARAMETERS = WIDTH * WIDTH + WIDTH
STATE_BYTES = 4 * (3 * PARAMETERS + 2)  # parameters, two moments, the optimizer's count and the step


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(WIDTH)(x)


def loss(params, x):
    return jnp.mean(Net().apply({"params": params}, x) ** 2)


PARAMS = jax.eval_shape(Net().init, jax.random.key(0), X)["params"]
STATE = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=ADAM), PARAMS)
MOMENTS = jax.eval_shape(ADAM.init, PARAMS)


def step(state, x):
    return state.apply_gradients(grads=jax.grad(loss)(state.params, x))


def batch_first(x, state):
    return jnp.sum(x), step(state, x)


def plain(params, opt_state, batch):
    updates, opt_state = ADAM.update(jax.grad(loss)(params, batch), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss(params, batch)


def updates_only(params, opt_state, batch):
    return ADAM.update(jax.grad(loss)(params, batch), opt_state, params)


def gradients(state, x):
    return jax.grad(loss)(state.params, x)


def evaluate(state, x):
    return loss(state.params, x)


def beside(carry, x):
    return {"state": step(carry["state"], x)}


def narrowed(state, x):
    new = step(state, x)
    return new.replace(params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), new.params))


def kept(fn, *args, target="cpu", **options):
    """The finding that state is not donated, if there is one."""
    found = [f for f in analyze(fn, *args, target=target, **options).findings if f.kind == "not_donated"]
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.parametrize(
    ("fn", "args", "line", "size"),
    [
        (step, (STATE, X), "jax.jit(step, donate_argnums=(0,))", STATE_BYTES),
        (jax.jit(step), (STATE, X), "jax.jit(step, donate_argnums=(0,))", STATE_BYTES),
        (batch_first, (X, STATE), "jax.jit(batch_first, donate_argnums=(1,))", STATE_BYTES),
        (plain, (PARAMS, MOMENTS, X), "jax.jit(plain, donate_argnums=(0, 1))", STATE_BYTES - 4),
        (
            jax.jit(plain, donate_argnames="opt_state"),
            (PARAMS, MOMENTS, X),
            "jax.jit(plain, donate_argnums=(0, 1))",
            4 * PARAMETERS,
        ),
        # What is returned are updates: the parameters are still needed.
        (updates_only, (PARAMS, MOMENTS, X), "jax.jit(updates_only, donate_argnums=(1,))", 4 * (2 * PARAMETERS + 1)),
        # The new parameters are narrower: only the rest can take the old one's place.
        (narrowed, (STATE, X), "jax.jit(narrowed, donate_argnums=(0,))", STATE_BYTES - 4 * PARAMETERS),
    ],
)
def test_state_that_is_not_donated(fn, args, line, size):
    finding = kept(fn, *args)
    assert finding and finding.size_bytes == size
    assert finding.cure.startswith(line + ":")


@pytest.mark.parametrize(
    ("fn", "args", "options"),
    [
        (evaluate, (STATE, X), {}),
        (gradients, (STATE, X), {}),
        (lambda state, x: (state, evaluate(state, x)), (STATE, X), {}),  # as it came
        (jax.grad(loss), (PARAMS, X), {"arg_kinds": {"params": "parameters"}}),
        (step, (STATE, X), {"donate_argnums": 0}),
        (jax.jit(plain, donate_argnums=(0, 1)), (PARAMS, MOMENTS, X), {}),
    ],
)
def test_what_must_not_be_advised(fn, args, options):
    assert kept(fn, *args, **options) is None


def test_kinds_without_arg_kinds_and_declared_ones_first():
    report = analyze(step, STATE, X, target="cpu")
    found = {kind: size for kind, size in report.by_kind if kind in ("parameters", "optimizer_state", "state")}
    assert found == {"parameters": 4 * PARAMETERS, "optimizer_state": 8 * PARAMETERS + 4, "state": 4}
    report = analyze(step, STATE, X, target="cpu", arg_kinds={"state.params": "constants"})
    assert dict(report.by_kind)["constants"] == 4 * PARAMETERS and "parameters" not in dict(report.by_kind)
    assert dict(report.by_kind)["optimizer_state"] == 8 * PARAMETERS + 4


@pytest.mark.parametrize("stage", ["trace", "lower", "compile"])
def test_stages_know_their_types_too(stage):
    made = getattr(jax.jit(step), "trace" if stage == "trace" else "lower")(STATE, X)
    finding = kept(made.compile() if stage == "compile" else made, target=None)
    assert finding and finding.size_bytes == STATE_BYTES
    assert finding.cure.startswith("jax.jit(step, donate_argnames=('state',)):")


def test_donation_that_was_advised_saves_what_was_said():
    """A gradient may lie in the output that is then the parameter; donated, it needs a buffer of its own."""
    before, after = (analyze(step, STATE, X, target="gpu-h100", donate_argnums=n) for n in ((), (0,)))
    (finding,) = [f for f in before.findings if f.kind == "not_donated"]
    assert after.alias_bytes == finding.size_bytes == STATE_BYTES
    assert finding.estimated and before.peak_bytes - after.peak_bytes >= 0.6 * finding.size_bytes


def test_a_state_in_an_argument_with_other_things():
    finding = kept(beside, {"state": STATE, "batch": X}, X)
    assert finding and "an argument of its own" in finding.cure and "`carry`" in finding.cure


def test_an_array_that_a_state_holds_twice_cannot_be_donated():
    """Case 34: JAX refuses the call."""

    class Averaged(TrainState):
        ema: dict

    def train(state, x):
        return step(state, x)

    params = jax.tree.map(lambda p: jnp.ones(p.shape), PARAMS)
    state = Averaged.create(apply_fn=None, params=params, tx=ADAM, ema=params)
    said = [w for w in analyze(train, state, X, target="cpu").warnings if "one array" in w]
    assert "state.params['Dense_0']['bias'] and state.ema['Dense_0']['bias'] are one array, and 1 more" in said[0]
    with pytest.raises(Exception, match="donate the same buffer twice"):
        jax.jit(train, donate_argnums=0)(state, jnp.ones(X.shape))
    own = state.replace(ema=jax.tree.map(jnp.copy, params))
    assert not [w for w in analyze(train, own, X, target="cpu").warnings if "one array" in w]
    jax.jit(train, donate_argnums=0)(own, jnp.ones(X.shape))


def test_nnx_jit():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    def train(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    x = jnp.ones(X.shape)
    report = analyze(nnx.jit(train), model, optimizer, x, target="cpu")
    kinds = dict(report.by_kind)
    assert (kinds["parameters"], kinds["optimizer_state"]) == (4 * PARAMETERS, 8 * PARAMETERS + 8)
    paths = {b.path for b in report.buffers if b.kind in ("parameters", "optimizer_state")}
    assert {"model.kernel", "optimizer.opt_state[0].mu['kernel']", "optimizer.step"} <= paths
    finding = kept(nnx.jit(train), model, optimizer, x)
    assert finding and finding.size_bytes == STATE_BYTES
    assert finding.cure.startswith("nnx.jit(train, donate_argnums=(0, 1)):")
    assert kept(nnx.jit(train, donate_argnums=(0, 1)), model, optimizer, x) is None
    both = kept(nnx.jit(lambda net, x: train(net["m"], net["o"], x)), {"m": model, "o": optimizer}, x)
    assert both and both.size_bytes == STATE_BYTES and "donate_argnums=(0,)" in both.cure and "`net`" in both.cure
    partly = kept(nnx.jit(train, donate_argnums=0), model, optimizer, x)
    assert partly and partly.size_bytes == 8 * PARAMETERS + 8 and "donate_argnums=(0, 1)" in partly.cure
    assert kept(nnx.jit(lambda model, x: jnp.mean(model(x) ** 2)), model, x) is None  # the model comes back as it was
    lowered = kept(nnx.jit(train).lower(model, optimizer, x), target=None)
    assert lowered and lowered.cure.startswith("nnx.jit(train, donate_argnames=('model', 'optimizer')):")
