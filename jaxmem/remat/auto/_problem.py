"""`Problem`: a function's blocks, the distinct ones once, with what is kept outside of them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.core import Tracer

from jaxmem._cell import shortening
from jaxmem._compat import effect_names
from jaxmem.jaxprs import (
    Call,
    Facts,
    Tokens,
    fused,
    is_float,
    jaxpr_of,
    keeping_nothing,
    of_some,
    stored_bytes,
    vjp_residuals,
    with_rule,
)
from jaxmem.remat._residuals import Residual, residuals
from jaxmem.remat.auto._candidates import candidates
from jaxmem.remat.auto._forward import Forward, capture
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._solve import Group
from jaxmem.remat.blocks import HEAD, Part, Plan, cover, evaluate, parts, scan_lengths
from jaxmem.targets import Tiles, in_mesh, mesh_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A function of flat arrays, traced.

    Args:
      closed: its jaxpr, of what the function closes over and then of its arguments; itself without constants.
      consts: what the function closes over.
      differentiated: which inputs may get a gradient.
    """

    closed: jex.ClosedJaxpr
    consts: tuple
    differentiated: tuple[bool, ...]

    def __call__(self, *inputs) -> list:
        return jex.jaxpr_as_fun(self.closed)(*inputs)

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The blocks; the whole function where there are none; None where nothing in it may run a second time."""
        return cover(self.closed)

    @functools.cached_property
    def parts(self) -> list[Part]:
        """The blocks one by one."""
        return [] if self.plan is None else list(parts(self.plan))

    def apply(
        self, wrap: Callable, segments: Mapping[str, tuple[int, ...]] | None = None, order: str = "free"
    ) -> Callable[..., list]:
        """The function of `consts` and arguments with `wrap(fn, scanned=, name=)` round each block.

        Scans are run in `segments`, and the backward pass in an `order`, as of `evaluate`.
        """
        plan = self.plan
        if plan is None:
            return self.__call__
        return lambda *inputs: evaluate(plan, (), inputs, wrap, segments=segments or {}, order=order)

    def kept_bytes(self, fn: Callable[..., list], tiles: Tiles | None = None) -> int:
        """Bytes that differentiating `fn`, this function or what `apply` made of it, keeps, in tiles."""
        return sum(stored_bytes(v.aval, tiles) for v in vjp_residuals(*self.split(fn), argnums=0)[1])

    def plain_bytes(self, tiles: Tiles | None) -> tuple[int, int]:
        """Bytes that differentiating this function keeps; and those of them that are stored, see `fused`."""
        jaxpr, kept = vjp_residuals(*self.split(self), argnums=0)
        sizes = {v: stored_bytes(v.aval, tiles) for v in kept}
        left = fused(jaxpr, kept) if tiles is not None else ()
        return sum(sizes.values()), sum(size for v, size in sizes.items() if v not in left)

    def split(self, fn: Callable[..., list]) -> tuple[Callable, list, list]:
        """`fn` of the inputs that may get a gradient and of the others, and the types of both."""
        avals = [v.aval for v in self.closed.jaxpr.invars]  # with the mesh axes that they vary over
        return of_some(fn, avals, self.differentiated)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What there is to choose.

    Args:
      groups: the distinct blocks.
      group_of: the group, by its index, of a block's name.
      free: by a block's name, which of its inputs are there anyway.
      scans: lengths of the outermost scans, by the name of the block that is their body.
      base_bytes: kept outside of blocks.
      rates: of the chip.
      program: the function, without what it closes over.
      shards: among how many devices its values are divided.
      runs: how often the function runs in what is compiled: a step's micro-batches.

    Bytes and seconds are those of one device.
    """

    groups: tuple[Group, ...]
    group_of: dict[str, int]
    free: dict[str, tuple[bool, ...]]
    scans: dict[str, int]
    base_bytes: int
    rates: Rates
    program: Program
    shards: int = 1
    runs: int = 1

    @functools.cached_property
    def _plain_bytes(self) -> tuple[int, int]:
        kept, stored = self.program.plain_bytes(self.rates.tiles)
        return kept // self.shards, stored // self.shards

    @property
    def traced_bytes(self) -> int:
        """What differentiating the whole function keeps without remat; it takes seconds where that is long."""
        return self._plain_bytes[0]

    @property
    def plain_bytes(self) -> int:
        """Of these what the chip stores: all, but on a TPU those that the compiler computes where they are read."""
        return self._plain_bytes[1]

    def share_bytes(self, share: float, least: int) -> float:
        """What a share of the residuals allows: of what the chip stores.

        Where the `least` that can be kept is more, that is allowed, if it is within the share of all residuals.
        """
        room = share * self.plain_bytes
        return float(least) if room < least <= share * self.traced_bytes else room

    @functools.cached_property
    def outside(self) -> tuple[Residual, ...]:
        """What is kept outside of blocks, value by value: what differentiation keeps where blocks keep nothing.

        On each device, as if all of it were divided among them.
        """
        table = residuals(*self.program.split(self.program.apply(keeping_nothing)), argnums=0)
        rows = table.stored_in(self.rates.tiles).rows
        return tuple(
            dataclasses.replace(
                row,
                size_bytes=-(-row.size_bytes // self.shards),
                stored_bytes=None if row.stored_bytes is None else -(-row.stored_bytes // self.shards),
            )
            for row in rows
        )


def program_of(fn: Callable[..., Sequence], avals: Sequence, differentiated: Sequence[bool] | None = None) -> Program:
    """Traces a function of flat arrays; without `differentiated` all floating inputs may get a gradient.

    Traced values that it closes over may too, such as weights of a model round it; arrays may not.
    """
    closed = jax.make_jaxpr(fn)(*avals)
    jaxpr, consts = closed.jaxpr, tuple(closed.consts)
    outer = tuple(is_float(jax.typeof(c)) and isinstance(c, Tracer) for c in consts)
    given = tuple(is_float(v.aval) for v in jaxpr.invars)
    if differentiated is not None:
        given = tuple(a and b for a, b in zip(given, differentiated, strict=True))
    if consts:  # a custom rule must be given what it differentiates
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        closed = jex.ClosedJaxpr(jaxpr_of(jaxpr.eqns, inputs, jaxpr.outvars, jaxpr.effects), ())
    return Program(closed=closed, consts=consts, differentiated=outer + given)


def build_problem(
    fn: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    rates: Rates,
    argnums: Sequence[int] | None = None,
    shards: int = 1,
) -> Problem:
    """The problem of a call of a function of pytrees.

    Args:
      fn: the function.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s.
      rates: of the chip.
      argnums: the arguments that are differentiated; None for all.
      shards: as of `problem_of`.
    """
    call = Call(fn, args, kwargs)
    differentiated = None
    if argnums is not None:
        chosen = frozenset(argnums)
        marked = tuple(jax.tree.map(lambda _, i=i: i in chosen, arg) for i, arg in enumerate(args))
        differentiated = call.arrays_of((marked, jax.tree.map(lambda _: False, kwargs)))
    with shortening(), in_mesh(mesh_of(mixed=True, arguments=(args, kwargs)), args, kwargs):
        return problem_of(program_of(call, call.leaves, differentiated), rates, shards)


def problem_of(program: Program, rates: Rates, shards: int = 1) -> Problem:
    """Finds the blocks of a function and what differentiating each distinct one keeps.

    Args:
      program: the function.
      rates: of the chip.
      shards: among how many devices its values are divided, where it does not say so itself by a `shard_map`.
    """
    found = {part.name: part for part in program.parts}
    keys = _keys(program.parts)
    # With nothing but inputs kept inside of blocks, the rest of what is kept is kept outside of them.
    flags, captured, around = _look(program, keys, rates.tiles)
    at: dict[Any, int] = {}
    groups, group_of = [], {}
    for name, part in found.items():
        if name not in flags:  # nothing differentiates it
            continue
        key = (keys[name], part.times, part.local, flags[name], name == HEAD)
        if key in at:
            groups[at[key]] = dataclasses.replace(groups[at[key]], members=groups[at[key]].members + 1)
        else:
            at[key] = len(groups)
            values = candidates(captured[keys[name], flags[name]], part.free, rates, 1 if part.local else shards)
            if name == HEAD:  # its backward pass follows at once, so what is kept is what the compiler does not fuse
                values = dataclasses.replace(values, keep_seconds=np.zeros(len(values.values)))
            groups.append(Group(candidates=values, times=part.times, last=name == HEAD))
        group_of[name] = at[key]
    inputs = sum(g.runs * g.candidates.kept_bytes(g.candidates.least) for g in groups)
    return Problem(
        groups=tuple(groups),
        group_of=group_of,
        free={name: part.free for name, part in found.items()},
        scans={} if program.plan is None else scan_lengths(program.plan),
        base_bytes=max(0, around // shards - inputs),
        rates=rates,
        program=dataclasses.replace(program, consts=()),
        shards=shards,
    )


def _keys(found: Sequence[Part]) -> dict[str, Any]:
    """By a block's name, what is equal for blocks that are alike."""
    keys, tokens = {}, {}
    for part in found:
        facts, run = part.facts, part.run
        if id(facts) not in tokens:
            tokens[id(facts)] = Tokens(facts)
        inputs, outputs = facts.inputs(run), facts.outputs(part.equations)
        keys[part.name] = (id(facts), part.free, _structure(tokens[id(facts)], facts, run, inputs, outputs))
    return keys


def _structure(tokens: Tokens, facts: Facts, indices, inputs, outputs) -> tuple:
    """Equal for blocks whose equations are alike and read one another alike."""
    number = {v: i for i, v in enumerate(inputs)}
    wiring = []
    for i in indices:
        eqn = facts.eqns[i]
        wiring.append(tuple(number.get(v, -1) for v in eqn.invars if isinstance(v, jex.Var)))
        for v in eqn.outvars:
            number[v] = len(number)
    ids = tuple(tokens.ids[list(indices)].tolist())
    effects = tuple(sorted(name for i in indices for name in effect_names(facts.eqns[i])))
    return ids, tuple(wiring), tuple(number[v] for v in outputs), effects


def _look(program: Program, keys: dict[str, Any], tiles: Tiles | None):
    """Differentiates with a rule that looks at each block. The rule is traced where the block is, with the axis names
    and types of a `shard_map` round it.

    Returns:
      By a block's name, which of its inputs get a gradient; by its key and that, its forward pass; and the bytes that
      are kept where blocks keep no more than the inputs that they need.
    """
    flags: dict[str, tuple[bool, ...]] = {}
    captured: dict[Any, Forward] = {}

    def wrap(fn, *, scanned, name):
        def forward(*primals):
            values = [p.value for p in primals]
            # A scan differentiates its body until it is clear which of its carries get a gradient: the last counts.
            flags[name] = tuple(p.perturbed and is_float(jax.typeof(p.value)) for p in primals)
            key = (keys[name], flags[name])
            if key not in captured:
                captured[key] = capture(fn, values, flags[name])
            return list(fn(*values)), [values[i] for i in captured[key].inputs_used()]

        return with_rule(fn, forward)

    around = program.kept_bytes(program.apply(wrap), tiles)
    return flags, captured, around
