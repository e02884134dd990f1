"""`compare`: several variants of one program, row by row."""

import contextlib
import dataclasses
import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jaxlib.version

from jaxmem._blame import is_own_fault, reason, whole_tracebacks
from jaxmem._shown import JsonRecord, one_line
from jaxmem._units import format_bytes
from jaxmem.analysis._build import analyze_program
from jaxmem.analysis._choice import Choice, choose
from jaxmem.analysis._program import Program, as_program, known
from jaxmem.analysis._progress import Progress, on_terminal
from jaxmem.analysis._report import MemoryReport
from jaxmem.analysis._shortfall import with_shortfall
from jaxmem.errors import InputError, RematWithoutEffect
from jaxmem.targets import Target, resolve_target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(JsonRecord):
    """Reports of several variants compiled for one target.

    Args:
      rows: one report a variant, in the order asked.
      target: name of the target.
      provenance: where the bytes are from.
      versions: (package, version) pairs.
      refused: (name, why) of variants that cannot be had: a budget that no choice stays within, names that nothing
        offers, what JAX or the target's compiler refuses.
      without_effect: names of those refused for a remat setting that changes nothing, which is a mistake in the
        setting or in the marks of the model.
    """

    rows: tuple[MemoryReport, ...]
    target: str
    provenance: str = "compiled"
    versions: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    without_effect: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = [f"{row.name!r} {format_bytes(row.peak_bytes)} ({row.fits})" for row in self.rows]
        refused = [("refused", str(len(self.refused)))] if self.refused else []
        about = [("target", repr(self.target)), ("provenance", self.provenance), *refused]
        return one_line("Comparison", [*about, *(("", text) for text in rows)])

    def __getitem__(self, name: str) -> MemoryReport:
        for row in self.rows:
            if row.name == name:
                return row
        why = dict(self.refused).get(name) or f"the rows are {', '.join(row.name for row in self.rows)}"
        raise KeyError(f"{name}: {why}")

    @property
    def choices(self) -> tuple[Choice, ...]:
        """For each target which row to take: the fastest that fits, or the smallest where none does.

        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> table = compare({"one": jnp.sin, "three": lambda x: x @ x @ x}, x, target="cpu")
        >>> [(choice.name, choice.fits) for choice in table.choices]
        [('one', 'yes')]
        """
        by_target: dict[str, list[MemoryReport]] = {}
        for row in self.rows:
            by_target.setdefault(row.target, []).append(row)
        return tuple(map(choose, by_target.values()))

    def to_dict(self) -> dict[str, Any]:
        """`{"rows": […], "target": …, "provenance": …, "versions": {…}, "refused": {name: why}, "choices": […]}`."""
        return {
            "rows": [row.to_dict(details=False) for row in self.rows],
            "target": self.target,
            "provenance": self.provenance,
            "versions": dict(self.versions),
            "refused": dict(self.refused),
            "choices": [dataclasses.asdict(choice) for choice in self.choices],
        }


def join_comparisons(comparisons: Sequence[Comparison], *, name_targets: bool = False) -> Comparison:
    """Comparisons for several targets as one; `target` then names all of them.

    Args:
      comparisons: at least one.
      name_targets: whether the rows' names shall tell the target, where there are several.
    """
    if len(comparisons) == 1:
        return comparisons[0]
    rows = [row for comparison in comparisons for row in comparison.rows]
    if name_targets:
        rows = [dataclasses.replace(row, name=f"{row.name} on {row.target}") for row in rows]
    targets = ",".join(comparison.target for comparison in comparisons)
    refused = tuple((f"{name} on {c.target}", why) for c in comparisons for name, why in c.refused)
    idle = tuple(f"{name} on {c.target}" for c in comparisons for name in c.without_effect)
    joined = dataclasses.replace(comparisons[0], rows=tuple(rows), target=targets)
    return dataclasses.replace(joined, refused=refused, without_effect=idle)


