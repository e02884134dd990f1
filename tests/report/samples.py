"""Reports as a compiler would give them, made from a little model of one: GPT with its layers scanned or unrolled."""

import bisect
import dataclasses
import random
from collections import defaultdict
from typing import Any

from jaxmem.analysis import (
    Buffer,
    Comparison,
    DonationMiss,
    Finding,
    LayerBytes,
    Loop,
    MemoryReport,
    Moment,
    StepTime,
    Timeline,
)

MODULES = ("ln_1", "attn/qkv", "attn/scores", "attn/proj", "ln_2", "mlp/in", "mlp/gelu", "mlp/out")
WEIGHTS = {"attn/qkv": (3, "kernel"), "attn/proj": (1, "kernel"), "mlp/in": (4, "kernel"), "mlp/out": (4, "kernel")}


class _Program:
    """Buffers in the order of a schedule: forward layers, loss, backward layers, update."""

    def __init__(self, *, layers: int, scanned: bool, width: int, rows: int, ops: int):
        self.random = random.Random(7)
        self.layers, self.scanned, self.width, self.rows, self.ops = layers, scanned, width, rows, ops
        self.buffers: list[dict] = []
        self.position = 0

    def path(self, layer: int) -> str:
        return "GPT/blocks" if self.scanned else f"GPT/block_{layer}"

    def add(self, **fields) -> dict:
        fields = {"start": self.position, "end": self.position, **fields}
        fields.setdefault("name", f"fusion.{len(self.buffers)}")
        self.buffers.append(fields)
        return fields

    def build(self) -> list[Loop]:
        passes = 1 if self.scanned else self.layers
        stacked = self.layers if self.scanned else 1
        kept, loops = [], []
        for layer in range(passes):
            begin = self.position
            for module in MODULES:
                self._arguments(layer, module, stacked)
                size = self.rows * self.width * 2 * (4 if "mlp" in module else 1)
                for op in range(self.ops):
                    self._temporary(layer, module, size, "forward")
                    self.position += 1
                    if op == self.ops // 2:
                        kept.append((layer, module, self._residual(layer, module, size * stacked)))
            if self.scanned:
                loops.append(Loop(name="while.1", start=begin, end=self.position - 1, trips=self.layers))
        self._loss()
        gradients = []
        begin = self.position
        for layer, module, residual in reversed(kept):
            for _ in range(2 * self.ops):
                self._temporary(layer, module, residual["size_bytes"] // stacked, "backward")
                self.position += 1
            residual["end"] = self.position
            if module in WEIGHTS:
                gradients.append(self._gradient(layer, module, stacked))
        if self.scanned:
            loops.append(Loop(name="while.2", start=begin, end=self.position - 1, trips=self.layers))
            loops.append(Loop(name="while.3", start=begin + 5, end=begin + 40, trips=None))
        for gradient in gradients:
            gradient["end"] = self.position + 1
            self.position += 3
        return loops

    def _arguments(self, layer: int, module: str, stacked: int):
        if module not in WEIGHTS:
            return
        factor, leaf = WEIGHTS[module]
        leading = f"{self.layers}," if self.scanned else ""
        for kind, root in (
            ("parameters", "params"),
            ("optimizer_state", "opt_state[0].mu"),
            ("optimizer_state", "opt_state[0].nu"),
        ):
            path = f"state.{root}['{self.path(layer).split('/')[1]}']['{module.replace('/', '_')}']['{leaf}']"
            self.add(
                kind=kind,
                layer=f"{self.path(layer)}/{module}",
                path=path,
                op="parameter",
                shape=f"f32[{leading}{self.width},{factor * self.width}]",
                size_bytes=4 * factor * self.width**2 * stacked,
                allocation=-1,
                start=0,
                end=None,
            )

    def _temporary(self, layer: int, module: str, size: int, phase: str):
        op = self.random.choice(("dot_general", "add", "exp", "transpose", "convert_element_type", "reduce_sum"))
        self.add(
            kind=self.random.choice(("activations", "activations", "workspace")),
            layer=f"{self.path(layer)}/{module}",
            phase=phase,
            op=op,
            op_name=f"jit(step)/jvp(GPT)/{self.path(layer)}/{module}/{op}",
            source=f"gpt.py:{40 + MODULES.index(module) * 3}",
            source_file="/home/me/project/gpt.py",
            function="Block.__call__",
            shape=f"bf16[{self.rows // 1024},1024,{self.width}]",
            layout="{2,1,0:T(8,128)(2,1)}",
            size_bytes=size,
            end=self.position + self.random.randint(1, 3),
            depth=int(self.scanned),
        )

    def _residual(self, layer: int, module: str, size: int) -> dict:
        leading = f"{self.layers}," if self.scanned else ""
        return self.add(
            kind="activations",
            layer=f"{self.path(layer)}/{module}",
            phase="forward",
            op="dot_general",
            saved_name=module.split("/")[-1] if "attn" in module else "",
            op_name=f"jit(step)/jvp(GPT)/{self.path(layer)}/{module}/dot_general",
            source=f"gpt.py:{40 + MODULES.index(module) * 3}",
            source_file="/home/me/project/gpt.py",
            function="Block.__call__",
            shape=f"bf16[{leading}{self.rows // 1024},1024,{size // self.rows // 2}]",
            layout="{2,1,0:T(8,128)(2,1)}",
            size_bytes=size,
            padding_bytes=size // 16 if module == "attn/scores" else 0,
        )

    def _loss(self):
        size = self.rows * 50304 * 4
        for op in ("dot_general", "exp", "log_softmax", "sub"):
            self.add(
                kind="activations",
                layer="GPT/head",
                phase="forward",
                op=op,
                op_name=f"jit(step)/jvp(GPT)/head/{op}",
                source="gpt.py:88",
                source_file="/home/me/project/gpt.py",
                function="loss",
                shape=f"f32[{self.rows // 1024},1024,50304]",
                size_bytes=size,
                end=self.position + 3,
            )
            self.position += 2

    def _gradient(self, layer: int, module: str, stacked: int) -> dict:
        factor, _ = WEIGHTS[module]
        return self.add(
            kind="gradients",
            layer=f"{self.path(layer)}/{module}",
            phase="backward",
            op="dot_general",
            source=f"gpt.py:{40 + MODULES.index(module) * 3}",
            shape=f"f32[{self.width},{factor * self.width}]",
            size_bytes=4 * factor * self.width**2 * stacked,
        )


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
    program = _Program(layers=layers, scanned=scanned, width=width, rows=rows, ops=ops)
    loops = program.build()
    length = program.position + 2
    buffers = _placed(program.buffers, length, scale)
    moments = _moments(buffers, length)
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
        "warnings": ("The compiler's own peak leaves out what loops hold.",),
        "by_kind": tuple(by_kind.items()),
        "by_layer": tuple(LayerBytes(layer=a, kind=b, size_bytes=size) for (a, b), size in by_layer.items()),
        "buffers": tuple(at_peak),
        "timeline": Timeline(
            length=length,
            peak_position=peak.position,
            moments=tuple(moments),
            loops=tuple(loops),
            buffers=tuple(sorted(buffers, key=lambda b: -b.size_bytes)[:1000]),
        ),
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


def _placed(raw: list[dict], length: int, scale: float) -> list[Buffer]:
    """Buffers with offsets: arguments an allocation each, all else first-fit in one."""
    taken: list[tuple[int, int, int]] = []  # (offset, end of range, last position) of what is alive, in order
    out, allocation = [], 1
    for fields in sorted(raw, key=lambda f: f["start"]):
        fields = dict(fields)
        if fields.get("allocation") == -1:
            fields |= {"allocation": allocation, "end": length - 1}
            allocation += 1
        else:
            if fields["kind"] != "gradients":
                fields["size_bytes"] = int(fields["size_bytes"] * scale)
            fields["end"] = min(fields["end"], length - 1)
            taken = [held for held in taken if held[2] >= fields["start"]]
            offset = 0
            for begin, end, _ in taken:
                if begin - offset >= fields["size_bytes"]:
                    break
                offset = max(offset, end)
            bisect.insort(taken, (offset, offset + fields["size_bytes"], fields["end"]))
            fields["offset_bytes"] = offset
        out.append(Buffer(**fields))
    return out


def _moments(buffers: list[Buffer], length: int) -> list[Moment]:
    starts, ends = defaultdict(list), defaultdict(list)
    for buffer in buffers:
        starts[buffer.start].append(buffer)
        ends[buffer.end + 1].append(buffer)
    alive: dict[str, int] = defaultdict(int)
    moments = []
    for position in range(length):
        if position not in starts and position not in ends:
            continue
        for buffer in ends[position]:
            alive[buffer.kind] -= buffer.size_bytes
        for buffer in starts[position]:
            alive[buffer.kind] += buffer.size_bytes
        what = max(starts[position], key=lambda b: b.size_bytes, default=None)
        about = {} if what is None else {f: getattr(what, f) for f in ("op", "layer", "source", "shape")}
        moments.append(Moment(position=position, by_kind=tuple((k, n) for k, n in alive.items() if n), **about))
    return moments


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
