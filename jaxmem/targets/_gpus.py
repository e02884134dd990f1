"""NVIDIA GPUs: dense peak rates from their data sheets, memory as their drivers report it.

What XLA asks the driver for (multiprocessors, caches, memory) is public for most of these chips in OpenXLA's own
target descriptions, https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs; the others' rows
follow from their architecture (CUDA C++ Programming Guide, compute capabilities) and say so.
"""

from jaxmem.targets._chip import PCIE_3, Chip, GpuFacts, tera

_KIB, _MIB = 2**10, 2**20
_PCIE_4, _PCIE_5 = 2 * PCIE_3, 4 * PCIE_3
_NO_DRIVER_DUMP = "Cache and multiprocessor sizes from its architecture, memory from a driver's report."


def _ampere(cores: int, l2_mib: int, clock_ghz: float, minor: int = 0) -> GpuFacts:
    """sm_80 and, of smaller multiprocessors, sm_86 and sm_89."""
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
        note=note,
    )


_NVIDIA = "https://www.nvidia.com/en-us"
GPUS = (
    _gpu(
        "v100", "Tesla V100-SXM2-16GB", 16_935_682_048,
        tera(float16=125, float32=15.7), 898.048, PCIE_3, 150, _VOLTA,
        "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
    ),
    _gpu(
        "v100-32g", "Tesla V100-SXM2-32GB", 34_079_637_504,
        tera(float16=125, float32=15.7), 898.048, PCIE_3, 150, _VOLTA,
        "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
        _NO_DRIVER_DUMP,
    ),
    _gpu(
        "t4", "Tesla T4", 15_828_320_256,
        tera(float16=65, float32=8.1, int8=130), 320.064, PCIE_3, 15.75, _TURING,
        f"{_NVIDIA}/data-center/tesla-t4/", f"Other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "a10g", "NVIDIA A10G", 23_609_475_072,
        tera(bfloat16=70, float16=70, tf32=35, float32=35, int8=140), 600.096, _PCIE_4, 31.5,
        _ampere(80, 6, 1.71, minor=6),
        "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        f"Other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "a100-40g", "NVIDIA A100-SXM4-40GB", 42_331_013_120,
        _AMPERE_RATES, 1555.2, _PCIE_4, 300, _ampere(108, 40, 1.41), f"{_NVIDIA}/data-center/a100/",
    ),
    _gpu(
        "a100-80g", "NVIDIA A100-SXM4-80GB", 85_100_068_864,
        _AMPERE_RATES, 2039.04, _PCIE_4, 300, _ampere(108, 40, 1.41), f"{_NVIDIA}/data-center/a100/",
    ),
    _gpu(
        "l4", "NVIDIA L4", 22_574 * _MIB,
        tera(bfloat16=121, float16=121, tf32=60, float32=30.3, int8=242.5, float8=242.5), 300.096, _PCIE_4, 31.5,
        _ampere(58, 48, 2.04, minor=9), f"{_NVIDIA}/data-center/l4/", f"Other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "h100", "NVIDIA H100 80GB HBM3", 84_942_979_072,
        _HOPPER_RATES, 3352.32, _PCIE_5, 450, _hopper(9, 132, 50 * _MIB, 1.98), f"{_NVIDIA}/data-center/h100/",
        "SXM5; half the rates that the data sheet gives with sparsity.",
    ),
    _gpu(
        "h200", "NVIDIA H200 141GB HBM3e", 151_397_597_184,
        _HOPPER_RATES, 4800, _PCIE_5, 450, _hopper(9, 132, 50 * _MIB, 1.98), f"{_NVIDIA}/data-center/h200/",
        "SXM5; half the rates that the data sheet gives with sparsity.",
    ),
    _gpu(
        "b200", "NVIDIA B200", 191_514_411_008,
        tera(bfloat16=2250, float16=2250, tf32=1125, float32=75, int8=4500, float8=4500), 7672.32, _PCIE_5, 900,
        _hopper(10, 148, 132_644_864, 1.965), f"{_NVIDIA}/data-center/dgx-b200/",
        "An eighth of a DGX B200; half the rates that the data sheet gives with sparsity.",
    ),
    _gpu(
        "rtx3090", "NVIDIA GeForce RTX 3090", 25_286_672_384,
        tera(bfloat16=71, float16=71, tf32=35.6, float32=35.6, int8=284), 936.096, _PCIE_4, 31.5,
        _ampere(82, 6, 1.695, minor=6),
        "https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf",
        f"Float32 sums; other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
    _gpu(
        "rtx4090", "NVIDIA GeForce RTX 4090", 25_393_692_672,
        tera(bfloat16=165.2, float16=165.2, tf32=82.6, float32=82.6, int8=660.6, float8=330.3),
        1008.096, _PCIE_4, 31.5, _ampere(128, 72, 2.52, minor=9),
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        f"Float32 sums; other devices over PCIe. {_NO_DRIVER_DUMP}",
    ),
)  # fmt: skip