def compare(
    variants: Mapping[str, Any],
    *args,
    target: str | Target | None = None,
    progress: Progress | None = None,
    make: Callable[..., Program] = as_program,
    without_effect: Literal["raise", "refuse"] = "raise",
) -> Comparison:
    """Compiles each variant for one target and puts the reports side by side.

    Every variant is traced, and its remat setting checked, before the first is compiled.

    Args:
      variants: name → function of `args`; or a `Program`, a lowered or compiled program (then without
        `args`); or whatever `make` understands. `jaxmem.compare` takes `MemoryConfig`s with a workload as `args`.
      *args: arrays or `jax.ShapeDtypeStruct` that all variants are given.
      target: "local" (None), "cpu" or a `Target`.
      progress: called with a variant's name and "tracing", "compiling" or "done"; without it a terminal shows a line.
      make: `make(variant, *args, name=, target=)` makes the program of a variant.
      without_effect: what becomes of a remat setting that leaves the residuals unchanged: "raise" stops before the
        first compile, "refuse" makes it one of `refused`, also named by `without_effect`.

    Raises:
      RematWithoutEffect: a remat setting that leaves the residuals unchanged, unless it is to be `refused`.
      InputError: no variants. Whatever the first of them raises, such as BudgetInfeasible, where all are refused;
        where some are not, the others are `refused`.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w) @ w)
    >>> shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    >>> table = compare({"loss": loss, "gradient": jax.grad(loss)}, *shapes, target="cpu")
    >>> [row.name for row in table.rows], table["gradient"].flops > table["loss"].flops
    (['loss', 'gradient'], True)
    """
    if not isinstance(variants, Mapping) or not variants or not all(isinstance(name, str) for name in variants):
        raise InputError(
            wanted="a mapping from names to at least one variant",
            got=f"a {type(variants).__name__}",
            do="Pass for example {'none': loss, 'full': jax.checkpoint(loss)} and the arguments of loss; with "
            "jaxmem.compare also {'none': MemoryConfig(), 'full': MemoryConfig(remat='full')} and a Workload.",
        )
    resolved = resolve_target(target)
    errors: dict[str, Exception] = {}

    def unless_refused(name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns; None, and the error remembered, where the variant is refused."""
        try:
            return make()
        except Exception as error:
            if is_own_fault(error) or (without_effect == "raise" and isinstance(error, RematWithoutEffect)):
                raise
            errors[name] = error
            if len(errors) == len(variants):
                raise next(iter(errors.values())) from None
            return None

    def traced(name: str) -> Program:
        program = make(variants[name], *args, name=name, target=resolved).resolved()
        check_remat_effect(program)
        return program

    rows = []
    shown = on_terminal(tuple(variants)) if progress is None else contextlib.nullcontext(progress)
    with whole_tracebacks(), shown as tell:
        prepared = {}
        for name in variants:
            tell(name, "tracing")
            program = unless_refused(name, functools.partial(traced, name))
            if program is not None:
                prepared[name] = program
        for name, program in prepared.items():
            tell(name, "compiling")
            row = unless_refused(name, functools.partial(analyze_program, program, resolved))
            rows += [] if row is None else [row]
            tell(name, "done")
    rows = [with_shortfall(row, rows) for row in rows]
    refused = tuple((name, reason(errors[name])) for name in variants if name in errors)
    idle = tuple(name for name, error in errors.items() if isinstance(error, RematWithoutEffect))
    return Comparison(rows=tuple(rows), target=resolved.name, versions=versions(), refused=refused, without_effect=idle)


def versions() -> tuple[tuple[str, str], ...]:
    """(package, version) pairs of what compiles here."""
    return (("jax", jax.__version__), ("jaxlib", jaxlib.version.__version__), ("python", platform.python_version()))


def check_remat_effect(program: Program) -> None:
    """RematWithoutEffect where a program's remat setting keeps what the plain step keeps."""
    if program.remat == "none":
        return
    saved, plain = known(program.saved_residual_bytes), known(program.plain_residual_bytes)
    if saved is None or plain is None or saved != plain:
        return
    raise RematWithoutEffect(
        wanted=f"remat={program.remat!r} to change what {program.name!r} keeps for its backward pass",
        got=f"{format_bytes(saved)} of residuals with and without it",
        do="Leave it out. If blocks are to be marked, mark each repeated one, not the whole loss: "
        "block = memory.block(block).",
    )
