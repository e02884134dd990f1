"""Tracing and lowering for a target that is not this machine's default device."""

import contextlib
import dataclasses
import linecache
import re
import traceback
from collections.abc import Iterator

import jax
from jax.extend.core import JaxprEqn

from jaxmem import _compat
from jaxmem._shown import Brief
from jaxmem._source import is_library, short_name, short_place, source_line
from jaxmem.errors import RetargetError
from jaxmem.targets._target import Target


@dataclasses.dataclass(kw_only=True)
class Scope(Brief):
    """What tracing for a target revealed; `notes` are for the report's warnings.

    Args:
      platform: of the target.
      asked: places in the source that asked for the default backend.
    """

    platform: str
    asked: list[str]

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.asked:
            return ()
        places = list(dict.fromkeys(self.asked))
        shown = f"{', '.join(places[:3])}{', …' if len(places) > 3 else ''}"
        return (
            f"The program reads jax.default_backend() ({shown}): it got {self.platform!r}, as on the target; its other "
            "questions to JAX about this machine are answered for this machine.",
        )


@contextlib.contextmanager
def on_target(target: Target) -> Iterator[Scope]:
    """A context in which arrays and functions that name no device are traced and lowered for `target`.

    For a deviceless target it sets `target.mesh`, so that bare PartitionSpecs and a `jax.shard_map` without a mesh use
    the target's. Nothing can be *run* in it.

    Raises:
      RetargetError: the program closes over a mesh of this machine, runs an operation, or (on a GPU) contains a
        callback to Python.
    """
    if target.deviceless:
        with _compat.answering_default_backend(target.platform) as asked, _explained(target), jax.set_mesh(target.mesh):
            yield Scope(platform=target.platform, asked=asked)
        return
    scope = Scope(platform=target.platform, asked=[])
    if target.platform == jax.default_backend():
        yield scope  # setting a default device would only miss the caller's trace caches
        return
    with jax.default_device(jax.local_devices(backend=target.platform)[0]):
        yield scope


@contextlib.contextmanager
def _explained(target: Target) -> Iterator[None]:
    """Turns JAX's errors about devices of another platform into a RetargetError that names the place."""
    try:
        yield
    except (ValueError, AttributeError, RuntimeError) as error:
        message = " ".join(str(error).split())
        where = _where(error, message)
        if "incompatible devices for jitted computation" in message or "should match the mesh passed to" in message:
            raise RetargetError(
                wanted=f"a program that leaves its devices to {target.name}",
                got=f"one that closes over {_foreign_mesh(message)}{where}",
                do="Use a bare PartitionSpec, or jax.shard_map without a mesh: both mean the mesh of the target; or "
                "declare `mesh` in FUNCTION, which is then given it.",
            ) from error
        if "Executable' object has no attribute 'local_devices'" in message:
            raise RetargetError(
                wanted=f"a program that is only traced, since no {target.name} is here to run it",
                got=f"one that runs an operation while it is traced{where}",
                do="Make arrays before the function is called, or with numpy.",
            ) from error
        if any(frame.f_code.co_name == "emit_python_callback" for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise RetargetError(
                wanted=f"a program without callbacks to Python, which JAX compiles only if a {target.platform} is here",
                got=f"one with {_callback(error)}",
                do="Leave jax.debug.print, jax.debug.callback, jax.pure_callback and io_callback out of what is "
                "analysed, or analyse it for cpu or a TPU.",
            ) from error
        raise


def _callback(error: BaseException) -> str:
    """The callback whose lowering failed, and its source line."""
    equation = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        local = frame.f_locals.get("eqn")
        equation = local if isinstance(local, JaxprEqn) else equation  # the innermost is the last
    if equation is None:
        return "a callback"
    return f"{equation.primitive.name} at {short_place(source_line(equation))}"


def _foreign_mesh(message: str) -> str:
    """The mesh of this machine that the message is about."""
    found = re.search(r"passed to \S+ (Mesh\([^)]*\)+)", message)
    if found:
        return found.group(1)
    found = re.findall(r"(\w+) inside jit with device ids (\[[^\]]*\]) on platform (\w+)", message)
    if found:
        kind, ids, platform = found[0]
        return f"a {kind} over {platform} devices {ids}"
    return "devices of this machine"


def _where(error: BaseException, message: str) -> str:
    """File, line and source of the user's code that raised an error."""
    found = re.search(r" at (\S+?):(\d+)(?::\d+)?", message)
    if found:
        file, line = found.group(1), int(found.group(2))
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
        if not frames:
            return ""
        file, line = frames[-1].filename, frames[-1].lineno or 0
    source = linecache.getline(file, line).strip()
    return f" at {short_name(file)} line {line}{f': `{source}`' if source else ''}"
