"""What a program asks for that the chip it was compiled for does not have."""

import re

from jaxmem.errors import UnsupportedByChip
from jaxmem.targets._chip import Chip

_ATTENTION = re.compile(r'custom_call_target="(__cudnn\$fmha[^"]*)"')
_FLOAT8_PRODUCT = re.compile(r'custom_call_target="(__cublas\$lt\$matmul\$f8[^"]*)"')
_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv')
_FLOAT8 = re.compile(r"\bf8e[0-9a-z]+\[")
_BFLOAT16 = re.compile(r"\bbf16\[")
# XLA's bound on the scratch of one cuDNN convolution while it looks for the fastest algorithm.
CONVOLUTION_SCRATCH_BYTES = 4 * 2**30


def check_runs(text: str, chip: Chip) -> tuple[str, ...]:
    """Notes about a compiled program that the chip runs badly.

    Args:
      text: the compiled HLO.
      chip: what it was compiled for.

    Raises:
      UnsupportedByChip: the compiler let something pass that the chip cannot run.
    """
    capability = chip.compute_capability
    if capability is None:
        return ()
    found = _ATTENTION.search(text)
    if found and not chip.cudnn_attention:
        raise UnsupportedByChip(
            wanted=f"a program that a {chip.kind} (sm_{capability[0]}{capability[1]}) can run",
            got=f"cuDNN flash attention ({found.group(1)}), which needs sm_80 or newer and is let pass by the compiler",
            do='Use jax.nn.dot_product_attention(implementation="xla"), or a newer chip.',
        )
    found = _FLOAT8_PRODUCT.search(text)
    if found and not chip.native_float8:
        raise UnsupportedByChip(
            wanted=f"a program that a {chip.kind} (sm_{capability[0]}{capability[1]}) can run",
            got=f"matrix products in float8 ({found.group(1)}), which need sm_89 or newer",
            do="Use bfloat16 or float16 for them, or a newer chip.",
        )
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
    """Bytes that a device may need beyond what a compile without it shows: scratch of cuDNN's convolutions."""
    if chip is None or chip.platform != "gpu" or not _CONVOLUTION.search(text):
        return 0
    return CONVOLUTION_SCRATCH_BYTES
