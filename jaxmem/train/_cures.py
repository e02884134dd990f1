"""`try_cures`: what the cures of a step's findings come to, by compiles; `cured`: the report with that."""

import contextlib
import dataclasses
import itertools
import json
import time

from jaxmem._blame import noting_refusal
from jaxmem._units import format_bytes
from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.analysis._compare import versions
from jaxmem.analysis._progress import Progress, on_terminal
from jaxmem.analysis._records import Finding, TriedCure
from jaxmem.config import MemoryConfig
from jaxmem.targets import Target
from jaxmem.train._variants import analyze
from jaxmem.workload import Workload

AS_ASKED = "as asked"
_SAME = 0.01  # of peak or time: what changes less is no gain, and no loss
_COMPILES_FASTER = 0.3  # times of compiles vary by a fifth on a machine at work


def try_cures(
    workload: Workload,
    config: MemoryConfig | None = None,
    *,
    target: str | Target | None = None,
    report: MemoryReport | None = None,
    progress: Progress | None = None,
    within_seconds: float | None = None,
) -> Comparison:
    """Compiles the settings that the findings of a step name, one at a time: what each gives in bytes, and its time.

    The first row is the step as asked; the name of another is what its config changes. A setting that this step does
    not take is refused with the reason.

    Args:
      workload: what is trained.
      config: how, as asked.
      target: "local" (None), "cpu", the name of a chip, or a `Target`.
      report: of the step on this target, if it was made already: it is not compiled again.
      progress: as for `compare`.
      within_seconds: after so many no other is begun, and remat budgets, which take several compiles, are left out.

    >>> import jax, jax.numpy as jnp, optax
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = jnp.sin(jnp.tanh(x @ w))
    ...     return jnp.mean(x**2)
    >>> workload = Workload(loss, [jnp.ones((64, 64))] * 4, jnp.ones((512, 64)), optax.sgd(0.1))
    >>> table = try_cures(workload, target="cpu")
    >>> [row.name for row in table.rows][:2]
    ['as asked', 'remat=full']
    >>> table["remat=full"].peak_bytes < table["as asked"].peak_bytes
    True
    """
    config, start = config or MemoryConfig(), time.perf_counter()
    first = report or analyze(workload, config, target=target)
    by_finding = [finding.configs for finding in first.findings]
    if within_seconds is not None:  # one of each before the others
        by_finding = itertools.zip_longest(*by_finding)
    texts = {_changes(config, text): text for several in by_finding for text in several if text}
    rows, refused = [dataclasses.replace(first, name=AS_ASKED)], []
    with contextlib.nullcontext(progress) if progress else on_terminal(list(texts)) as tell:
        for name, text in texts.items():
            other = MemoryConfig.from_json(text)
            if within_seconds is not None and (time.perf_counter() - start > within_seconds or other.budget):
                continue
            tell(name, "compiling")
            with noting_refusal(refused, name):
                made = analyze(workload, other, target=target)
                rows.append(dataclasses.replace(made, name=name))
            tell(name, "done")
    return Comparison(rows=tuple(rows), target=first.target, versions=versions(), refused=tuple(refused))


def cured(report: MemoryReport, tried: Comparison) -> MemoryReport:
    """A report whose findings tell what their cures came to.

    Findings whose cures were all compiled, and none helps, are left out; the report's notes say so.

    Args:
      report: of a step.
      tried: what `try_cures` made of it.

    >>> import jax.numpy as jnp, optax
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = jnp.sin(jnp.tanh(x @ w))
    ...     return jnp.mean(x**2)
    >>> workload = Workload(loss, [jnp.ones((64, 64))] * 4, jnp.ones((512, 64)), optax.sgd(0.1))
    >>> report = analyze(workload, target="cpu")
    >>> told = cured(report, try_cures(workload, target="cpu", report=report))
    >>> next(finding.proof for finding in told.findings if finding.kind == "residuals").partition("=full")[0]
    'Compiled: remat'
    """
    config = MemoryConfig.from_json(report.config)
    rows, refused = {row.name: row for row in tried.rows}, dict(tried.refused)

    def with_proof(finding: Finding) -> Finding:
        found = []
        for name in dict.fromkeys(_changes(config, text) for text in finding.configs):
            if name in rows:
                found.append(_compared(name, report, rows[name]))
            elif name in refused:
                found.append(TriedCure(name=name, helps=False, text="is refused"))
        return dataclasses.replace(finding, tried=tuple(found))

    proven = [with_proof(finding) for finding in report.findings]
    harmful = [
        f for f in proven if f.tried and len(f.tried) == _settings(config, f) and not any(t.helps for t in f.tried)
    ]
    left_out = dict.fromkeys(f"{each.name} {each.text}" for f in harmful for each in f.tried)
    notes = (f"Not advised, as a compile shows no gain: {'; '.join(left_out)}.",) if left_out else ()
    kept = tuple(finding for finding in proven if finding not in harmful)
    return dataclasses.replace(report, findings=kept, notes=(*report.notes, *notes))


def _settings(config: MemoryConfig, finding: Finding) -> int:
    """How many settings a finding's cure names."""
    return len({_changes(config, text) for text in finding.configs})


def _compared(name: str, before: MemoryReport, after: MemoryReport) -> TriedCure:
    """What a setting gives: bytes of the peak, time of a step, time to compile."""
    peak, seconds, compiling = (
        _share(getattr(before, field), getattr(after, field))
        for field in ("peak_bytes", "step_seconds", "compile_seconds")
    )
    change = (after.peak_bytes or 0) - (before.peak_bytes or 0)
    parts = ["same peak" if abs(peak) < _SAME / 2 else f"{'−' if change < 0 else '+'}{format_bytes(abs(change))}"]
    parts.append("same time" if abs(seconds) < _SAME / 2 else f"{'−' if seconds < 0 else '+'}{abs(seconds):.0%} time")
    faster = compiling < -_COMPILES_FASTER
    parts += [f"compile × {1 + compiling:.1f}"] if faster else []
    helps = peak <= -_SAME or (peak < _SAME and (seconds <= -_SAME or (faster and seconds < _SAME)))
    return TriedCure(
        name=name,
        helps=helps,
        text=", ".join(parts),
        peak_bytes=after.peak_bytes,
        step_seconds=after.step_seconds,
    )


def _share(before: float | None, after: float | None) -> float:
    """By what share of itself a number changed; 0 where one is unknown."""
    return (after - before) / before if before and after is not None else 0.0


def _changes(config: MemoryConfig, text: str) -> str:
    """What a config as JSON has otherwise: `remat=full`."""
    old, new = json.loads(config.to_json()), json.loads(text)
    return ", ".join(f"{name}={value}" for name, value in new.items() if value != old[name])
