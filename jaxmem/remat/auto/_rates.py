"""`Rates`: how fast the chip is that recomputation and keeping are priced for."""

import dataclasses

from jaxmem.targets import GpuFacts, Target, Tiles, find_chip

_REFERENCE = "gpu-h100"  # where no accelerator is named; only ratios of rates decide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of the chip by which seconds are estimated; replace them to price for another chip.

    Args:
      matmul_flops_per_second: by dtype; the smallest where a dtype is not among them.
      hbm_bytes_per_second: between memory and compute units.
      host_bytes_per_second: to host memory, one direction.
      statistic_passes: extra reads of the input of a norm or softmax where its row statistics are kept. XLA:GPU
        computes and uses them in one pass, which keeping them splits. On a TPU a GPT's layers compile to a faster and
        smaller program with them kept.
      tiles: in which the chip stores values; None where they are dense.
      multiprocessors: of a GPU, among which a product's tiles are divided; None of other chips.

    >>> Rates.of(None).hbm_bytes_per_second > 1e12
    True
    """

    matmul_flops_per_second: tuple[tuple[str, float], ...]
    hbm_bytes_per_second: float
    host_bytes_per_second: float = 2e10
    statistic_passes: float = 1.0
    tiles: Tiles | None = None
    multiprocessors: int | None = None

    @classmethod
    def of(cls, target: Target | None) -> "Rates":
        """Rates of a target's chip; of an H100 where it has none."""
        chip = target.chip if target is not None and target.chip is not None else find_chip(_REFERENCE)
        return cls(
            matmul_flops_per_second=chip.flops_per_second,
            hbm_bytes_per_second=chip.hbm_bytes_per_second,
            host_bytes_per_second=chip.host_bytes_per_second or 2e10,
            statistic_passes=0.0 if target is not None and target.platform == "tpu" else 1.0,
            tiles=target.tiles if target is not None else None,
            multiprocessors=chip.facts.cores if isinstance(chip.facts, GpuFacts) else None,
        )

    def matmul(self, dtype) -> float:
        """FLOP/s of products of a dtype; by default a TPU multiplies float32 in bfloat16, and a GPU in tf32."""
        rates = dict(self.matmul_flops_per_second)
        names = [str(dtype), *(("tf32", "bfloat16") if str(dtype) == "float32" else ())]
        if str(dtype) == "float32" and "tf32" in rates:
            names = ["tf32"]
        return next((rates[name] for name in names if name in rates), min(rates.values()))
