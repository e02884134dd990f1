"""The error of accumulated gradients over random set-ups, for jaxmem and for the usual ways of accumulating.

    python -m benchmarks.accumulation_exactness --json -

A set-up draws micro-batches K, rows, padding, valid tokens of each row, terms of the objective, dtype, shards (1 or 8
virtual CPU devices, on a mesh of one or two axes, automatic or explicit), kinds of model state and derivative rules of
the loss. The truth is the gradient of the whole batch in float64; the error is the largest relative L2 distance of a
leaf. In 16 bits errors are compared with those of the one-batch step of the same dtypes, which rounds too:
`worst_ratio_bf16` is the largest ratio of the two, leaf by leaf. Metrics of every kind must equal those of one batch
of the same dtypes (`wrong_metrics`). For sharded set-ups `separable_by_rows` must say "yes" for the loss with its own
rule, and "no" for one with a rule that mixes rows (`rules_mistaken`).
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._harness import emit
from jaxmem import Last, LossOutput, Max, Sum, WeightedMean
from jaxmem.accumulate import separable_by_rows, value_and_grad

SETUPS = 210
DEVICES = 8
IGNORED = -100
TOKENS, WIDTH, VOCABULARY = 6, 8, 11
LOSS_SCALE = 256.0
TERMS = ("mean", "weighted", "weighted+aux", "weighted+sum", "three")
STATES = ("none", "counter", "maximum", "mean", "carry")
DTYPES = ("float32", "bfloat16", "float16")
MESHES = (
    ("data", (8,), "Auto"),
    ("data", (8,), "Explicit"),
    (("a", "b"), (2, 4), "Auto"),
    (("b", "a"), (4, 2), "Explicit"),
)
METRIC_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-1, "float16": 2e-2}


def derivative_rule(bwd):
    """The identity with a gradient that `bwd` changes."""
    rule = jax.custom_vjp(lambda x: x)
    rule.defvjp(lambda x: (x, None), lambda _, gradient: (bwd(gradient),))
    return rule


@jax.custom_jvp
def softened(x):
    return x


softened.defjvp(lambda primals, tangents: (primals[0], tangents[0] / (1 + abs(primals[0]))))

RULES = {
    "none": lambda x: x,
    "reversed": derivative_rule(lambda gradient: -0.5 * gradient),
    "centred": derivative_rule(lambda gradient: gradient - gradient.mean(-1, keepdims=True)),
    "softened": softened,
}
MIXING = derivative_rule(lambda gradient: gradient / (1e-30 + jnp.abs(gradient).max()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetUp:
    """One drawn configuration."""

    seed: int
    micro_batches: int
    rows: int
    terms: str
    dtype: str
    shards: int
    state: str
    rule: str
    mesh: tuple = ()

    @classmethod
    def draw(cls, seed: int) -> "SetUp":
        rng = np.random.default_rng(seed)
        pick = lambda options: options[int(rng.integers(len(options)))]  # noqa: E731
        terms, shards, dtype = pick(TERMS), pick((1, 1, DEVICES)), DTYPES[seed % len(DTYPES)]
        count = pick((2, 3, 4, 5, 8))
        rule = pick(tuple(RULES))
        if shards > 1:
            return cls(
                seed=seed, micro_batches=pick((2, 3)), rows=48, terms=terms, dtype=dtype, shards=shards,
                state=pick(STATES[:-1]), rule=rule, mesh=pick(MESHES),
            )  # fmt: skip
        # Only an objective whose every term is weighted may be padded.
        rows = pick((24, 40)) if terms in ("weighted", "weighted+aux") else 24 if 24 % count == 0 else 40
        count = count if terms in ("weighted", "weighted+aux") or rows % count == 0 else 4
        return cls(
            seed=seed, micro_batches=count, rows=rows, terms=terms, dtype=dtype, shards=1, state=pick(STATES), rule=rule
        )  # fmt: skip

    @property
    def padded(self) -> bool:
        return self.rows % self.micro_batches != 0


def params_and_batch(setup: SetUp):
    rng = np.random.default_rng([setup.seed, 1])
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    params = {
        "embedding": normal(VOCABULARY, WIDTH),
        "hidden": {"kernel": normal(WIDTH, 2 * WIDTH) / WIDTH**0.5, "bias": 0.1 * normal(2 * WIDTH)},
        "out": normal(2 * WIDTH, VOCABULARY) / (2 * WIDTH) ** 0.5,
    }
    lengths = rng.integers(0, TOKENS + 1, setup.rows)
    lengths[0] = TOKENS  # at least one token is valid
    labels = rng.integers(0, VOCABULARY, (setup.rows, TOKENS))
    labels = np.where(np.arange(TOKENS) < lengths[:, None], labels, IGNORED)
    batch = {"tokens": rng.integers(0, VOCABULARY, (setup.rows, TOKENS)), "labels": labels}
    return params, {name: leaf.astype(np.int32) for name, leaf in batch.items()}


def parts(params, batch, dtype, rule):
    """Sums over rows and their denominators, computed in `dtype` and summed in at least float32."""
    wide = jnp.promote_types(dtype, jnp.float32)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    valid = batch["labels"] != IGNORED
    x = params["embedding"][batch["tokens"]]
    x = rule(jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"]))
    logits = (x @ params["out"]).astype(wide)
    log_z = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, jnp.where(valid, batch["labels"], 0)[..., None], -1)[..., 0]
    rows = jnp.any(valid, 1)
    return {
        "ce": (jnp.where(valid, log_z - picked, 0).sum(), valid.sum()),
        "z": (jnp.where(valid, log_z**2, 0).sum(), valid.sum()),
        "norm": (jnp.where(rows, (x.astype(wide) ** 2).mean((1, 2)), 0).sum(), rows.sum()),
        "mean": (x.astype(wide) ** 2).mean(),
        "right": (jnp.where(valid, logits.argmax(-1) == batch["labels"], False).sum(), valid.sum()),
        "max_logit": jnp.where(valid, logits.max(-1), -jnp.inf).max().astype(jnp.float32),
    }


def terms_of(found, terms: str, ratio, total):
    """The objective, of means `ratio(name)` and sums `total(value)`."""
    if terms == "mean":
        return found["mean"]
    objective = ratio("ce")
    if terms == "weighted+aux":
        objective = objective + 0.01 * ratio("z")
    elif terms == "weighted+sum":
        objective = objective + total(found["norm"][0] / 40)
    elif terms == "three":
        objective = objective + 0.3 * ratio("norm") + 0.05 * found["mean"]
    return objective


def metrics_of(params, found, mean, total, largest, last):
    """Metrics of every kind, each made by the function of its kind."""
    norm = optax.global_norm(params)
    return {
        "ce": mean(*found["ce"]),
        "right": mean(*found["right"]),
        "tokens": total(found["ce"][1]),
        "max_logit": largest(found["max_logit"]),
        "norm": last(norm),
        "mean_norm": mean(norm, 1),
    }


def loss_of(setup: SetUp, rule=None):
    """The loss for jaxmem, with the set-up's derivative rule or another one."""

    def loss(params, batch, state):
        found = parts(params, batch, setup.dtype, rule or RULES[setup.rule])
        objective = terms_of(found, setup.terms, lambda name: WeightedMean(*found[name]), Sum)
        tokens = found["ce"][1]
        new = {
            "none": lambda: state,
            "counter": lambda: {"tokens": state["tokens"] + tokens},
            "maximum": lambda: {"amax": jnp.maximum(state["amax"], found["max_logit"])},
            "mean": lambda: {"share": tokens / batch["labels"].size},
            "carry": lambda: {"calls": state["calls"] + 1},
        }[setup.state]()
        return LossOutput(objective, metrics_of(params, found, WeightedMean, Sum, Max, Last), state=new)

    return loss


