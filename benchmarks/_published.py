"""Published numbers: the tables that `benchmarks.oracles` recomputes.

Temporaries of jax 0.10.2 / 0.12.0.1 and libtpu 0.0.52 on a machine without an accelerator: compiled, not run.
"""

# Eight-layer float32 transformer, value and gradient: (policy, layout, compiler) → MiB of temporaries. Layout
# "residuals" is what the trace keeps rather than what a compiler allots.
TRAPS_MIB = {
    ("none", "unrolled", "residuals"): 1412,
    ("none", "scan", "residuals"): 1108,
    ("none", "unrolled", "cpu-default"): 1184,
    ("none", "unrolled", "cpu-memory"): 940,
    ("none", "unrolled", "tpu-v5e"): 403,
    ("none", "scan", "cpu-default"): 1180,
    ("none", "scan", "tpu-v5e"): 865,
    ("per_layer", "unrolled", "residuals"): 51,
    ("per_layer", "scan", "residuals"): 27,
    ("per_layer", "unrolled", "cpu-default"): 1177,
    ("per_layer", "unrolled", "cpu-memory"): 566,
    ("per_layer", "unrolled", "tpu-v5e"): 34,
    ("per_layer", "scan", "cpu-default"): 188,
    ("per_layer", "scan", "tpu-v5e"): 18,
    ("per_layer_cse", "unrolled", "cpu-default"): 1184,
    ("per_layer_cse", "unrolled", "tpu-v5e"): 403,
    ("per_layer_cse", "scan", "cpu-default"): 188,
    ("per_layer_cse", "scan", "tpu-v5e"): 3,
    ("dots_no_batch", "unrolled", "residuals"): 179,
    ("dots_no_batch", "scan", "residuals"): 155,
    ("dots_no_batch", "unrolled", "cpu-default"): 1175,
    ("dots_no_batch", "unrolled", "cpu-memory"): 763,
    ("dots_no_batch", "unrolled", "tpu-v5e"): 133,
    ("dots_no_batch", "scan", "cpu-default"): 272,
    ("dots_no_batch", "scan", "tpu-v5e"): 165,
    ("everything_saveable", "unrolled", "cpu-default"): 919,
    ("everything_saveable", "unrolled", "tpu-v5e"): 795,
    ("everything_saveable", "scan", "cpu-default"): 1180,
    ("everything_saveable", "scan", "tpu-v5e"): 886,
    ("whole_model", "unrolled", "cpu-default"): 1184,
    ("whole_model", "scan", "cpu-default"): 1180,
    ("whole_model", "scan", "tpu-v5e"): 875,
}

