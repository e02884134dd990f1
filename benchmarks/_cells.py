"""One compile each: the cells of the tables of `benchmarks.oracles`, and the file that remembers them."""

import hashlib
import importlib.metadata
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

import jaxmem
from benchmarks import _stacks
from benchmarks._stacks import STACKS, checkpointed
from jaxmem.analysis import hlo_flops
from jaxmem.remat import residual_bytes
from jaxmem.targets import compile_on

POLICIES = jax.checkpoint_policies
# MaxText's, as it writes them.
_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")
_NAMED = {
    "minimal": (*_QKV, "out_proj", *_MLP),
    "minimal_with_context": (*_QKV, "out_proj", *_MLP, "context"),
    "save_dot_with_context_except_mlp": (*_QKV, "out_proj", "context"),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", "mlpwo"),
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
}
PEERS = {
    "dots": POLICIES.dots_saveable,
    "dots_no_batch": POLICIES.dots_with_no_batch_dims_saveable,
    **{name: POLICIES.save_only_these_names(*names) for name, names in _NAMED.items()},
    "full": POLICIES.nothing_saveable,
}
# How each row of the eight-layer table puts its checkpoints; "whole_model" is not one of a layer.
_TRAPS = {
    "none": lambda block: block,
    "per_layer": checkpointed(POLICIES.nothing_saveable),
    "per_layer_cse": checkpointed(POLICIES.nothing_saveable, prevent_cse=False),
    "dots_no_batch": checkpointed(POLICIES.dots_with_no_batch_dims_saveable),
    "everything_saveable": checkpointed(POLICIES.everything_saveable),
    "whole_model": lambda block: block,
    "offload": checkpointed(
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["qkv_proj"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    ),
}
# "cpu-default" is XLA:CPU as it runs, "cpu-memory" the same with its memory-minimising scheduler.
_COMPILERS = {"cpu-default": "local", "cpu-memory": "cpu", "tpu-v5e": "tpu-v5e:1x1", "gpu-h100": "gpu-h100"}


class Cells:
    """Records by key; a missing one is computed and written at once, so that an interrupted run can continue.

    Args:
      path: of the JSON file; None remembers nothing.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self.records: dict[str, dict] = json.loads(path.read_text()) if path and path.exists() else {}
        self.made = 0
        # A cell depends on its models and its compilers.
        source = "".join(map(inspect.getsource, (_stacks, checkpointed, peer, traps)))
        source = hashlib.sha256(source.encode()).hexdigest()[:8]
        self.stamp = f"{source} {compilers()}"

    def get(self, key: tuple[str, ...], make: Callable[..., dict]) -> dict:
        """The record of `make(*key[1:])`, remembered under the key."""
        name = " ".join((*key, self.stamp))
        if name not in self.records:
            start = time.perf_counter()
            record = make(*key[1:])
            self.made += 1
            self.records[name] = {**record, "made_in_seconds": round(time.perf_counter() - start, 1)}
            self._write()
            print(f"{' '.join(key)}: {self.records[name]['made_in_seconds']:.0f} s", file=sys.stderr, flush=True)
        return self.records[name]

    def _write(self) -> None:
        if self.path is not None:
            half = self.path.with_suffix(self.path.suffix + ".part")
            half.write_text(json.dumps(self.records, indent=1))
            os.replace(half, self.path)


def compilers() -> str:
    """Versions of what compiles, where they are installed."""
    names = ("jax", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
    found = {name: _version(name) for name in names}
    return " ".join(f"{name}={version}" for name, version in found.items() if version)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def peer(model: str, policy: str, target: str) -> dict:
    """A policy on a stack of layers under scan, value and gradient: what `jaxmem.analyze` says of it."""
    stack = STACKS[model]
    # Within a scan nothing merges a recomputation with its original, so it needs no barrier.
    wrap = (lambda block: block) if policy == "none" else checkpointed(PEERS[policy], prevent_cse=False)
    report = jaxmem.analyze(jax.value_and_grad(stack.loss(wrap)), *stack.shapes(), target=target)
    seconds = report.step_time
    return {
        "temp_bytes": report.temp_bytes,
        "peak_bytes": report.peak_bytes,
        "fits": report.fits,
        "forward_flops": report.forward_flops,
        "recompute_flops": report.recompute_flops,
        "step_seconds": report.step_seconds,
        # Seconds from the compiler's own cycles only, without a roofline's additions.
        "cycle_seconds": seconds.seconds * (1 - seconds.filled_share)
        if seconds is not None and seconds.method == "compiler_cycles"
        else None,
    }


def traps(policy: str, layout: str, compiler: str) -> dict:
    """A checkpoint policy on the small stack: the compiler's raw fields, or the residuals of the trace."""
    stack = STACKS["small"]
    loss = stack.loss(_TRAPS[policy], scan=layout == "scan")
    if policy == "whole_model":
        loss = jax.checkpoint(loss)
    if compiler == "residuals":
        return {"temp_bytes": residual_bytes(loss, *stack.shapes())}
    compiled = compile_on(_COMPILERS[compiler], jax.value_and_grad(loss), *stack.shapes())
    memory, counted = compiled.memory_analysis(), hlo_flops(compiled.as_text() or "")
    cost = compiled.cost_analysis() or {}
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "sum_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        "compiler_peak_bytes": memory.peak_memory_in_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        "flops": counted.flops,
        "recompute_flops": counted.recompute_flops,
        "cost_analysis_flops": cost.get("flops"),
        "cost_analysis_seconds": cost.get("optimal_seconds"),
    }
