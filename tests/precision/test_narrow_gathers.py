"""Gathers of widened values: which read the narrow one, and that no number changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmem import MemoryConfig, Workload, make_train_step
from jaxmem._settled import AS_WRITTEN, Settled
from jaxmem.jaxprs import equations_in
from jaxmem.precision import narrow_gathers, widened_gathers
from jaxmem.targets import resolve_target
from jaxmem.train import TrainStep, _gathers
from jaxmem.train._forms import spend
from jaxmem.train._settle import settled
from jaxmem.train._spec import StepSpec

CPU, V5E, H100 = map(resolve_target, ("cpu", "tpu-v5e", "gpu-h100"))
NARROW = Settled(gathers="narrow")
WIDTH, VOCABULARY, ROWS = 16, 48, 12
KEYS = jax.random.split(jax.random.key(0), 3)
W = jax.random.normal(KEYS[0], (WIDTH, VOCABULARY), jnp.bfloat16)
X = jax.random.normal(KEYS[1], (ROWS, WIDTH), jnp.bfloat16)
LABELS = jax.random.randint(KEYS[2], (ROWS,), 0, VOCABULARY)


# XLA:CPU by default leaves out the rounding to 16 bits of a product that is widened again, where nothing reads it.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


def logits_of(w, x):
    return (x @ w).astype(jnp.float32)


def by_optax(w, x, labels):
    logits = logits_of(w, x)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return nats.sum() + (logits.argmax(-1) == labels).sum()


def own(w, x, labels):
    logits = logits_of(w, x)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean((jax.nn.logsumexp(logits, axis=-1) - picked) * (labels > 3))


def smoothed(w, x, labels):
    logits = logits_of(w, x)
    picked = logits[jnp.arange(labels.size), labels]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - 0.9 * picked - 0.1 * logits.mean(-1))


def moved(w, x, labels):
    logits = logits_of(w, x).reshape(3, 4, VOCABULARY)[:, :-1].reshape(-1, VOCABULARY)
    labels = labels.reshape(3, 4)[:, 1:].reshape(-1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def by_scan(w, x, labels):
    parts = x.reshape(3, -1, WIDTH), labels.reshape(3, -1)
    chunk = jax.checkpoint(lambda total, part: (total + by_optax(w, *part), None))
    return jax.lax.scan(chunk, jnp.zeros(()), parts)[0]


def by_vmap(w, x, labels):
    return jax.vmap(own, (None, 0, 0))(w, x.reshape(3, -1, WIDTH), labels.reshape(3, -1)).sum()


def sharded(fn, **options):
    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")
    summed = lambda w, x, labels: jax.lax.psum(fn(w, x, labels), "data")  # noqa: E731
    specs = (PartitionSpec(), spec, spec)
    return jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), **options)


by_shard_map = sharded(by_optax, check_vma=False)


def by_cond(w, x, labels):
    return jax.lax.cond(labels[0] >= 0, by_optax, own, w, x, labels)


LOSSES = [by_optax, own, smoothed, moved, by_scan, by_vmap, by_shard_map, by_cond]


def equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def gathered(fn, *args) -> list:
    """What the gathers in the program of a function read, those of custom derivatives too."""
    found = equations_in(jax.make_jaxpr(fn)(*args).jaxpr)
    return [eqn.invars[0].aval for eqn in found if eqn.primitive.name == "gather"]


@pytest.mark.parametrize("loss", LOSSES)
def test_no_bit_changes_and_gathers_read_the_narrow_value(loss):
    narrow = narrow_gathers(loss, least=0)
    around = [lambda fn: fn, jax.checkpoint] if loss is by_optax else [lambda fn: fn]
    for wrapped in around:
        want, got = (jit(jax.value_and_grad(wrapped(fn), argnums=(0, 1)))(W, X, LABELS) for fn in (loss, narrow))
        equal(got, want)
    equal(jit(narrow)(W, X, LABELS), jit(loss)(W, X, LABELS))
    differentiated = jax.value_and_grad(narrow, argnums=(0, 1))
    large = {each.dtype.name for each in gathered(differentiated, W, X, LABELS) if each.shape[-1] == VOCABULARY}
    assert large == {"bfloat16"}


def test_within_a_typed_shard_map():
    of = lambda fn: jit(jax.value_and_grad(fn, argnums=(0, 1)))(W, X, LABELS)  # noqa: E731
    want, inside = of(sharded(by_optax)), of(sharded(narrow_gathers(by_optax, least=0)))
    equal(inside, want)
    equal(of(narrow_gathers(sharded(by_optax), least=0)), want)


def test_a_narrow_gather_is_vmapped_and_differentiated_twice_and_forward():
    narrow = narrow_gathers(own, least=0)
    stacked = jnp.stack([X, 2 * X])

    def each(fn):
        def squares(w):
            return jnp.sum(jax.grad(fn)(w, X, LABELS).astype(jnp.float32) ** 2)

        batched = jax.vmap(fn, (None, 0, None))
        return (
            jax.vmap(jax.grad(fn), (None, 0, None))(W, stacked, LABELS),
            jax.grad(lambda w: batched(w, stacked, LABELS).sum())(W),
            jax.jvp(lambda w: fn(w, X, LABELS), (W,), (W,)),
            jax.grad(squares)(W),
        )

    equal(*(jit(functools.partial(each, fn))() for fn in (narrow, own)))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x, labels: own(w.astype(jnp.float32), x.astype(jnp.float32), labels),
        lambda w, x, labels: jnp.take_along_axis(jax.nn.log_softmax(logits_of(w, x)), labels[:, None], -1).sum(),
        lambda w, x, labels: jnp.take(logits_of(w, x), labels % 4, axis=0, mode="fill", fill_value=0.1).sum(),
        lambda w, x, labels: logits_of(w, x)[jnp.arange(ROWS)[::-1]].sum(),  # all that there is
        lambda w, x, labels: jnp.sin(x @ w).astype(jnp.float32)[3].sum(),
    ],
)
def test_what_gains_nothing_or_would_change_numbers_is_left(fn):
    assert str(jax.make_jaxpr(narrow_gathers(fn, least=0))(W, X, LABELS)) == str(jax.make_jaxpr(fn)(W, X, LABELS))


def test_small_values_are_left():
    assert widened_gathers(jax.make_jaxpr(own)(W, X, LABELS)) == ()
    many = jnp.zeros((2**15, WIDTH), jnp.bfloat16)
    (found,) = widened_gathers(jax.make_jaxpr(own)(W, many, jnp.zeros(2**15, int)))
    assert (found.narrow, found.wide, found.num_bytes) == ("bfloat16", "float32", 2**15 * VOCABULARY * 4)


# -- as the form of a step ---------------------------------------------------------------------------


def model(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    logits = (x @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


@functools.cache
def workload(rows=2**12, vocabulary=512):
    params = {"layers": [0.1 * jnp.eye(WIDTH)] * 3, "head": jax.random.normal(KEYS[0], (WIDTH, vocabulary))}
    x = jax.random.normal(KEYS[1], (rows, WIDTH))
    labels = jax.random.randint(KEYS[2], (rows,), 0, vocabulary)
    options = {"xla_allow_excess_precision": False}
    return Workload(model, params, {"x": x, "labels": labels}, optax.sgd(0.1), compiler_options=options)


def form_of(spec, target) -> Settled:
    return settled(spec, target).settled or AS_WRITTEN


@pytest.mark.parametrize("remat", ["none", "full", "auto:0.3"])
def test_a_step_computes_the_same_bits(remat):
    spec = StepSpec.of(workload(), MemoryConfig(remat=remat, precision="bfloat16", accumulation_steps=2))
    made = []
    for form in (AS_WRITTEN, NARROW):
        step = TrainStep(spend(spec.in_form(form), CPU), CPU)
        assert step.spec.settled == form
        made.append(step(step.init(), workload().batch))
    (want, metrics), (got, others) = made
    equal(got.params, want.params)
    equal(others, metrics)


def test_the_form_is_narrow_on_a_tpu_where_the_loss_gathers_from_a_large_widened_value():
    spec = StepSpec.of(workload(), MemoryConfig(precision="bfloat16"))
    forms = [form_of(spec, target).gathers for target in (V5E, H100, CPU)]
    assert forms == ["narrow", "as written", "as written"]
    (line,) = _gathers.LEVER.told(settled(spec, V5E), V5E).news
    assert line == (
        "a gather of the loss reads bfloat16 numbers as they are computed, and not a float32 copy of them, 8.0 MiB a "
        "micro-batch."
    )
    assert _gathers.LEVER.told(settled(spec, H100), H100).news == ()
    small = StepSpec.of(workload(64), MemoryConfig(precision="bfloat16"))
    broken = StepSpec.of(Workload(lambda w, x: jnp.dot(x, x), W, X, optax.sgd(0.1)))
    for each in (StepSpec.of(workload()), small, broken):
        assert form_of(each, V5E).gathers == "as written"


def test_a_report_tells_it_and_a_decision_keeps_it():
    config = MemoryConfig(remat="auto:0.3", precision="bfloat16")
    decided = spend(StepSpec.of(workload(), config).in_form(NARROW), CPU)
    report = TrainStep(decided, CPU).report()
    assert any("bfloat16 numbers as they are computed" in note for note in report.notes)
    assert decided.decision is not None
    put_back = make_train_step(workload(), config, target="cpu", decision=decided.decision.to_json())
    assert put_back.spec.settled == NARROW
