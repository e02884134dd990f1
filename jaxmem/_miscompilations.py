"""Known faults of compilers that give wrong numbers: the versions that have them, and what avoids them.

How each shows in a compiled program is in `analysis.hlo._miscompiled`, under the same name.
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
    """One fault.

    Args:
      name: of the public report.
      platform: whose compiler has it.
      distribution: the package with that compiler, which has the fault from version `since` up to, without it, `fixed`.
      what: it does, to end "XLA:GPU of jaxlib 0.10.2 ...".
      needs: what a program must do to meet it: "offload"; empty where nobody can tell before it is compiled.
      hlo_pass: without it the program is compiled right.
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
        """Whether the installed compiler has it."""
        return self.since <= numbers(version(self.distribution)) < self.fixed

    @property
    def compiler(self) -> str:
        """The compiler and its version, in words."""
        return f"XLA:{self.platform.upper()} ({self.distribution} {version(self.distribution)})"

    @property
    def cure(self) -> str:
        """What to do, as a sentence."""
        return f'Compile with compiler_options={{"{_OPTION}": "{self.hlo_pass}"}}, or with another version of JAX.'


# Each was seen in the first version and not in the last; what lies between was not tried.
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
    """Faults of the installed compiler of a platform that a program would meet.

    >>> faults_met("cpu", offloads=True)
    ()
    """
    does = {"offload": offloads}
    return tuple(
        fault for fault in MISCOMPILATIONS if fault.platform == platform and does.get(fault.needs) and fault.here
    )


def without_faults(options: Mapping[str, Any] | None, faults: tuple[Miscompilation, ...]) -> dict[str, Any] | None:
    """Compiler options that avoid the faults, beside all that the user gave, there or in `XLA_FLAGS`.

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
    """That a program was compiled without the fault, for a report."""
    return f"Compiled with {_OPTION}={fault.hlo_pass}, since {fault.compiler} {fault.what} ({fault.name})."
