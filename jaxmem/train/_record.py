"""What a checkpoint says of the step that made its state, as JSON, and how another step differs."""

import json
from collections.abc import Mapping
from typing import Any

from jaxmem._installed import version
from jaxmem.config import MemoryConfig


def record_of(step: Any, position: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint: "config", the step's `MemoryConfig`, and "data", its position in the data.

    Args:
      step: one that is no `TrainStep` has no config.
      position: `Batches.position()`.
    """
    config = getattr(step, "config", None)
    told = {"config": json.loads(config.to_json())} if isinstance(config, MemoryConfig) else {}
    return {**told, "data": dict(position)}


def changes(record: Mapping[str, Any], versions: Mapping[str, str | None], step: Any) -> list[str]:
    """How a step and what is installed differ from those that a checkpoint was made with: "accumulation_steps 4 → 8".

    >>> from types import SimpleNamespace
    >>> before = record_of(SimpleNamespace(config=MemoryConfig(accumulation_steps=4)), {})
    >>> changes(before, {}, SimpleNamespace(config=MemoryConfig(accumulation_steps=8, precision="bfloat16")))
    ['accumulation_steps 4 → 8', 'precision float32 → bfloat16']
    """
    now = record_of(step, {}).get("config", {})
    # A field that came later had its neutral default then.
    then = {**json.loads(MemoryConfig().to_json()), **record["config"]} if "config" in record else now
    pairs = [(name, then.get(name), now.get(name)) for name in {**now, **then}]
    pairs += [(name, old, version(name)) for name, old in versions.items() if name != "python"]
    return [f"{name} {_short(old)} → {_short(new)}" for name, old, new in pairs if old != new]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
