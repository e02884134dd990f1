"""Settings of a step that do nothing for its workload."""

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxmem.config import MemoryConfig
from jaxmem.workload import is_creator, select_paths

if TYPE_CHECKING:
    from jaxmem.train._step import TrainStep

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MemoryConfig)}


def idle_settings(step: "TrainStep", shards: int) -> tuple[str, ...]:
    """One sentence for each setting that changes nothing; nothing is traced for it.

    Args:
      step: with its workload and config.
      shards: among how many devices the rows lie.
    """
    config, workload = step.config, step.workload
    found = []
    if config.gradient_reduction == "once" and shards == 1:
        found.append(
            "gradient_reduction='once' does nothing, as the rows are not sharded: pass mesh=, or a sharded batch."
        )
    # Shards that accumulate locally add up their gradients in it too.
    local = config.gradient_reduction != "each" and shards > 1
    if config.accumulator_dtype != _DEFAULTS["accumulator_dtype"] and config.accumulation_steps == 1 and not local:
        found.append(
            f"accumulator_dtype={config.accumulator_dtype!r} does nothing, as one micro-batch has no accumulator: set "
            "accumulation_steps."
        )
    if workload.state is None and workload.state_reduction != "carry":
        found.append("state_reduction does nothing, as the workload has no state: pass state=, or leave it out.")
    if isinstance(workload.trainable, str) and not is_creator(workload.params):
        chosen = jax.tree.leaves(select_paths(workload.params, workload.trainable))
        if chosen and all(chosen):
            found.append(f"trainable={workload.trainable!r} picks every parameter, as leaving it out does.")
    return tuple(found)
