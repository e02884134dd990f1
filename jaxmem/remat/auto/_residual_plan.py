"""`ResidualPlan`: what becomes of the residuals of a function's blocks, and the function with that realised.

`jax.checkpoint` chooses among values of the function before it is differentiated, by the operation that makes them;
here any value may be kept, also those that only the derivative has. Forward-mode differentiation of the block itself
is the price; gradients of gradients work, since both rules are programs.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxmem._compat import pull_back
from jaxmem._scopes import REMAT_SCOPE
from jaxmem._settled import AS_WRITTEN, Settled
from jaxmem.jaxprs import Call, is_float, together, with_rule
from jaxmem.remat.auto._assignment import Assignment
from jaxmem.remat.auto._candidates import Candidates, Choice, candidates
from jaxmem.remat.auto._content import content_of
from jaxmem.remat.auto._forward import Forward, capture
from jaxmem.remat.auto._problem import Problem, Program, program_of
from jaxmem.remat.auto._solution import Solution, describe
from jaxmem.remat.auto._solve import Group, Limits, solve
from jaxmem.remat.auto._stored import Stored, decision_hash, stored_form

_COMPILED = ("target", "peak_bytes", "compiles", "program")
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ResidualPlan:
    """What becomes of the residuals of a function's blocks.

    Args:
      problem: the blocks.
      assignment: the choice for each.
      peak_bytes: of the program that it was made for, as compiled; None where nothing was.
      compiles: how many programs were compiled to make it.
      target: what these were compiled for.
      program: what is equal for programs that compile to the same peak.
      settled: the form of the step in which the blocks were found.

    As JSON it can be stored, and put back in a later process, which then solves and compiles nothing:

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem.remat.auto import Rates, Stored, auto, build_problem
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    >>> plan = auto(loss, 0.9).decide(jnp.ones((8, 8)), jnp.ones((8, 8)))
    >>> stored = Stored.read(plan.to_json())
    >>> again = build_problem(loss, (jnp.ones((8, 8)), jnp.ones((8, 8))), {}, stored.rates)
    >>> ResidualPlan.of_stored(stored, again).hash == plan.hash == stored.hash
    True
    """

    problem: Problem
    assignment: Assignment
    peak_bytes: int | None = None
    compiles: int = 0
    target: str | None = None
    program: str | None = None
    settled: Settled = AS_WRITTEN

    def __repr__(self) -> str:
        known = f"{self.peak_bytes:,} bytes, {self.compiles} compiles" if self.peak_bytes else "modelled"
        return f"ResidualPlan({len(self.assignment.choices)} blocks, peak {known})"

    @functools.cached_property
    def hash(self) -> str:
        """Equal for decisions that make the same program of the same blocks, in whatever process."""
        return decision_hash(content_of(self.problem), self.assignment)

    def to_json(self) -> str:
        """The decision as JSON for people and for `of_stored`: per kind of block its values, and which are kept."""
        compiled = {name: getattr(self, name) for name in _COMPILED} | {"settled": dataclasses.asdict(self.settled)}
        return json.dumps(stored_form(self.problem, self.assignment, compiled), indent=1)

    @classmethod
    def of_stored(cls, stored: Stored, problem: Problem) -> "ResidualPlan":
        """A stored decision for the blocks that it was made for, found anew.

        Raises:
          DecisionError: they are others; names what differs.
        """
        compiled: dict[str, Any] = {name: stored.fields[name] for name in _COMPILED}
        return cls(problem=problem, assignment=stored.assignment(problem), settled=stored.settled, **compiled)

    def solution(self, *, budget_bytes: int | None = None, more: float | None = None) -> Solution:
        """What was decided, readable."""
        return describe(self.problem, self.assignment, budget_bytes=budget_bytes, more=more, peak_bytes=self.peak_bytes)

    def apply(self, fn: Callable, order: str = "free") -> Callable:
        """The function that the problem was built for, or one with the same blocks, with the choices realised.

        Args:
          fn: the function.
          order: of the backward pass, as of `remat.blocks.evaluate`.
        """

        def decided(*args, **kwargs):
            call = Call(fn, args, kwargs)
            program = program_of(call, call.leaves)
            return call.result(
                apply_choices(program, self.problem, self.assignment, order)(*program.consts, *call.leaves)
            )

        return decided


def apply_choices(
    program: Program, problem: Problem, assignment: Assignment, order: str = "free"
) -> Callable[..., list]:
    """The program with its blocks realised, as a function of its constants and arguments.

    Each block keeps its names, scopes and source lines.
    """
    free = {part.name: part.free for part in program.parts}

    def wrap(fn, *, scanned, name):
        if name not in assignment.choices:
            # Nothing differentiated this block when the problem was built; one that is new keeps its inputs alone.
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

    return program.apply(wrap, assignment.segments, order)


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
    """For a block differentiated by other inputs than expected: a new choice that keeps the same share of residuals."""
    share = expected.kept_bytes(choice) / max(1, expected.kept_bytes(expected.plain))
    size = max(share * found.kept_bytes(found.plain), found.kept_bytes(found.least))
    solved = solve([Group(candidates=found)], Limits(budget_bytes=size, working=False), "seconds")
    return solved.choices[0] if solved else found.least


def realise(
    fn: Callable[..., Sequence],
    decide: Callable[[tuple[bool, ...], Sequence], tuple[Forward, Sequence, Sequence]],
    *,
    scanned: bool,
) -> Callable[..., list]:
    """The block `fn` of flat arrays, with values kept, offloaded and recomputed.

    Args:
      fn: the block; what runs where nothing is differentiated.
      decide: of which inputs get a gradient and of the inputs: the forward pass, its variables kept and offloaded.
      scanned: the block is the body of a scan, where nothing can merge the recomputation with the first computation.
    """
    decided = {}

    def forward(*primals):
        inputs = [p.value for p in primals]
        differentiated = tuple(p.perturbed and is_float(jax.typeof(p.value)) for p in primals)
        if differentiated not in decided:  # once, so that one trace after another has the same backward pass
            decided[differentiated] = decide(differentiated, inputs)
        program, kept, offloaded = decided[differentiated]
        known = dict(zip(program.jaxpr.invars, inputs, strict=True))
        wanted = [*program.outputs, *kept, *offloaded]
        values = program.evaluate(wanted, known, effects=True)
        outs, values = values[: program.num_outputs], values[program.num_outputs :]
        used = [program.jaxpr.invars[i] for i in program.inputs_used({*kept, *offloaded})]
        device, host = values[: len(kept)], [jax.device_put(value, _HOST) for value in values[len(kept) :]]
        saved = _Backward(program, (*used, *kept), tuple(offloaded), scanned)
        return outs, jax.tree_util.Partial(saved, [known[v] for v in used] + device, host)

    def backward(saved, cotangents):
        return tuple(saved(cotangents))

    realised = with_rule(fn, forward, backward)
    realised.has_own_rule = True  # pyright: ignore[reportFunctionMemberAccess]  what `evaluate` asks
    return realised


class _Backward:
    """The backward pass of a block; equal to another of the same choice, so that traces can be compared."""

    def __init__(self, program: Forward, device: tuple, host: tuple, scanned: bool):
        self.key = (program, device, host, scanned)

    def __eq__(self, other):
        return isinstance(other, _Backward) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def __call__(self, device, host, cotangents):
        program, names, away, scanned = self.key
        known = {*names, *away}
        if not scanned and program.needed_for(program.residuals, known):
            # Behind a barrier with the cotangents nothing is recomputed before the backward pass comes here.
            arrays = [c for c in cotangents if _is_array(c)]
            device, host, arrays = together((device, host, arrays))
            arrays = iter(arrays)
            cotangents = [next(arrays) if _is_array(c) else c for c in cotangents]
        values = dict(zip((*names, *away), (*device, *(jax.device_put(value, _DEVICE) for value in host)), strict=True))
        with jax.named_scope(REMAT_SCOPE):
            residuals = program.evaluate(program.residuals, values)
        gradients = iter(pull_back(jax.tree.unflatten(program.vjp_tree, residuals), list(cotangents)))
        return [next(gradients) if yes else None for yes in program.differentiated]


def _is_array(cotangent) -> bool:
    return not isinstance(cotangent, SymbolicZero) and cotangent.dtype != jax.dtypes.float0
