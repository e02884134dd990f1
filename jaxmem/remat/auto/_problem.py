"""`Problem`: a function's blocks, the distinct ones once, with what is kept outside of them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import Tracer

from jaxmem._compat import effect_names, without_tangents
from jaxmem.remat._kept import kept_values, num_bytes
from jaxmem.remat._residuals import Residual, residuals
from jaxmem.remat.auto._candidates import candidates
from jaxmem.remat.auto._forward import Forward, capture, is_float
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._solve import Group
from jaxmem.remat.auto._stem import HEAD, with_stems
from jaxmem.remat.blocks._apply import evaluate
from jaxmem.remat.blocks._blocks import plan_of
from jaxmem.remat.blocks._facts import Facts, body_of
from jaxmem.remat.blocks._marked import keeping_nothing, never
from jaxmem.remat.blocks._plan import Inside, Plan, interval, scanned_block, with_cheap_inputs
from jaxmem.remat.blocks._repeats import Tokens
from jaxmem.remat.blocks._run import jaxpr_of
from jaxmem.remat.blocks._search import intervals

WHOLE = "whole"  # the name of the block of a function in which nothing repeats


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
        plan = plan_of(self.closed)
        return _whole(self.closed) if plan is None else with_stems(plan)

    def apply(self, wrap: Callable, segments: Mapping[str, tuple[int, ...]] | None = None) -> Callable[..., list]:
        """The function of `consts` and arguments with `wrap(fn, scanned=, name=)` round each block.

        Scans are run in `segments`, as of `evaluate`.
        """
        plan = self.plan
        if plan is None:
            return self.__call__
        return lambda *inputs: evaluate(plan, (), inputs, wrap, segments=segments or {})

    def kept_bytes(self, fn: Callable[..., list]) -> int:
        """Bytes that differentiating `fn`, this function or what `apply` made of it, keeps."""
        given, rest = self.split()
        return sum(
            num_bytes(v.aval) for v in kept_values(lambda g, r: fn(*self.joined(g, r)), given, rest, argnums=0)[1]
        )

    def split(self) -> tuple[list, list]:
        """Types of the inputs that may get a gradient, and of the others."""
        avals = [v.aval for v in self.closed.jaxpr.invars]  # with the mesh axes that they vary over
        pairs = list(zip(avals, self.differentiated, strict=True))
        return [aval for aval, yes in pairs if yes], [aval for aval, yes in pairs if not yes]

    def joined(self, given, rest) -> list:
        """The inputs that `split` took apart."""
        given, rest = iter(given), iter(rest)
        return [next(given) if yes else next(rest) for yes in self.differentiated]


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

    @functools.cached_property
    def plain_bytes(self) -> int:
        """Kept without remat, by the whole function; differentiates it, which takes seconds where it is long."""
        return self.program.kept_bytes(self.program) // self.shards

    @functools.cached_property
    def outside(self) -> tuple[Residual, ...]:
        """What is kept outside of blocks, value by value: what differentiation keeps where blocks keep nothing.

        On each device, as if all of it were divided among them.
        """
        fn = self.program.apply(keeping_nothing)
        given, rest = self.program.split()
        rows = residuals(lambda g, r: fn(*self.program.joined(g, r)), given, rest, argnums=0).rows
        return tuple(dataclasses.replace(row, size_bytes=-(-row.size_bytes // self.shards)) for row in rows)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoundBlock:
    """A block in the program; blocks of the same `key` are alike."""

    name: str
    times: int
    local: bool
    free: tuple[bool, ...]
    key: Any


def program_of(fn: Callable[..., Sequence], avals: Sequence, differentiated: Sequence[bool] | None = None) -> Program:
    """Traces a function of flat arrays; without `differentiated` all floating inputs may get a gradient.

    Of what it closes over, what is traced may: weights of a model round it. Arrays do not.
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


def _whole(closed: jex.ClosedJaxpr) -> Plan | None:
    """All of a function as one block, but for what prints and is read nowhere."""
    jaxpr, _ = body_of(closed)
    facts = Facts(jaxpr, frozenset(jaxpr.invars))
    block = interval(facts, "structure", WHOLE, 0, len(facts.eqns), split=False)
    return None if block is None else Plan(facts=facts, items=(block,))


