"""Compiled against measured bytes and seconds: the examples' steps on this machine's device, in five minutes at most.

    python -m benchmarks.device_check --json -
    python -m benchmarks.device_check --quick            two small cases, also without an accelerator

Each case runs in its own process, without preallocation: the step is compiled, its state is created, and the step runs
three times. The allocator's maximum less the bytes in use before is compared with the compiled peak, and with the peak
of the same chip's compiler without the chip. A CPU keeps no statistics, so the growth of the process's resident memory
is measured instead, which is too coarse for a small case. If a GPU's initialisation took more than the step, the case
is `masked` and does not count.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

RUNS = 3
SECONDS = 300
MEASURABLE_BYTES = 2**27  # of resident memory: below, the runtime's own comes and goes by as much
CONFIGS = {
    "none": {},
    "full_k4": {"remat": "full", "accumulation_steps": 4},
    "dots_bf16": {"remat": "dots", "precision": "bfloat16"},
}
_MARK = "DEVICE-CHECK "


def _sizes() -> dict[str, Callable]:
    """The workloads by "example-size"; the medium ones are those that people train, with small batches."""
    from examples import gpt, llama, resnet_batchnorm, vit_nnx

    return {
        "gpt-tiny": gpt.workload,
        "llama-tiny": llama.workload,
        "vit-tiny": vit_nnx.workload,
        "resnet-tiny": resnet_batchnorm.workload,
        "gpt-small": lambda: gpt.workload(batch=16, seq=128, layers=4, width=256),
        "gpt-medium": lambda: gpt.gpt2_124m(batch=8, seq=512),
        "llama-medium": lambda: llama.workload(batch=32, seq=512, layers=8, width=512, heads=8, hidden=1408),
        "vit-medium": lambda: vit_nnx.vit_b16(batch=64),
        "resnet-medium": lambda: resnet_batchnorm.resnet50(batch=64),
    }


MEDIUM = ("gpt-medium", "llama-medium", "vit-medium", "resnet-medium")
TINY = ("gpt-tiny", "llama-tiny", "vit-tiny", "resnet-tiny")
# The medium ones first: they tell the most, should time run out.
CASES = (*((size, config) for config in CONFIGS for size in MEDIUM), *((size, "none") for size in TINY))
QUICK = (("gpt-small", "none"), ("gpt-tiny", "full_k4"))


# ---------------------------------------------------------------- one case, in its own process


def measure(size: str, config: str) -> dict:
    """Compiled and measured bytes and seconds of one case, in a fresh process."""
    import jax
    import jax.numpy as jnp

    import jaxmem
    from jaxmem.targets import CHIPS, device_memory
    from jaxmem.targets._device_memory import process_memory, restart_process_peak

    workload = _sizes()[size]()
    step = jaxmem.make_train_step(workload, jaxmem.MemoryConfig(**CONFIGS[config]))
    compiled = step.compile()  # before anything is allocated: autotuning would count as the step's
    report = jaxmem.analyze(compiled)
    before, resident = device_memory(), process_memory() if restart_process_peak() else None
    state = step.init()
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if _is_shape(x) else jnp.asarray(x), workload.batch)
    jax.block_until_ready((state, batch))
    ready, seconds = device_memory(), []
    for _ in range(RUNS):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        seconds.append(time.perf_counter() - start)
    after = device_memory()
    measured = {"measured_by": "unavailable", "measured_bytes": None, "masked": False}
    if after.peak_bytes is not None and before.in_use_bytes is not None:
        # The allocator's maximum cannot be reset: it counts only if running the step has raised it.
        masked = after.peak_bytes == ready.peak_bytes
        held = after.peak_bytes - before.in_use_bytes
        measured = {"measured_by": "allocator", "measured_bytes": held, "masked": masked}
    elif resident is not None and resident.in_use_bytes is not None:
        grown = process_memory().peak_bytes - resident.in_use_bytes
        measured = {"measured_by": "resident memory", "measured_bytes": grown, "masked": False}
    chip = next((chip for chip in CHIPS if chip.kind == after.device), None)
    return {
        "size": size,
        "config": config,
        "device": after.device,
        "compiled_bytes": report.peak_bytes,
        "compiler_peak_bytes": report.compiler_peak_bytes,
        "temp_bytes": report.temp_bytes,
        **measured,
        "measured_seconds": min(seconds[1:]),
        "loss": float(metrics["loss"]),
        **(_deviceless(step, chip.name) if chip else {"deviceless_bytes": None, "estimated_seconds": None}),
    }


def _is_shape(leaf) -> bool:
    import jax

    return isinstance(leaf, jax.ShapeDtypeStruct)


def _deviceless(step, target: str) -> dict:
    """The same step compiled for the target of the chip's name, without the chip."""
    import jaxmem
    from jaxmem.errors import JaxmemError

    try:
        report = jaxmem.analyze(step, target=target)
    except JaxmemError as error:
        return {"deviceless_bytes": None, "estimated_seconds": None, "deviceless_error": str(error)}
    return {"deviceless_bytes": report.peak_bytes, "estimated_seconds": report.step_seconds}


