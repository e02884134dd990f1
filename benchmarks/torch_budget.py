"""The bytes that PyTorch saves under `activation_memory_budget`, given to jaxmem as its budget.

    pip install "jaxmem[torch]"
    python -m benchmarks.torch_budget --json -

One pre-norm GPT block, and four in a row. PyTorch's figures are measured: its forward half is run, and
the tensors that it passes to the backward half are counted in bytes; FLOPs are those of the matrix products in its
graphs. The block's inputs, weights and `x`, are alive anyway and count on neither side. PyTorch's saved tensors are
counted by their own sizes and by the storages they keep alive; the smaller figure is our budget. jaxmem's choice is
modelled, then realised and traced: residuals of `jax.vjp` and products of the gradient must be as modelled.

`ours_over_budget` and `ours_more_recompute` count points at which the model or the trace is above PyTorch's;
`monotone_violations` those at which a larger budget of ours recomputes more.
"""

import argparse
import functools
import itertools
import sys

import jax
import numpy as np

from benchmarks._gpt_block import Shape, stack
from benchmarks._harness import emit
from jaxmem.remat.auto import Problem, Rates, build_problem
from jaxmem.remat.auto._frontier import gradient_flops
from jaxmem.remat.auto._problem import Program, program_of
from jaxmem.remat.auto._residual_plan import apply_choices
from jaxmem.remat.auto._within import assign

LAYERS = (1, 4)
BUDGETS = tuple(i / 10 for i in range(1, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    try:
        import torch
    except ImportError:
        parser.error('wanted PyTorch; it is not installed. Install it: pip install "jaxmem[torch]"')
    from benchmarks._torch_block import saved

    rows = []
    for layers in LAYERS:
        shape = Shape(layers=layers)
        program, problem = posed(shape)
        for budget in BUDGETS:
            theirs = saved(shape.weights, shape.x, shape.heads, layers, budget)
            size = min(theirs.held_bytes, theirs.logical_bytes)
            rows.append(
                {"layers": layers, "activation_memory_budget": budget, "torch_bytes": size}
                | {"torch_held_bytes": theirs.held_bytes, "torch_recompute_flops": theirs.recompute_flops}
                | ours(program, problem, size)
            )
            print(rows[-1], file=sys.stderr, flush=True)
    emit(
        {**counts(rows), "outputs_max_difference": difference(Shape(layers=1))},
        target="none: bytes and FLOPs of the graphs",
        provenance={
            "torch_bytes": "measured: tensors that the run forward half hands to the backward half",
            "torch_recompute_flops": "counted in the partitioned graphs, less the joint graph's",
            "ours_bytes, ours_recompute_flops": "modelled",
            "traced_bytes, traced_recompute_flops": "traced: residuals of jax.vjp, products of the gradient's jaxpr",
        },
        notes={
            "torch": torch.__version__,
            "torch_not_monotone": sum(not_monotone(rows, "torch_bytes", "torch_recompute_flops")),
            "points": rows,
        },
        out=options.json,
    )


def posed(shape: Shape) -> tuple[Program, Problem]:
    """The problem of the traced stack."""
    fn = functools.partial(stack, heads=shape.heads)
    arguments = shape.abstract()
    leaves, tree = jax.tree.flatten(arguments)
    program = program_of(lambda *flat: [fn(*jax.tree.unflatten(tree, flat))], leaves)
    return program, build_problem(fn, arguments, {}, Rates.of(None))


def ours(program: Program, problem: Problem, budget_bytes: int) -> dict[str, float | None]:
    """Bytes and recomputation of the cheapest choice within a budget, modelled and traced; None if there is none."""
    found = assign(problem, budget_bytes, working=False, objective="flops")
    if found is None:
        return dict.fromkeys(("ours_bytes", "ours_recompute_flops", "traced_bytes", "traced_recompute_flops"))
    made = apply_choices(program, problem, found)
    return {
        "ours_bytes": found.kept_bytes,
        "ours_recompute_flops": found.recompute_flops,
        "traced_bytes": program.kept_bytes(made),
        "traced_recompute_flops": gradient_flops(program, made, problem.rates)
        - gradient_flops(program, program, problem.rates),
        "gap": found.gap,
    }


def counts(rows: list[dict]) -> dict[str, float]:
    """The figures: a budget that we cannot stay within counts as passed.

    >>> row = {"layers": 1, "torch_bytes": 8, "torch_recompute_flops": 3, "traced_bytes": 8, "ours_bytes": 9}
    >>> counts([row | {"ours_recompute_flops": 3.0, "traced_recompute_flops": 3.0}])["ours_over_budget"]
    1
    """
    over = [above(row, "bytes", row["torch_bytes"]) for row in rows]
    more = [above(row, "recompute_flops", row["torch_recompute_flops"]) for row in rows]
    less = [
        row["ours_recompute_flops"] is not None and not m and row["ours_recompute_flops"] < row["torch_recompute_flops"]
        for row, m in zip(rows, more, strict=True)
    ]
    return {
        "ours_over_budget": sum(over),
        "ours_more_recompute": sum(more),
        "ours_less_recompute": sum(less),
        "monotone_violations": sum(not_monotone(rows, "torch_bytes", "ours_recompute_flops")),
        "points": len(rows),
    }


def above(row: dict, quantity: str, limit: float) -> bool:
    """Whether the model or the trace is above a limit, or there is no choice at all."""
    return any(row[f"{kind}_{quantity}"] is None or row[f"{kind}_{quantity}"] > limit for kind in ("ours", "traced"))


def not_monotone(rows: list[dict], size: str, flops: str) -> list[bool]:
    """For each pair of points of one stack, whether the one with more bytes recomputes more."""
    known = [row for row in rows if row[flops] is not None]
    pairs = itertools.permutations(known, 2)
    return [a["layers"] == b["layers"] and a[size] <= b[size] and a[flops] < b[flops] for a, b in pairs]


def difference(shape: Shape) -> float:
    """How far apart the two blocks' outputs are on the same numbers."""
    from benchmarks._torch_block import output

    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape.x, np.float32)
    weights = {name: rng.standard_normal(each, np.float32) / 16 for name, each in shape.weights.items()}
    return float(np.abs(output(weights, x, shape.heads) - stack([weights], x, shape.heads)).max())


if __name__ == "__main__":
    main()
