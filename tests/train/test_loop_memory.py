"""The peak of training beside the compiled one: by an allocator's statistics, and by the growth of a process."""

import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.errors import MemoryWarning
from jaxmem.targets import _device_memory
from jaxmem.train import TrainStep, _loop
from jaxmem.train._loop import WINDOWS_IN_FLIGHT, run_loop
from jaxmem.train._loop_memory import RESIDENT_SLACK_BYTES, LoopMemory, Watch

ROWS = 64
OTHERS = 10**6  # bytes in use of neither state nor batch
BATCH_BYTES = 4 * 32 * ROWS


def linear(params, batch):
    return jnp.mean(jnp.tanh(jnp.sin(batch @ params)) ** 2)


class Device:
    """Statistics as XLA's allocators give them, of a device that this machine lacks: each call raises the peak."""

    def __init__(self, in_use, peak=0, raised=0):
        self.stats = {"bytes_in_use": in_use, "peak_bytes_in_use": max(peak, in_use), "bytes_limit": 2**40}
        self.raised = raised

    def run(self):
        self.stats["peak_bytes_in_use"] = max(self.stats["peak_bytes_in_use"], self.raised)


@pytest.fixture
def step():
    return jaxmem.make_train_step(
        jaxmem.Workload(linear, jnp.ones((32, 32)), jnp.ones((ROWS, 32)), optax.sgd(0.1, momentum=0.9))
    )


def trained(step, monkeypatch, path=None, **device):
    """The memory of a loop on a `Device` that holds the state, the first batch, and what others do."""
    device = Device(OTHERS + step.report().argument_bytes, **device)
    monkeypatch.setattr(_device_memory, "memory_stats", lambda _: dict(device.stats))
    called = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda *given: (device.run(), called(*given))[1])
    return run_loop(step, step.init(), lambda _: jnp.ones((ROWS, 32)), 3, log_every=1, metrics_path=path).memory


def test_what_others_held_before_the_first_step_is_not_trainings(step, monkeypatch, tmp_path, capsys):
    predicted, path = step.report().peak_bytes, tmp_path / "metrics.jsonl"
    memory = trained(step, monkeypatch, str(path), raised=OTHERS + predicted)
    assert (memory.measured_bytes, memory.predicted_bytes) == (predicted, predicted)
    assert (memory.measured_by, memory.at_most, memory.surprise) == ("memory_stats", False, "")
    lines = [json.loads(line)["memory"] for line in path.read_text().splitlines()]
    assert lines == 3 * [memory.to_dict()]
    assert lines[0]["provenance"] == {"measured_bytes": "measured", "predicted_bytes": "compiled"}
    assert "measured (the allocator of cpu)" in capsys.readouterr().err


def test_a_batch_that_waits_on_the_host_is_not_held_before_the_first_step(step, monkeypatch):
    monkeypatch.setattr(_device_memory, "memory_stats", lambda _: Device(OTHERS).stats)
    state, batch = step.init(), jnp.ones((ROWS, 32))
    held = [Watch.of(step, state, b, in_flight=1)._held_bytes for b in (batch, jax.device_get(batch))]
    assert held == [step.report().argument_bytes, step.report().argument_bytes - BATCH_BYTES]


@pytest.mark.parametrize("percent, said", [(104, ""), (107, "7% more"), (96, ""), (93, "7% less")])
def test_more_than_5_percent_is_a_warning_once(step, monkeypatch, percent, said):
    waiting = WINDOWS_IN_FLIGHT * BATCH_BYTES if percent == 104 else 0  # batches ahead are no surprise
    monkeypatch.setattr(_loop, "WINDOWS_IN_FLIGHT", 4 if waiting else 0)
    raised = OTHERS + step.report().peak_bytes * percent // 100 + waiting
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(step, monkeypatch, raised=raised)
    found = [str(w.message) for w in caught if w.category is MemoryWarning and w.filename == __file__]
    assert len(found) == bool(said) and all(said in text for text in found)


def test_a_peak_from_before_training_is_an_upper_bound(step, monkeypatch, capsys):
    peak = step.report().peak_bytes
    memory = trained(step, monkeypatch, peak=OTHERS + 2 * peak, raised=OTHERS + peak)  # autotuning, say
    assert memory.at_most and memory.measured_bytes == 2 * memory.predicted_bytes and memory.surprise == ""
    assert "at most" in capsys.readouterr().err


PROCESS = """
import json, os, warnings
os.environ.pop("XLA_FLAGS", None)
import jax.numpy as jnp, numpy as np, optax, jaxmem
from jaxmem.train._loop import run_loop

def loss(w, x):
    for _ in range(8):
        x = jnp.sin(x @ w)
    return jnp.mean(x**2)

workload = jaxmem.Workload(loss, jnp.eye(64), jnp.ones((2**15, 64)), optax.sgd(0.1))
step = jaxmem.make_train_step(workload)
hoard, seen = [], []
for spent in [np.ones(2**29, np.uint8)]:  # a peak from before training, which is not training's
    del spent
for kept in (0, 2**28):
    def data(window):
        hoard.append(np.ones(kept // 4, np.uint8))
        return np.ones((2**15, 64), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen.append(run_loop(step, step.init(), data, 4, log_every=1).memory.to_dict())
    seen[-1]["warned"] = [str(w.message) for w in caught if w.category.__name__ == "MemoryWarning"]
print(json.dumps(seen))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
def test_a_process_grows_by_what_was_compiled_and_what_the_data_keeps_is_a_warning():
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    honest, hoarding = json.loads(done.stdout)
    assert (honest["device"], honest["measured_by"]) == ("this process", "resident memory")
    assert honest["predicted_bytes"] > 2**26 and honest["warned"] == []
    assert not honest["at_most"] and 0.9 < honest["measured_bytes"] / honest["predicted_bytes"] < 2
    (warned,) = hoarding["warned"]
    assert hoarding["measured_bytes"] > honest["measured_bytes"] + 2**27 and "Arrays that the data" in warned


def test_a_save_holds_memory_of_the_process_and_none_of_a_device(step, monkeypatch):
    state, batch = step.init(), jnp.ones((ROWS, 32))
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    def saving_bytes(**options):
        return Watch.of(step, state, batch, in_flight=1, **options)._saving_bytes

    assert (saving_bytes(), saving_bytes(saves=True)) == (0, 3 * state_bytes)
    monkeypatch.setattr(_device_memory, "memory_stats", lambda _: Device(OTHERS).stats)
    assert saving_bytes(saves=True) == 0
    told = {"device": "this process", "measured_by": "resident memory", "before_bytes": 0, "at_most": False}
    sizes = {"predicted_bytes": 100, "saving_bytes": 2**30, "peak_bytes": 0}
    most = 105 + 2**30 + RESIDENT_SLACK_BYTES
    assert not LoopMemory(measured_bytes=most, **told, **sizes).surprise
    assert "A save may hold 1.00 GiB." in LoopMemory(measured_bytes=most + 1, **told, **sizes).surprise


@pytest.mark.parametrize("sharded", [False, True])
def test_the_step_is_compiled_once(sharded, caplog):
    mesh = jax.make_mesh((len(jax.devices()),), ("data",)) if sharded else None
    workload = jaxmem.Workload(linear, jnp.ones((32, 32)), jnp.ones((ROWS, 32)), optax.sgd(0.1))
    step = jaxmem.make_train_step(workload, mesh=mesh)
    state = step.init()
    with jax.log_compiles():
        run_loop(step, state, lambda window: jax.device_get(workload.batch), 3)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert len(compiled) == 1 and "jit(step)" in compiled[0]
