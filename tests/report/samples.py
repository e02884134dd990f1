"""Reports as a compiler would give them, and what may happen to them."""

import dataclasses
from collections import defaultdict
from typing import Any

from jaxmem.analysis import (
    Buffer,
    Comparison,
    DonationMiss,
    Finding,
    LayerBytes,
    MemoryReport,
    Moment,
    PhasePeak,
    SourceLine,
    StepTime,
    Timeline,
)
from tests.report.program import Program, live_bytes, placed, stretches


def gpt_report(
    *,
    layers: int = 12,
    scanned: bool = True,
    width: int = 768,
    rows: int = 8192,
    ops: int = 6,
    name: str = "gpt2_124m",
    scale: float = 1.0,
    capacity_bytes: int | None = 16 * 2**30,
    **fields,
) -> MemoryReport:
    """A report whose parts agree: kinds sum to the peak, the timeline is that of its buffers.

    Args:
      layers, scanned, width, rows: of the model; `rows` are tokens.
      ops: operations a module and pass; buffers and positions grow with it.
      scale: of what residuals and temporaries take, for variants of one program.
      fields: of the report, in place of those made up.
    """
    program = Program(layers=layers, scanned=scanned, width=width, rows=rows, ops=ops)
    loops = program.build()
    length = program.position + 2
    buffers = placed(program.buffers, length, scale)
    moments = live_bytes(buffers, length)
    peak = max(moments, key=lambda moment: moment.live_bytes)
    at_peak = [b for b in buffers if b.start <= peak.position <= b.end]
    at_peak.sort(key=lambda b: -b.size_bytes)
    by_layer: dict[tuple[str, str], int] = defaultdict(int)
    for buffer in at_peak:
        by_layer[buffer.layer, buffer.kind] += buffer.size_bytes
    by_kind = dict(peak.by_kind) | {"code": 3 << 20, "fragmentation": peak.live_bytes // 50}
    peak_bytes = sum(by_kind.values())
    fits = "uncertain" if capacity_bytes is None else "yes" if peak_bytes < 0.94 * capacity_bytes else "no"
    seconds = 0.18 / scale**0.2
    values: dict[str, Any] = {
        "name": name,
        "target": "tpu-v5e:1x1",
        "backend": "tpu",
        "jax_version": "0.10.2",
        "peak_bytes": peak_bytes,
        "compiler_peak_bytes": peak_bytes,
        "argument_bytes": sum(b.size_bytes for b in buffers if b.op == "parameter"),
        "output_bytes": 1 << 30,
        "temp_bytes": sum(b.size_bytes for b in at_peak if b.op != "parameter"),
        "alias_bytes": 1 << 30,
        "generated_code_bytes": 3 << 20,
        "saved_residual_bytes": int(5e9 * scale),
        "forward_flops": int(2.2e12),
        "flops": int(7.1e12),
        "recompute_flops": int(2.2e12 * (1 - scale)) if scale < 1 else 0,
        "step_seconds": seconds,
        "fits": fits,
        "fits_reason": f"The peak against {capacity_bytes or 0} bytes, 6 % of them kept in reserve for the runtime.",
        "capacity_bytes": capacity_bytes,
        "phases": (
            PhasePeak(name="init", peak_bytes=3 << 30, provenance="modelled", how="The state, and 1 GiB to draw it."),
            PhasePeak(name="step", peak_bytes=peak_bytes, provenance="compiled", how="Its own program."),
            PhasePeak(name="save", peak_bytes=2 << 30, host_bytes=2 << 30, provenance="modelled", how="The state."),
        ),
        "warnings": ("The compiler's own peak leaves out what loops hold.",),
        "by_kind": tuple(by_kind.items()),
        "by_layer": tuple(LayerBytes(layer=a, kind=b, size_bytes=size) for (a, b), size in by_layer.items()),
        "buffers": tuple(at_peak),
        "timeline": Timeline(
            length=length,
            peak_position=peak.position,
            moments=tuple(moments),
            loops=tuple(loops),
            phases=stretches(moments, length),
            buffers=tuple(sorted(buffers, key=lambda b: -b.size_bytes)[:1000]),
        ),
        "source_lines": (SourceLine(file="/home/me/project/gpt.py", line=88, text="logits = self.head(x)"),),
        "padding_bytes": sum(b.padding_bytes for b in at_peak),
        "donation_misses": (
            DonationMiss(path="state.loss_scale", size_bytes=4, dtype_in="float32", dtype_out="bfloat16"),
        ),
        "findings": (
            Finding(
                kind="upcast",
                size_bytes=3 * rows * 50304 * 4,
                title="Logits and their softmax are held in float32",
                evidence=("GPT/head log_softmax f32[8,1024,50304] gpt.py:88", "GPT/head exp gpt.py:88"),
                cure="Compute the loss in chunks of tokens, or cast the logits to bfloat16.",
            ),
            Finding(
                kind="padding",
                size_bytes=sum(b.padding_bytes for b in at_peak),
                title="Head dimension 64 is padded to 128 lanes",
                evidence=tuple(f"GPT/blocks/attn/scores fusion.{i}" for i in range(31)),
                cure="Use heads of 128, or keep two heads in one row.",
                estimated=True,
            ),
        ),
        "step_time": StepTime(
            seconds=seconds, method="compiler_cycles", filled_share=0.07, compute_seconds=0.12, memory_seconds=0.05
        ),
    }
    return MemoryReport(**(values | fields))


def comparison() -> Comparison:
    """Five variants; the last recomputes most."""
    scales = {"none": 1.0, "dots": 0.6, "save_qkv": 0.45, "dots_no_batch": 0.4, "full": 0.2}
    rows = [gpt_report(name=name, remat=name, scale=scale, capacity_bytes=8 * 2**30) for name, scale in scales.items()]
    return Comparison(rows=tuple(rows), target="tpu-v5e:1x1", versions=(("jax", "0.10.2"),))


def bare_report() -> MemoryReport:
    """What is known when a compiler tells next to nothing."""
    return MemoryReport(
        name="step",
        target="cpu",
        backend="cpu",
        jax_version="0.10.2",
        fits="uncertain",
        fits_reason="No capacity known.",
    )


def renamed(report: MemoryReport, text: str) -> MemoryReport:
    """`report` with `text` at the beginning of every name that comes from the program."""

    def buffer(b: Buffer) -> Buffer:
        names = (
            "name",
            "layer",
            "path",
            "saved_name",
            "op",
            "op_name",
            "source",
            "source_file",
            "function",
            "shape",
            "layout",
        )
        return dataclasses.replace(b, **{name: text + getattr(b, name) for name in names})

    line = report.timeline
    assert line is not None
    moments = tuple(
        dataclasses.replace(m, op=text + m.op, layer=text + m.layer, source=text + m.source, shape=text + m.shape)
        for m in line.moments
    )
    return dataclasses.replace(
        report,
        name=text + report.name,
        target=text + report.target,
        fits_reason=text + report.fits_reason,
        warnings=(text,),
        by_layer=tuple(dataclasses.replace(row, layer=text + row.layer) for row in report.by_layer),
        buffers=tuple(buffer(b) for b in report.buffers),
        timeline=dataclasses.replace(
            line,
            moments=moments,
            loops=tuple(dataclasses.replace(loop, name=text + loop.name) for loop in line.loops),
            buffers=tuple(buffer(b) for b in line.buffers),
        ),
        findings=tuple(
            dataclasses.replace(
                f, title=text + f.title, cure=text + f.cure, evidence=tuple(text + e for e in f.evidence)
            )
            for f in report.findings
        ),
        donation_misses=tuple(dataclasses.replace(m, path=text + m.path) for m in report.donation_misses),
    )


def stretched(report: MemoryReport, *, buffers: int = 6000, moments: int = 15000) -> MemoryReport:
    """As many of everything as a hundred unrolled layers have; every name is a new one."""
    line = report.timeline
    assert line is not None

    def renumbered(b: Buffer, number: int) -> Buffer:
        layer = f"GPT/block_{number % 100}/{b.layer.split('/', 2)[-1]}"
        start = number * moments // buffers
        return dataclasses.replace(
            b, name=f"{b.name}.clone.{number}", layer=layer, op_name=f"jit(step)/jvp({layer})/{b.op}", start=start
        )

    many = [renumbered(report.buffers[i % len(report.buffers)], i) for i in range(buffers)]
    many.sort(key=lambda b: -b.size_bytes)
    return dataclasses.replace(
        report,
        buffers=tuple(many),
        by_layer=tuple(LayerBytes(layer=b.layer, kind=b.kind, size_bytes=b.size_bytes) for b in many[::3]),
        timeline=dataclasses.replace(
            line,
            length=moments,
            peak_position=moments // 2,
            moments=tuple(
                dataclasses.replace(line.moments[i % len(line.moments)], position=i)
                if i != moments // 2
                else Moment(position=i, by_kind=(("activations", 10**11),), op="the_peak")
                for i in range(moments)
            ),
            buffers=tuple(many[:1000]),
        ),
    )