# Twelve bfloat16 layers: (model, policy, target) → GiB of temporaries; on v5e without any policy, what the refusing
# compiler said that it would need.
PEERS_GIB = {
    ("gpt", "none", "gpu-h100"): 17.35,
    ("gpt", "none", "tpu-v5e:1x1"): 17.43,
    ("gpt", "dots", "gpu-h100"): 6.34,
    ("gpt", "dots", "tpu-v5e:1x1"): 6.39,
    ("gpt", "dots_no_batch", "gpu-h100"): 3.15,
    ("gpt", "dots_no_batch", "tpu-v5e:1x1"): 3.20,
    ("gpt", "minimal_with_context", "gpu-h100"): 3.34,
    ("gpt", "minimal_with_context", "tpu-v5e:1x1"): 3.39,
    ("gpt", "save_dot_with_context_except_mlp", "gpu-h100"): 2.61,
    ("gpt", "save_dot_with_context_except_mlp", "tpu-v5e:1x1"): 2.64,
    ("gpt", "save_dot_except_mlp", "gpu-h100"): 2.64,
    ("gpt", "save_dot_except_mlp", "tpu-v5e:1x1"): 2.45,
    ("gpt", "save_qkv_proj", "gpu-h100"): 2.23,
    ("gpt", "save_qkv_proj", "tpu-v5e:1x1"): 2.27,
    ("gpt", "save_out_proj", "gpu-h100"): 1.84,
    ("gpt", "save_out_proj", "tpu-v5e:1x1"): 1.89,
    ("gpt", "full", "gpu-h100"): 1.75,
    ("gpt", "full", "tpu-v5e:1x1"): 1.70,
    ("llama", "none", "gpu-h100"): 26.11,
    ("llama", "none", "tpu-v5e:1x1"): 25.99,
    ("llama", "dots", "gpu-h100"): 10.13,
    ("llama", "dots", "tpu-v5e:1x1"): 10.57,
    ("llama", "dots_no_batch", "gpu-h100"): 3.94,
    ("llama", "dots_no_batch", "tpu-v5e:1x1"): 3.87,
    ("llama", "minimal_with_context", "gpu-h100"): 4.13,
    ("llama", "minimal_with_context", "tpu-v5e:1x1"): 4.00,
    ("llama", "save_dot_with_context_except_mlp", "gpu-h100"): 3.09,
    ("llama", "save_dot_with_context_except_mlp", "tpu-v5e:1x1"): 3.01,
    ("llama", "save_dot_except_mlp", "gpu-h100"): 2.86,
    ("llama", "save_dot_except_mlp", "tpu-v5e:1x1"): 2.82,
    ("llama", "save_qkv_proj", "gpu-h100"): 2.77,
    ("llama", "save_out_proj", "gpu-h100"): 2.65,
    ("llama", "full", "gpu-h100"): 2.44,
    ("llama", "full", "tpu-v5e:1x1"): 2.42,
}

# (model, policy) → seconds on v5e by the compiler's own cycles at 1.5 GHz.
PEERS_SECONDS = {
    ("gpt", "dots"): 0.2555,
    ("gpt", "dots_no_batch"): 0.2098,
    ("gpt", "minimal_with_context"): 0.2053,
    ("gpt", "save_dot_with_context_except_mlp"): 0.1979,
    ("gpt", "save_dot_except_mlp"): 0.2065,
    ("gpt", "save_qkv_proj"): 0.2056,
    ("gpt", "save_out_proj"): 0.2078,
    ("gpt", "full"): 0.2056,
    ("llama", "dots"): 0.416,
    ("llama", "dots_no_batch"): 0.407,
    ("llama", "minimal_with_context"): 0.385,
    ("llama", "save_dot_with_context_except_mlp"): 0.382,
    ("llama", "save_dot_except_mlp"): 0.404,
    ("llama", "full"): 0.401,
}

# (model, policy) → recomputation as a share of the FLOPs of all forward matrix products.
PEERS_SHARE = {
    ("gpt", "none"): 0.0,
    ("gpt", "dots"): 0.0,
    ("gpt", "dots_no_batch"): 0.12,
    ("gpt", "minimal_with_context"): 0.06,
    ("gpt", "save_dot_with_context_except_mlp"): 0.30,
    ("gpt", "save_dot_except_mlp"): 0.36,
    ("gpt", "save_qkv_proj"): 0.42,
    ("gpt", "save_out_proj"): 0.54,
    ("gpt", "full"): 0.60,
    ("llama", "none"): 0.0,
    ("llama", "dots"): 0.0,
    ("llama", "dots_no_batch"): 0.23,
    ("llama", "minimal_with_context"): 0.12,
    ("llama", "save_dot_with_context_except_mlp"): 0.43,
    ("llama", "save_dot_except_mlp"): 0.55,
    ("llama", "save_qkv_proj"): 0.61,
    ("llama", "save_out_proj"): 0.63,
    ("llama", "full"): 0.69,
}

# Checkmate (arXiv:1910.02653, figure 5 and its text): largest batch on 16e9 bytes with at most one extra forward pass:
# (with its schedules, with all of the forward pass's values kept). Of ResNet-50 only the first was found.
CHECKMATE = {"vgg19": (289, 167), "unet": (61, 16), "mobilenet": (1105, 217), "resnet50": (193, None)}