def pose(program: Program, rates: Rates, shards: int = 1) -> Problem:
    """Finds the blocks of a function and what differentiating each distinct one keeps.

    Args:
      program: the function.
      rates: of the chip.
      shards: among how many devices its values are divided, where it does not say so itself by a `shard_map`.
    """
    found = {block.name: block for block in _blocks_of(program)}
    # With nothing but inputs kept inside of blocks, the rest of what is kept is kept outside of them.
    flags, captured, around = _look(program, found)
    at: dict[Any, int] = {}
    groups, group_of = [], {}
    for name, block in found.items():
        if name not in flags:  # nothing differentiates it
            continue
        key = (block.key, block.times, block.local, flags[name], name == HEAD)
        if key in at:
            groups[at[key]] = dataclasses.replace(groups[at[key]], members=groups[at[key]].members + 1)
        else:
            at[key] = len(groups)
            values = candidates(captured[block.key, flags[name]], block.free, rates, 1 if block.local else shards)
            groups.append(Group(candidates=values, times=block.times, last=name == HEAD))
        group_of[name] = at[key]
    inputs = sum(g.runs * g.candidates.kept_bytes(g.candidates.least) for g in groups)
    return Problem(
        groups=tuple(groups),
        group_of=group_of,
        free={name: block.free for name, block in found.items()},
        scans=_scans(program),
        base_bytes=max(0, around // shards - inputs),
        rates=rates,
        program=dataclasses.replace(program, consts=()),
        shards=shards,
    )


def _blocks_of(program: Program) -> list[FoundBlock]:
    found, tokens = [], {}
    for facts, name, part, times, local in _parts(program):
        if id(facts) not in tokens:
            tokens[id(facts)] = Tokens(facts)
        indices = with_cheap_inputs(facts, part)
        inputs, outputs = facts.inputs(indices), facts.outputs(part)
        free = tuple(v in facts.free for v in inputs)
        key = (id(facts), free, _structure(tokens[id(facts)], facts, indices, inputs, outputs))
        found.append(FoundBlock(name=name, times=times, local=local, free=free, key=key))
    return found


def free_inputs(program: Program) -> dict[str, tuple[bool, ...]]:
    """By a block's name, which of its inputs are there anyway."""
    return {
        name: tuple(v in facts.free for v in facts.inputs(with_cheap_inputs(facts, part)))
        for facts, name, part, _, _ in _parts(program)
    }


def _parts(program: Program) -> Iterator[tuple[Facts, str, tuple[int, ...], int, bool]]:
    """(facts, name, equations, times it runs, whether its shapes are one device's) of every block."""
    for plan, item, times, local in intervals(program.plan) if program.plan is not None else ():
        for name, part in item.named_parts:
            yield plan.facts, name, part, times, local


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


def _scans(program: Program) -> dict[str, int]:
    plan, lengths = program.plan, {}
    if plan is None:
        return {}
    for item in plan.items:
        if isinstance(item, Inside):
            eqn = plan.facts.eqns[item.start]
            name = scanned_block(eqn, item)
            if name is not None:
                lengths[name] = eqn.params["length"]
    return lengths


def _look(program: Program, found: dict[str, FoundBlock]):
    """Differentiates with a rule that looks: which inputs of each block get a gradient, its forward pass with that, and
    the bytes that are kept where blocks keep no more than the inputs that they need.

    The rule is traced where the block is, with the axis names and types of a `shard_map` round it.
    """
    flags: dict[str, tuple[bool, ...]] = {}
    captured: dict[Any, Forward] = {}

    def wrap(fn, *, scanned, name):
        @jax.custom_vjp
        def block(*args):
            return list(fn(*args))

        def forward(*primals):
            values = [p.value for p in primals]
            # A scan differentiates its body until it is clear which of its carries get a gradient: the last counts.
            flags[name] = tuple(p.perturbed and is_float(jax.typeof(p.value)) for p in primals)
            key = (found[name].key, flags[name])
            if key not in captured:
                captured[key] = capture(fn, values, flags[name])
            return list(fn(*values)), [values[i] for i in captured[key].inputs_used()]

        block.defvjp(forward, never, symbolic_zeros=True)
        return lambda *args: without_tangents(block(*args))

    around = program.kept_bytes(program.apply(wrap))
    return flags, captured, around
