"""Registry of known miscompilations: the compiler versions that compute wrong numbers, and the option that avoids it.

`analysis.hlo._miscompiled` recognises each of them in a compiled program, under the same name.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from jaxmem._installed import numbers, version

_OPTION = "xla_disable_hlo_passes"
_FLAG = re.compile(rf"--{_OPTION}=(\S+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miscompilation:
    """One fault of a compiler.

    Args:
      name: the public report of the fault.
      platform: "gpu" or "tpu".
      distribution: the package with the compiler.
      since, fixed: the first version with the fault, and the first without it.
      what: the effect, as the end of a sentence that begins "XLA:GPU of jaxlib 0.10.2 ...".
      needs: what a program must do to be affected: "offload"; empty if only the compiled program tells.
      hlo_pass: the pass with the fault; without it programs are compiled correctly.
    """

    name: str
    platform: str
    distribution: str
    since: tuple[int, ...]
    fixed: tuple[int, ...]
    what: str
    needs: str
    hlo_pass: str

    @property
    def here(self) -> bool:
        """Whether the installed compiler has the fault."""
        return self.since <= numbers(version(self.distribution)) < self.fixed

    @property
    def compiler(self) -> str:
        """The compiler and its version, for a sentence."""
        return f"XLA:{self.platform.upper()} ({self.distribution} {version(self.distribution)})"

    @property
    def cure(self) -> str:
        """What to do, as a sentence."""
        return f'Compile with compiler_options={{"{_OPTION}": "{self.hlo_pass}"}}, or with another version of JAX.'


# Each fault was seen in version `since` and not in `fixed`; the versions between them were not tried.
MISCOMPILATIONS = (
    Miscompilation(
        name="openxla/xla#46231",
        platform="gpu",
        distribution="jaxlib",
        since=(0, 10, 2),
        fixed=(0, 12),
        what="reads values that a scan keeps in host memory in the wrong order on the way back, so gradients are wrong",
        needs="offload",
        hlo_pass="dynamic-slice-annotator",
    ),
    Miscompilation(
        name="openxla/xla#49143",
        platform="tpu",
        distribution="libtpu",
        since=(0, 0, 42),
        fixed=(0, 0, 52),
        what="leaves the sum over devices of scattered gradients to after a scan, so that micro-batches are forgotten",
        needs="",
        hlo_pass="while-loop-all-reduce-code-motion",
    ),
)


def faults_met(platform: str, *, offloads: bool) -> tuple[Miscompilation, ...]:
    """Faults of the installed compiler of a platform that affect a program.

    >>> faults_met("cpu", offloads=True)
    ()
    """
    does = {"offload": offloads}
    return tuple(
        fault for fault in MISCOMPILATIONS if fault.platform == platform and does.get(fault.needs) and fault.here
    )


def without_faults(options: Mapping[str, Any] | None, faults: tuple[Miscompilation, ...]) -> dict[str, Any] | None:
    """The user's compiler options, with the passes of the faults disabled besides those in `options` or `XLA_FLAGS`.

    >>> without_faults({"xla_disable_hlo_passes": "cse"}, MISCOMPILATIONS[:1])
    {'xla_disable_hlo_passes': 'cse,dynamic-slice-annotator'}
    """
    if not faults:
        return None if options is None else dict(options)
    flag = _FLAG.search(os.environ.get("XLA_FLAGS", ""))
    theirs = str((options or {}).get(_OPTION) or (flag.group(1) if flag else ""))
    passes = [*theirs.split(","), *(fault.hlo_pass for fault in faults)]
    return {**(options or {}), _OPTION: ",".join(dict.fromkeys(filter(None, passes)))}


def told(fault: Miscompilation) -> str:
    """A sentence for a report: the program was compiled without the faulty pass."""
    return f"Compiled with {_OPTION}={fault.hlo_pass}, since {fault.compiler} {fault.what} ({fault.name})."
