"""Is a budget kept, whatever the model, the target and the budget?

    python -m benchmarks.budget_promises --json - --cache promises.json
    python -m benchmarks.budget_promises --targets gpu-h100 --models gpt_scan,mlp

Models that compile in seconds – scanned and unrolled transformers, a convolutional network, an MLP – each at five
budgets between the modelled minimum and the modelled bytes without remat. Each budget starts without a cache: a
program that was compiled for another budget counts as a compile again. `violations`: compiled peaks over the budget,
and refused budgets that another choice meets. `monotone`: larger budgets with a costlier choice.
`median_gap_to_bound` is of the modelled problem; `median_compiled_gap` also counts the bytes that the compiler left
over. `step_violations` are of whole training steps under a budget of bytes, halfway between full remat and none: the
returned step is over its budget by its own report, or it is refused although a policy meets the budget.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from benchmarks._cells import Cells, compilers
from benchmarks._choices import Chosen, Found
from benchmarks._harness import emit
from benchmarks._stacks import STACKS
from benchmarks._vit_stack import VitStack
from jaxmem import MemoryConfig, Workload, make_train_step
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto._assignment import plain, smallest
from jaxmem.remat.auto._within import assign

TARGETS = ("gpu-h100", "tpu-v5e:1x1")
SHARES = (0.05, 0.15, 0.3, 0.5, 0.8)
_DEARER = 1.002  # the solver's own gap, twice


def stack(kind: str, layers: int):
    """A transformer of 16 MiB a value, large enough that activations do not fit a TPU's on-chip memory."""
    small = {"batch": 16, "time": 512, "width": 256, "heads": 4, "hidden": 768, "vocabulary": 256, "dtype": "bfloat16"}
    return dataclasses.replace(STACKS[kind], layers=layers, kv_heads=4 if kind == "gpt" else 2, **small)


def mlp(weights, data):
    """Eight layers of `(rows, width)`, unrolled, with a gate."""
    x = data
    for a, b in zip(weights["in"], weights["out"], strict=True):
        x = x + (jax.nn.silu(x @ a) * jnp.tanh(x)) @ b
    return (x.astype(jnp.float32) ** 2).mean()


def convnet(weights, data):
    """Six residual convolutions with a normalisation over the batch, unrolled."""
    x = data
    for kernel in weights["kernels"]:
        numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
        h = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        h = (h - h.mean((0, 1, 2))) * jax.lax.rsqrt(h.var((0, 1, 2)) + 1e-5)
        x = x + jax.nn.relu(h)
    return (x**2).mean()


