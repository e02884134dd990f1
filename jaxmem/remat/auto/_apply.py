"""`apply_choices`: a function whose blocks keep what was chosen for them."""

from collections.abc import Callable

import jax

from jaxmem.remat.auto._assign import Assignment
from jaxmem.remat.auto._candidates import Candidates, Choice, candidates
from jaxmem.remat.auto._forward import capture
from jaxmem.remat.auto._problem import Problem, Program, free_inputs
from jaxmem.remat.auto._realise import realise
from jaxmem.remat.auto._solve import Group, Limits, solve


def apply_choices(program: Program, problem: Problem, assignment: Assignment) -> Callable[..., list]:
    """The program with its blocks realised, as a function of its constants and arguments.

    Each block keeps its names, scopes and source lines.
    """
    free = free_inputs(program)

    def wrap(fn, *, scanned, name):
        if name not in assignment.choices:
            # Nothing differentiated it when the problem was posed; a block that was not there is kept small.
            return fn if name in problem.free else jax.checkpoint(fn, prevent_cse=not scanned)
        expected, choice = problem.groups[problem.group_of[name]].candidates, assignment.choices[name]
        if choice == expected.plain:
            return fn
        if choice == expected.least and not expected.fixed.any():
            return jax.checkpoint(fn, prevent_cse=not scanned)

        def decide(differentiated, inputs):
            forward = capture(fn, inputs, differentiated)
            found = candidates(forward, free[name], problem.rates)
            made = choice if _alike(found, expected) else _again(found, expected, choice)
            values = found.values
            return forward, [values[i] for i in made.kept], [values[i] for i in made.offloaded]

        return realise(fn, decide, scanned=scanned)

    return program.apply(wrap, assignment.segments)


def _alike(found: Candidates, expected: Candidates) -> bool:
    """Whether a choice for one is a choice for the other: the same operations, of however many rows."""
    return (
        _operations(found) == _operations(expected)
        and found.reads == expected.reads
        and found.is_residual.tolist() == expected.is_residual.tolist()
        and found.is_input.tolist() == expected.is_input.tolist()
    )


def _operations(c: Candidates) -> list[str]:
    return [c.forward.jaxpr.eqns[e].primitive.name for e in c.equations]


def _again(found: Candidates, expected: Candidates, choice: Choice) -> Choice:
    """A block that is differentiated by other inputs than was thought: the same share of its residuals, chosen anew."""
    share = expected.kept_bytes(choice) / max(1, expected.kept_bytes(expected.plain))
    size = max(share * found.kept_bytes(found.plain), found.kept_bytes(found.least))
    solved = solve([Group(candidates=found)], Limits(budget_bytes=size, working=False), "seconds")
    return solved.choices[0] if solved else found.least
