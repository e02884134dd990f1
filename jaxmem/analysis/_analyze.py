"""`analyze`: what a function, a lowered or a compiled program needs."""

import dataclasses

import jax

from jaxmem._flax import is_a
from jaxmem.analysis._build import analyze_program
from jaxmem.analysis._kind_paths import check_kinds, kinds_by_path
from jaxmem.analysis._program import Program, function_program
from jaxmem.analysis._report import MemoryReport
from jaxmem.analysis._stages import jax_stage, jit_of
from jaxmem.errors import InputError
from jaxmem.targets import Target, resolve_target


def analyze(
    fn,
    *args,
    target: str | Target | None = None,
    donate_argnums=(),
    static_argnames=(),
    in_shardings=None,
    arg_kinds=None,
    **keywords,
) -> MemoryReport:
    """What `fn(*args)` needs when compiled for `target`. Nothing is run and no argument is allocated.

    Args:
      fn: a function, or one that `jax.jit` or `nnx.jit` made, also as a method or in a `functools.partial`; a
        `Program`, a `jax.stages.Traced`, `Lowered` or `Compiled` (then without `args`). `jaxmem.analyze` takes
        workloads and train steps too.
      *args, **keywords: arrays or `jax.ShapeDtypeStruct`, nnx objects, static arguments by value.
      target: "local" (None), "cpu" or a `Target`. A compiled program has its own.
      donate_argnums, static_argnames, in_shardings: as for `jax.jit`.
      arg_kinds: what the arguments hold, where their types do not tell: a `TrainState` of flax, the states of optax
        and the variables of linen and nnx are known by themselves. One of `KINDS` for each path, such as
        {"params": "parameters", "state.opt_state": "optimizer_state"}: the longest path that begins an argument's own
        decides. Or one kind for each of `args`.

    Raises:
      InputError: on something that cannot be analysed, or on arguments that do not fit it.
      UnknownTargetError: a target that this version cannot compile for.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> report = analyze(jnp.dot, x, x, target="cpu")
    >>> report.argument_bytes, report.output_bytes, report.forward_flops == report.flops == 2 * 256**3
    (524288, 262144, True)
    """
    options = {"donate_argnums": donate_argnums, "static_argnames": static_argnames, "in_shardings": in_shardings}
    staged = _staged(fn, target)
    if staged is not None:
        refuse_arguments(fn, args, {**options, "arg_kinds": arg_kinds, **keywords})
        return analyze_program(*staged)
    if is_a(type(fn), "flax.linen", "Module") and fn.scope is None:
        raise InputError(
            wanted="a function",
            got=f"the linen module {type(fn).__name__}, which has no parameters of its own",
            do="Pass its method, and the variables: analyze(model.apply, variables, x).",
        )
    if not callable(fn):
        raise InputError(
            wanted="a function, a Program, or what jax.jit(...).trace(...), .lower(...) or .compile() returns",
            got=f"a {type(fn).__name__}",
            do="Call analyze(fn, *args) with a function of arrays.",
        )
    resolved = resolve_target(target)
    kind_of = kinds_by_path(arg_kinds, fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    program = function_program(fn, *args, name=name, target=resolved, keywords=keywords, **options)
    check_kinds(arg_kinds, fn, args)  # once tracing has shown that the arguments fit
    return analyze_program(dataclasses.replace(program, kind_of=kind_of), resolved)


def _staged(fn, target: str | Target | None) -> tuple[Program, Target] | None:
    """The program of what is traced, lowered or compiled already, and its target; None of a function."""
    if isinstance(fn, Program):
        return fn, resolve_target(target)
    jit, fn = jit_of(fn), jax_stage(fn)
    name = str(getattr(fn, "fun_name", None) or "program")
    if isinstance(fn, jax.stages.Traced):
        resolved = resolve_target(target)
        return dataclasses.replace(Program.from_traced(fn, name=name, target=resolved), jit=jit), resolved
    if hasattr(fn, "trace"):
        return None
    # Wrappers and stand-ins of JAX's stages are known by what they can do.
    if callable(getattr(fn, "memory_analysis", None)):
        if target is not None:
            raise InputError(
                wanted="target=None for a program that is compiled already",
                got=repr(target),
                do="Pass the function and its arguments to compile it for another target.",
            )
        local = resolve_target("local")
        # With which options it was compiled is not known: the target's notes do not apply.
        own = Target(name=local.name, platform=local.platform, memory_bytes=local.memory_bytes)
        return dataclasses.replace(Program.from_compiled(fn, name=name, platform=own.platform), jit=jit), own
    if callable(getattr(fn, "compile", None)):
        return Program(name=name, lower=fn, jit=jit), resolve_target(target)
    return None


def refuse_arguments(stage, args, options) -> None:
    """InputError for arguments and options of `jax.jit` beside what has its own."""
    given = [f"{len(args)} argument(s)"] if args else []
    given += [name for name, value in options.items() if value not in ((), None)]
    if given:
        raise InputError(
            wanted=f"no arguments or jit options beside a {type(stage).__name__}, which has its own",
            got=", ".join(given),
            do="Leave them out, or pass the function instead.",
        )
