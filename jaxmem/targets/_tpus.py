"""TPUs: rates from Google's documentation, available bytes from libtpu 0.0.52's error for a program too large."""

from jaxmem.targets._chip import PCIE_3, Chip, TpuFacts, tera
from jaxmem.targets._tiles import Tiles

_GIB = 2**30
_DOCS = "https://docs.cloud.google.com/tpu/docs"
_PLANAR = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
_LINKS = "interconnect from Jouppi et al., doi.org/10.1145/3360307"
# Google states bidirectional bandwidths for v5e and later; PCIe is stated for v4 and used for v6e in
# https://jax-ml.github.io/scaling-book/tpus (15 GB/s a chip).
#
# Clocks of v2 to v4 are from Jouppi et al., doi.org/10.1145/3360307 and 10.1145/3579371. The others follow from the
# stated bf16 peak and the number of matrix units (four of 128x128 a core, in v6e four of 256x256) at 2 FLOPs for each
# of their cells in each cycle: 197, 459 and 918 TFLOP/s.


TPUS = (
    Chip(
        name="tpu-v2",
        kind="TPU v2",
        platform="tpu",
        hbm_bytes=8 * _GIB,
        compiler_bytes=round(7.48 * _GIB),
        devices_per_chip=2,
        flops_per_second=tera(bfloat16=23),
        hbm_bytes_per_second=350_000_000_000,
        host_bytes_per_second=PCIE_3 // 2,
        interconnect_bytes_per_second=124_000_000_000,
        facts=TpuFacts(
            generation="v2",
            rank=2,
            max_chips=256,
            topologies=("1x1", "2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
            clock_ghz=0.70,
            tiles=Tiles(least=2),
        ),
        source=f"{_DOCS}/v2",
        note=f"A device is one of the chip's two cores, with half its memory; {_LINKS}.",
    ),
    Chip(
        name="tpu-v3",
        kind="TPU v3",
        platform="tpu",
        hbm_bytes=16 * _GIB,
        compiler_bytes=round(15.48 * _GIB),
        devices_per_chip=2,
        flops_per_second=tera(bfloat16=61.5),
        hbm_bytes_per_second=450_000_000_000,
        host_bytes_per_second=PCIE_3 // 2,
        interconnect_bytes_per_second=164_000_000_000,
        facts=TpuFacts(
            generation="v3",
            rank=2,
            max_chips=1024,
            topologies=("1x1", "2x2", "4x4", "8x8", "16x16", "32x32"),
            clock_ghz=0.94,
            tiles=Tiles(least=2),
        ),
        source=f"{_DOCS}/v3",
        note=f"A device is one of the chip's two cores, with half its memory; {_LINKS}.",
    ),
    Chip(
        name="tpu-v4",
        kind="TPU v4",
        platform="tpu",
        hbm_bytes=32 * _GIB,
        compiler_bytes=round(30.75 * _GIB),
        flops_per_second=tera(bfloat16=275, int8=275),
        hbm_bytes_per_second=1_200_000_000_000,
        host_bytes_per_second=PCIE_3,
        interconnect_bytes_per_second=300_000_000_000,
        # libtpu's default shows two devices of half the memory; JAX on a v4 runs the two cores as one.
        facts=TpuFacts(generation="v4", rank=3, max_chips=4096, topologies=_CUBIC, config="megacore", clock_ghz=1.05),
        source=f"{_DOCS}/v4",
        note="A device is a chip: its two cores work as one (megacore).",
    ),
    Chip(
        name="tpu-v5e",
        kind="TPU v5 lite",
        platform="tpu",
        hbm_bytes=16 * _GIB,
        compiler_bytes=round(15.75 * _GIB),
        flops_per_second=tera(bfloat16=197, int8=393),
        hbm_bytes_per_second=819_000_000_000,
        host_bytes_per_second=PCIE_3,
        interconnect_bytes_per_second=200_000_000_000,
        facts=TpuFacts(generation="v5e", rank=2, max_chips=256, topologies=_PLANAR, clock_ghz=1.50),
        source=f"{_DOCS}/v5e",
    ),
    Chip(
        name="tpu-v5p",
        kind="TPU v5",
        platform="tpu",
        hbm_bytes=95 * _GIB,
        # More than the 95 GiB that Google states; the compiler's limit counts, since the compiler refuses programs.
        compiler_bytes=round(95.73 * _GIB),
        flops_per_second=tera(bfloat16=459, int8=918),
        hbm_bytes_per_second=2_765_000_000_000,
        host_bytes_per_second=PCIE_3,
        interconnect_bytes_per_second=600_000_000_000,
        facts=TpuFacts(generation="v5p", rank=3, max_chips=8960, topologies=(*_CUBIC, "16x16x24"), clock_ghz=1.75),
        source=f"{_DOCS}/v5p",
        note="A device is a chip: its two cores work as one (megacore). Its compiler offers more than 95 GiB.",
    ),
    Chip(
        name="tpu-v6e",
        kind="TPU v6 lite",
        platform="tpu",
        hbm_bytes=32 * _GIB,
        compiler_bytes=round(31.24 * _GIB),
        flops_per_second=tera(bfloat16=918, int8=1836),
        hbm_bytes_per_second=1_638_000_000_000,
        host_bytes_per_second=PCIE_3,
        interconnect_bytes_per_second=400_000_000_000,
        facts=TpuFacts(generation="v6e", rank=2, max_chips=256, topologies=_PLANAR, clock_ghz=1.75),
        source=f"{_DOCS}/v6e",
        note="Trillium.",
    ),
    Chip(
        name="tpu-7x",
        kind="TPU7x",
        platform="tpu",
        hbm_bytes=96 * _GIB,
        compiler_bytes=round(94.74 * _GIB),
        devices_per_chip=2,
        flops_per_second=tera(bfloat16=1153.5, float8=2307),
        hbm_bytes_per_second=3_690_000_000_000,
        host_bytes_per_second=None,
        interconnect_bytes_per_second=300_000_000_000,
        facts=TpuFacts(generation="tpu7x", rank=3, max_chips=9216, topologies=(*_CUBIC, "16x16x16")),
        source=f"{_DOCS}/tpu7x",
        note="Ironwood. A device is one of the chip's two chiplets, with half its memory.",
    ),
)
