"""What a compiler made of a program, or had made of it when it refused: HLO, buffers, FLOPs; each read once."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem._miscompilations import Miscompilation
from jaxmem._shown import Brief
from jaxmem.analysis._signature import Signature
from jaxmem.analysis._sizes import MemoryBytes
from jaxmem.analysis.assignment import Assignment, BufferDump
from jaxmem.analysis.hlo._flops import HloFlops, hlo_flops
from jaxmem.analysis.hlo._miscompiled import miscompiled
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.errors import DoesNotFitError
from jaxmem.targets import Target, compile_noting, read_back


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram(Brief, identity=("platform", "how", "said")):
    """A compiled program, or a refused one.

    Args:
      compiled: a `jax.stages.Compiled`; None where the compiler refused it for lack of memory.
      refusal: why; None where it compiled.
      lowered: of a refused program, the `jax.stages.Lowered`.
      platform: of the compiler.
      text: the optimised, scheduled HLO; None where the backend keeps it to itself.
      module: the same, parsed; None where there is none, or none that can be read.
      assignment: where each buffer lies; None where nothing tells.
      how: notes on how it was compiled, where that is not the usual way.
      said: what JAX warned of meanwhile that belongs into a report.
      seconds: wall time that the compiler took; None where another process, or the user, had it compiled.
    """

    compiled: Any = None
    refusal: DoesNotFitError | None = None
    lowered: Any = None
    platform: str
    text: str | None = None
    module: Module | None = None
    assignment: Assignment | None = None
    how: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    seconds: float | None = None

    @functools.cached_property
    def _flops(self) -> tuple[HloFlops | None, tuple[str, ...]]:
        if not self.text:
            return None, ("Compiled FLOPs are unavailable: this backend does not show its program.",)
        try:
            flops = hlo_flops(self.module or self.text)
        except ValueError as error:
            return None, (f"Compiled FLOPs are unavailable: {error}.",)
        return flops, flops.notes

    @property
    def flops(self) -> HloFlops | None:
        """Of the optimised HLO."""
        return self._flops[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read, and what it does not show."""
        return (*self.how, *self._flops[1])

    @functools.cached_property
    def signature(self) -> Signature | None:
        """Its arguments and outputs, leaf by leaf; None where they cannot be told from one another."""
        stage = self.compiled if self.compiled is not None else self.lowered
        return Signature.of(stage, self.module) if self.module is not None else None

    @functools.cached_property
    def miscompiled(self) -> list[tuple[Miscompilation, tuple[str, ...]]]:
        """Known faults of the compiler that the program shows, each with where it does."""
        return miscompiled(self.module, self.platform) if self.module is not None else []

    @property
    def on_chip_bytes(self) -> int:
        """Of temporaries in memories on the chip: a TPU's vector memory and the like."""
        if self.assignment is None:
            return 0
        spaces = self.assignment.memory_space
        temps = [a for a in self.assignment.allocations if a.kind == "temp"]
        return sum(a.size_bytes for a in temps if spaces(a.color) not in ("device", "host"))

    @property
    def assigned_bytes(self) -> MemoryBytes | None:
        """Bytes from the assignment, for a program without a memory analysis."""
        if self.assignment is None:
            return None
        sizes = self.assignment.bytes_by_kind()
        aliased = sum(a.size_bytes for a in self.assignment.allocations if a.kind == "parameter" and a.live_out)
        return MemoryBytes(
            argument_bytes=sizes.get("parameter", 0),
            output_bytes=sizes.get("output", 0) + aliased,
            temp_bytes=sizes.get("temp", 0),
            alias_bytes=aliased,
            host_temp_bytes=self.assignment.host_temp_bytes,
        )


def compile_program(lowered, target: Target, compiler_options: Mapping[str, Any] | None = None) -> CompiledProgram:
    """Compiles `lowered` for `target`; options of the program's own win over the target's.

    A compiler that refuses for lack of memory has placed the buffers by then: what it dumped is read.
    """
    with BufferDump(compiler_options, platform=target.platform) as dump:
        start = time.perf_counter()
        try:
            compiled, notes = compile_noting(lowered, target, dump.options)
            seconds = time.perf_counter() - start
        except DoesNotFitError as error:
            found = dump.refused()
            text, assignment = found if found else (None, None)
            return CompiledProgram(
                refusal=error,
                lowered=lowered,
                platform=target.platform,
                text=text,
                module=_parsed(text),
                assignment=assignment,
                seconds=time.perf_counter() - start,
            )
        made = read_compiled(compiled, target.platform, dump)
        return dataclasses.replace(made, how=(*notes, *made.how), seconds=seconds)


def read_compiled(compiled, platform: str, dump: BufferDump | None = None) -> CompiledProgram:
    """A program that is compiled already; without a `dump` its buffers come from itself or from its HLO."""
    dump = dump or BufferDump(platform=platform)
    text, why = dump.text(), ""
    if text is None:
        text, why = read_back(lambda: compiled.as_text())
    if text is None:
        text = dump.last_text()
    module = _parsed(text)
    assignment, unplaced = read_back(lambda: dump.of(compiled, module))
    return CompiledProgram(
        compiled=compiled,
        platform=platform,
        text=text,
        module=module,
        assignment=assignment,
        how=_unread(why, told=text is not None, unplaced=unplaced),
    )


def _unread(why: str, *, told: bool, unplaced: str) -> tuple[str, ...]:
    """What could not be read of a compiled program, and what comes without it."""
    said = []
    if why:
        what = (
            "read from the compiler's dump instead."
            if told
            else "kinds, layers, buffers, compiled FLOPs and time are left out. Try the compiler that this JAX was "
            "made for, or a newer JAX."
        )
        said.append(f"JAX {jax.__version__} cannot read this program back ({why}): {what}")
    if unplaced:
        said.append(f"Where the buffers lie cannot be read ({unplaced}): kinds, layers and buffers are left out.")
    return tuple(said)


def _parsed(text: str | None) -> Module | None:
    module = parse_hlo(text) if text else None
    return module if module is not None and module.entry else None
