"""Random programs in random forms, under random budgets: values and gradients against those of the plain function.

    python -m benchmarks.budget_fuzz --programs 1000 --json -

A form has ties or not, its repeated layers rolled or not, its masks fenced or not; some have no budget. `inexact`
counts programs with ties or fences alone whose numbers are not those of the plain function to the last bit.

A budget is refused if it is below the program's minimum. `max_rel_error` is over programs in float32: the largest
difference in a leaf, as a share of its largest entry (or of a thousandth of the largest entry of all leaves).
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
from jaxmem.random_bits import fenced
from jaxmem.remat.auto import auto
from jaxmem.remat.blocks import tied
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


def one(seed: int) -> tuple[str, float, str]:
    """("equal", "refused", "differs" or "inexact"), the relative error, and what was done, for a seed's program."""
    rng = np.random.default_rng((seed, 1))
    program = random_program(seed)
    bytes_or_share = int(np.exp(rng.uniform(5, 10))) if rng.integers(3) == 0 else float(rng.choice(SHARES))
    objective, jit = ("seconds", "flops")[rng.integers(2)], bool(rng.integers(5) == 0)
    options = {"objective": objective, "offload": bool(rng.integers(4) == 0)}
    order, roll = ("free", "tied", "tied", "head")[rng.integers(4)], bool(rng.integers(2))
    fence, budget = bool(rng.integers(2)), bool(rng.integers(3))
    fn = fenced(program.fn, least=1) if fence else program.fn
    fn = rolled(fn) if roll else fn
    want = differentiated(program, program.fn, jit)
    done = {"16 bits": program.low_precision, order: True, "rolled": roll, "fenced": fence, str(bytes_or_share): budget}
    words = ", ".join(word for word, yes in done.items() if yes)
    try:
        form = within(fn, bytes_or_share, order, **options) if budget else tied(fn, order)
        got = differentiated(program, form, jit)
    except BudgetInfeasible:
        if isinstance(bytes_or_share, int):
            return "refused", 0.0, words
        got = differentiated(program, within(fn, 0.0, order, **options), jit)  # the least
    error = relative_error(got, want)
    if error > TOLERANCE[program.low_precision]:
        return "differs", error, words
    exact = budget or roll or _equal_bits(got, want)
    return ("equal" if exact else "inexact"), error, words


def within(fn, budget, order: str, **options):
    """The function under a budget, with ties."""
    chosen = auto(fn, budget, **options)
    return lambda *args: chosen.decide(*args).apply(fn, order)(*args)


def _equal_bits(got, want) -> bool:
    pairs = zip(map(_array, jax.tree.leaves(got)), map(_array, jax.tree.leaves(want)), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def run(seeds) -> tuple[collections.Counter, float, list[str]]:
    """Counts of outcomes, the largest error in float32, and what differed or was inexact."""
    outcomes, largest, wrong = collections.Counter(), 0.0, []
    for done, seed in enumerate(seeds):
        try:
            outcome, error, kind = one(seed)
        except Exception as exc:  # any error in a form that the program itself does not raise
            outcome, error, kind = "differs", 0.0, f"{type(exc).__name__}: {exc}"[:200]
        outcomes[outcome] += 1
        if outcome in ("differs", "inexact"):
            wrong.append(f"seed {seed}: {outcome}, {kind}, {error:.3g}")
        elif "16 bits" not in kind:
            largest = max(largest, error)
        if sys.stderr.isatty() or done % 25 == 24:
            print(f"{done + 1}: {dict(outcomes)}, {largest:.2g}", *wrong[-1:], file=sys.stderr, flush=True)
    return outcomes, largest, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs in random forms, under random budgets.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", default="-")
    given = parser.parse_args()
    outcomes, largest, wrong = run(range(given.first, given.first + given.programs))
    figures = {
        "programs": sum(outcomes.values()),
        "mismatches": outcomes["differs"],
        "inexact": outcomes["inexact"],
        "max_rel_error": largest,
        "refusals": outcomes["refused"],
    }
    emit(
        figures,
        target="cpu",
        provenance=dict.fromkeys(figures, "measured"),
        notes={"first_seed": given.first, "wrong": wrong},
        out=given.json,
    )


if __name__ == "__main__":
    main()
