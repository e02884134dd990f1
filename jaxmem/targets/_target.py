"""Targets of this version: the default backend, and XLA:CPU compiled so that memory differences show."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from jaxmem.errors import UnknownTargetError
from jaxmem.targets._memory import device_memory_bytes, host_memory_bytes

KNOWN_TARGETS = ("local", "cpu")

# XLA:CPU's default scheduler keeps the temporaries of an unrolled checkpointed model unchanged.
_MEMORY_SCHEDULER = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What is compiled for; equal by value.

    Args:
      name: as the user wrote it.
      platform: the JAX platform whose compiler is used, for example "cpu".
      memory_bytes: bytes that a program may use: of one device, or of the whole machine on
        "cpu", whose devices share it. None where unknown.
      compiler_options: (name, value) pairs given to the compiler.
      notes: sentences about this target that every report repeats among its warnings.

    >>> resolve_target("cpu").platform
    'cpu'
    """

    name: str
    platform: str
    memory_bytes: int | None = None
    compiler_options: tuple[tuple[str, str | bool | int | float], ...] = ()
    notes: tuple[str, ...] = ()


def resolve_target(name: "str | Target | None" = None) -> Target:
    """The target of that name; None means "local", and a `Target` is returned as it is.

    "local" is the default backend, compiled exactly as it would run. "cpu" is XLA:CPU whatever the
    default backend, with its memory-minimising scheduler.

    Raises:
      UnknownTargetError: any other name, or "cpu" where JAX was told not to start that backend.
    """
    if isinstance(name, Target):
        return name
    if name is None or name == "local":
        return _local()
    if name == "cpu":
        return _cpu()
    raise UnknownTargetError(
        wanted=f"a target that this version compiles for: {', '.join(KNOWN_TARGETS)}",
        got=repr(name),
        do="Use cpu for an embedded compile, or local for the backend JAX runs on.",
    )


@contextlib.contextmanager
def on_target(target: Target) -> Iterator[None]:
    """Within it, arrays and functions that name no device are traced and lowered for `target`."""
    if target.platform == jax.default_backend():
        yield  # entering a default device here would only miss the caller's trace caches
        return
    with jax.default_device(jax.local_devices(backend=target.platform)[0]):
        yield


def _local() -> Target:
    platform = jax.default_backend()
    if platform != "cpu":
        return Target(name="local", platform=platform, memory_bytes=device_memory_bytes(jax.local_devices()[0]))
    note = (
        "XLA:CPU's default scheduler may hide what rematerialisation saves outside a scan: "
        "target cpu compiles with its memory-minimising scheduler."
    )
    return Target(name="local", platform="cpu", memory_bytes=host_memory_bytes(), notes=(note,))


def _cpu() -> Target:
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise UnknownTargetError(
            wanted="the cpu backend for target 'cpu'",
            got=f"JAX without it ({error})",
            do="Add cpu to JAX_PLATFORMS, for example JAX_PLATFORMS=cuda,cpu.",
        ) from None
    option, value = _MEMORY_SCHEDULER
    note = f"Compiled by XLA:CPU with {option}={value}: bytes differ from a plain CPU run and from a TPU or GPU."
    return Target(
        name="cpu",
        platform="cpu",
        memory_bytes=host_memory_bytes(),
        compiler_options=(_MEMORY_SCHEDULER,),
        notes=(note,),
    )
