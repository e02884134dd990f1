"""`Solution`: what was chosen, readable."""

import dataclasses
import itertools
import math
from typing import Any

from jaxmem._shown import Brief, JsonRecord
from jaxmem._source import short_place, source_line
from jaxmem._units import format_bytes, format_seconds
from jaxmem.jaxprs import origin
from jaxmem.policy import Policy
from jaxmem.remat._residuals import Residual
from jaxmem.remat.auto._assignment import Assignment
from jaxmem.remat.auto._forward import Forward, to_name
from jaxmem.remat.auto._problem import Problem

FATES = ("keep", "offload", "recompute")
_WORTH_A_NAME = 0.01
_NAMED = 3  # values that a refusal names


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolvedValue(Brief):
    """One value of one kind of block.

    Args:
      fate: "keep", "offload" or "recompute".
      layer: the block it is of; `layers` of them are alike.
      layers: how many blocks keep such a value, runs of a scan counted.
      name: what `checkpoint_name` called it; None without.
      op, module, source: what made it, where.
      anchor: the operand to name instead, where a name on the value itself does not keep it.
      shape, dtype: of one block's value, of the whole batch.
      size_bytes: of all `layers`, on one device, as the chip stores them; a recomputed value would take them if it
        were kept.
      seconds: to make it in all layers; of a kept or offloaded value, to keep it so.
    """

    fate: str
    layer: str
    layers: int
    name: str | None
    op: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    seconds: float
    anchor: "Anchor | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anchor(Brief):
    """The operand to name with `checkpoint_name`, where a name on the value itself does not keep it.

    Args:
      name: what it is called already; None where nothing is.
      op, source: what made it, where.
    """

    name: str | None
    op: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution(
    JsonRecord, identity=("budget_bytes", "kept_bytes", "plain_bytes", "working_bytes", "recompute_seconds", "promise")
):
    """What a budget buys; modelled.

    Args:
      values: kept and offloaded values, and residuals that are recomputed, the largest first.
      budget_bytes: what was asked for; None where it was a share.
      kept_bytes: on the device, by blocks and outside of them.
      host_bytes: in host memory.
      working_bytes: the largest working set of a block's backward pass.
      plain_bytes: what the chip stores of what the function keeps without remat.
      recompute_flops, recompute_seconds: of what runs a second time.
      price, bound, gap: of the objective; no choice is cheaper than `bound`, the gap is a share of the price.
      more_buys_seconds: recompute seconds that one more GiB would save.
      peak_bytes: of the step, as compiled; None where nothing was.
      promise: the strength of the budget's promise, "compiled" for a peak, else "modelled".
      outside: what is kept outside of blocks, whatever is chosen, the largest first; bytes on each device.
    """

    values: tuple[SolvedValue, ...]
    budget_bytes: int | None
    kept_bytes: int
    host_bytes: int
    working_bytes: int
    plain_bytes: int
    recompute_flops: float
    recompute_seconds: float
    price: float
    bound: float
    gap: float
    more_buys_seconds: float | None = None
    peak_bytes: int | None = None
    promise: str = "modelled"
    outside: tuple[Residual, ...] = ()

    def policy(self) -> tuple[Policy, tuple[str, ...]]:
        """What is kept and offloaded as a named policy, and the lines in which to give the names that are missing.

        The derivative of an operation like tanh reads its result before any name is on it; there the lines name what
        the operation is given, as many bytes. A value that only the derivative has cannot be named in the function.
        Values of less than a hundredth of all that is kept, such as statistics of a normalisation, are left out.

        Returns:
          The policy, and "FILE:LINE: checkpoint_name(<op>, 'name')" for values without a name: one for all that the
          same operation of a line makes, in whatever layer. A line may be that of a call into a library, which has to
          be opened up for it.
        """
        names, given = {"keep": [], "offload": []}, {}
        taken = {place.name for value in self.values for place in (value, value.anchor) if place is not None}
        worth = _WORTH_A_NAME * (self.kept_bytes + self.host_bytes)
        for value in self.values:
            place = value.anchor or value
            if value.fate not in names or place.op in ("argument", "constant"):
                continue
            name = place.name
            if name is None and value.size_bytes < worth:
                continue
            if name is None:
                stem = f"{value.fate}_{place.op}".replace(" ", "_")
                new = next(each for i in itertools.count(1) if (each := f"{stem}_{i}") not in taken)
                name = given.setdefault((value.fate, place.op, place.source), new)
                taken.add(name)
            names[value.fate].append(name)
        lines = [
            f"{source or '(no line)'}: checkpoint_name(<{op}>, {name!r})" for (_, op, source), name in given.items()
        ]
        kept = tuple(sorted(set(names["keep"])))
        return Policy(save=kept, offload=tuple(sorted(set(names["offload"]) - set(kept)))), tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        return dataclasses.asdict(self)

    @property
    def summary(self) -> str:
        """A sentence of totals: what is kept and recomputed, and what more bytes would buy."""
        kept = (
            f"{format_bytes(self.kept_bytes)} kept of {format_bytes(self.plain_bytes)}, working set "
            f"{format_bytes(self.working_bytes)}, {format_seconds(self.recompute_seconds)} recomputed; modelled"
            + (f", within {self.gap:.1%} of the cheapest" if self.bound > 0 else "")
        )
        if self.peak_bytes is not None:
            kept += f"; the compiled peak is {format_bytes(self.peak_bytes)}"
        more = self.more_buys_seconds
        if more is not None:
            kept += (
                f"; one more GiB would save {format_seconds(more)}" if more > 0 else "; more bytes would save nothing"
            )
        return f"{kept}."


