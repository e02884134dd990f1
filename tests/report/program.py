"""A little model of a compiler: GPT with its layers scanned or unrolled, as buffers in the order of a schedule."""

import bisect
import random
from collections import defaultdict

from jaxmem.analysis import Buffer, Loop, Moment, Stretch

MODULES = ("ln_1", "attn/qkv", "attn/scores", "attn/proj", "ln_2", "mlp/in", "mlp/gelu", "mlp/out")
WEIGHTS = {"attn/qkv": (3, "kernel"), "attn/proj": (1, "kernel"), "mlp/in": (4, "kernel"), "mlp/out": (4, "kernel")}


class Program:
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


def placed(raw: list[dict], length: int, scale: float) -> list[Buffer]:
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


def live_bytes(buffers: list[Buffer], length: int) -> list[Moment]:
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
        about = {} if what is None else {f: getattr(what, f) for f in ("op", "layer", "source", "shape", "phase")}
        moments.append(Moment(position=position, by_kind=tuple((k, n) for k, n in alive.items() if n), **about))
    return moments


def stretches(moments: list[Moment], length: int) -> tuple[Stretch, ...]:
    """Forward to where the first value of the backward pass is made, then backward."""
    turn = next(moment.position for moment in moments if moment.phase == "backward")
    return (
        Stretch(phase="forward", start=0, end=turn - 1),
        Stretch(phase="backward", start=turn, end=length - 1),
    )
