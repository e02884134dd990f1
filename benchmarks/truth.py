"""Whether reports account for every byte, and how long they take beside the compile.

    python -m benchmarks.truth --json -

GPT-2 (124 M) on five targets: the kinds must sum to the peak, and the union of the buffers' places must give the
compiler's temporaries. The four examples on a TPU and a GPU: the share of activation bytes with operation, source line
and layer, and the unexplained share of the peak. And a page of 100 unrolled layers: seconds after the compile, size.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxmem
from benchmarks._harness import emit
from benchmarks.policy_order import WORKLOADS
from examples import gpt
from jaxmem.analysis import _build, _compiled
from jaxmem.report import html_report

GPT2_TARGETS = ("cpu", "gpu-h100", "gpu-t4", "gpu-a100-40g", "tpu-v5e:1x1")
EXAMPLE_TARGETS = ("gpu-h100", "tpu-v5e:1x1")


class Stopwatch:
    """Separates the compiler's seconds from ours, and keeps the buffer assignment of a report."""

    def __init__(self):
        self.compile_seconds, self.compiled_at, self.assignment = 0.0, 0.0, None
        self._compile, self._details = _compiled.compile_noting, _build.details

    def __enter__(self):
        _compiled.compile_noting = self._timed
        _build.details = self._seen
        return self

    def __exit__(self, *exc_info):
        _compiled.compile_noting, _build.details = self._compile, self._details

    def _timed(self, *args):
        start = time.perf_counter()
        try:
            return self._compile(*args)
        finally:
            self.compiled_at = time.perf_counter()
            self.compile_seconds += self.compiled_at - start

    def _seen(self, made, *args):
        self.assignment = made.assignment
        return self._details(made, *args)


def analyzed(workload: jaxmem.Workload, target: str, config: jaxmem.MemoryConfig | None = None) -> tuple:
    """(report, figures of the run)."""
    with Stopwatch() as watch:
        start = time.perf_counter()
        jaxmem.make_train_step(workload, config, target=target).lower()  # JAX's tracing and lowering
        lowered_seconds = time.perf_counter() - start
        start = time.perf_counter()
        report = jaxmem.analyze(workload, config or jaxmem.MemoryConfig(), target=target)
        end = time.perf_counter()
        total, after = end - start, end - watch.compiled_at
    assignment = watch.assignment
    assert assignment is not None, "no buffers were told"
    activations = [b for b in report.buffers if b.kind == "activations"]
    told = [b for b in activations if b.op not in ("", "while") and b.source]
    size = sum(b.size_bytes for b in activations) or 1
    figures = {
        "total_seconds": total,
        "compile_seconds": watch.compile_seconds,
        # What is neither the compiler's nor JAX's: `analyze` traces and lowers again.
        "our_seconds": max(0.0, total - watch.compile_seconds - lowered_seconds),
        "after_compile_seconds": after,
        "peak_bytes": report.peak_bytes,
        "kinds_off_bytes": abs(sum(b for _, b in report.by_kind) - report.peak_bytes),
        "union_error": abs(assignment.used_temp_bytes / max(1, report.temp_bytes) - 1),
        "told_share": sum(b.size_bytes for b in told) / size,
        "layer_share": sum(b.size_bytes for b in activations if b.layer) / size,
        "unattributed_share": dict(report.by_kind).get("unattributed", 0) / report.peak_bytes,
        "fits": report.fits,
    }
    print(target, {k: round(v, 5) if isinstance(v, float) else v for k, v in figures.items()}, file=sys.stderr)
    return report, figures


class Layers(nn.Module):
    """`layers` blocks in a Python loop, so that the compiler sees each of them."""

    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return x


def unrolled(layers: int = 100) -> jaxmem.Workload:
    """100 layers, none of them in a scan."""
    batch = {"x": jax.ShapeDtypeStruct((1024, 256), "float32")}
    return jaxmem.Workload.from_linen(Layers(layers), lambda m, b: jnp.mean(m(b["x"]) ** 2), batch, optax.adamw(1e-3))


def main() -> None:
    rows: dict[str, dict] = {}
    for target in GPT2_TARGETS:
        print("gpt2_124m", end=" ", file=sys.stderr)
        rows[f"gpt2_124m {target}"] = analyzed(gpt.gpt2_124m(), target)[1]
    for name, make in WORKLOADS.items():
        for target in EXAMPLE_TARGETS:
            print(name, end=" ", file=sys.stderr)
            rows[f"{name} {target}"] = analyzed(functools.partial(make)(), target)[1]
    report, page = analyzed(unrolled(), "gpu-h100")
    start = time.perf_counter()
    html = html_report(report)
    page_seconds = page["after_compile_seconds"] + time.perf_counter() - start
    everything = [*rows.values(), page]
    gpu = [row for name, row in rows.items() if name.startswith("gpt2") and "gpu" in name]
    tpu = [row for name, row in rows.items() if name.startswith("gpt2") and "tpu" in name]
    figures = {
        "kinds_off_bytes": max(row["kinds_off_bytes"] for row in everything),
        "union_error_max": max(row["union_error"] for row in everything),
        "told_share_min": min(row["told_share"] for row in rows.values()),
        "layer_share_min": min(row["layer_share"] for row in rows.values()),
        "unattributed_share_max": max(row["unattributed_share"] for row in everything),
        "gpt2_gpu_seconds_max": max(row["total_seconds"] for row in gpu),
        "gpt2_tpu_seconds_max": max(row["total_seconds"] for row in tpu),
        "our_seconds_max": max(row["our_seconds"] for row in [*gpu, *tpu]),
        "page_seconds": page_seconds,
        "page_mbytes": len(html.encode()) / 1e6,
        "page_buffers": len(report.buffers),
    }
    emit(
        figures,
        target=",".join(GPT2_TARGETS),
        provenance={name: "measured" if "seconds" in name else "compiled" for name in figures},
        notes={"rows": rows, "page": page},
    )


if __name__ == "__main__":
    main()