STARTS = {
    "none": None,
    "counter": {"tokens": np.int32(0)},
    "maximum": {"amax": np.float32(-np.inf)},
    "mean": {"share": np.float32(0)},
    "carry": {"calls": np.int32(0)},
}
REDUCTIONS = {"none": "carry", "counter": "sum", "maximum": "max", "mean": "mean", "carry": "carry"}


def whole_batch(params, batch, *, terms: str, dtype, rule: str):
    """The objective of a batch as one plain function."""
    found = parts(params, batch, dtype, RULES[rule])
    return terms_of(found, terms, lambda name: found[name][0] / jnp.maximum(found[name][1], 1), lambda value: value)


@functools.cache
def one_batch(terms: str, dtype: str, rule: str):
    scale = LOSS_SCALE if dtype == "float16" else 1.0
    grad = jax.grad(lambda params, batch: scale * whole_batch(params, batch, terms=terms, dtype=dtype, rule=rule))
    return jax.jit(lambda params, batch: jax.tree.map(lambda leaf: leaf / scale, grad(params, batch)))


def truth(setup: SetUp, params, batch):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        return jax.tree.map(np.asarray, one_batch(setup.terms, "float64", setup.rule)(wide, batch))


@functools.cache
def one_batch_metrics(dtype: str):
    def metrics(params, batch):
        found = parts(params, batch, dtype, RULES["none"])
        same = lambda value: value  # noqa: E731
        return metrics_of(params, found, lambda total, weight: total / weight, same, same, same)

    return jax.jit(metrics)


