"""`examine`: does a policy do anything to a whole loss? A dry trace that names the reason where it does not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxmem._compat import called_jaxprs, checkpoint_name_of, prevents_cse
from jaxmem._shown import JsonRecord
from jaxmem.errors import RematWithoutEffect
from jaxmem.jaxprs import equations_in, is_float, is_nested_scan, num_bytes, of_some, vjp_residuals
from jaxmem.policy import Policy, as_policy, matches
from jaxmem.remat._queries import PolicyQueries, check_names
from jaxmem.remat._residuals import Residual, ResidualTable, residuals
from jaxmem.remat.blocks import find_blocks, without_marked

_LOOPS = ("scan", "while")
_NEARLY_ALL = 0.9  # a block that makes this share of a loss's values is the whole loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination(JsonRecord, identity=("blocks", "residuals", "names", "warnings")):
    """What a dry trace found.

    Args:
      residuals: what the loss keeps under the policy.
      warnings: sentences on what the policy does not do, with the reason.
      names: the names that the policy was offered.
      blocks: number of calls of blocks in the traced program; a scan's body is called once.
      outside: traces once more, and returns what is kept outside of blocks whatever the policy; None for a policy that
        keeps everything.
      inside: there are blocks in something that is recomputed as a whole (a segment of `nested_scan`, a
        checkpoint of the user's own). What they keep, they keep while that is recomputed, so that the
        policy shows in the peak and not in the residuals of the forward pass.
    """

    residuals: ResidualTable
    warnings: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    blocks: int = 0
    inside: bool = False
    outside: Callable[[], tuple[Residual, ...]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What was found, JSON-ready."""
        return {
            "residuals": self.residuals.to_dict(),
            "warnings": list(self.warnings),
            "names": list(self.names),
            "blocks": self.blocks,
            "inside": self.inside,
        }


def examine(loss: Callable, *args, policy: str | Policy, argnums: int | None = None) -> Examination:
    """Traces and differentiates a loss without computing anything.

    Args:
      loss: called with the function that marks blocks, `checkpoint(target, policy, **options)`; returns
        the function of `args` that is differentiated.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      policy: what the blocks are marked with.
      argnums: the argument that is differentiated; None for all of them.

    Raises:
      UnmatchedNamesError: an exact name that no block of the loss offers, or a regular expression
        that matches none.
      RematWithoutEffect: the loss marks no block.

    >>> import jax.numpy as jnp
    >>> loss = lambda checkpoint: lambda x: checkpoint(jnp.sin, "dots")(x).sum()
    >>> print(*examine(loss, jnp.ones(8), policy="dots").warnings)  # doctest: +ELLIPSIS
    The dots rule of dots kept nothing: ...
    """
    policy = as_policy(policy)
    queries = PolicyQueries()
    traced = jax.make_jaxpr(loss(queries.checkpoint))(*args)

    def again(*args):  # the user's Python code runs once
        return jex.jaxpr_as_fun(traced)(*jax.tree.leaves(args))

    table = residuals(again, *args, argnums=argnums)
    if policy.keeps_everything:
        return Examination(residuals=table)
    if not any(isinstance(out, jex.Var) for out in traced.jaxpr.outvars):
        raise RematWithoutEffect(
            wanted=f"a loss computed from arrays, for remat={str(policy)!r}",
            got="a loss whose results are Python values, so there is nothing to recompute",
            do="Compute it from the parameters and the batch with jax.numpy.",
        )
    if not queries.blocks:
        raise RematWithoutEffect(
            wanted=f"a loss that marks its blocks, for remat={str(policy)!r}",
            got="a loss that declares `memory` but marks none, so the setting has nowhere to apply",
            do="Wrap each repeated block, block = memory.block(block). Or leave `memory` out (pass Net(), not "
            "lambda memory: Net(...)): then jaxmem finds the layers.",
        )
    program, inside = traced.jaxpr, _inside(traced.jaxpr)
    if inside and not queries.answer(policy):
        _differentiate(again, args, argnums)
    names = {name for eqn in equations_in(program) if (name := checkpoint_name_of(eqn)) is not None}
    check_names(policy, queries.names, where="a block of the loss", in_program=names)
    warnings = [
        *_empty(program),
        *_dots(policy, queries),
        *_barriers(program),
        *_whole(program),
        *_offloads(policy, queries, table),
    ]
    return Examination(
        residuals=table,
        warnings=tuple(warnings),
        names=tuple(sorted(queries.names)),
        blocks=queries.blocks,
        inside=inside,
        outside=lambda: _outside(traced, args, argnums),
    )


def _outside(traced, args, argnums: int | None) -> tuple[Residual, ...]:
    """What differentiation keeps where blocks keep nothing."""
    program = without_marked(traced.jaxpr)
    if program is None:
        return ()
    return residuals(lambda *args: program(traced.consts, *jax.tree.leaves(args)), *args, argnums=argnums).rows


def _dots(policy: Policy, queries: PolicyQueries) -> list[str]:
    if policy.dots == "none" or queries.dots:
        return []
    reason = (
        "no block has a matrix product without batch dimensions (batched and vmapped products have some). "
        'Use dots="all", or save by name.'
        if policy.dots == "no_batch"
        else "no block has a matrix product or convolution outside custom derivative rules. Save by name."
    )
    return [f"The dots rule of {policy} kept nothing: {reason}"]


def _empty(program) -> list[str]:
    """No block keeps a value that it makes itself: there is nothing to recompute."""
    for _, _, inner in _blocks(program):
        avals: list[Any] = [v.aval for v in inner.invars]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        try:
            run = jex.jaxpr_as_fun(jex.ClosedJaxpr(inner, ()))
            if inner.constvars or vjp_residuals(*of_some(run, shapes, list(map(is_float, shapes))), argnums=0)[1]:
                return []
        except Exception:  # it cannot be traced alone, as within a shard_map
            return []
    return ["The blocks keep nothing but what they are given, so there is nothing to recompute: leave remat out."]


def _barriers(program) -> list[str]:
    loose = sum(1 for eqn, in_loop, _ in _blocks(program) if not in_loop and not prevents_cse(eqn))
    if not loose:
        return []
    return [
        f"{loose} of the blocks are marked scanned=True, but are not the body of a scan: there the compiler merges the "
        "recomputation with the first computation, and keeps what was to be recomputed. Leave scanned=True out."
    ]


def _whole(program) -> list[str]:
    """One checkpoint round everything, though it has layers that could have their own."""
    total = _made_bytes(program)
    for _, in_loop, inner in _blocks(program):
        made = _made_bytes(inner)
        if in_loop or made < _NEARLY_ALL * total or any(_blocks(inner)):
            continue
        if inner.constvars or not find_blocks(jex.ClosedJaxpr(inner, ())):
            continue  # nothing repeats in it: it may well be the only layer of a small model
        return [
            f"One block makes {made / total:.0%} of all values of the loss: the backward pass begins by computing them "
            "again, and then all of them are there at once, so the peak stays. Mark each of its layers instead."
        ]
    return []


def _offloads(policy: Policy, queries: PolicyQueries, table: ResidualTable) -> list[str]:
    moved = {row.name for row in table.rows if row.memory == "host"}
    idle = [
        pattern
        for pattern in policy.offload
        if not any(matches(pattern, name) for name in moved if name is not None)
        and any(matches(pattern, name) and policy.fate(name) == "offload" for name in queries.names)
    ]
    return [
        f"Offloading {pattern!r} moves nothing: the backward pass does not need that value. The output of a scan's "
        "body is kept as the next iteration's input; name that input instead."
        for pattern in idle
    ]


def _blocks(jaxpr, in_loop: bool = False):
    """(equation, whether it is in a loop, its program) of every block, the outer ones first."""
    for eqn in jaxpr.eqns:
        for inner in called_jaxprs(eqn):
            if prevents_cse(eqn) is not None:
                yield eqn, in_loop, inner
            yield from _blocks(inner, in_loop or eqn.primitive.name in _LOOPS)


def _inside(jaxpr, recomputed: bool = False) -> bool:
    """Whether a block is in a block, or in the primal of a nested scan."""
    for eqn in jaxpr.eqns:
        block = prevents_cse(eqn) is not None
        if block and recomputed:
            return True
        if any(_inside(inner, recomputed or block or is_nested_scan(eqn)) for inner in called_jaxprs(eqn)):
            return True
    return False


def _differentiate(fn: Callable, args, argnums: int | None) -> None:
    """Traces the backward pass too: there JAX asks the policies of blocks in what is recomputed."""

    chosen = range(len(args)) if argnums is None else (argnums,)

    def backward(*args):
        def total(*some):
            given = dict(enumerate(args)) | dict(zip(chosen, some, strict=True))
            outs = jax.tree.leaves(fn(*given.values()))
            return sum(jnp.sum(out) for out in outs if is_float(out))

        out, pull_back = jax.vjp(total, *(args[i] for i in chosen))
        pull_back(jnp.ones_like(out))

    jax.eval_shape(backward, *args)


def _made_bytes(jaxpr) -> int:
    """Bytes of all values that a program makes, iteration by iteration."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = called_jaxprs(eqn)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if inner:
            total += times * max(_made_bytes(program) for program in inner)
        else:
            total += sum(num_bytes(v.aval) for v in eqn.outvars if hasattr(v.aval, "dtype"))
    return total
