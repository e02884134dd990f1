"""Buffers of the examples' compiled steps against labels given by hand: what each one holds, read off the model."""

import linecache

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from examples import gpt, llama, resnet_batchnorm, vit_nnx

# (shape, kind, layer, phase, operation, what stands on its source line); "a|b" where JAX versions fuse differently.
LABELS = {
    ("gpt", "gpu-h100"): [
        ("f32[2,4,4,64,64]", "activations", "GPT/blocks", "forward", "exp", "softmax"),
        ("f32[2,4,4,64,64]", "activations", "GPT/blocks", "forward", "div", "softmax"),
        ("f32[2,4,64,256]", "activations", "GPT/blocks", "forward", "tanh|mul", "gelu"),
        ("f32[2,4,64,256]", "activations", "GPT/blocks/mlp_in", "forward", "add", '"mlp_in"'),
        ("f32[256,256]", "activations", "GPT/embed", "forward", "dot_general", "embed.attend"),
        ("f32[4,64,256]", "activations", "GPT/blocks", "backward", "add_any", "gelu"),
        ("f32[2,64,256]", "gradients", "GPT/blocks/mlp_in", "backward", "transpose", '"mlp_in"'),
        ("f32[2,256,64]", "gradients", "GPT/blocks/mlp_out", "backward", "transpose", '"mlp_out"'),
        ("f32[2,4,64,64]", "activations", "GPT/blocks", "forward", "dot_general", "context = "),
    ],
    ("llama", "gpu-h100"): [
        ("f32[2,4,2,2,64,64]", "activations", "Llama/blocks", "forward", "exp", "softmax"),
        ("f32[2,4,64,176]", "activations", "Llama/blocks/mlp_gate", "forward", "dot_general", '"mlp_gate"'),
        ("f32[4,256,64]", "activations", "Llama/blocks/mlp_up", "backward", "dot_general", '"mlp_up"'),
        ("f32[2,4,2,64,2,16]", "activations", "Llama/blocks", "forward", "concatenate", "cos"),
        ("f32[2,4,64,64]", "activations", "Llama/blocks/norm_mlp", "forward", "mul", '"norm_mlp"'),
    ],
    ("vit", "gpu-h100"): [
        ("f32[1088,256]", "activations", "ViT/Block", "forward", "dot_general|add", "self.mlp_in"),
        ("f32[64,17,256]", "activations", "ViT/Block", "forward", "mul", "gelu"),
        ("f32[256,17,17]", "activations", "ViT/Block", "forward", "dot_general", "scores = "),
        ("f32[64,17,64]", "activations", "ViT/Block", "forward", "add", "x + self.dropout("),
        ("f32[64,17,64]", "activations", "ViT", "forward", "select_n", "self.dropout(x)"),
    ],
    ("resnet", "gpu-h100"): [
        ("f32[64,8,8,64]", "activations", "ResNet/stage0_block0/conv_out", "forward", "conv_general_dilated", "Conv"),
        ("f32[64,8,8,64]", "activations", "ResNet/stage0_block0", "forward", "max", "relu(x + h)"),
        ("f32[64,4,4,128]", "activations", "ResNet/stage1_block0/norm_out", "backward", "mul", "BatchNorm"),
        ("f32[64,8,8,16]", "activations", "ResNet/stem", "forward", "conv_general_dilated", "stem(images)"),
    ],
}
WORKLOADS = {
    "gpt": lambda: gpt.workload(layers=2, batch=4),
    "llama": lambda: llama.workload(layers=2, batch=4),
    "vit": lambda: vit_nnx.workload(layers=2),
    "resnet": resnet_batchnorm.workload,
}


@pytest.mark.parametrize(("example", "target"), LABELS)
def test_labels(example, target):
    report = jaxmem.analyze(WORKLOADS[example](), target=target)
    assert sum(size for _, size in report.by_kind) == report.peak_bytes
    assert report.buffer_provenance == "compiled"
    assert dict(report.by_kind).get("unattributed", 0) <= 0.01 * report.peak_bytes
    activations = [b for b in report.buffers if b.kind == "activations"]
    told = [b for b in activations if b.op not in ("", "while") and b.source and b.layer]
    assert sum(b.size_bytes for b in told) >= 0.95 * sum(b.size_bytes for b in activations)
    for shape, kind, layer, phase, ops, line in LABELS[example, target]:
        told = [shape, kind, layer, phase]
        buffers = [b for b in report.buffers if [b.shape, b.kind, b.layer, b.phase] == told and b.op in ops.split("|")]
        lines = [linecache.getline(b.source_file, int(b.source.rpartition(":")[2])) for b in buffers]
        assert any(line in text for text in lines), (told, ops, lines)


def _layer(x, weights):
    """A hidden layer over 8200 rows, which the chip keeps in the lanes: padded to 8320."""
    up, down = weights
    return x + jnp.tanh(x @ up) @ down, None


def _mlp(weights, x):
    x, _ = jax.lax.scan(_layer, x, weights)
    return jnp.mean(x**2)


def test_labels_on_a_tpu():
    layers, rows, width, hidden = 16, 8200, 128, 200  # more than the memory on the chip holds
    weights = tuple(jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for shape in ((width, hidden), (hidden, width)))
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    step = jax.value_and_grad(_mlp)
    report = jaxmem.analyze(step, weights, x, target="tpu-v5e", arg_kinds=("parameters", "batch"))
    assert sum(size for _, size in report.by_kind) == report.peak_bytes
    # tanh is kept as 1 - y² or, by newer compilers, as y in 16 bits
    kept = [b for b in report.buffers if b.shape.endswith(f"32[{layers},{rows},{hidden}]") or b.op == "tanh"]
    assert [(b.kind, b.phase, b.layer, b.function) for b in kept[:1]] == [
        ("activations", "forward", "scan(_layer)", "_layer")
    ]
    assert kept[0].op in ("sub", "tanh")
    itemsize = 4 if kept[0].shape.startswith("f32") else 2
    assert kept[0].padding_bytes == layers * (8320 - rows) * hidden * itemsize
    assert {b.path for b in report.buffers if b.kind == "parameters"} >= {"weights[0]", "weights[1]"}
    found = {finding.kind: finding for finding in report.findings}
    assert found["residuals"].size_bytes >= kept[0].size_bytes
    assert [(loop.trips) for loop in report.timeline.loops] == [layers, layers]
