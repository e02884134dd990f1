"""Whether the installed JAX compiles for every chip of the table, and the programs can be read.

    python -m benchmarks.chip_matrix --json -

All chips x a GPT in bfloat16, a convolutional net, a step sharded over several chips. A cell fails if
there is no report, or one without a peak, without kinds that sum to it, or without FLOPs. Run it on each supported
Python, which each have another JAX. `--chips tpu-v6e,gpu-t4` selects chips.
"""

import argparse
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmem
from benchmarks._harness import emit
from examples import gpt, resnet_batchnorm
from jaxmem._installed import version
from jaxmem.targets import CHIPS, Chip, find_chip, resolve_target

_SIDES = {"gpu": ("1x1x2",), "tpu": ("2x2", "2x2x1")}  # the smallest of several chips


def transformer() -> tuple[jaxmem.Workload, jaxmem.MemoryConfig]:
    """A GPT of two layers in a scan."""
    workload = gpt.workload(batch=4, seq=256, layers=2, width=256, heads=4)
    return workload, jaxmem.MemoryConfig(remat="full", precision="bfloat16")


def convolutions() -> tuple[jaxmem.Workload, jaxmem.MemoryConfig]:
    """A residual net with batch norm, two micro-batches."""
    workload = resnet_batchnorm.workload(batch=16, stages=(1, 1), width=16)
    return workload, jaxmem.MemoryConfig(accumulation_steps=2)


def sharded(devices: int) -> tuple[jaxmem.Workload, jaxmem.MemoryConfig]:
    """Layers in a scan, whose rows are sharded and gradients reduced."""

    def loss(params, x, *, memory):
        layer = memory.block(lambda x, w: (x + jnp.tanh(x @ w), None), scanned=True)
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    rows = NamedSharding(AbstractMesh((devices,), ("data",)), PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((64 * devices, 256), "float32", sharding=rows)
    workload = jaxmem.Workload(loss, jax.ShapeDtypeStruct((4, 256, 256), "float32"), batch, optax.adamw(1e-3))
    return workload, jaxmem.MemoryConfig(remat="full", accumulation_steps=2)


def several(chip: Chip) -> str:
    """A target of several chips of a kind."""
    for sides in _SIDES[chip.platform]:
        try:
            return resolve_target(f"{chip.name}:{sides}").name
        except jaxmem.errors.UnknownTargetError:
            continue
    raise AssertionError(f"no topology of several {chip.name}")


def cells(chip: Chip) -> dict[str, tuple[str, Callable]]:
    """(target, program) of each cell."""
    many = several(chip)
    devices = resolve_target(many).device_count
    return {
        "gpt_bf16": (chip.name, transformer),
        "conv": (chip.name, convolutions),
        "sharded": (many, lambda: sharded(devices)),
    }


def cell(target: str, make: Callable) -> dict:
    """The figures of one analysis, or its error."""
    start = time.perf_counter()
    try:
        workload, config = make()
        report = jaxmem.analyze(workload, config, target=target)
    except Exception as error:  # of whatever class: that is what is counted
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    wrong = {
        "no peak": not report.peak_bytes,
        "kinds do not sum to the peak": sum(size for _, size in report.by_kind) != report.peak_bytes,
        "no buffers": not report.buffers,
        "no FLOPs": not report.flops,
        "no time": not report.step_seconds,
    }
    return {
        "peak_bytes": report.peak_bytes,
        "kinds": len(report.by_kind),
        "buffers": report.buffer_provenance,
        "fits": report.fits,
        "seconds": round(time.perf_counter() - start, 2),
        "error": ", ".join(what for what, so in wrong.items() if so),
        "unread": [warning for warning in report.warnings if "cannot" in warning and "read" in warning],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--chips", default="", metavar="LIST", help="some chips only, separated by commas")
    options = parser.parse_args()
    try:
        wanted = [find_chip(name).name for name in options.chips.split(",") if name]
    except jaxmem.errors.UnknownTargetError as error:
        parser.error(str(error))
    start, rows = time.perf_counter(), {}
    for chip in CHIPS:
        if wanted and chip.name not in wanted:
            continue
        for name, (target, make) in cells(chip).items():
            rows[f"{name} {target}"] = cell(target, make)
            print(f"{name} {target}", rows[f"{name} {target}"], file=sys.stderr, flush=True)
    failed = {name: row["error"] for name, row in rows.items() if row["error"]}
    figures = {
        "failed": len(failed),
        "compiled": sum("peak_bytes" in row for row in rows.values()),
        "read_from_dump_or_not_at_all": sum(bool(row.get("unread")) for row in rows.values()),
        "seconds": round(time.perf_counter() - start, 1),
    }
    emit(
        figures,
        target=",".join(wanted or [chip.name for chip in CHIPS]),
        provenance={name: "measured" if name == "seconds" else "compiled" for name in figures},
        notes={"compilers": {name: version(name) for name in ("libtpu", "jax-cuda12-plugin")}, "rows": rows},
        out=options.json,
    )


if __name__ == "__main__":
    main()
