"""What an estimate needs to know of a chip: its rates."""

import dataclasses

from jaxmem.targets import Chip, TpuFacts

# HLO's names of what a matrix unit multiplies, where they are not the chip table's.
_NARROW = {"s8": "int8", "u8": "int8", "s4": "int4", "u4": "int4", "f16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipSpeed:
    """Peak rates of one device; None where unknown.

    Args:
      name: of the chip.
      flops_per_second: (dtype, FLOP/s) pairs of matrix products; "tf32" is what a GPU makes of float32 products.
      vector_flops_per_second: of everything else; None leaves it out of the estimate.
      hbm_bytes_per_second: between memory and compute units.
      host_bytes_per_second: to host memory, one direction.
      interconnect_bytes_per_second: to other devices, one direction.
      clock_hertz: what a compiler's cycles are counted in.
      note: a sentence for the estimate.

    >>> ChipSpeed.of(NOMINAL_CPU) is NOMINAL_CPU, NOMINAL_CPU.matmul_rate("bf16", exact=False)
    (True, 100000000000.0)
    """

    name: str
    flops_per_second: tuple[tuple[str, float], ...]
    hbm_bytes_per_second: float
    vector_flops_per_second: float | None = None
    host_bytes_per_second: float | None = None
    interconnect_bytes_per_second: float | None = None
    clock_hertz: float | None = None
    note: str = ""

    @classmethod
    def of(cls, chip: "Chip | ChipSpeed") -> "ChipSpeed":
        """The rates of a row of the chip table."""
        if isinstance(chip, ChipSpeed):
            return chip
        # Of a TPU the table has the rates of its matrix units only; a GPU's compiler counts no cycles.
        tpu = chip.facts if isinstance(chip.facts, TpuFacts) else None
        return cls(
            name=chip.name,
            flops_per_second=chip.flops_per_second,
            hbm_bytes_per_second=chip.hbm_bytes_per_second,
            vector_flops_per_second=None if tpu else chip.flops("float32"),
            host_bytes_per_second=chip.host_bytes_per_second,
            interconnect_bytes_per_second=chip.interconnect_bytes_per_second,
            clock_hertz=tpu.clock_ghz * 1e9 if tpu and tpu.clock_ghz else None,
        )

    def matmul_rate(self, dtype: str, *, exact: bool) -> float:
        """FLOP/s of a product of HLO's `dtype`; of the nearest wider one that the chip has a rate for.

        Args:
          dtype: "bf16", "f32", "f8e4m3fn", ...
          exact: whether float32 operands are multiplied as such, and not rounded first.
        """
        rates = dict(self.flops_per_second)
        name = "float8" if dtype.startswith("f8") else _NARROW.get(dtype)
        wanted = [name] if name else []
        if name is None and not exact and dtype != "f64":
            wanted.append("tf32" if "tf32" in rates else "float32" if "float32" in rates else "bfloat16")
        wanted += ["float32" if dtype != "f64" else "float64", "bfloat16", "float16"]
        return next((rates[key] for key in wanted if key in rates), max(rates.values()))


NOMINAL_CPU = ChipSpeed(
    name="cpu",
    flops_per_second=(("float32", 1e11), ("float64", 5e10)),
    vector_flops_per_second=5e10,
    hbm_bytes_per_second=2e10,
    host_bytes_per_second=2e10,
    interconnect_bytes_per_second=1e10,
    note="Step time is of a nominal CPU of 100 GFLOP/s and 20 GB/s, not of this machine: compare it between rows only.",
)
"""A stand-in for whatever CPU the program will run on: its numbers order variants, they do not predict."""
