"""What is handed to the analysis: a way to lower a program, and what is known before compiling it."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem._cell import shortening
from jaxmem._shown import Brief
from jaxmem.analysis._call import Called
from jaxmem.analysis._compiled import CompiledProgram, read_compiled
from jaxmem.analysis._jaxpr_flops import JaxprFlops, jaxpr_flops
from jaxmem.analysis._kind_paths import shared_arrays
from jaxmem.analysis._phases import Phases
from jaxmem.analysis._stages import jax_stage, jit_of, parameters_of
from jaxmem.config import MemoryConfig
from jaxmem.errors import InputError
from jaxmem.targets import Target, in_mesh, mesh_of, on_target


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program(Brief, identity=("name", "remat", "shards")):
    """A program to be analysed. Values that cost work may be functions, called when needed.

    Args:
      name: for the report.
      lower: the `jax.stages.Lowered`, or what makes it: called once, with the target's platform as default.
      compiler_options: XLA options; they win over the target's own.
      modelled_flops: `jaxpr_flops` of the program's jaxpr, or a function that computes it.
      saved_residual_bytes: residuals of one micro-batch as configured.
      plain_residual_bytes: the same with remat "none": `compare` refuses a remat setting for which
        the two are equal.
      remat: name of the rematerialisation setting.
      saved_names: the names under which values are saved, by the line of source that makes them ("/path/gpt.py:59")
        and their number of elements.
      kind_of: declared kind of an argument from its path ("state.params['w']"), one of `KINDS`; "" where none is.
      config: of a step of jaxmem: what it costs without need is cured by its settings.
      jit: what jits the function, "jax.jit" or "nnx.jit"; `parameters` names its parameters. Empty where it is unknown.
      jaxpr: of the program, or a function that gives it.
      gradients: shapes of the gradients on one device, of a step that reduces them.
      shards: devices among which they are reduced.
      gradient_reduction: "once" or "each" micro-batch.
      phases: of a run whose step it is: `fits` counts them all.
      settings: what it was made with, by name, for a diff of reports.
      notes: sentences for the report's warnings.
      news: sentences for the report's notes: what was done, and is as it should be.
      made: what the target's compiler made of it, where that is known already: it is not compiled again.
      refuse_miscompiled: whether to raise where the compiler made it compute wrong numbers, instead of a finding.
    """

    name: str
    lower: jax.stages.Lowered | Callable[[], jax.stages.Lowered]
    compiler_options: Mapping[str, Any] | None = None
    modelled_flops: JaxprFlops | Callable[[], JaxprFlops | None] | None = None
    saved_residual_bytes: int | Callable[[], int | None] | None = None
    plain_residual_bytes: int | Callable[[], int | None] | None = None
    remat: str = "none"
    saved_names: Mapping[tuple[str, int], str] | Callable[[], Mapping[tuple[str, int], str]] | None = None
    kind_of: Callable[[str], str] | None = None
    config: MemoryConfig | None = None
    jit: str = "jax.jit"
    parameters: tuple[str, ...] = ()
    jaxpr: ClosedJaxpr | Callable[[], ClosedJaxpr] | None = None
    gradients: tuple[tuple[int, ...], ...] = ()
    shards: int = 1
    gradient_reduction: str | None = None
    phases: Phases | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    news: tuple[str, ...] = ()
    made: CompiledProgram | None = None
    refuse_miscompiled: bool = False

    @classmethod
    def from_traced(cls, traced: jax.stages.Traced, *, name: str, target: Target | None = None, **fields) -> "Program":
        """The program of `jax.jit(f).trace(...)`, with its FLOPs counted from the jaxpr.

        Args:
          traced: what was traced; `flax.nnx` wraps its own round that of JAX.
          name: for the report.
          target: what it was traced for, where its mesh is not the one of the target asked for.
          **fields: of the program.
        """
        own = jax_stage(traced)

        def lower() -> jax.stages.Lowered:
            with on_target(target) if target is not None else contextlib.nullcontext():
                return own.lower()

        made = {"lower": lower, "modelled_flops": lambda: jaxpr_flops(own.jaxpr), "jaxpr": lambda: own.jaxpr}
        return cls(name=name, **{**made, **fields})

    @classmethod
    def from_compiled(cls, compiled: Any, *, name: str, platform: str) -> "Program":
        """What is compiled already, for a platform."""

        def lower():
            raise AssertionError("a compiled program is not lowered again")

        return cls(name=name, lower=lower, made=read_compiled(compiled, platform))

    def resolved(self) -> "Program":
        """The same with every modelled value computed."""
        names = ("modelled_flops", "saved_residual_bytes", "plain_residual_bytes")
        return dataclasses.replace(self, **{name: known(getattr(self, name)) for name in names})


def known(value: Any) -> Any:
    """`value`, or its result if it is a function."""
    return value() if callable(value) else value


def as_program(variant, *args, name: str, target: Target) -> Program:
    """How `compare` understands one of its variants, with the arguments that all variants share.

    Raises:
      InputError: for what is neither a function, a `Program`, nor a lowered or compiled program.
    """
    variant = jax_stage(variant)
    if isinstance(variant, (Program, jax.stages.Lowered, jax.stages.Compiled)):
        if args:
            raise InputError(
                wanted=f"no arguments beside the {type(variant).__name__} named {name!r}, which has its own",
                got=f"{len(args)} argument(s)",
                do="Leave them out, or pass the function instead.",
            )
        if isinstance(variant, jax.stages.Lowered):
            return Program(name=name, lower=variant)
        if isinstance(variant, jax.stages.Compiled):
            return Program.from_compiled(variant, name=name, platform=target.platform)
        return dataclasses.replace(variant, name=name)
    if callable(variant):
        return function_program(variant, *args, name=name, target=target)
    raise InputError(
        wanted="variants that are functions, Programs, or what jax.jit(...).lower(...) returns",
        got=f"a {type(variant).__name__} named {name!r}",
        do="Pass a mapping such as {'plain': loss, 'remat': jax.checkpoint(loss)} and the arguments; jaxmem.compare "
        "takes MemoryConfigs beside a Workload, too.",
    )


def function_program(
    fn: Callable,
    *args,
    name: str,
    target: Target,
    donate_argnums=(),
    static_argnames=(),
    in_shardings=None,
    keywords: Mapping[str, Any] | None = None,
) -> Program:
    """The program of a function called with `args` (arrays or `jax.ShapeDtypeStruct`), traced for `target`.

    A function that `jax.jit` or `nnx.jit` made keeps the options it was made with, also in a partial or as a method.
    """
    call = Called.of(fn, args, keywords or {}, name)
    fn = call.fn
    options = {"donate_argnums": donate_argnums, "static_argnames": static_argnames}
    if in_shardings is not None:
        options["in_shardings"] = in_shardings
    if target.deviceless and in_shardings is not None:  # their devices are not here: the arguments carry them
        del options["in_shardings"]
    jitted: Any = fn
    if hasattr(fn, "trace"):
        given = [key for key, value in options.items() if key == "in_shardings" or value not in ((), None)]
        if given:
            raise InputError(
                wanted="the options of a jitted function where it is jitted",
                got=f"{', '.join(given)} for {name!r}, which jax.jit made already",
                do="Pass the function that jax.jit wraps, or give jax.jit these options.",
            )
    else:
        try:
            jitted = call.jit(fn, **options)
        except (TypeError, ValueError) as error:
            given = [f"{key}={value!r}" for key, value in options.items() if value not in ((), None)]
            raise InputError(
                wanted=f"options of jax.jit that fit {name!r}",
                got=f"{', '.join(given) or 'none'} ({str(error).rstrip('.')})",
                do="donate_argnums are positions of arguments, from 0; static_argnames are their names.",
            ) from error
    shared = shared_arrays(call.fn, call.args)
    call, placed, notes = call.placed(target, in_shardings, _movable)
    with on_target(placed.target) as scope, in_mesh(mesh_of(mixed=True, arguments=placed.args)), shortening(all=True):
        traced = jitted.trace(*call.args, **call.keywords)
    notes = (*notes, *placed.notes, *scope.notes, *shared)
    known_of_it = {"notes": notes, "jit": jit_of(jitted), "parameters": parameters_of(fn)}
    return Program.from_traced(traced, target=placed.target, name=name, **known_of_it)


def _movable(args, target: Target):
    """Arguments as shapes where they are arrays on another platform than the target's."""
    if target.deviceless:  # `place` moves them, and knows their shardings
        return args, ()
    dropped = False

    def move(leaf):
        nonlocal dropped
        if not isinstance(leaf, jax.Array):
            return leaf
        devices = leaf.sharding.device_set
        if next(iter(devices)).platform == target.platform:
            return leaf
        dropped |= len(devices) > 1
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)

    moved = jax.tree.map(move, args)
    note = f"Arguments are sharded over devices that are not {target.platform}: analysed unsharded, on one device."
    return moved, (note,) if dropped else ()
