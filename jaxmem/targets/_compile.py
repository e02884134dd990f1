"""Compiling for a target, with errors that say why it failed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from jaxmem.errors import ConfigError, DoesNotFitError
from jaxmem.targets._chip_limits import check_runs, compile_oom
from jaxmem.targets._mesh import in_mesh, mesh_of
from jaxmem.targets._on_target import on_target
from jaxmem.targets._place import place
from jaxmem.targets._target import Target, resolve_target

Part = TypeVar("Part")

# Without autotuning XLA:GPU finds no tiles for some products, and fails instead of leaving them to cuBLAS. Triton is
# not turned off by default: most programs need less memory with it, and which of the two a device chooses is unknown.
_NO_TRITON = ("xla_gpu_enable_triton_gemm", False)
_LACKS_TILES = "Couldn't find output tile sizes"
_NO_TRITON_NOTE = (
    "Compiled with xla_gpu_enable_triton_gemm=false: without autotuning XLA:GPU finds no tiles for a product. So all "
    "products go to cuBLAS, whose workspace (32 MiB on sm_90 and later, 4 MiB before) counts among the temporaries."
)


def compile_on(
    target: str | Target,
    fn: Callable,
    *args: Any,
    compiler_options: Mapping[str, Any] | None = None,
    in_shardings: Any = None,
    **jit_options: Any,
) -> jax.stages.Compiled:
    """`fn(*args)` compiled for `target`, whose devices need not be here.

    Args:
      target: a name, or a `Target`.
      fn: a function of arrays, or a jitted function (then without `jit_options`).
      *args: arrays or `jax.ShapeDtypeStruct`, with shardings if they have them (see `place`); static arguments by
        value.
      compiler_options: XLA options such as {"xla_dump_to": folder}; they override the target's own.
      in_shardings: PartitionSpecs or NamedShardings, a prefix of `args`.
      **jit_options: of `jax.jit`, such as donate_argnums.

    Returns:
      The compiled program, with `memory_analysis()` and `as_text()`. It cannot be called if its devices are not here.

    Raises:
      DoesNotFitError: a TPU's compiler refused the program for lack of memory. XLA:GPU never does: compare the bytes
        with `target.memory_bytes`.
      UnsupportedByChip: the chip cannot run the program.
      RetargetError: the program is tied to devices of this machine.
      MissingCompilerError: the compiler is not installed.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> compile_on("cpu", jnp.dot, x, x).memory_analysis().output_size_in_bytes
    262144
    """
    resolved = resolve_target(target)
    placed = place(args, resolved, in_shardings=in_shardings)
    if in_shardings is not None and not resolved.deviceless:
        jit_options["in_shardings"] = in_shardings
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn, **jit_options)
    with on_target(placed.target), in_mesh(mesh_of(mixed=True, arguments=placed.args)):
        lowered = jitted.trace(*placed.args).lower()
    return compile_lowered(lowered, resolved, compiler_options)


def compile_lowered(
    lowered: jax.stages.Lowered, target: Target, compiler_options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """`lowered` compiled with the target's options, which `compiler_options` override. Raises as `compile_on` does."""
    return compile_noting(lowered, target, compiler_options)[0]


@contextlib.contextmanager
def refusing_options(options: Mapping[str, Any] | None) -> Iterator[None]:
    """Raises ConfigError if XLA refuses one of the user's options."""
    try:
        yield
    except Exception as error:  # jaxlib's class for it differs from version to version
        message = " ".join(str(error).split())
        about = any(words in message for words in ("No such compile option", "While setting option"))
        if not about or not any(name in message for name in options or {}):
            raise
        raise ConfigError(
            wanted="compiler_options that the target's XLA has, with values of their types",
            got=message[:300].rstrip("."),
            do="Correct the name or the value; options are named as in XLA_FLAGS, without the dashes.",
        ) from error


def compile_noting(
    lowered: jax.stages.Lowered, target: Target, compiler_options: Mapping[str, Any] | None = None
) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    """As `compile_lowered`, with notes on how the program was compiled if not in the usual way."""
    with refusing_options(compiler_options):
        return _compile(lowered, target, compiler_options)


def _compile(lowered, target: Target, compiler_options) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    options = {**dict(target.compiler_options), **dict(compiler_options or {})}
    if target.chip is None:
        return lowered.compile(compiler_options=options), ()
    notes: tuple[str, ...] = ()
    try:
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as error:
            name, value = _NO_TRITON
            if target.platform != "gpu" or name in options or _LACKS_TILES not in str(error):
                raise
            compiled, notes = lowered.compile(compiler_options={**options, name: value}), (_NO_TRITON_NOTE,)
    except Exception as error:  # jaxlib's class for it differs from version to version
        oom = compile_oom(str(error))
        if oom is None:
            raise
        failed = DoesNotFitError(
            wanted=f"a program that fits a device of {target.name}",
            got=" ".join(str(error).split())[:500].rstrip("."),
            do="Try more accumulation steps, remat, or bfloat16.",
        )
        failed.needed_bytes, failed.available_bytes, failed.text = oom.needed_bytes, oom.available_bytes, oom.text
        raise failed from error
    if target.platform == "gpu" and not (target.chip.cudnn_attention and target.chip.native_float8):
        check_runs(read_back(lambda: compiled.as_text())[0] or "", target.chip)
    return compiled, notes


def read_back(read: Callable[[], Part]) -> tuple[Part | None, str]:
    """The result of `read` and "", or None and the reason why reading failed.

    A backend may not expose a part of a compiled program, and a compiler newer than jaxlib may write instructions that
    jaxlib does not know. Each raises its own errors.

    Args:
      read: a thunk such as `lambda: compiled.as_text()`.

    >>> read_back(lambda: "HloModule jit_f"), read_back(lambda: 1 // 0)
    (('HloModule jit_f', ''), (None, 'integer division or modulo by zero'))
    """
    try:
        return read(), ""
    except Exception as error:
        return None, " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
