"""What the phases of a run need beside its steps: the state is made, restored and saved."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxmem._compat import prune
from jaxmem._units import format_bytes
from jaxmem.analysis import PhaseNeed, Phases, Program, compiled_program, peak_and_seconds
from jaxmem.analysis._sizes import shard_bytes
from jaxmem.jaxprs import num_bytes
from jaxmem.targets import Target
from jaxmem.train._layout import sharding_of
from jaxmem.train._program import TargetProgram, lower_init
from jaxmem.train._spec import StepSpec
from jaxmem.workload import is_creator

# Of each element of a leaf that a key creates: a counter of 64 bits, its random bits and the float32 made of them, were
# nothing fused. What our examples' programs need is less, on CPU, H100 and TPU; most need none of it.
_DRAWN_BYTES = 16
# Of a value's own bytes, what some operations need inside, where no jaxpr shows it: counters; loops of rejection.
_INSIDE = {"random_bits": 3, "random_gamma": 40}
# The program's own temporaries and tables; with a TPU's tiles these were up to 0.5 MiB.
_SMALL_BYTES = 2**20


def run_phases(spec: StepSpec, program: TargetProgram, more: Sequence[PhaseNeed] = ()) -> Phases:
    """The phases of a run of a step, on one device of a target; nothing is compiled.

    Args:
      program: the step, traced for the target.
      more: phases that levers bring.
    """
    state, batch = (list(map(_local_bytes, jax.tree.leaves(tree))) for tree in program.arguments)
    whole, largest = sum(state), max(state, default=0)
    # A CPU's memory is the host's. There a save holds the state itself, so that the next step allocates another.
    cpu = program.target.platform == "cpu"
    shared, where = (whole, "here in the same memory") if cpu else (0, "on the host")
    restore = PhaseNeed(
        name="restore",
        beside_bytes=largest + shared,
        host_bytes=whole,
        how="The state, and a copy of its largest leaf: each is copied into buffers that the first step reuses. What "
        f"was read lies {where}.",
    )
    save = PhaseNeed(
        name="save",
        beside_bytes=shared,
        with_steps=cpu,
        host_bytes=whole,
        how="A step, and the state before it, which stays until it is written."
        if cpu
        else "The state. A copy lies on the host until it is written.",
    )
    needs = (_init(spec, program), restore, save, *more)
    return Phases(state_bytes=whole, other_bytes=sum(batch), needs=needs)


def _init(spec: StepSpec, program: TargetProgram) -> PhaseNeed:
    given = jax.tree.leaves(spec.given())
    shapes_only = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in given)
    own = 0 if shapes_only else sum(_local_bytes(leaf) for leaf in given if hasattr(leaf, "dtype"))
    drawn, how = 0, "The state"
    if own:
        how += f", {format_bytes(own)} of the workload's own arrays, which are copied to it and stay"
    if shapes_only or is_creator(spec.workload.params) or is_creator(spec.workload.state):
        leaves = jax.tree.leaves(program.arguments[0])
        drawn = _DRAWN_BYTES * max(_local_bytes(leaf) // leaf.dtype.itemsize for leaf in leaves)
        if not shapes_only:
            drawn = max(drawn, _creator_bytes(spec))
        how += f", and {format_bytes(drawn)} to draw its leaves"
    return PhaseNeed(
        name="init",
        beside_bytes=own + drawn + _SMALL_BYTES,
        how=f"{how}.",
        compiled_bytes=None if shapes_only else functools.partial(compiled_init_bytes, spec, program.target),
    )


def _creator_bytes(spec: StepSpec) -> int:
    """What making parameters and model state needs beside them, on one device that has to do all of it."""
    traced = jax.make_jaxpr(spec.new_model)(*spec.abstract_given())
    program = prune(traced, [True] * len(traced.jaxpr.outvars))[0].jaxpr  # a module's init also runs the module
    return max(0, working_bytes(program) - sum(num_bytes(var.aval) for var in program.outvars))


def working_bytes(program: Any) -> int:
    """The most bytes alive in a jaxpr, its inputs left out, if a compiler fused nothing and freed nothing.

    What an operation holds inside is freed with it: compilers make values early where nothing waits for them, as
    XLA:CPU draws all terms of a sum, and fuse what draws one.
    """
    made, inside = 0, [0]
    for eqn in program.eqns:
        size = sum(num_bytes(var.aval) for var in eqn.outvars)
        made += size
        inside += [working_bytes(inner) for inner in jex.jaxprs_in_params(eqn.params)]
        inside.append(_INSIDE.get(eqn.primitive.name, 0) * size)
    return made + max(inside)


def compiled_init_bytes(spec: StepSpec, target: Target) -> int | None:
    """The peak of what makes the first state, compiled for a target; None where its compiler does not tell."""
    lowered = Program(name="init", lower=functools.partial(lower_init, spec, target))
    return peak_and_seconds(compiled_program(lowered, target), target)[0]


def _local_bytes(leaf: Any) -> int:
    """Bytes of a leaf on one device."""
    return shard_bytes(leaf, sharding_of(leaf))
