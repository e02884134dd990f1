"""What a checkpoint says of the step that made its state, as JSON, and what a resumed run takes from there."""

import json
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem._blame import warn
from jaxmem._installed import version
from jaxmem._processes import conversation, say
from jaxmem._shown import array_type
from jaxmem.config import MemoryConfig
from jaxmem.errors import DecisionError, SettingWarning
from jaxmem.remat.auto import Stored
from jaxmem.targets import Target
from jaxmem.train._step import TrainStep, make_train_step
from jaxmem.workload import Workload, path_string


def record_of(step: Any, position: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a step is made with, JSON-ready.

    "config" is the step's `MemoryConfig`; "decision" what its remat budget was spent on, None without one; "mesh" the
    axes of its mesh; "batch" the types of the example batch's leaves; "data" the position in the data.

    Args:
      step: one that is no `TrainStep` has a config at most.
      position: `Batches.position()`.

    >>> import jax.numpy as jnp, optax, jaxmem
    >>> workload = jaxmem.Workload(lambda w, x: jnp.mean((x * w) ** 2), jnp.ones(()), jnp.ones(8), optax.sgd(0.1))
    >>> record = record_of(jaxmem.make_train_step(workload))
    >>> record["config"]["remat"], record["decision"], record["mesh"], record["batch"]
    ('none', None, None, {'batch': 'float32[8]'})
    """
    config, told = getattr(step, "config", None), {}
    if isinstance(config, MemoryConfig):
        told["config"] = json.loads(config.to_json())
    if isinstance(step, TrainStep):
        batch = jax.tree_util.tree_leaves_with_path(step.abstract_batch())
        mesh = step.spec.layout.mesh
        told |= {
            "decision": None if step.decision is None else json.loads(step.decision.to_json()),
            "mesh": None if mesh is None else dict(mesh.shape),
            "batch": {path_string(path, root="batch"): array_type(leaf) for path, leaf in batch},
            "processes": jax.process_count(),
        }
    return told if position is None else {**told, "data": dict(position)}


def changes(record: Mapping[str, Any], versions: Mapping[str, str | None], step: Any) -> list[str]:
    """How a step and what is installed differ from those that a checkpoint was made with: "accumulation_steps 4 → 8".

    >>> from types import SimpleNamespace
    >>> before = record_of(SimpleNamespace(config=MemoryConfig(accumulation_steps=4)))
    >>> changes(before, {}, SimpleNamespace(config=MemoryConfig(accumulation_steps=8, precision="bfloat16")))
    ['accumulation_steps 4 → 8', 'precision float32 → bfloat16']
    """
    new = record_of(step)
    now = new.get("config", {})
    # A field that came later had its neutral default then.
    then = {**json.loads(MemoryConfig().to_json()), **record["config"]} if "config" in record else now
    pairs = [(name, then.get(name), now.get(name)) for name in {**now, **then}]
    leaves = new.get("batch", {})
    pairs += [(name, old, leaves.get(name)) for name, old in record.get("batch", {}).items()]
    pairs += [(name, record[name], new.get(name)) for name in ("mesh", "processes") if name in record]
    pairs += [(name, old, version(name)) for name, old in versions.items() if name != "python"]
    return [f"{name} {_short(old)} → {_short(new)}" for name, old, new in pairs if old != new]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def stored_decision(record: Mapping[str, Any], config: MemoryConfig | None) -> str | None:
    """The text of a record's decision, where it is of the remat budget that a config asks for; else None."""
    decision, before = record.get("decision"), record.get("config") or {}
    if decision is None or not isinstance(config, MemoryConfig) or config.budget is None:
        return None
    return json.dumps(decision) if before.get("remat") == config.remat else None


def step_of(record: Mapping[str, Any], step: Any) -> Any:
    """The step with the decision of a record, where both have the same remat budget; else the step as it is.

    A decision for other blocks, as those of another batch or of another version of JAX, is not used: a SettingWarning
    says what differs.
    """
    text = stored_decision(record, step.config) if isinstance(step, TrainStep) else None
    if text is None:
        return step
    try:
        if step.decision is not None and Stored.read(text).hash == step.decision.hash:
            return step
        made = step.with_decision(text)
    except DecisionError as error:
        _not_used(step.config, error)
        return step
    say(f"{step.config.remat} keeps what the checkpoint's run had decided, not what was decided anew")
    return made


def resumed_step(
    record: Mapping[str, Any],
    workload: Workload,
    config: MemoryConfig | None = None,
    *,
    mesh: Any = None,
    target: str | Target | None = None,
) -> TrainStep:
    """`make_train_step` for a run that goes on: with the record's decision, as of `step_of`.

    Where it is used, nothing is solved and nothing is compiled. Of several processes the record of process 0 counts;
    all call this.
    """
    text = conversation("resuming").first_does(lambda: stored_decision(record, config))
    if text:
        try:
            return make_train_step(workload, config, mesh=mesh, target=target, decision=text)
        except DecisionError as error:
            _not_used(config, error)
    return make_train_step(workload, config, mesh=mesh, target=target)


def _not_used(config: MemoryConfig | None, error: DecisionError) -> None:
    setting = "a remat budget" if config is None else config.remat
    warn(
        f"{setting} is decided anew, as what the checkpoint's run decided cannot be used here: wanted {error.wanted}; "
        f"got {error.got}.",
        SettingWarning,
    )
