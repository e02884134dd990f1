"""Has a compiler tell where it puts each value of a program, and leaves no file behind."""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jaxmem.analysis.assignment._liveness import liveness
from jaxmem.analysis.assignment._proto import read_proto
from jaxmem.analysis.assignment._records import Assignment
from jaxmem.analysis.assignment._text import read_text
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.targets import read_back

# CPU and GPU put the chip in front: "sm_9.0a_gpu_after_optimizations-...".
_BUFFERS = "after_optimizations-buffer-assignment.txt"
_TEXT = "after_optimizations.txt"
_RANGES = "after_optimizations-live-range.txt"
_LAST_TEXT = "after_codegen.txt"  # of a TPU
_NAME = re.compile(r"^\s+(?:ROOT )?%(\S+) = ", re.MULTILINE)
_SCHEDULED = re.compile(r"^    \d+:(\S+)$", re.MULTILINE)
_FLAG = re.compile(r"--xla_dump_to=(\"[^\"]*\"|'[^']*'|\S+)")


class BufferDump:
    """A context in which to compile with `options`, and from which to read where the compiler put every value.

    On CPU the compiled program carries its assignment. A GPU's and a TPU's compiler write theirs to a temporary
    folder, which is removed whatever happens; where the user asks for a dump (`xla_dump_to` among the options or in
    `XLA_FLAGS`), theirs is read, and stays. Where nothing comes, as with a program from the compilation cache, the
    assignment is worked out from the HLO: its `source` is "liveness".

    Args:
      compiler_options: XLA's, as the user gives them.
      platform: of the compiler: "cpu", "gpu" (or "cuda", "rocm") or "tpu".
    """

    def __init__(self, compiler_options: Mapping[str, Any] | None = None, *, platform: str):
        self.options = dict(compiler_options or {})
        self.platform = "gpu" if platform in ("cuda", "rocm") else platform
        self._folder: Path | None = None
        self._own = False  # whether nobody else writes into the folder
        self._before: set[Path] = set()
        self._stack = ExitStack()

    def __enter__(self) -> "BufferDump":
        if self.platform != "cpu":
            self._folder, self._own = self._stack.enter_context(_dump_folder(self.options))
            self._before = self._files()
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def text(self) -> str | None:
        """The optimised HLO as the compiler dumped it, or None where only the compiled program can tell.

        A GPU's dump is what the compiled program prints of itself, and saves the seconds that printing a large one
        takes. A TPU's lacks what its compiler adds later, such as cycles. A dump whose schedule has other names than
        its text (JAX 0.12) is not of the finished program.
        """
        if self.platform != "gpu" or not self._own:
            return None
        return self._finished(_TEXT)

    def last_text(self) -> str | None:
        """The optimised HLO that the compiler dumped last, for a program that cannot be read back; None where none is.

        A TPU's has the cycles.
        """
        return self._finished(_LAST_TEXT) or self._finished(_TEXT)

    def _finished(self, ending: str) -> str | None:
        """A dumped text of the one program compiled within, if its names are those of the schedule."""
        new = self._files() - self._before
        found = new.pop() if len(new) == 1 else None
        if found is None or not _beside(found, ending).exists() or not _beside(found, _RANGES).exists():
            return None
        text = _beside(found, ending).read_text()
        named = set(_NAME.findall(text))
        return text if named.issuperset(_SCHEDULED.findall(_beside(found, _RANGES).read_text())) else None

    def of(self, compiled: Any, hlo: str | Module | None) -> Assignment | None:
        """The assignment of what was compiled within; `hlo` is its text, or parsed. None where nothing tells."""
        module = parse_hlo(hlo) if isinstance(hlo, str) else hlo
        if self._folder is not None:
            # The executable knows its name too, but makes all of its HLO anew to say it: seconds for a large program.
            name = module.name if module else read_back(lambda: compiled.runtime_executable().hlo_modules()[0].name)[0]
            found = self._newest(name or "")
            if found is not None:
                return self._read(found)
        return _from_program(compiled, module, self.platform)

    def refused(self) -> tuple[str, Assignment] | None:
        """The optimised HLO and the assignment of a program that was refused with its values placed, as on a TPU.

        None where nothing was dumped.
        """
        found = self._newest("") if self._folder is not None else None
        if found is None:
            return None
        text = _beside(found, _TEXT)
        if not text.exists():
            return None
        return text.read_text(), self._read(found)

    def _read(self, buffers: Path) -> Assignment:
        return read_text(buffers.read_text(), _beside(buffers, _RANGES).read_text(), platform=self.platform)

    def _files(self) -> set[Path]:
        return set(self._folder.glob(f"*{_BUFFERS}")) if self._folder else set()

    def _newest(self, module: str) -> Path | None:
        """The new file of the module: of several, as a compiler may write for its parts, the largest."""
        files = self._files() - self._before
        files = {path for path in files if f".{module}." in path.name} or files
        files = {path for path in files if _beside(path, _RANGES).exists()}
        return max(files, key=lambda path: path.stat().st_size, default=None)


@contextmanager
def _dump_folder(options: dict[str, Any]) -> Iterator[tuple[Path | None, bool]]:
    """The folder of the dump, which is entered into the options, and whether it is ours alone.

    None where the user's dump goes to no folder.
    """
    flag = _FLAG.search(os.environ.get("XLA_FLAGS", ""))
    theirs = options.get("xla_dump_to") or (flag.group(1).strip("\"'") if flag else "")
    # A dump in another format alone, as by xla_dump_hlo_as_proto, would lack the texts.
    options["xla_dump_hlo_as_text"] = True
    if theirs:
        yield (None if theirs in ("-", "sponge") else Path(theirs)), False
        return
    with tempfile.TemporaryDirectory(prefix="jaxmem-", ignore_cleanup_errors=True) as folder:
        options["xla_dump_to"] = folder
        yield Path(folder), True


def _beside(path: Path, ending: str) -> Path:
    """Another file of the program whose buffer assignment is at `path`."""
    return path.with_name(path.name.removesuffix(_BUFFERS) + ending)


def _from_program(compiled: Any, module: Module | None, platform: str) -> Assignment | None:
    """From XLA:CPU's message if there is one, else from the HLO."""
    if module is None:
        return None
    placed, _ = read_back(lambda: compiled.memory_analysis().serialized_buffer_assignment_proto)
    numbered, _ = read_back(lambda: compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    return read_proto(placed, numbered, module) if placed and numbered else liveness(module, platform=platform)
