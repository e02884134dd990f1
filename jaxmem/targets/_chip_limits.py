"""Where a program exceeds its chip: features the chip lacks, and the compiler's error for lack of memory."""

import dataclasses
import re

from jaxmem._shown import Brief
from jaxmem._units import SIZE, size_in
from jaxmem.errors import UnsupportedByChip
from jaxmem.targets._chip import Chip

_ATTENTION = re.compile(r'custom_call_target="(__cudnn\$fmha[^"]*)"')
_FLOAT8_PRODUCT = re.compile(r'custom_call_target="(__cublas\$lt\$matmul\$f8[^"]*)"')
_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv')
_FLOAT8 = re.compile(r"\bf8e[0-9a-z]+\[")
_BFLOAT16 = re.compile(r"\bbf16\[")
# XLA's bound on the scratch of one cuDNN convolution while it searches for the fastest algorithm.
CONVOLUTION_SCRATCH_BYTES = 4 * 2**30
# Messages of libtpu 0.0.5x; of older versions and of XLA; and of a compiler that gives up early.
_PATTERNS = (
    re.compile(rf"total memory required[^()]{{0,80}}\({SIZE}\) exceeds available \w+ \({SIZE}\)"),
    re.compile(rf"[Uu]sed {SIZE} of {SIZE} hbm"),
    re.compile(rf"unlikely to have enough [\w ]{{0,20}}memory\. Requires {SIZE}, has {SIZE} available"),
)


def check_runs(text: str, chip: Chip) -> tuple[str, ...]:
    """Notes about operations of a compiled program that are slow on the chip.

    Args:
      text: the compiled HLO.
      chip: the chip that it was compiled for.

    Raises:
      UnsupportedByChip: the program holds an operation that the chip cannot run, although it compiles.
    """
    if chip.compute_capability is None:
        return ()
    refused, do = "", ""
    if not chip.cudnn_attention and (found := _ATTENTION.search(text)):
        refused = f"cuDNN flash attention ({found.group(1)}), which needs sm_80 or newer; the compiler lets it pass"
        do = 'Use jax.nn.dot_product_attention(implementation="xla"), or a newer chip.'
    elif not chip.native_float8 and (found := _FLOAT8_PRODUCT.search(text)):
        refused = f"matrix products in float8 ({found.group(1)}), which need sm_89 or newer"
        do = "Use bfloat16 or float16 for them, or a newer chip."
    if refused:
        name = "sm_{}{}".format(*chip.compute_capability)
        raise UnsupportedByChip(wanted=f"a program that a {chip.kind} ({name}) can run", got=refused, do=do)
    notes = []
    if not chip.native_bfloat16 and _BFLOAT16.search(text):
        notes.append(
            f"bfloat16 is not native on {chip.kind} (it is from sm_80 on): it saves memory there, but products are "
            "computed in float32 at a fraction of the rate; float16 has units of its own."
        )
    if not chip.native_float8 and _FLOAT8.search(text):
        notes.append(f"float8 products are not native on {chip.kind} (they are from sm_89 on): XLA widens them.")
    return tuple(notes)


def unknown_scratch_bytes(text: str, chip: Chip | None) -> int:
    """Bytes of scratch for cuDNN's convolutions, which a device may need and a deviceless compile does not show."""
    if chip is None or chip.platform != "gpu" or not _CONVOLUTION.search(text):
        return 0
    return CONVOLUTION_SCRATCH_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOom(Brief):
    """Bytes that a program needs and that a device has, as the compiler rounds them; None if it did not say."""

    needed_bytes: int | None
    available_bytes: int | None
    text: str


def compile_oom(text: str) -> CompileOom | None:
    """The bytes in a compiler's out-of-memory error; None for an error about something else.

    >>> oom = compile_oom("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    ...     "required for HLO temporaries (18.59G) exceeds available HBM (15.75G). HLO module: jit_step.")
    >>> round(oom.needed_bytes / 2**30, 2), oom.available_bytes / 2**30
    (18.59, 15.75)
    >>> compile_oom("INVALID_ARGUMENT: no such option")
    """
    head = text[:20_000]  # the message comes first; lists of buffers follow
    if not any(words in head for words in ("RESOURCE_EXHAUSTED", "CompileTimeHbmOom", "Aborting compilation early")):
        return None
    for pattern in _PATTERNS:
        found = pattern.search(head)
        if found:
            return CompileOom(needed_bytes=size_in(found), available_bytes=size_in(found, 3), text=text)
    return CompileOom(needed_bytes=None, available_bytes=None, text=text)
