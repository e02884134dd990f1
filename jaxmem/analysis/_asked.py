"""What was asked to be analysed, as far as cures name it, and a cure."""

import dataclasses
from typing import Any, NamedTuple

from jaxmem.analysis._fits import RESERVE
from jaxmem.config import MemoryConfig
from jaxmem.targets import Target

FILE = "FILE"
"""Stands in a command for the user's file and options; the command line knows them."""


class Cure(NamedTuple):
    """What to do: in Python; round a command, empty where there is none; the configs that it names, as JSON."""

    python: str
    shell: str = ""
    configs: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a `Finding`."""
        return {"cure": self.python, "shell": self.shell, "configs": self.configs}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked to be analysed, for cures that can be pasted.

    Args:
      target: what it is compiled for; None where only a text tells of it.
      platform: of the target, "tpu" or "gpu".
      config: of a step of jaxmem; None of a function or a program.
      function: name of the function; `jit` what jits it.
      parameters: names of its parameters, where its signature is known.
      peak_bytes, capacity_bytes: of a device.
      donated: (number, name) of the arguments that are donated already.
      rows: of the batch, on a device; None where they are not known.
      draws, recomputes: whether the program draws random bits, and computes something again.
      fenced: whether the program has fences round masks.
      by_hardware: whether all random bits are drawn by the hardware.
    """

    target: Target | None
    platform: str = ""
    config: MemoryConfig | None = None
    function: str = "step"
    jit: str = "jax.jit"
    parameters: tuple[str, ...] = ()
    donated: tuple[tuple[int, str], ...] = ()
    peak_bytes: int | None = None
    capacity_bytes: int | None = None
    rows: int | None = None
    draws: bool = False
    recomputes: bool = False
    fenced: bool = False
    by_hardware: bool = False

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the peak exceeds what fits with the reserve; 0 where it fits, or nobody knows."""
        if self.peak_bytes is None or self.capacity_bytes is None:
            return 0
        return max(0, self.peak_bytes - int(self.capacity_bytes * (1 - RESERVE)))

    @property
    def may_undo_recomputation(self) -> bool:
        """Whether 16 bits may take many times what 32 do: a TPU's compiler can then keep what random bits are for.

        Fences round the masks keep it from that, and so does the hardware's generator.
        """
        return self.draws_and_recomputes and not self.fenced and not self.by_hardware

    @property
    def draws_and_recomputes(self) -> bool:
        """Whether 16 bits may save time only: six layers of GPT-2 with dropout, full remat, their masks fenced, take
        2.11 GiB on a v5e in bfloat16, and 1.95 GiB in float32.
        """
        return self.platform == "tpu" and self.draws and self.recomputes

    def configs(self, **changes: Any) -> tuple[str, ...]:
        """The step's config with one change, as JSON; empty where there is no config."""
        return () if self.config is None else (dataclasses.replace(self.config, **changes).to_json(),)

    def command(self, verb: str, **options: str) -> str:
        """A command line for this target.

        >>> from jaxmem.targets import resolve_target
        >>> asked_of(resolve_target("gpu-t4")).command("compare", remat="none,full")
        '`jaxmem compare FILE --target gpu-t4 --remat none,full`'
        """
        options = {"target": self.target.name if self.target else "T", **options}
        given = [f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value != "local"]
        return f"`{' '.join(['jaxmem', verb, FILE, *given])}`"


def asked_of(target: Target, **known: Any) -> Asked:
    """What was asked of a target."""
    return Asked(target=target, platform=target.platform, **known)