def metrics_are_right(setup: SetUp, out, params, batch) -> bool:
    want = one_batch_metrics(setup.dtype)(params, batch)
    tolerance = METRIC_TOLERANCE[setup.dtype]
    return all(np.allclose(out.metrics[name], value, rtol=tolerance, atol=0) for name, value in want.items())


def rules_are_mistaken(setup: SetUp, params, batch) -> bool:
    """Whether a row-wise derivative rule gets the verdict of one that mixes rows, or the other way round."""
    losses = [loss_of(dataclasses.replace(setup, state="none"), rule) for rule in (None, MIXING)]
    found = [separable_by_rows(loss, params, batch, state=None, parts=DEVICES).verdict for loss in losses]
    return found != ["yes", "no"]


def ours(setup: SetUp, params, batch):
    fn = value_and_grad(
        loss_of(setup),
        setup.micro_batches,
        state_reduction=REDUCTIONS[setup.state],
        data_sharding=setup.mesh[0] if setup.shards > 1 else None,
        pad={"tokens": 0, "labels": IGNORED} if setup.padded else None,
    )
    scale = LOSS_SCALE if setup.dtype == "float16" else None
    state = STARTS[setup.state]
    if setup.shards == 1:
        return jax.jit(fn)(params, batch, state=state, loss_scale=scale)
    axes, sizes, kind = setup.mesh
    names = (axes,) if isinstance(axes, str) else axes
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType[kind],) * len(names))
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes)))
        params = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        return jax.jit(fn)(params, batch, state=state, loss_scale=scale)


def state_is_right(setup: SetUp, out, batch) -> bool:
    tokens = int((batch["labels"] != IGNORED).sum())
    if setup.state == "counter":
        return int(out.state["tokens"]) == tokens
    if setup.state == "carry":
        return int(out.state["calls"]) == setup.micro_batches
    if setup.state == "mean":
        padded = setup.rows + (-setup.rows % setup.micro_batches)
        return abs(float(out.state["share"]) - tokens / (padded * TOKENS)) < 1e-6
    return setup.state == "none" or bool(jnp.isfinite(out.state["amax"]))


# -- the usual ways ------------------------------------------------------------------------------


@functools.cache
def peers(terms: str, count: int, rule: str):
    """name → gradients of a float32 batch that `count` divides, each micro-batch its own mean."""
    loss = functools.partial(whole_batch, terms=terms, dtype="float32", rule=rule)
    grad = jax.grad(loss)

    def cut(batch):
        return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)

    def mean_of_means(params, batch):
        add = lambda total, micro: (jax.tree.map(jnp.add, total, grad(params, micro)), None)  # noqa: E731
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), cut(batch))
        return jax.tree.map(lambda leaf: leaf / count, total)

    def multi_steps(params, batch):
        optimizer = optax.MultiSteps(optax.identity(), count)

        def micro_step(state, micro):
            updates, state = optimizer.update(grad(params, micro), state, params)
            return state, updates

        _, updates = jax.lax.scan(micro_step, optimizer.init(params), cut(batch))
        return jax.tree.map(lambda leaf: leaf[-1], updates)

    def microbatching(params, batch):
        size = batch["labels"].shape[0] // count
        kind = optax.microbatching.AccumulationType.MEAN
        return optax.microbatching.microbatch(grad, argnums=1, microbatch_size=size, accumulator=kind)(params, batch)

    found = {"mean_of_means": mean_of_means, "optax_multi_steps": multi_steps, "optax_microbatching": microbatching}
    return {name: jax.jit(fn) for name, fn in found.items()}


