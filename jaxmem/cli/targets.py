"""`jaxmem targets`: the chips that programs can be compiled for, whether or not they are here."""

import json
from typing import Any

from jaxmem.cli._options import Debug, JsonOut
from jaxmem.cli._output import Outputs, clean_stdout

# Headings → fields; of rates by their unit.
_SIZES = {"GiB": "hbm_bytes", "usable": "usable_bytes"}
_RATES = {
    1e12: {"bf16\nTFLOP/s": "bfloat16", "fp16": "float16", "fp8": "float8", "int8": "int8"},
    1e9: {
        "memory\nGB/s": "hbm_bytes_per_second",
        "host": "host_bytes_per_second",
        "links": "interconnect_bytes_per_second",
    },
}


def targets(json_out: JsonOut = None, debug: Debug = False):
    """List what can be compiled for: memory, rates, and whether its compiler is installed here."""
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out})
    outputs.check()
    with clean_stdout(outputs.to_stdout) as stdout:
        start_jax()
        rows = chip_rows()
        outputs.write(stdout, {"--json": lambda: json.dumps({"targets": rows}, indent=2)})
    outputs.show(*_table(rows))


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


def _table(rows: list[dict[str, Any]]) -> list[Any]:
    from rich.text import Text

    from jaxmem._installed import INSTALL_GPU, INSTALL_TPU
    from jaxmem.report.terminal import Columns

    def rates(key: str, unit: float) -> list[Text]:
        return [Text(_rate(row[key] if key in row else row["flops_per_second"].get(key), unit)) for row in rows]

    sizes = [(name, [Text(f"{row[key] / 2**30:.2f}") for row in rows]) for name, key in _SIZES.items()]
    speeds = [(name, rates(key, unit)) for unit, of in _RATES.items() for name, key in of.items()]
    shown: list[Any] = [
        Columns(("target", [Text(row["name"]) for row in rows]), [*sizes, *speeds]),
        "Of one JAX device; dense rates; host and links in one direction. A topology may follow: tpu-v5e:2x2, or "
        "gpu-h100:1x1x8 for slices x hosts x GPUs of a host. local and cpu are this machine. --json tells the sources.",
    ]
    for platform, cure in (("tpu", INSTALL_TPU), ("gpu", INSTALL_GPU)):
        installed = next(row["installed"] for row in rows if row["platform"] == platform)
        shown.append(Text(f"Compiler of {platform}-…: {installed or f'not installed. {cure}'}"))
    return shown


def _rate(value: int | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.0f}"
