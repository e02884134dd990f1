"""What must be in place before the first test file imports JAX."""

import gc
import os
import tempfile

# Tests run on the CPU, whatever the machine has; with a CUDA plugin and no GPU, anything else does not even start.
os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = (
    "--xla_force_host_platform_device_count=8",  # so that a batch or a parameter can be sharded
    # Machine code of the lowest quality, in a third of the time: buffers and HLO are the same, and tests compile
    # hundreds of tiny programs. What trains for long sets its own flags.
    "--xla_backend_optimization_level=0",
)
_given = os.environ.get("XLA_FLAGS", "").split()
os.environ["XLA_FLAGS"] = " ".join(_given + [flag for flag in _FLAGS if flag not in _given])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
_cache = tempfile.TemporaryDirectory(prefix="jaxmem-tests-")
os.environ["JAXMEM_CACHE_DIR"] = _cache.name  # what another run remembers is no test of this one

import hypothesis  # noqa: E402
import jax  # noqa: E402

if jax.__version__.startswith("0.10."):
    # The older of its two emitters of kernels, in half the time; some fusions differ by a few bytes. Newer versions
    # have none but the newer one, with which the newest JAX runs the same tests. Flags are read once, here, and then
    # taken back: the TPU's compiler reads them for itself, and ends the process at one that it does not know.
    _flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_cpu_use_fusion_emitters=false"
    jax.devices()
    os.environ["XLA_FLAGS"] = _flags

# One example may compile a program, so no deadline; the same examples every time, so that a red run is red again.
hypothesis.settings.register_profile("jaxmem", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jaxmem")


def pytest_collection_finish():
    """What imports and collection made stays: collectors of garbage need not look at it after every few traces."""
    gc.collect()
    gc.freeze()
