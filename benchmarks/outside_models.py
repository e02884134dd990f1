"""Training steps of other authors' models: are gradients equal to a hand-written step's, and do all tables come out?

    pip install equinox==0.13.8 paramax==0.0.5 dm-haiku==0.0.17 e3nn-jax==0.21.0 jraph==0.0.6.dev0 keras==3.15.1
    pip install flowjax==19.1.2 netket==3.23.0 ott-jax==0.6.0 pdequinox==0.1.2
    pip install --no-deps nano-moe-jax==0.1.0 mamba3-jax==1.0.1 flaxdiff==0.2.11 nequix==0.4.5 jraphx==0.1.0 spyx==1.0.0
    pip install --no-deps einops==0.8.2 grain==0.2.18 array_record portpicker jax-tqdm==0.4.0 nir==1.0.8  # these need
    python -m benchmarks.outside_models --json -
    python -m benchmarks.outside_models --models FNO,U-Net --target tpu-v5e
    python -m benchmarks.outside_models --forms --target gpu-h100

Each model is trained for one step with K of 1 and 4 micro-batches under each of three remat settings; gradients and
model state are compared with a plain float32 loop over the same rows and keys: relative L2 distance, leaf by leaf.
`refused` counts combinations that a setting does not support, with the reason; `lost_tables` counts comparisons,
residual tables and reports that failed. Tables are for `--target`. Models that cannot be imported are only named.

With `--forms` these models and those of `benchmarks.real_models` are trained for three steps with weight gradients
tied, masks fenced, layers rolled, and all of these, with remat none and full. `forms_wrong` counts forms whose
gradients after the first step are not the plain form's, to the bit or if rolled to 1e-6, and those that fail;
`forms_worse` counts settings under which "auto" needs more than 1 % more peak or time than the plain form, compiled.
"""

import argparse
import dataclasses
import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._harness import emit
from benchmarks._outside_forms import forms_counted, in_forms, workload_of
from benchmarks._outside_models import MODELS, Trial
from benchmarks._real_models import MODELS as REAL_MODELS
from benchmarks.real_models import version_of
from jaxmem import MemoryConfig, TrainState, analyze, compare, make_train_step
from jaxmem.errors import BudgetInfeasible, JaxmemError, RematWithoutEffect

STEPS, REMATS = (1, 4), ("none", "full", "auto:0.3")
CONFIGS = {
    f"{steps} × {remat}": MemoryConfig(accumulation_steps=steps, remat=remat)
    for steps, remat in itertools.product(STEPS, REMATS)
}
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--models", metavar="NAMES", help=f"of {', '.join(MODELS)}, with commas; all if not given")
    parser.add_argument("--target", default="cpu", help="what the tables are compiled for")
    parser.add_argument("--forms", action="store_true", help="order, roll and masks, of real_models' models, too")
    options = parser.parse_args()
    models = REAL_MODELS | MODELS if options.forms else MODELS
    names = options.models.split(",") if options.models else list(models)
    if unknown := set(names) - set(models):
        parser.error(f"--models: wanted some of {', '.join(models)}; got {', '.join(sorted(unknown))}")
    jax.config.update("jax_platforms", "cpu")
    rows, missing = [], {}
    for name in names:
        model = models[name]
        version, start = version_of(model.package), time.perf_counter()
        jax.config.update("jax_enable_x64", False)  # netket turns it on for all that comes after
        try:
            made = model.make()
        except ImportError as failure:
            missing[name] = f"{model.package}: {failure}"
            continue
        row = {"model": name, "package": f"{model.package} {version}", "kind": model.kind, "what": model.what}
        if options.forms:
            workload = made.workload if isinstance(made, Trial) else workload_of(*made)
            row |= in_forms(workload, options.target, error)
        else:
            row |= compared(made) | {"lost": lost(made, options.target)}
        rows.append(row | {"seconds": round(time.perf_counter() - start)})
        print(rows[-1], file=sys.stderr, flush=True)
    if options.forms:
        emit(
            {"models": len(rows), **forms_counted(rows)},
            target=options.target,
            provenance={"forms_wrong": "measured", "forms_worse": "compiled"},
            notes={"models": rows, "not_installed": missing},
            out=options.json,
        )
        return
    errors = [apart for row in rows for apart in row["errors"].values()]
    emit(
        {
            "models": len(rows),
            "combinations": len(rows) * len(CONFIGS),
            "wrong": sum(not error <= TOLERANCE for error in errors) + sum(len(row["failed"]) for row in rows),
            "max_rel_error": max(errors, default=0.0),
            "lost_tables": sum(len(row["lost"]) for row in rows),
            "refused": sum(len(row["refused"]) for row in rows),
        },
        target=options.target,
        provenance={"max_rel_error": "measured", "lost_tables": "compiled"},
        notes={"tolerance": TOLERANCE, "models": rows, "not_installed": missing},
        out=options.json,
    )


