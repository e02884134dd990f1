"""`frontier`: what every budget would buy, with a bound, beside JAX's own policies."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxmem._blame import noting_refusal
from jaxmem._display import renderers
from jaxmem._shown import Brief, JsonRecord
from jaxmem.jaxprs import Call, is_float
from jaxmem.remat._checkpoint import checkpoint_unchecked
from jaxmem.remat.auto._assignment import Assignment, plain, smallest, standard
from jaxmem.remat.auto._auto import check_function, check_objective
from jaxmem.remat.auto._costs import jaxpr_cost
from jaxmem.remat.auto._problem import Program, problem_of, program_of
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._within import within
from jaxmem.targets import Target, in_mesh, mesh_of, resolve_target

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontierPoint(Brief):
    """One way to keep residuals.

    Args:
      name: of the policy; "" for what was chosen.
      kept_bytes: residuals on the device.
      total_bytes: with the largest working set.
      recompute_flops: of products and kernels that run a second time.
      recompute_seconds: of everything that does.
      price: of the objective.
      bound: no choice within the same bytes has a lower price than this; None for a policy.
    """

    name: str = ""
    kept_bytes: int
    total_bytes: int
    recompute_flops: float
    recompute_seconds: float
    price: float
    bound: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frontier(JsonRecord, identity=("points", "policies", "objective", "provenance")):
    """The curve of memory against recomputation; modelled.

    Args:
      points: what was chosen, the fewest bytes first.
      policies: JAX's own at the same blocks.
      objective: what the points minimise.
      refused: (name, why) of policies that JAX refuses for this function.
    """

    points: tuple[FrontierPoint, ...]
    policies: tuple[FrontierPoint, ...]
    objective: str
    provenance: str = "modelled"
    refused: tuple[tuple[str, str], ...] = ()

    def figure(self) -> "Figure":
        """A plotly figure of bytes against price; `.figure().write_html("frontier.html")` is a page of it."""
        return renderers().frontier_figure(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        return dataclasses.asdict(self)


def frontier(
    fn: Callable,
    target: str | Target | None = None,
    *,
    objective: str = "seconds",
    offload: bool = False,
    points: int = 16,
) -> Callable[..., Frontier]:
    """What every budget would buy for a function: call the result with the function's arguments.

    Args:
      fn: as of `auto`.
      target: whose speed is priced; an H100's where None.
      objective, offload: as of `auto`.
      points: how many budgets to solve for between the least and everything, each by the same factor larger.

    >>> import jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(jnp.tanh(x) @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> curve = frontier(loss, objective="flops")([x] * 3, x)
    >>> curve.points[0].kept_bytes < curve.points[-1].kept_bytes
    True
    >>> [p.recompute_flops for p in curve.policies if p.name in ("full", "none")]
    [3072.0, 0.0]
    """
    check_function(fn)
    check_objective(objective)
    rates = Rates.of(None if target is None else resolve_target(target))

    def curve(*args, **kwargs) -> Frontier:
        with in_mesh(mesh_of(mixed=True, arguments=(args, kwargs)), args, kwargs):
            return found_for(args, kwargs)

    def found_for(args, kwargs) -> Frontier:
        call = Call(fn, args, kwargs)
        program = program_of(call, call.leaves)
        problem = problem_of(program, rates)
        least, most = smallest(problem, objective=objective).total_bytes, plain(problem).total_bytes
        found: list[Assignment] = []
        for size in np.geomspace(max(1, least), max(1, most, least), points):
            better = within(problem, float(size), objective=objective, offload=offload)
            if better is not None and (not found or better.price < found[-1].price):
                found.append(better)
        policies, refused = [], []
        for name, choice in standard(problem, objective=objective).items():
            with noting_refusal(refused, name):
                policies.append(_of_policy(program, name, choice, rates))
        return Frontier(
            points=tuple(map(_point, found)), policies=tuple(policies), objective=objective, refused=tuple(refused)
        )

    return curve


def _point(a: Assignment) -> FrontierPoint:
    fields = (field.name for field in dataclasses.fields(FrontierPoint) if field.name != "name")
    return FrontierPoint(**{name: getattr(a, name) for name in fields})


def _of_policy(program: Program, policy: str, choice: Assignment, rates: Rates) -> FrontierPoint:
    """What JAX keeps and recomputes under a policy, with the price of the same choice of ours."""
    marked = program.apply(lambda fn, *, scanned, name: checkpoint_unchecked(fn, policy, scanned=scanned))
    extra = gradient_flops(program, marked, rates) - gradient_flops(program, program, rates)
    kept_bytes = program.kept_bytes(marked, rates.tiles)
    return FrontierPoint(
        name=policy,
        kept_bytes=kept_bytes,
        total_bytes=kept_bytes + choice.total_bytes - choice.kept_bytes,
        recompute_flops=max(0.0, extra),
        recompute_seconds=choice.recompute_seconds,
        price=choice.price,
    )


def gradient_flops(program: Program, fn: Callable[..., list], rates: Rates) -> float:
    """FLOPs of a gradient's products; JAX takes dead code out of what is recomputed."""
    split, given, rest = program.split(fn)

    def gradient(given, rest):
        outs, pull_back = jax.vjp(lambda given: split(given, rest), given)
        return pull_back([_ones(out) for out in outs])

    return jaxpr_cost(jax.make_jaxpr(gradient)(given, rest).jaxpr, rates).flops


def _ones(out: Any):
    if is_float(out):
        return jax.numpy.ones_like(out)
    return np.zeros(out.shape, jax.dtypes.float0)
