"""`try_cures`: what the cures of a step's findings come to, by compiles."""

import contextlib
import dataclasses
import json

from jaxmem._blame import noting_refusal
from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.analysis._compare import versions
from jaxmem.analysis._progress import Progress, on_terminal
from jaxmem.config import MemoryConfig
from jaxmem.targets import Target
from jaxmem.train._variants import analyze
from jaxmem.workload import Workload

AS_ASKED = "as asked"


def try_cures(
    workload: Workload,
    config: MemoryConfig | None = None,
    *,
    target: str | Target | None = None,
    report: MemoryReport | None = None,
    progress: Progress | None = None,
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
    config = config or MemoryConfig()
    first = report or analyze(workload, config, target=target)
    texts = {_changes(config, text): text for finding in first.findings for text in finding.configs}
    rows, refused = [dataclasses.replace(first, name=AS_ASKED)], []
    with contextlib.nullcontext(progress) if progress else on_terminal(list(texts)) as tell:
        for name, text in texts.items():
            tell(name, "compiling")
            with noting_refusal(refused, name):
                made = analyze(workload, MemoryConfig.from_json(text), target=target)
                rows.append(dataclasses.replace(made, name=name))
            tell(name, "done")
    return Comparison(rows=tuple(rows), target=first.target, versions=versions(), refused=tuple(refused))


def _changes(config: MemoryConfig, text: str) -> str:
    """What a config as JSON has otherwise: `remat=full`."""
    old, new = json.loads(config.to_json()), json.loads(text)
    return ", ".join(f"{name}={value}" for name, value in new.items() if value != old[name])
