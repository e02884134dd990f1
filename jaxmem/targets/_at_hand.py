"""The target of a comparison that names none."""

import dataclasses

import jax

from jaxmem._installed import version
from jaxmem.errors import MissingCompilerError
from jaxmem.targets._gpu_compiler import check_installed
from jaxmem.targets._target import Target, resolve_target

_RULE = "an accelerator of this machine, else gpu-h100 or tpu-v5e if its compiler is installed, else cpu"


def target_at_hand(*, runs: bool = False) -> Target:
    """The target at hand that shows what rematerialisation saves, which "local" on a CPU often does not.

    It is "local" where this machine has an accelerator; else "gpu-h100", whose compiler is quick, or "tpu-v5e", where
    the compiler is installed; else "cpu". A note of the target, which reports repeat, says so.

    Args:
      runs: whether steps shall also be run, so that only this machine's own targets will do.

    >>> target_at_hand(runs=True).name  # on a machine without an accelerator
    'cpu'
    """
    if jax.default_backend() != "cpu":
        return resolve_target("local")
    chosen = resolve_target("cpu" if runs else _deviceless() or "cpu")
    why = "its steps can be run here" if runs else f"the rule is {_RULE}"
    said = f"No target was named, so this is {chosen.name}: {why}. XLA:CPU as it runs hides what remat saves."
    return dataclasses.replace(chosen, notes=(said, *chosen.notes))


def _deviceless() -> str | None:
    """The quickest chip's name whose compiler is installed."""
    try:
        check_installed("gpu-h100")
        return "gpu-h100"
    except MissingCompilerError:
        return "tpu-v5e" if version("libtpu") else None
