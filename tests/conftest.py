"""What must be in place before the first test file imports JAX."""

import os

# Tests run on the CPU, whatever the machine has; with a CUDA plugin and no GPU, anything else does not even start.
os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices of it, so that a batch or a parameter can be sharded.
_EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
if _EIGHT_DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT_DEVICES}".strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis  # noqa: E402

# One example may compile a program, so no deadline; the same examples every time, so that a red run is red again.
hypothesis.settings.register_profile("jaxmem", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jaxmem")
