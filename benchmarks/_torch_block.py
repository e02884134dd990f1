"""A GPT block in PyTorch under `activation_memory_budget`: what its partitioner saves and recomputes.

AOTAutograd traces the block forward and backward into one graph. A min-cut with a knapsack splits the graph in two; the
tensors that the first half passes to the second are saved. The first half is run, so bytes are those of live storages.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.flop_counter import flop_registry

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """What PyTorch did under one budget.

    Args:
      held_bytes: of storages that the saved tensors keep alive, those of the block's inputs aside.
      logical_bytes: of the saved tensors that are no views of inputs, by their own sizes.
      recompute_flops: of matrix products in both halves, less those in the whole.
    """

    held_bytes: int
    logical_bytes: int
    recompute_flops: int


def block(x, weights: dict, heads: int):
    """Pre-norm, fused qkv, causal attention as products, GELU; x `(batch, time, width)`."""
    batch, time, width = x.shape
    h = F.layer_norm(x, (width,), weights["norm_1"], weights["bias_1"])
    qkv = (h @ weights["qkv"]).view(batch, time, 3, heads, width // heads)
    query, key, value = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    scores = query @ key.transpose(-1, -2) / (width // heads) ** 0.5
    scores = scores.masked_fill(~torch.ones(time, time, dtype=torch.bool).tril(), -1e30)
    context = (torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(batch, time, width)
    x = x + context @ weights["out"]
    h = F.layer_norm(x, (width,), weights["norm_2"], weights["bias_2"])
    return x + F.gelu(h @ weights["wi"]) @ weights["wo"]


def output(weights: dict, x, heads: int):
    """What the block makes of NumPy arrays, as one."""
    return block(torch.from_numpy(x), {name: torch.from_numpy(w) for name, w in weights.items()}, heads).numpy()


def saved(shapes: dict[str, tuple[int, ...]], x: tuple[int, ...], heads: int, layers: int, budget: float) -> Saved:
    """Partitions a stack of blocks under a budget and runs its forward half.

    Args:
      shapes: of the weights of one block, float32.
      x: shape of the input, which is differentiated too.
      budget: PyTorch's `activation_memory_budget`.
    """
    seen: dict[str, Any] = {}

    def partition(joint, *args, num_fwd_outputs: int, **kwargs):
        halves = min_cut_rematerialization_partition(joint, *args, num_fwd_outputs=num_fwd_outputs, **kwargs)
        seen["outputs"] = num_fwd_outputs
        seen["recompute"] = sum(map(_flops, halves)) - _flops(joint)
        return halves

    def run(graph, _) -> Callable:
        def forward(args: list):
            given = list(args)
            outs = graph(*given)
            seen["bytes"] = _sizes([t for t in outs[seen["outputs"] :] if isinstance(t, torch.Tensor)], given)
            return outs

        forward._boxed_call = True
        return forward

    torch.manual_seed(0)
    weights = [torch.randn(shape, requires_grad=True) for _ in range(layers) for shape in shapes.values()]

    def stack(x, *flat):
        for each in (flat[i : i + len(shapes)] for i in range(0, len(flat), len(shapes))):
            x = block(x, dict(zip(shapes, each, strict=True)), heads)
        return x

    with config.patch(activation_memory_budget=budget):
        traced = aot_function(
            stack,
            fw_compiler=run,
            bw_compiler=lambda graph, _: graph,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        traced(torch.randn(x, requires_grad=True), *weights)
    held, logical = seen["bytes"]
    return Saved(held_bytes=held, logical_bytes=logical, recompute_flops=seen["recompute"])


def _sizes(tensors: list, inputs: list) -> tuple[int, int]:
    given = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, torch.Tensor)}
    own = [t for t in tensors if t.untyped_storage().data_ptr() not in given]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}
    return sum(storages.values()), sum(t.numel() * t.element_size() for t in own)


def _flops(graph) -> int:
    total = 0
    for node in graph.graph.nodes:
        known = getattr(node.target, "overloadpacket", None) in flop_registry
        if known and node.target not in _PRODUCTS:
            raise NotImplementedError(f"wanted a graph of mm and bmm; got {node.target} too. Count its FLOPs here.")
        if node.target in _PRODUCTS:
            left, right = (arg.meta["val"] for arg in node.args[:2])
            total += 2 * left.numel() * right.shape[-1]
    return total
