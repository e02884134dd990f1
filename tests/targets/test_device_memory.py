"""Case 36: what is in use and what the allocator has taken are two numbers, and settings that came late are told."""

import json
import subprocess
import sys

import jax

from jaxmem.targets import DeviceMemory, device_memory, find_chip
from jaxmem.targets._device_memory import late_settings

H100 = find_chip("gpu-h100")


class Gpu:
    """Statistics as XLA:GPU's allocator gives them, under preallocation: 3 GB in use of a pool of 60."""

    platform, device_kind = "gpu", H100.kind

    def memory_stats(self):
        limit = int(0.75 * H100.hbm_bytes)
        return {"bytes_in_use": 3e9, "peak_bytes_in_use": 5e9, "pool_bytes": limit, "bytes_limit": limit}


def test_the_pool_is_not_what_is_in_use(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    memory = device_memory(Gpu())
    assert (memory.in_use_bytes, memory.peak_bytes) == (3e9, 5e9)
    assert memory.pool_bytes == memory.limit_bytes == int(0.75 * H100.hbm_bytes)
    assert memory.notes == ()


def test_a_cpu_keeps_no_statistics_and_says_so():
    memory = device_memory()
    assert memory == DeviceMemory(device="cpu", notes=("cpu keeps no statistics of its memory.",))
    assert jax.devices()[0].memory_stats() is None  # else there would be something to show


def test_a_fraction_that_the_allocator_did_not_get_is_a_note(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    (note,) = late_settings(None, H100.kind, int(0.75 * H100.hbm_bytes))
    assert "may take 75% of the device, not the 90%" in note and "Set it before" in note
    assert late_settings(None, H100.kind, int(0.9 * H100.hbm_bytes)) == ()
    assert late_settings(None, "a chip of next year", 1) == ()


def test_a_setting_made_after_the_start_is_a_note(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    (note,) = late_settings({}, H100.kind, None)
    assert note.startswith("XLA_PYTHON_CLIENT_PREALLOCATE was changed after this process began")
    assert late_settings({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, H100.kind, None) == ()


def test_what_a_process_was_started_with_stays_known_when_it_changes_its_environment():
    script = (
        "import json, os; os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'true'\n"
        "from jaxmem.targets._device_memory import _at_start\n"
        "print(json.dumps((_at_start() or {}).get('XLA_PYTHON_CLIENT_PREALLOCATE')))"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == ("false" if sys.platform == "linux" else None)
