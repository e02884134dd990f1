"""Compiles a program so that its buffer assignment is known, and leaves no file behind."""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmem.analysis.assignment._liveness import liveness
from jaxmem.analysis.assignment._proto import read_proto
from jaxmem.analysis.assignment._records import Assignment
from jaxmem.analysis.assignment._text import read_text

_BUFFERS = "after_optimizations-buffer-assignment.txt"
_RANGES = "after_optimizations-live-range.txt"
_FLAG = re.compile(r"--xla_dump_to=(\"[^\"]*\"|'[^']*'|\S+)")


def compile_with_assignment(
    lowered: Any, compiler_options: Mapping[str, Any] | None = None, *, platform: str
) -> tuple[Any, Assignment]:
    """Compiles, and reads where every value lies.

    On CPU the compiled program carries its assignment. A GPU's and a TPU's compiler write theirs to a temporary
    folder, which is removed whatever happens; where the user asks for a dump (`xla_dump_to` among the options or in
    `XLA_FLAGS`), theirs is read, and stays. Where nothing comes, as with a program from the compilation cache, the
    assignment is worked out from the HLO: its `source` is "liveness".

    Args:
      lowered: a `jax.stages.Lowered`.
      compiler_options: XLA's.
      platform: of the compiler: "cpu", "gpu" (or "cuda", "rocm") or "tpu".

    Returns:
      (`jax.stages.Compiled`, `Assignment`).

    Raises:
      Whatever the compiler raises.
    """
    options = dict(compiler_options or {})
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if platform == "cpu":
        compiled = lowered.compile(compiler_options=options or None)
        return compiled, _from_program(compiled, platform)
    with _dump_folder(options) as folder:
        before = set(folder.glob(f"*{_BUFFERS}")) if folder else set()
        compiled = lowered.compile(compiler_options=options)
        assignment = _from_dump(folder, before, _module_name(compiled), platform) if folder else None
    return compiled, assignment or _from_program(compiled, platform)


@contextmanager
def _dump_folder(options: dict[str, Any]) -> Iterator[Path | None]:
    """The folder of the dump, which is entered into the options; None where the user's dump goes to no folder."""
    flag = _FLAG.search(os.environ.get("XLA_FLAGS", ""))
    theirs = options.get("xla_dump_to") or (flag.group(1).strip("\"'") if flag else "")
    # A dump in another format alone, as by xla_dump_hlo_as_proto, would lack the two texts.
    options["xla_dump_hlo_as_text"] = True
    if theirs:
        yield None if theirs in ("-", "sponge") else Path(theirs)
        return
    with tempfile.TemporaryDirectory(prefix="jaxmem-", ignore_cleanup_errors=True) as folder:
        options["xla_dump_to"] = folder
        yield Path(folder)


def _module_name(compiled: Any) -> str:
    return compiled.runtime_executable().hlo_modules()[0].name


def _from_dump(folder: Path, before: set[Path], name: str, platform: str) -> Assignment | None:
    """What the newest files of the module say: of several, as a compiler may write for its parts, the largest."""
    files = [path for path in folder.glob(f"*{_BUFFERS}") if path not in before]
    files = [path for path in files if f".{name}." in path.name] or files
    files = [path for path in files if _ranges_of(path).exists()]
    if not files:
        return None
    path = max(files, key=lambda path: path.stat().st_size)
    return read_text(path.read_text(), _ranges_of(path).read_text(), platform=platform)


def _ranges_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(_BUFFERS) + _RANGES)


def _from_program(compiled: Any, platform: str) -> Assignment:
    """From XLA:CPU's message if there is one, else from the HLO."""
    text = compiled.as_text()
    serialized = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    if serialized:
        module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
        return read_proto(serialized, module, text)
    return liveness(text, platform=platform)
