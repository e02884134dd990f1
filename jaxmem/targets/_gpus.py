"""NVIDIA GPUs: dense peak rates as published, memory as their drivers report it.

NVIDIA's data sheets and white papers could not be opened when the rates were checked. A row's source is the page of its
16-bit rate. Its note names the pages of other rates and bandwidths, and the rates that follow from another rate.
Generations of PCIe are from these pages or similar ones. Rates published with sparsity are halved. Tensor core rates
are with float32 sums, which on a GeForce run at half the speed of float16 sums. Memory bandwidths (all but the H200's)
are clock times bus width, and round to the published ones. PCIe is 16 lanes in one direction; NVLink is half the
published sum of both directions.

Multiprocessors, caches and memory, which XLA would ask the driver about, are public for most chips in OpenXLA's target
descriptions, https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs. Those of the other
chips follow from their architecture (CUDA C++ Programming Guide, compute capabilities), and their rows say so.
"""

from jaxmem.targets._chip import PCIE_3, Chip, GpuFacts, tera

_KIB, _MIB = 2**10, 2**20
_PCIE_4, _PCIE_5 = 2 * PCIE_3, 4 * PCIE_3
_NO_DRIVER_DUMP = "Cache and multiprocessor sizes from its architecture, memory from a driver's report."
_SECOND_HAND = "Rates read second-hand: NVIDIA's own data sheet could not be opened."
_VOLTA_NOTE = (
    "NVIDIA's page has the float16 rate only; the rest read in copies of its table of V100 and A100, "
    "NVLink in wikimili.com/en/NVLink."
)


def _ampere(cores: int, l2_mib: int, clock_ghz: float, minor: int = 0) -> GpuFacts:
    """sm_80, and sm_86 and sm_89 with their smaller multiprocessors."""
    large = minor == 0
    return GpuFacts(
        compute_capability=(8, minor),
        cores=cores,
        fpus_per_core=64 if large else 128,
        threads_per_core=2048 if large else 1536,
        shared_bytes_per_core=(164 if large else 100) * _KIB,
        shared_bytes_per_block=(163 if large else 99) * _KIB,
        l2_bytes=l2_mib * _MIB,
        clock_ghz=clock_ghz,
    )


def _hopper(major: int, cores: int, l2_bytes: int, clock_ghz: float) -> GpuFacts:
    """sm_90a and sm_100a."""
    return GpuFacts(
        compute_capability=(major, 0),
        cores=cores,
        fpus_per_core=128,
        threads_per_core=2048,
        shared_bytes_per_core=228 * _KIB,
        shared_bytes_per_block=227 * _KIB,
        l2_bytes=l2_bytes,
        clock_ghz=clock_ghz,
        accelerated=True,
    )


_VOLTA = GpuFacts(
    compute_capability=(7, 0),
    cores=80,
    fpus_per_core=64,
    threads_per_core=2048,
    shared_bytes_per_core=96 * _KIB,
    shared_bytes_per_block=96 * _KIB,
    l2_bytes=6 * _MIB,
    clock_ghz=1.53,
)
_TURING = GpuFacts(
    compute_capability=(7, 5),
    cores=40,
    fpus_per_core=64,
    threads_per_core=1024,
    shared_bytes_per_core=64 * _KIB,
    shared_bytes_per_block=64 * _KIB,
    l2_bytes=4 * _MIB,
    clock_ghz=1.59,
)
_HOPPER_RATES = tera(bfloat16=989.4, float16=989.4, tf32=494.7, float32=66.9, int8=1978.9, float8=1978.9)
_AMPERE_RATES = tera(bfloat16=312, float16=312, tf32=156, float32=19.5, int8=624)


def _gpu(
    name: str, kind: str, memory: int, rates, hbm: float, host: int, links: float, facts: GpuFacts, source: str, note=""
) -> Chip:
    """A row; `hbm` and `links` in GB/s."""
    return Chip(
        name=f"gpu-{name}",
        kind=kind,
        platform="gpu",
        hbm_bytes=memory,
        flops_per_second=rates,
        hbm_bytes_per_second=round(hbm * 1e9),
        host_bytes_per_second=host,
        interconnect_bytes_per_second=round(links * 1e9),
        facts=facts,
        source=source,
        note=f"{note} {_SECOND_HAND}".lstrip(),
    )


