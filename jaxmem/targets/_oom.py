"""What a TPU's compiler says when a program needs more memory than the chip has."""

import dataclasses
import re

from jaxmem._units import SIZE, size_in

# Of libtpu 0.0.5x, of older ones and XLA's own, and of one that does not try.
_PATTERNS = (
    re.compile(rf"total memory required[^()]{{0,80}}\({SIZE}\) exceeds available \w+ \({SIZE}\)"),
    re.compile(rf"[Uu]sed {SIZE} of {SIZE} hbm"),
    re.compile(rf"unlikely to have enough [\w ]{{0,20}}memory\. Requires {SIZE}, has {SIZE} available"),
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
    if not any(words in head for words in ("RESOURCE_EXHAUSTED", "CompileTimeHbmOom", "Aborting compilation early")):
        return None
    for pattern in _PATTERNS:
        found = pattern.search(head)
        if found:
            return CompileOom(needed_bytes=size_in(found), available_bytes=size_in(found, 3), text=text)
    return CompileOom(needed_bytes=None, available_bytes=None, text=text)
