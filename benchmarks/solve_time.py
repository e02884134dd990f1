"""The time to solve a budget for a hundred layers, unrolled and under a scan.

    python -m benchmarks.solve_time --json -

A hundred GPT layers of `benchmarks._stacks`, already traced. The problem is built (blocks, their residuals and costs)
and solved for three budgets: a quarter, a half and three quarters of the way from the smallest residuals to those
without remat. Figures are CPU seconds of the slowest budget; `*_solve_seconds` are of solving alone. A budget that is a
share, and a printed solution, also differentiate the plain function: `*_plain_seconds`. Nothing is compiled.
"""

import dataclasses
import time

import jax

from benchmarks._harness import emit
from benchmarks._stacks import STACKS
from jaxmem.jaxprs import Call
from jaxmem.remat.auto._assignment import plain, smallest
from jaxmem.remat.auto._problem import problem_of, program_of
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._within import within

LAYERS = 100
SHARES = (0.25, 0.5, 0.75)
OBJECTIVES = ("seconds", "flops")


def timed(scan: bool) -> dict:
    """CPU seconds of building the problem and, by objective and share, of solving it."""
    stack = dataclasses.replace(STACKS["gpt"], layers=LAYERS)
    call = Call(stack.loss(scan=scan), stack.shapes(), {})
    program = program_of(call, call.leaves)
    start = time.process_time()
    problem = problem_of(program, Rates.of(None))
    posing = time.process_time() - start
    low, high = smallest(problem).total_bytes, plain(problem).total_bytes
    solving, gaps = {}, []
    for objective in OBJECTIVES:
        for share in SHARES:
            start = time.process_time()
            found = within(problem, low + share * (high - low), objective=objective)
            solving[f"{objective} {share}"] = time.process_time() - start
            assert found is not None
            gaps.append(found.gap)
    start = time.process_time()
    assert problem.plain_bytes > 0
    whole = time.process_time() - start
    return {"pose": posing, "solve": solving, "plain": whole, "max_gap": max(gaps), "blocks": len(problem.group_of)}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    within_warm_up()
    found = {"scanned": timed(True), "unrolled": timed(False)}
    figures = {}
    for name, each in found.items():
        slowest = max(each["solve"].values())
        figures |= {
            f"{name}_{LAYERS}_seconds": each["pose"] + slowest,
            f"{name}_{LAYERS}_solve_seconds": slowest,
            f"{name}_{LAYERS}_plain_seconds": each["plain"],
            f"{name}_{LAYERS}_max_gap": each["max_gap"],
        }
    emit(figures, target="cpu", provenance=dict.fromkeys(figures, "measured"), notes={"parts": found})


def within_warm_up() -> None:
    """Runs the imports that happen once: the solver, and JAX's rules."""
    stack = dataclasses.replace(STACKS["small"], layers=2)
    call = Call(stack.loss(), stack.shapes(), {})
    problem = problem_of(program_of(call, call.leaves), Rates.of(None))
    within(problem, plain(problem).total_bytes)


if __name__ == "__main__":
    main()