_TENSOR_CORES = "https://developer.nvidia.com/programming-tensor-cores-cuda-9-0"
_KLOCKWOOD = "https://glennklockwood.com/garden/processors"
GPUS = (
    _gpu(
        "v100", "Tesla V100-SXM2-16GB", 16_935_682_048,
        tera(float16=125, float32=15.7), 898.048, PCIE_3, 150, _VOLTA,
        _TENSOR_CORES, _VOLTA_NOTE,
    ),
    _gpu(
        "v100-32g", "Tesla V100-SXM2-32GB", 34_079_637_504,
        tera(float16=125, float32=15.7), 898.048, PCIE_3, 150, _VOLTA,
        _TENSOR_CORES, f"{_VOLTA_NOTE} {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "t4", "Tesla T4", 15_828_320_256,
        tera(float16=65, float32=8.1, int8=130), 320.064, PCIE_3, 15.75, _TURING,
        "https://geektopia.es/es/technology/2018/09/13/noticias/"
        "nvidia-presenta-la-nueva-tesla-t4-basada-en-turing-orientada-a-inteligencia-artificial.html",
        "Memory bandwidth and PCIe read in heise.de/news/"
        "Nvidia-Tesla-P4-K-I-Beschleuniger-mit-8-TFlops-bei-75-Watt-Leistungsaufnahme-4164684.html. "
        f"Other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "a10g", "NVIDIA A10G", 23_609_475_072,
        tera(bfloat16=70, float16=70, tf32=35, float32=35, int8=140), 600.096, _PCIE_4, 31.5,
        _ampere(80, 6, 1.71, minor=6),
        "https://github.com/the-full-stack/website/blob/0a20ae70a2bf75426dd4cb1260597be6cf9ae5f8/docs/cloud-gpus/index.md",
        "Not the A10, whose tensor cores are faster. The source quotes AWS's data sheet; products measured in "
        "github.com/zzc0721/torch-performance-test-data/issues/126 reach 69.5 (bfloat16) and 34.7 (tf32) TFLOP/s. "
        "Memory bandwidth read in baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference, int8 in other quotations. "
        f"Other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "a100-40g", "NVIDIA A100-SXM4-40GB", 42_331_013_120,
        _AMPERE_RATES, 1555.2, _PCIE_4, 300, _ampere(108, 40, 1.41), f"{_KLOCKWOOD}/A100",
    ),
    _gpu(
        "a100-80g", "NVIDIA A100-SXM4-80GB", 85_100_068_864,
        _AMPERE_RATES, 2039.04, _PCIE_4, 300, _ampere(108, 40, 1.41), f"{_KLOCKWOOD}/A100",
    ),
    _gpu(
        "l4", "NVIDIA L4", 22_574 * _MIB,
        tera(bfloat16=121, float16=121, tf32=60, float32=30.3, int8=242.5, float8=242.5), 300.096, _PCIE_4, 31.5,
        _ampere(58, 48, 2.04, minor=9), "https://grokipedia.com/page/NVIDIA_L4_vs_L40S",
        "Half the rates with sparsity; tf32 and the bus read in store.sourcecode.com/en-us/bg-bucket-compare/125/9820, "
        "float32 in github.com/nanoporetech/dorado/issues/459. Products measured reach 71 TFLOP/s in bfloat16 at "
        "most, in github.com/zzc0721/torch-performance-test-data/issues/120. "
        f"Other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "h100", "NVIDIA H100 80GB HBM3", 84_942_979_072,
        _HOPPER_RATES, 3352.32, _PCIE_5, 450, _hopper(9, 132, 50 * _MIB, 1.98), f"{_KLOCKWOOD}/h100", "SXM5.",
    ),
    _gpu(
        "h200", "NVIDIA H200 141GB HBM3e", 151_397_597_184,
        _HOPPER_RATES, 4800, _PCIE_5, 450, _hopper(9, 132, 50 * _MIB, 1.98),
        "https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html",
        "SXM5; the same chip as the H100, whose row the digits after 989 and 1979, tf32, float32 and int8 are from.",
    ),
    _gpu(
        "b200", "NVIDIA B200", 191_514_411_008,
        tera(bfloat16=2250, float16=2250, tf32=1125, float32=75, int8=4500, float8=4500), 7672.32, _PCIE_5, 900,
        _hopper(10, 148, 132_644_864, 1.965), "https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html",
        "At 1000 W (HGX); half the rates that the copied data sheet gives with sparsity. Its tf32, 2.2 PFLOP/s, is "
        "rounded: an eighth of the 18 PFLOP/s that copies of NVIDIA's HGX page give is 2.25. "
        "Memory bandwidth as worked out in github.com/pytorch/ao/pull/4002.",
    ),
    _gpu(
        "rtx3090", "NVIDIA GeForce RTX 3090", 25_286_672_384,
        tera(bfloat16=71, float16=71, tf32=35.6, float32=35.6, int8=284), 936.096, _PCIE_4, 31.5,
        _ampere(82, 6, 1.695, minor=6),
        "https://github.com/modula-systems/modula/pull/1",
        "Float32 sums. int8 and float32 read in rhkb.cn/news/324462.html, memory bandwidth in "
        "cuttingedgegamer.com/2022/12; tf32 follows from bfloat16, as in published rates of the 3090 Ti. "
        f"Other devices over PCIe, without an NVLink bridge. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "rtx4090", "NVIDIA GeForce RTX 4090", 25_393_692_672,
        tera(bfloat16=165.2, float16=165.2, tf32=82.6, float32=82.6, int8=660.6, float8=330.3),
        1008.096, _PCIE_4, 31.5, _ampere(128, 72, 2.52, minor=9),
        "https://waredb.com/processor/nvidia-geforce-rtx-4090",
        f"Float32 sums; other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
)  # fmt: skip
