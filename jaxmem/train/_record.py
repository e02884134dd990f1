"""What of a step goes into a checkpoint beside its state, and what a resumed run takes from there."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem._blame import warn
from jaxmem._shown import array_type, changes
from jaxmem.config import MemoryConfig
from jaxmem.errors import DecisionError, SettingWarning
from jaxmem.remat.auto import Stored, versions
from jaxmem.targets import Target
from jaxmem.train._step import TrainStep, make_train_step
from jaxmem.workload import Workload, path_string


def record_of(step: TrainStep) -> dict[str, Any]:
    """What a step is made with, JSON-ready.

    "config" is `MemoryConfig.to_json`, "decision" what its remat budget was spent on, `ResidualPlan.to_json` (None
    without a budget); "mesh" has the axes of the mesh, "batch" the types of the example batch's leaves.

    >>> import jax.numpy as jnp, optax, jaxmem
    >>> workload = jaxmem.Workload(lambda w, x: jnp.mean((x * w) ** 2), jnp.ones(()), jnp.ones(8), optax.sgd(0.1))
    >>> record = record_of(jaxmem.make_train_step(workload))
    >>> record["config"]["remat"], record["decision"], record["batch"]
    ('none', None, {'batch': 'float32[8]'})
    """
    batch = jax.tree_util.tree_leaves_with_path(step.abstract_batch())
    return {
        "config": json.loads(step.config.to_json()),
        "decision": None if step.decision is None else json.loads(step.decision.to_json()),
        "versions": versions(),
        "mesh": _axes(step),
        "processes": jax.process_count(),
        "batch": {path_string(path, root="batch"): array_type(leaf) for path, leaf in batch},
    }


def differences(record: Mapping[str, Any], step: TrainStep) -> list[str]:
    """What a step is made with that the step of a record was not, in words: "accumulation_steps 4 → 8".

    Raises:
      ConfigError: the record's config has fields that this version does not know.
    """
    now = record_of(step)
    told = changes(MemoryConfig.from_json(json.dumps(record["config"])), step.config) if "config" in record else []
    for name, before in (record.get("batch") or {}).items():
        after = now["batch"].get(name)
        if after != before:
            told.append(f"{name} {before} → {after or 'not there'}")
    for name in ("mesh", "processes"):
        if name in record and record[name] != now[name]:
            told.append(f"{name} {_text(record[name])} → {_text(now[name])}")
    return told


def stored_decision(record: Mapping[str, Any], config: MemoryConfig | None) -> str | None:
    """The text of a record's decision, where it is of the remat budget that a config asks for; else None."""
    decision, before = record.get("decision"), record.get("config") or {}
    if decision is None or not isinstance(config, MemoryConfig) or config.budget is None:
        return None
    if before.get("remat") != config.remat:
        return None
    return json.dumps(decision)


def step_of(record: Mapping[str, Any], step: TrainStep) -> TrainStep:
    """The step with the decision of a record, where both have the same remat budget; else the step as it is.

    A decision for other blocks, as those of another batch or of another version of JAX, is not used: a SettingWarning
    says what differs.
    """
    text = stored_decision(record, step.config)
    if text is None:
        return step
    try:
        if step.decision is not None and Stored.read(text).hash == step.decision.hash:
            return step
        made = step.with_decision(text)
    except DecisionError as error:
        _not_used(step.config, error)
        return step
    _say(step.config)
    return made


def resumed_step(
    record: Mapping[str, Any],
    workload: Workload,
    config: MemoryConfig | None = None,
    *,
    mesh: Any = None,
    target: str | Target | None = None,
) -> TrainStep:
    """`make_train_step` for a run that goes on: the record's decision instead of a new one, as of `step_of`.

    Where it is used, nothing is solved and nothing is compiled.
    """
    text = stored_decision(record, config)
    if text is not None:
        try:
            step = make_train_step(workload, config, mesh=mesh, target=target, decision=text)
            _say(step.config)
            return step
        except DecisionError as error:
            _not_used(config, error)
    return make_train_step(workload, config, mesh=mesh, target=target)


def _say(config: MemoryConfig) -> None:
    print(f"jaxmem: {config.remat} keeps what the checkpoint's run had decided", file=sys.stderr)


def _not_used(config: MemoryConfig | None, error: DecisionError) -> None:
    setting = "a remat budget" if config is None else config.remat
    warn(f"What the checkpoint's run decided for {setting} is not used: it is decided anew. {error}", SettingWarning)


def _axes(step: TrainStep) -> dict[str, Any] | None:
    mesh = step.spec.layout.mesh
    return None if mesh is None else {"axes": dict(mesh.shape)}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " x ".join(f"{axis}={size}" for axis, size in value["axes"].items())
    return "none" if value is None else str(value)
