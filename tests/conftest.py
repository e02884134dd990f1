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

# One example may compile a program, so no deadline; the same examples every time, so that a red run is red again.
hypothesis.settings.register_profile("jaxmem", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jaxmem")


def pytest_collection_finish():
    """What imports and collection made stays: collectors of garbage need not look at it after every few traces."""
    gc.collect()
    gc.freeze()
