"""The chip and topology that a target's name stands for."""

import math
import re

from jaxmem._suggest import meant
from jaxmem.errors import UnknownTargetError
from jaxmem.targets._chip import Chip, TpuFacts
from jaxmem.targets._gpus import GPUS
from jaxmem.targets._tpus import TPUS

CHIPS = (*TPUS, *GPUS)
_BY_NAME = {chip.name: chip for chip in CHIPS}
# Other names in use.
_ALIASES = {
    "tpu-v7": "tpu-7x",
    "tpu-v7x": "tpu-7x",
    "tpu7x": "tpu-7x",
    "tpu-ironwood": "tpu-7x",
    "tpu-trillium": "tpu-v6e",
    "tpu-v5litepod": "tpu-v5e",
    "gpu-rtx-3090": "gpu-rtx3090",
    "gpu-3090": "gpu-rtx3090",
    "gpu-rtx-4090": "gpu-rtx4090",
    "gpu-4090": "gpu-rtx4090",
    "gpu-v100-16g": "gpu-v100",
}
KNOWN_TARGETS = ("local", "cpu", *_BY_NAME)
_MOST_GPUS = 65536  # libraries index devices in 16 bits


def find_chip(name: str) -> Chip:
    """The chip of a name without topology.

    Raises:
      UnknownTargetError: there is no chip of that name.

    >>> find_chip("gpu-h100").kind
    'NVIDIA H100 80GB HBM3'
    """
    key = name.strip().lower().replace("_", "-")
    chip = _BY_NAME.get(_ALIASES.get(key, key))
    if chip is not None:
        return chip
    close = _meant(key)
    raise UnknownTargetError(
        wanted=f"a target that this version compiles for: {', '.join(KNOWN_TARGETS)}",
        got=repr(name),
        do=f"Did you mean {' or '.join(close)}?" if close else "Run `jaxmem targets` for what each of them is.",
    )


def _meant(key: str) -> list[str]:
    """The targets that an unknown name probably stands for.

    >>> _meant("h100"), _meant("v5e"), _meant("nvidia-a100"), _meant("gpu-h10")
    (['gpu-h100'], ['tpu-v5e'], ['gpu-a100-40g', 'gpu-a100-80g'], ['gpu-h100'])
    """
    chip = re.sub(r"^(gpu|tpu|cuda|nvidia|google|tesla)[-:]?", "", key)
    whole = [*_BY_NAME, *_ALIASES]
    same = [known for known in whole if chip and known.partition("-")[2] == chip]
    same = same or [known for known in _BY_NAME if chip and known.partition("-")[2].startswith(f"{chip}-")]
    if chip and not same:
        close = meant(key, ["local", "cpu", *whole])
        same = [] if close is None else [close]
    return list(dict.fromkeys(_ALIASES.get(name, name) for name in same))


def parse_name(name: str) -> tuple[Chip, str]:
    """Chip and topology of a target's name; a single chip if it names no topology.

    Raises:
      UnknownTargetError: there is no such chip, or it does not come in that topology.

    >>> chip, topology = parse_name("tpu-v5p:4x4x4")
    >>> chip.name, topology, parse_name("tpu-v5e")[1], parse_name("gpu-h100:1x8x8")[1]
    ('tpu-v5p', '4x4x4', '1x1', '1x8x8')
    """
    base, colon, topology = name.partition(":")
    chip = find_chip(base)
    if not colon:
        return chip, "x".join("1" * (chip.facts.rank if isinstance(chip.facts, TpuFacts) else 3))
    sizes = [int(size) for size in topology.split("x")] if re.fullmatch(r"\d{1,6}(x\d{1,6})*", topology) else []
    check = _tpu_sizes if isinstance(chip.facts, TpuFacts) else _gpu_sizes
    return chip, "x".join(map(str, check(name, chip, sizes)))


def chip_count(topology: str) -> int:
    """
    >>> chip_count("2x2x4")
    16
    """
    return math.prod(int(size) for size in topology.split("x"))


def _tpu_sizes(name: str, chip: Chip, sizes: list[int]) -> list[int]:
    facts = chip.facts
    assert isinstance(facts, TpuFacts)
    if facts.rank == 2 and len(sizes) == 3 and sizes[-1] == 1:
        sizes = sizes[:2]
    elif facts.rank == 3 and len(sizes) == 2:
        sizes = [*sizes, 1]
    # A host holds 2x2 chips (or one alone), so an odd side other than 1 cannot be wired.
    fine = len(sizes) == facts.rank and all(size == 1 or (size > 0 and size % 2 == 0) for size in sizes)
    if fine and math.prod(sizes) <= facts.max_chips:
        return sizes
    raise UnknownTargetError(
        wanted=f"a topology of {chip.name}: {facts.rank} sides, each 1 or even, at most {facts.max_chips} chips in all",
        got=repr(name),
        do=f"Use for example {', '.join(f'{chip.name}:{known}' for known in facts.topologies)}.",
    )


def _gpu_sizes(name: str, chip: Chip, sizes: list[int]) -> list[int]:
    if len(sizes) == 3 and all(sizes) and math.prod(sizes) <= _MOST_GPUS:
        return sizes
    raise UnknownTargetError(
        wanted=f"{chip.name}:SLICESxHOSTSxGPUS, GPUS being those of one host, at most {_MOST_GPUS} in all",
        got=repr(name),
        do=f"Use for example {chip.name}:1x1x8 for one host of eight, or {chip.name} for one GPU.",
    )
