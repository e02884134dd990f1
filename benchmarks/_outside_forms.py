"""The forms of other authors' steps: are gradients those of the plain form, and is "auto" no worse?"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._forms import compiled
from benchmarks.order_and_roll import judge
from jaxmem import LossOutput, MemoryConfig, Workload, make_train_step
from jaxmem.errors import JaxmemError, SettingWarning
from jaxmem.targets import resolve_target
from jaxmem.train._program import content, trace_for
from jaxmem.train._settle import settled
from jaxmem.train._spec import StepSpec

PLAIN = {"order": "free", "roll": False, "random": "free"}
TIED, ROLLED, FENCED = {"order": "tied"}, {"roll": True}, {"random": "fenced"}
LEVERS = {"tied": TIED, "fenced": FENCED, "rolled": ROLLED}
FORMS = {"plain": PLAIN, **{name: PLAIN | lever for name, lever in LEVERS.items()}, "all": TIED | ROLLED | FENCED}
REMATS = ("none", "full")
ROLL_TOLERANCE = 1e-6
STEPS = 3


def workload_of(loss: Callable, params: Any, batch: tuple) -> Workload:
    """Of a loss `(params, *batch)`: a key becomes the step's, what has no rows is closed over.

    >>> made = workload_of(lambda w, x, key, scale: (x * w * scale).sum(), jnp.ones(2), (jnp.ones((4, 2)),
    ...     jax.random.key(0), jnp.float32(2.0)))
    >>> len(made.batch)
    1
    """
    count = len(jax.tree.leaves(batch[0])[0])
    rows = [i for i, part in enumerate(batch) if all(x.shape[:1] == (count,) for x in jax.tree.leaves(part))]
    keys = [i for i, part in enumerate(batch) if isinstance(part, jax.Array) and part.shape == () and _is_key(part)]

    def output(params, given, *, rng):
        parts = list(batch)
        for i, part in zip(rows, given, strict=True):
            parts[i] = part
        for i in keys:
            parts[i] = rng
        return LossOutput(loss(params, *parts))

    return Workload(output, params, tuple(batch[i] for i in rows), optax.sgd(0.1), rng=jax.random.key(0))


def _is_key(part: jax.Array) -> bool:
    return jnp.issubdtype(part.dtype, jax.dtypes.prng_key)


def descending(rate: float = 0.01) -> optax.GradientTransformation:
    """Gradient descent whose state is the last gradient."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -rate * g, grads), grads

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def of_forms(workload: Workload, distance: Callable[[Any, Any], float]) -> dict[str, dict]:
    """Under each remat setting, by form: the distance of gradients and model state from the plain form's after a step.

    "same" stands for a program that is the plain one. A form is wrong where a step fails or is traced again, where a
    loss is not finite, or where numbers differ: at all, or in a rolled form by more than `ROLL_TOLERANCE`. Programs are
    compiled without LLVM's optimizations: what is fused otherwise then rounds as before, and a bit that differs is the
    form's.
    """
    found: dict[str, dict] = {"distances": {}, "wrong": {}, "refused": {}}
    cpu = resolve_target("cpu")
    for remat in REMATS:
        plain, known = None, None
        for name, form in FORMS.items():
            cell, config = f"{remat}, {name}", MemoryConfig(remat=remat, **form)
            try:
                step = make_train_step(workload, config)
                spec = settled(step.spec, cpu)
                key = content(spec, trace_for(spec, cpu).lower(), cpu)
                if key == known:
                    found["distances"][cell] = "same"
                    continue
                with _as_written():
                    first, why = _run(step, workload.batch)
            except JaxmemError as refusal:
                found["refused"][cell] = f"{type(refusal).__name__}: {refusal}"[:200]
                continue
            except Exception as failure:  # whatever it is, the form did it
                found["wrong"][cell] = f"{type(failure).__name__}: {failure}"[:400]
                continue
            if plain is None:
                plain, known = first, key
            found["distances"][cell] = apart = distance(plain, first)
            equal = apart <= ROLL_TOLERANCE if config.roll else _bits(plain) == _bits(first)
            if why or not equal:
                found["wrong"][cell] = why or f"gradients differ by {apart:.1e}"
    return found


@contextlib.contextmanager
def _as_written():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _run(step, batch) -> tuple[Any, str]:
    """Gradients and model state after the first step, and what went wrong in all."""
    state, losses = step.init(), []
    for i in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if i == 0:
            first = jax.tree.map(_numbers, (state.opt_state, state.state))
    return first, "" if np.isfinite(losses).all() else f"losses {losses}"


def _numbers(leaf) -> np.ndarray:
    return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _bits(tree) -> list[bytes]:
    return [leaf.tobytes() for leaf in jax.tree.leaves(tree)]


def auto_beside_plain(workload: Workload, target_name: str) -> dict[str, dict]:
    """Under each remat setting: the plain form, "auto", and which is worse, as compiled for a target.

    Where both are one program, nothing is compiled.
    """
    target, found = resolve_target(target_name), {}
    for remat in REMATS:
        made = {}
        for name, form in (("plain", PLAIN), ("auto", {})):
            spec = settled(StepSpec.of(workload, MemoryConfig(remat=remat, **form)), target)
            made[name] = spec, trace_for(spec, target).lower()
        plain, auto = (content(spec, program, target) for spec, program in made.values())
        if plain == auto:
            found[remat] = {"verdict": "same"}
            continue
        records = {name: compiled(spec, program, target_name) for name, (spec, program) in made.items()}
        found[remat] = {**records, **judge(records["auto"], records["plain"])}
    return found


def in_forms(workload: Workload, target: str, distance: Callable[[Any, Any], float]) -> dict[str, Any]:
    """`of_forms` and `auto_beside_plain`, without the warnings that a setting does nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingWarning)
        found = of_forms(dataclasses.replace(workload, optimizer=descending()), distance)
        return {**found, "compiled": auto_beside_plain(workload, target)}


def forms_counted(rows: list[dict]) -> dict[str, int]:
    """The figures of all models.

    >>> forms_counted([{"wrong": {}, "refused": {}, "distances": {"none, plain": 0.0, "none, tied": "same"},
    ...     "compiled": {"none": {"verdict": "worse"}}}])
    {'forms_wrong': 0, 'forms_worse': 1, 'forms_refused': 0, 'forms': 2, 'forms_as_plain': 1}
    """
    distances = [apart for row in rows for apart in row["distances"].values()]
    return {
        "forms_wrong": sum(len(row["wrong"]) for row in rows),
        "forms_worse": sum(pair["verdict"] == "worse" for row in rows for pair in row["compiled"].values()),
        "forms_refused": sum(len(row["refused"]) for row in rows),
        "forms": len(distances),
        "forms_as_plain": sum(apart == "same" for apart in distances),
    }