def _array(*shape: int, dtype: str = "bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def models() -> dict[str, tuple[Callable, tuple]]:
    """By name: loss and its arguments' shapes."""
    vit = VitStack(batch=64, side=112, patch=7, width=256, heads=4, hidden=768, layers=6)
    found = {f"{kind}_scan": (stack(kind, 8).loss(), stack(kind, 8).shapes()) for kind in ("gpt", "llama")}
    found["gpt_unrolled"] = stack("gpt", 3).loss(scan=False), stack("gpt", 3).shapes()
    found["vit_scan"] = vit.loss(), vit.shapes()
    square = [_array(1024, 1024)] * 8
    found["mlp"] = mlp, ({"in": square, "out": square}, _array(32768, 1024))
    kernels = [_array(3, 3, 64, 64, dtype="float32")] * 6
    found["convnet"] = convnet, ({"kernels": kernels}, _array(64, 56, 56, 64, dtype="float32"))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON file that remembers each compile")
    parser.add_argument("--models", default=",".join(models()))
    parser.add_argument("--targets", default=",".join(TARGETS))
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the plugins of absent chips fail to start

    cells, rows, steps = Cells(options.cache), [], []
    for target, name in itertools.product(options.targets.split(","), options.models.split(",")):
        loss, shapes = models()[name]
        rows += budgets(Chosen(cells, name, loss, shapes, target))
        steps.append(step_budget(name, loss, shapes, target))
    kept = [row for row in rows if row["peak_bytes"] is not None]
    emit(
        {
            "combinations": len(rows),
            "violations": sum(row["violation"] for row in rows),
            "steps": len(steps),
            "step_violations": sum(step["violation"] for step in steps),
            "monotone": sum(row["dearer"] for row in rows),
            "infeasible": len(rows) - len(kept),
            "max_compiles": max(row["compiles"] for row in rows),
            "mean_compiles": statistics.mean(row["compiles"] for row in rows),
            "median_gap_to_bound": statistics.median(row["gap"] for row in kept),
            "median_compiled_gap": statistics.median(row["compiled_gap"] for row in kept),
            "median_budget_left": statistics.median(1 - row["peak_bytes"] / row["budget_bytes"] for row in kept),
            "compiles": cells.made,
        },
        target=options.targets.replace(",", ", "),
        provenance={"peak": "compiled", "gap": "modelled"},
        notes={"compilers": compilers(), "rows": rows, "steps": steps},
        out=options.json,
    )


def budgets(chosen: Chosen) -> list[dict]:
    """A row for each budget, the smallest first."""
    problem = chosen.problem
    low, high = smallest(problem).total_bytes, plain(problem).total_bytes
    arguments = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(chosen.shapes))  # and gradients
    rows, reached = [], []
    for share in SHARES:
        budget = int(arguments + low + share * (high - low))
        row = {"model": chosen.name, "target": chosen.target, "share": share, "budget_bytes": budget}
        try:
            found = chosen.fit(budget, "flops", remember=False)
        except BudgetInfeasible as error:
            row |= {"peak_bytes": None, "price": float("inf"), "error": str(error), "compiles": 6}
        else:
            row |= {"peak_bytes": found.record["peak_bytes"], "price": found.assignment.price, "compiles": found.new}
            row |= {"gap": found.assignment.gap, "compiled_gap": compiled_gap(chosen, found, budget)}
            reached += [trial.peak_bytes for trial in found.fitted.trials]
        rows.append(row)
    for row, before in zip(rows, [None, *rows], strict=False):
        over = row["peak_bytes"] is not None and row["peak_bytes"] > row["budget_bytes"]
        refused = row["peak_bytes"] is None and min(reached, default=float("inf")) <= row["budget_bytes"]
        row["violation"] = over or refused
        row["dearer"] = before is not None and row["price"] > _DEARER * before["price"]
        print(chosen.target, row, file=sys.stderr, flush=True)
    return rows


def step_budget(name: str, loss: Callable, shapes: tuple, target: str) -> dict:
    """A row for a training step with a budget halfway between the compiled peaks of full remat and of none."""
    workload = Workload(lambda params, batch: loss(params, batch), *shapes, optax.sgd(0.1))
    full, none = (
        make_train_step(workload, MemoryConfig(remat=remat), target=target).report() for remat in ("full", "none")
    )
    budget = (full.peak_bytes + none.peak_bytes) // 2
    row = {"model": name, "target": target, "budget_bytes": budget, "peak_bytes": None, "violation": True}
    try:
        step = make_train_step(workload, MemoryConfig(remat=f"auto:{budget}B"), target=target)
    except BudgetInfeasible as error:
        row["error"] = str(error)
    else:
        peak = step.report().peak_bytes
        row |= {"peak_bytes": peak, "violation": peak > budget or peak != step.decision.peak_bytes}
        row |= {"compiles": step.decision.compiles, "full_bytes": full.peak_bytes, "none_bytes": none.peak_bytes}
    print(target, row, file=sys.stderr, flush=True)
    return row


def compiled_gap(chosen: Chosen, found: Found, budget_bytes: int) -> float:
    """The largest possible saving of a choice that uses the whole budget, as a share of the cost."""
    best = found.assignment
    room = best.total_bytes + budget_bytes - found.record["peak_bytes"]
    bound = assign(chosen.problem, room, objective="flops")
    return 0.0 if bound is None or best.price <= 0 else max(0.0, (best.price - bound.bound) / best.price)


if __name__ == "__main__":
    main()
