"""Random programs under random budgets: values and gradients against those of the plain function.

    python -m benchmarks.budget_fuzz --programs 1000 --json -

With `--roll` repeated layers are rolled before the budget is spent. A budget is refused if it is below the program's
minimum. `max_rel_error` is over programs in float32: the largest difference in a leaf, as a share of its largest
entry (or of a thousandth of the largest entry of all leaves).
"""

import argparse
import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._harness import emit
from benchmarks._interpret import interpret
from benchmarks._random_programs import RandomProgram, random_program
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto import auto
from jaxmem.remat.roll import rolled

TOLERANCE = {False: 2e-4, True: 0.1}  # by whether the program computes in 16 bits
SHARES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99)


def relative_error(got, want) -> float:
    """The largest difference of any leaf; infinite where structure, dtype or NaNs differ.

    >>> relative_error([1.0], [2.0])
    0.5
    """
    if jax.tree.structure(got) != jax.tree.structure(want):
        return float("inf")
    pairs = list(zip(map(_array, jax.tree.leaves(got)), map(_array, jax.tree.leaves(want)), strict=True))
    if any(a.shape != b.shape or (np.isfinite(a) != np.isfinite(b)).any() for a, b in pairs):
        return float("inf")
    pairs = [(np.nan_to_num(a, posinf=0, neginf=0), np.nan_to_num(b, posinf=0, neginf=0)) for a, b in pairs if a.size]
    largest = [float(np.abs(b).max()) for _, b in pairs]
    floor = 1e-3 * max(largest, default=0.0) or 1.0
    return max(
        (float(np.abs(a - b).max()) / max(size, floor) for (a, b), size in zip(pairs, largest, strict=True)),
        default=0.0,
    )


def _array(leaf) -> np.ndarray:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and (dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended)):
        return np.zeros(np.shape(leaf))
    return np.asarray(leaf, np.float64)


def differentiated(program: RandomProgram, fn, jit: bool):
    """((loss, other outputs), gradients), traced and run equation by equation; with `jit` the function is one call."""
    *arrays, scale = program.args
    trees = {}

    def flat(*leaves):
        args = jax.tree.unflatten(trees["in"], leaves)
        called = jax.jit(lambda *a: _split(fn(*a, scale), trees)) if jit else lambda *a: _split(fn(*a, scale), trees)
        out = jax.value_and_grad(called, program.argnums, has_aux=True)(*args)
        outs, trees["out"] = jax.tree.flatten(out)
        return outs

    leaves, trees["in"] = jax.tree.flatten(tuple(arrays))
    outs = interpret(jax.make_jaxpr(flat)(*leaves), *leaves)
    return jax.tree.unflatten(trees["out"], outs), trees["number"]


def _split(result, trees):
    """Separates the Python number among the outputs, which jit would turn into an array."""
    loss, others = result
    trees["number"] = others["number"]
    return loss, {name: value for name, value in others.items() if name != "number"}


def one(seed: int, roll: bool = False) -> tuple[str, float, str]:
    """("equal", "refused" or "differs"), the relative error, and whether 16 bits were used, for a seed's program."""
    rng = np.random.default_rng((seed, 1))
    program = random_program(seed)
    bytes_or_share = int(np.exp(rng.uniform(5, 10))) if rng.integers(3) == 0 else float(rng.choice(SHARES))
    objective, jit = ("seconds", "flops")[rng.integers(2)], bool(rng.integers(5) == 0)
    want = differentiated(program, program.fn, jit)
    fn = rolled(program.fn) if roll else program.fn
    options = {"objective": objective, "offload": bool(rng.integers(4) == 0)}
    kind = "16 bits" if program.low_precision else "32 bits"
    try:
        got = differentiated(program, auto(fn, bytes_or_share, **options), jit)
    except BudgetInfeasible:
        if isinstance(bytes_or_share, int):
            return "refused", 0.0, kind
        got = differentiated(program, auto(fn, 0.0, **options), jit)  # the least
    error = relative_error(got, want)
    return ("equal" if error <= TOLERANCE[program.low_precision] else "differs"), error, kind


def run(seeds, roll: bool = False) -> tuple[collections.Counter, float, list[str]]:
    """Counts of outcomes, the largest error in float32, and what differed."""
    outcomes, largest, wrong = collections.Counter(), 0.0, []
    for done, seed in enumerate(seeds):
        try:
            outcome, error, kind = one(seed, roll)
        except Exception as exc:  # any error under a budget that the program does not raise without one
            outcome, error, kind = "differs", 0.0, f"{type(exc).__name__}: {exc}"[:200]
        outcomes[outcome] += 1
        if outcome == "differs":
            wrong.append(f"seed {seed}: {kind}, {error:.3g}")
        elif kind == "32 bits":
            largest = max(largest, error)
        if sys.stderr.isatty() or done % 25 == 24:
            print(f"{done + 1}: {dict(outcomes)}, {largest:.2g}", *wrong[-1:], file=sys.stderr, flush=True)
    return outcomes, largest, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs under random budgets.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--roll", action="store_true", help="roll repeated layers first")
    parser.add_argument("--json", default="-")
    given = parser.parse_args()
    outcomes, largest, wrong = run(range(given.first, given.first + given.programs), given.roll)
    figures = {
        "programs": sum(outcomes.values()),
        "mismatches": outcomes["differs"],
        "max_rel_error": largest,
        "refusals": outcomes["refused"],
    }
    emit(
        figures,
        target="cpu",
        provenance=dict.fromkeys(figures, "measured"),
        notes={"first_seed": given.first, "roll": given.roll, "wrong": wrong},
        out=given.json,
    )


if __name__ == "__main__":
    main()