def in_the_way(problem: Problem, assignment: Assignment) -> str:
    """The largest values that an assignment keeps, in blocks and outside, as "a, b and c"; modelled."""
    inside = describe(problem, assignment, budget_bytes=None, more=None, peak_bytes=None).values
    rows = [(v.size_bytes, v.op, f"{v.layer} × {v.layers}", short_place(v.source)) for v in inside if v.fate == "keep"]
    rows += [(r.held_bytes, r.op, "outside of blocks", short_place(r.source)) for r in problem.outside]
    texts = [
        f"{format_bytes(size)} {'input' if op == 'argument' else op} ({where}{', ' if source else ''}{source})"
        for size, op, where, source in sorted(rows, key=lambda row: -row[0])[:_NAMED]
    ]
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def _anchor(forward: Forward, v) -> Anchor | None:
    at = to_name(forward, v)
    if at is v:
        return None
    made = origin(forward.jaxpr, at)
    return Anchor(name=made.name, op=made.op, source=made.source)


def describe(
    problem: Problem,
    assignment: Assignment,
    *,
    budget_bytes: int | None,
    more: float | None,
    peak_bytes: int | None,
) -> Solution:
    """The readable form of an assignment."""
    rows, counts = [], {}
    for name, choice in assignment.choices.items():
        counts.setdefault((problem.group_of[name], choice), []).append(name)
    for (at, choice), names in counts.items():
        group = problem.groups[at]
        c, layers = group.candidates, _kept_times(problem, assignment, names[0], group.times) * len(names)
        kept, away = set(choice.kept), set(choice.offloaded)
        for i, v in enumerate(c.values):
            fate = "keep" if i in kept else "offload" if i in away else "recompute" if c.is_residual[i] else None
            if fate is None or not c.value_bytes[i]:
                continue
            made = origin(c.forward.jaxpr, v)
            cost = {"keep": c.keep_seconds[i], "offload": c.offload_seconds[i]}.get(fate)
            if cost is None:
                cost = c.seconds[c.maker[i]] if c.maker[i] >= 0 else 0.0
            rows.append(
                SolvedValue(
                    fate=fate,
                    layer=names[0],
                    layers=layers,
                    name=made.name,
                    op=made.op,
                    module=made.module,
                    source=made.source or _first_line(c.forward.jaxpr),
                    shape=tuple(v.aval.shape),
                    dtype=str(v.aval.dtype),
                    size_bytes=int(c.value_bytes[i]) * layers,
                    seconds=float(cost) * layers,
                    anchor=_anchor(c.forward, v) if fate != "recompute" else None,
                )
            )
    rows.sort(key=lambda row: (FATES.index(row.fate), -row.size_bytes))
    return Solution(
        values=tuple(rows),
        budget_bytes=budget_bytes,
        kept_bytes=assignment.kept_bytes,
        host_bytes=assignment.host_bytes,
        working_bytes=assignment.working_bytes,
        plain_bytes=problem.plain_bytes,
        recompute_flops=assignment.recompute_flops,
        recompute_seconds=assignment.recompute_seconds,
        price=assignment.price,
        bound=assignment.bound,
        gap=assignment.gap,
        more_buys_seconds=more,
        peak_bytes=peak_bytes,
        promise="modelled" if peak_bytes is None else "compiled",
        outside=problem.outside,
    )


def _kept_times(problem: Problem, assignment: Assignment, name: str, times: int) -> int:
    """How often a block's values are kept: in segments, an input for each of them."""
    if name not in assignment.segments:
        return times
    return math.ceil(problem.scans[name] / assignment.segments[name][0])


def _first_line(jaxpr) -> str:
    """The source line where a block begins, for its inputs, which have none of their own."""
    return next(filter(None, map(source_line, jaxpr.eqns)), "")
