"""`jaxmem targets`: the chips that programs can be compiled for, whether or not they are here."""

import json
from typing import Any

from jaxmem.cli._options import Debug, JsonOut
from jaxmem.cli._output import Outputs, clean_stdout


def targets(json_out: JsonOut = None, debug: Debug = False):
    """List what can be compiled for: memory, rates, and whether its compiler is installed here."""
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out})
    outputs.check()
    with clean_stdout(outputs.to_stdout) as stdout:
        start_jax()
        rows = chip_rows()
        outputs.write(stdout, {"--json": lambda: json.dumps({"targets": rows}, indent=2)})
    if not outputs.to_stdout:
        _print_table(rows)


def chip_rows() -> list[dict[str, Any]]:
    """One record a chip: the chip table's, and `installed`, the version of its compiler here or None."""
    from jaxmem._installed import version
    from jaxmem.targets import CHIPS, TpuFacts

    compilers = {"tpu": version("libtpu"), "gpu": version("jax-cuda12-plugin") or version("jax-cuda13-plugin")}
    rows = []
    for chip in CHIPS:
        capability = chip.compute_capability
        rows.append(
            {
                "name": chip.name,
                "kind": chip.kind,
                "platform": chip.platform,
                "hbm_bytes": chip.hbm_bytes,
                "usable_bytes": chip.usable_bytes,
                "devices_per_chip": chip.devices_per_chip,
                "flops_per_second": dict(chip.flops_per_second),
                "hbm_bytes_per_second": chip.hbm_bytes_per_second,
                "host_bytes_per_second": chip.host_bytes_per_second,
                "interconnect_bytes_per_second": chip.interconnect_bytes_per_second,
                "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
                "native_bfloat16": chip.native_bfloat16,
                "native_float8": chip.native_float8,
                "cudnn_attention": chip.cudnn_attention,
                "topologies": list(chip.facts.topologies) if isinstance(chip.facts, TpuFacts) else ["1x1x1", "1x1x8"],
                "installed": compilers[chip.platform],
                "source": chip.source,
                "note": chip.note,
            }
        )
    return rows


def _print_table(rows: list[dict[str, Any]]):
    from rich.console import Console
    from rich.table import Table

    from jaxmem._installed import INSTALL_GPU, INSTALL_TPU

    console = Console()
    table = Table(box=None, pad_edge=False)
    table.add_column("target", no_wrap=True)
    for name in ("GiB", "usable", "bf16\nTFLOP/s", "fp16", "fp8", "int8", "memory\nGB/s", "host", "links"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rates = row["flops_per_second"]
        table.add_row(
            row["name"],
            *(f"{row[name] / 2**30:.2f}" for name in ("hbm_bytes", "usable_bytes")),
            *(_rate(rates.get(dtype), 1e12) for dtype in ("bfloat16", "float16", "float8", "int8")),
            *(_rate(row[f"{name}_bytes_per_second"], 1e9) for name in ("hbm", "host", "interconnect")),
        )
    console.print(table)
    console.print(
        "Of one JAX device; dense rates; host and links in one direction. A topology may follow: tpu-v5e:2x2, or "
        "gpu-h100:1x1x8 for slices x hosts x GPUs of a host. local and cpu are this machine. --json tells the sources."
    )
    for platform, cure in (("tpu", INSTALL_TPU), ("gpu", INSTALL_GPU)):
        installed = next(row["installed"] for row in rows if row["platform"] == platform)
        console.print(f"Compiler of {platform}-…: {installed or f'not installed. {cure}'}", markup=False)


def _rate(value: int | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.0f}"