def errors(got, want) -> dict[str, float]:
    """Relative L2 distance of each leaf; a leaf that does not matter to this objective must be zero."""
    found = {}
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        norm = float(np.linalg.norm(other))
        distance = float(np.linalg.norm(np.asarray(one, np.float64) - other))
        found[jax.tree_util.keystr(path)] = distance / norm if norm else distance
    return found


def main():
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    worst = dict.fromkeys(DTYPES, 0.0)
    ratios = dict.fromkeys(DTYPES, 0.0)
    one_batch_worst = dict.fromkeys(DTYPES, 0.0)
    theirs: dict[str, list[float]] = {}
    wrong_states = wrong_metrics = rules_mistaken = 0
    drawn = []
    for seed in range(SETUPS):
        setup = SetUp.draw(seed)
        drawn.append(setup)
        params, batch = params_and_batch(setup)
        want = truth(setup, params, batch)
        out = ours(setup, params, batch)
        wrong_states += not state_is_right(setup, out, batch)
        wrong_metrics += not metrics_are_right(setup, out, params, batch)
        rules_mistaken += setup.shards > 1 and rules_are_mistaken(setup, params, batch)
        found = errors(out.grads, want)
        plain = errors(one_batch(setup.terms, setup.dtype, setup.rule)(params, batch), want)
        worst[setup.dtype] = max(worst[setup.dtype], *found.values())
        one_batch_worst[setup.dtype] = max(one_batch_worst[setup.dtype], *plain.values())
        exact = [leaf for leaf in found if not plain[leaf]]  # leaves that this objective does not depend on
        assert all(found[leaf] == 0 for leaf in exact), setup
        ratio = max(found[leaf] / plain[leaf] for leaf in found if plain[leaf])
        ratios[setup.dtype] = max(ratios[setup.dtype], ratio)
        if setup.dtype == "float32" and not setup.padded:
            for name, fn in peers(setup.terms, setup.micro_batches, setup.rule).items():
                theirs.setdefault(name, []).append(max(errors(fn(params, batch), want).values()))
        print(f"\r{seed + 1} of {SETUPS}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    figures = {
        "setups": SETUPS,
        "max_rel_error_fp32": worst["float32"],
        "one_batch_max_rel_error_fp32": one_batch_worst["float32"],
        **{f"max_rel_error_{short}": worst[dtype] for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))},
        **{
            f"one_batch_max_rel_error_{short}": one_batch_worst[dtype]
            for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))
        },
        **{f"worst_ratio_{short}": ratios[dtype] for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))},
        "wrong_states": wrong_states,
        "wrong_metrics": wrong_metrics,
        "rules_mistaken": rules_mistaken,
        **{f"{name}_max_rel_error_fp32": max(values) for name, values in theirs.items()},
        **{f"{name}_median_rel_error_fp32": float(np.median(values)) for name, values in theirs.items()},
    }
    counts = {
        "padded": sum(setup.padded for setup in drawn),
        "sharded": sum(setup.shards > 1 for setup in drawn),
        **{f"dtype {dtype}": sum(setup.dtype == dtype for setup in drawn) for dtype in DTYPES},
        **{f"terms {terms}": sum(setup.terms == terms for setup in drawn) for terms in TERMS},
        **{f"rule {rule}": sum(setup.rule == rule for setup in drawn) for rule in RULES},
        "explicit axes": sum("Explicit" in setup.mesh for setup in drawn),
        "rows over two axes": sum(bool(setup.mesh) and len(setup.mesh[0]) == 2 for setup in drawn),
        **{f"state {state}": sum(setup.state == state for setup in drawn) for state in STATES},
    }
    emit(
        figures,
        target="cpu",
        provenance=dict.fromkeys(figures, "measured"),
        notes={"drawn": counts, "devices": DEVICES},
    )


if __name__ == "__main__":
    main()
