"""`standard`: what JAX's built-in policies keep, as choices; a search that tries them is never worse than they are."""

import dataclasses

import numpy as np

from jaxmem.remat.auto._assign import Assignment, assigned, uniform
from jaxmem.remat.auto._candidates import Candidates, Choice
from jaxmem.remat.auto._nested import in_segments
from jaxmem.remat.auto._problem import Problem


def standard(problem: Problem, *, objective: str = "seconds") -> dict[str, Assignment]:
    """By the name: "full", "dots_no_batch", "dots", "none". They leave what comes after the last block alone."""
    kinds = {
        "full": lambda c: c.least,
        "dots_no_batch": lambda c: _products(c, batched=False),
        "dots": lambda c: _products(c, batched=True),
        "none": lambda c: c.plain,
    }

    def chosen(kind) -> Assignment:
        left = lambda g: g.candidates.plain if g.last else kind(g.candidates)  # noqa: E731
        return uniform(problem, left, objective=objective)

    return {name: chosen(kind) for name, kind in kinds.items()}


def repriced(problem: Problem, assignment: Assignment, *, objective: str) -> Assignment:
    """The same choices, priced by an objective."""
    found = assigned(problem, assignment.choices, objective=objective)
    if assignment.segments:
        found = in_segments(problem, found, assignment.segments, objective=objective)
    same = abs(found.price - assignment.price) <= 1e-9 * abs(found.price)
    return dataclasses.replace(found, bound=assignment.bound) if same else found


def _products(c: Candidates, *, batched: bool) -> Choice:
    """Keeps the outputs of matrix products as far as they are read; where `batched`, of those with batch dimensions."""
    eqns = [c.forward.jaxpr.eqns[c.equations[e]] if e >= 0 else None for e in c.maker]
    return c.keeping(np.array([eqn is not None and _is_product(eqn, batched) for eqn in eqns], bool))


def _is_product(eqn, batched: bool) -> bool:
    return eqn.primitive.name == "dot_general" and (batched or not any(eqn.params["dimension_numbers"][1]))
