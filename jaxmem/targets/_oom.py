"""What a TPU's compiler says when a program needs more memory than the chip has."""

import dataclasses
import re

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([0-9]+(?:\.[0-9]+)?)([BKMGT]?)(?:i?B)?"
# Of libtpu 0.0.5x, and of older ones and XLA's own.
_PATTERNS = (
    re.compile(r"total memory required[^()]{0,80}\(" + _SIZE + r"\) exceeds available \w+ \(" + _SIZE + r"\)"),
    re.compile(r"[Uu]sed " + _SIZE + r" of " + _SIZE + r" hbm"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOom:
    """Bytes that a program needs and that a device has, as its compiler rounds them; None where it did not say."""

    needed_bytes: int | None
    available_bytes: int | None
    text: str


def compile_oom(text: str) -> CompileOom | None:
    """What the text of a compiler's error says about memory; None where it is about something else.

    >>> oom = compile_oom("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    ...     "required for HLO temporaries (18.59G) exceeds available HBM (15.75G). HLO module: jit_step.")
    >>> round(oom.needed_bytes / 2**30, 2), oom.available_bytes / 2**30
    (18.59, 15.75)
    >>> compile_oom("INVALID_ARGUMENT: no such option")
    """
    head = text[:20_000]  # the verdict comes first; lists of buffers follow
    if "RESOURCE_EXHAUSTED" not in head and "CompileTimeHbmOom" not in head:
        return None
    for pattern in _PATTERNS:
        found = pattern.search(head)
        if found:
            number, unit, limit, limit_unit = found.groups()
            needed, available = (round(float(n) * _UNITS[u]) for n, u in ((number, unit), (limit, limit_unit)))
            return CompileOom(needed_bytes=needed, available_bytes=available, text=text)
    return CompileOom(needed_bytes=None, available_bytes=None, text=text)