def compared(trial: Trial) -> dict[str, dict]:
    """For each combination its error, the reason of its refusal, or its failure."""
    found = {"errors": {}, "refused": {}, "failed": {}}
    workload = dataclasses.replace(trial.workload, optimizer=keep_gradients())
    start = make_train_step(workload).init()
    wanted = {steps: by_hand(trial, steps, start) for steps in STEPS}
    for name, config in CONFIGS.items():
        try:
            step = make_train_step(workload, config)
            state, _ = step(jax.tree.map(jnp.copy, start), workload.batch)  # donated
            pairs = zip(wanted[config.accumulation_steps], (state.opt_state, state.state), strict=True)
            found["errors"][name] = max(error(want, got) for want, got in pairs)
        except (BudgetInfeasible, RematWithoutEffect) as refusal:
            found["refused"][name] = str(refusal)
        except JaxmemError as failure:
            found["failed"][name] = f"{type(failure).__name__}: {failure}"
    return found


def by_hand(trial: Trial, steps: int, start: TrainState):
    """Mean gradients, and the state after the last micro-batch, of a loop without jaxmem."""
    params, state, batch, total = start.params, start.state, trial.workload.batch, None
    key = jax.random.fold_in(start.rng, 0)  # the first step's
    differentiate = jax.jit(jax.value_and_grad(trial.plain, has_aux=True))
    for i in range(steps):
        micro = jax.tree.map(lambda leaf, i=i: leaf[i::steps], batch)
        (_, state), grads = differentiate(params, micro, key if steps == 1 else jax.random.fold_in(key, i), state)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return jax.tree.map(lambda leaf: leaf / steps, total), state


def keep_gradients() -> optax.GradientTransformation:
    """An optimizer that changes nothing; its state is the last gradient."""
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    return optax.GradientTransformation(zeros, lambda grads, state, params=None: (zeros(grads), grads))


def error(want, got) -> float:
    """The largest relative L2 distance of two trees' leaves; infinite where numbers are not finite.

    Keys and integers are equal or infinitely apart. Leaves less than 1e-5 as large as the largest are rounding errors
    themselves, such as the gradient of a bias before a batch norm, which is zero: their distance is taken as a share of
    the largest.

    >>> error([np.array([3.0, 4.0])], [np.array([3.0, 4.5])]), error([np.array(7)], [np.array(8)])
    (0.1, inf)
    """

    def numbers(leaf):
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    pairs = [(numbers(a), numbers(b)) for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)]
    if not all(np.array_equal(a, b) for a, b in pairs if not np.issubdtype(a.dtype, np.inexact)):
        return float("inf")
    pairs = [(a.astype(complex), b.astype(complex)) for a, b in pairs if np.issubdtype(a.dtype, np.inexact)]
    norms = [float(np.linalg.norm(a)) for a, _ in pairs]
    largest = max(norms, default=0.0) or 1.0
    shares = [norm if norm > 1e-5 * largest else largest for norm in norms]
    apart = [float(np.linalg.norm(a - b)) / share for (a, b), share in zip(pairs, shares, strict=True)]
    return max((x if np.isfinite(x) else float("inf") for x in apart), default=0.0)


def lost(trial: Trial, target: str) -> dict[str, str]:
    """The tables that failed, and why."""
    found = {}

    def comparison():
        table = compare(CONFIGS, trial.workload, target=target)
        assert {row.name for row in table.rows} | {name for name, _ in table.refused} == set(CONFIGS)
        assert str(table)

    def residuals():
        assert make_train_step(trial.workload).residuals().rows

    def report():
        made = analyze(trial.workload, MemoryConfig(), target=target)
        assert made.peak_bytes and str(made)

    for table in (comparison, residuals, report):
        try:
            table()
        except Exception as failure:  # any error means a lost table
            found[table.__name__] = f"{type(failure).__name__}: {failure}"
    return found


if __name__ == "__main__":
    main()