# ---------------------------------------------------------------- all of them


def run_case(size: str, config: str, timeout: float) -> dict:
    """The record of a case, or its `error`."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.device_check", "--case", f"{size}/{config}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return {"size": size, "config": config, "error": f"not done within {timeout:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    return {"size": size, "config": config, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def summary(rows: list[dict]) -> dict[str, float]:
    """Largest relative errors of compiled against measured bytes, by who measured; ratios of seconds.

    >>> row = {"compiled_bytes": 103, "deviceless_bytes": 90, "measured_bytes": 100, "measured_by": "allocator"}
    >>> row |= {"masked": False, "measured_seconds": 2.0, "estimated_seconds": 1.0}
    >>> summary([row, {"error": "timeout"}])
    {'cases': 2, 'failed': 1, 'measured': 1, 'max_error': 0.03, 'max_error_deviceless': 0.1, 'max_seconds_ratio': 2.0}
    """
    figures: dict[str, float] = {"cases": len(rows), "failed": sum("error" in row for row in rows)}
    good = [row for row in rows if row.get("measured_bytes") and not row["masked"]]
    exact = [row for row in good if row["measured_by"] == "allocator"]
    rough = [row for row in good if row["measured_by"] != "allocator" and row["compiled_bytes"] >= MEASURABLE_BYTES]
    figures["measured"] = len(exact)
    for name, some, field in (
        ("max_error", exact, "compiled_bytes"),
        ("max_error_deviceless", exact, "deviceless_bytes"),
        ("max_error_resident", rough, "compiled_bytes"),
    ):
        errors = [abs(row[field] / row["measured_bytes"] - 1) for row in some if row[field]]
        if errors:
            figures[name] = round(max(errors), 6)
    ratios = [row["measured_seconds"] / row["estimated_seconds"] for row in exact if row["estimated_seconds"]]
    if ratios:
        figures["max_seconds_ratio"] = max(ratios)
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--quick", action="store_true", help="two small cases")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no case after so many (default 300)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        print(_MARK + json.dumps(measure(*options.case.split("/"))), flush=True)
        return
    start, rows, left_out = time.perf_counter(), [], []
    for size, config in QUICK if options.quick else CASES:
        left = options.seconds - (time.perf_counter() - start)
        if left < 15:  # not even a tiny case compiles in less
            left_out.append(f"{size}/{config}")
            continue
        rows.append(row := run_case(size, config, left))
        print(line(row), file=sys.stderr, flush=True)
    from benchmarks._harness import emit  # JAX only now: this process must not hold a device

    devices = sorted({row["device"] for row in rows if "device" in row})
    emit(
        summary(rows),
        target=", ".join(devices) or "unknown",
        provenance={
            "compiled_bytes": "compiled",
            "deviceless_bytes": "compiled",
            "measured_bytes": "measured",
            "measured_seconds": "measured",
            "estimated_seconds": "modelled",
        },
        notes={"rows": rows, "left_out": left_out, "wanted_max_error": 0.05},
        out=options.json,
    )


def line(row: dict) -> str:
    """One row as text."""
    name = f"{row['size']}/{row['config']}"
    if "error" in row:
        return f"{name:26} failed: {row['error']}"
    compiled, measured = row["compiled_bytes"], row["measured_bytes"]
    text = f"{name:26} compiled {compiled / 2**20:9.1f} MiB"
    if measured:
        how = row["measured_by"] + (", masked" if row["masked"] else "")
        text += f"  measured {measured / 2**20:9.1f} MiB by {how}  ratio {compiled / measured:.3f}"
    else:
        text += "  measured: unavailable"
    text += f"  {row['measured_seconds'] * 1e3:8.1f} ms"
    return text + (f" (estimated {row['estimated_seconds'] * 1e3:.1f})" if row["estimated_seconds"] else "")


if __name__ == "__main__":
    main()
