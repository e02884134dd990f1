"""Several processes on this machine train as one does, and where one of them fails or is killed, all end and say so."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmem.cli import _rendezvous
from jaxmem.cli._hosts import check_options
from jaxmem.errors import BatchError, ProcessError
from jaxmem.train import _hosts

ROOT = Path(__file__).parents[2]
FILE = """
import time
import jax, jax.numpy as jnp, numpy as np, optax, jaxmem

def batch_of(window):
    x = np.random.default_rng(window).normal(size=(16, 4)).astype("float32")
    return {"x": x, "y": (x.sum(-1) > 0).astype("float32")}

def loss(params, batch):
    error = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]
    return jaxmem.WeightedMean(jnp.sum(error**2), error.size)

def params(key):
    first, second = jax.random.split(key)
    return {"w": jax.random.normal(first, (4, 8)), "v": jax.random.normal(second, (8,))}

def workload(data=batch_of, **fields):
    return jaxmem.Workload(loss, params, batch_of(0), optax.adam(0.01), data=data, **fields)

def slow():
    return workload(lambda window: (time.sleep(0.05), batch_of(window))[1])

def one():  # all devices of one process
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    return jaxmem.Workload(loss, params, jax.device_put(batch_of(0), rows), optax.adam(0.01), data=batch_of)

def own_rows():
    here = slice(8 * jax.process_index(), 8 * jax.process_index() + 8)
    return workload(lambda window: jax.tree.map(lambda x: x[here], batch_of(window)), per_process_data=True)

def unlike():
    return workload(lambda window: batch_of(window + jax.process_index()))

def breaks():
    def data(window):
        if window == 3 and jax.process_index() == 1:
            raise OSError("cannot read shard 7")
        return batch_of(window)
    return workload(data)
"""
# The command line, less patient than it is with users. JAX is imported as late as there.
RUN = """
import sys
import jaxmem.cli._hosts as hosts, jaxmem.cli._rendezvous as rendezvous
from jaxmem.cli import main
initialize = hosts._initialize

def impatient(*given):
    initialize(*given)
    import jaxmem._peers as peers
    peers.GONE_SECONDS = 8.0

hosts._initialize = impatient
rendezvous.meet.__kwdefaults__["patience"] = 60.0
sys.exit(main())
"""


def free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


class Run:
    """Processes of one run, with what they say."""

    def __init__(self, folder: Path, arguments: list, *, count: int = 2, devices: int = 8, environments=({}, {})):
        self.folder, self.processes = folder, []
        (folder / "w.py").write_text(FILE)
        port = free_port()
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices // count), "PYTHONPATH": str(ROOT)}
        for name in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):  # set for these tests: users have neither
            env.pop(name, None)
        for process in range(count):
            own = arguments[process] if isinstance(arguments[0], list) else arguments
            joins = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count), "--process-id", str(process)]
            with open(folder / f"out{process}", "w") as out, open(folder / f"err{process}", "w") as err:
                command = [sys.executable, "-c", RUN, "train", *own, *(joins if count > 1 else [])]
                here = {**env, **environments[process]}
                self.processes.append(subprocess.Popen(command, cwd=folder, env=here, stdout=out, stderr=err))

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + 60
        while text not in self.said(0)[1]:
            assert time.monotonic() < until and self.processes[0].poll() is None, self.said(0)
            time.sleep(0.05)

    def said(self, process: int) -> tuple[str, str]:
        return (self.folder / f"out{process}").read_text(), (self.folder / f"err{process}").read_text()

    def end(self) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) of each process; none hangs."""
        try:
            codes = [process.wait(90) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(code, *self.said(index)) for index, code in enumerate(codes)]


def losses(path: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in map(json.loads, path.read_text().splitlines())}


def test_two_processes_train_as_one_and_resume_one_another(tmp_path):
    options = ["--log-every", "1", "--checkpoint-dir", "D"]
    first = Run(tmp_path, ["w.py", "--steps", "4", "--metrics", "a.jsonl", *options]).end()
    assert [code for code, _, _ in first] == [0, 0], first
    assert "2 processes with 8 devices, mesh: data 8; each gives the whole batch" in first[0][2]
    assert re.fullmatch(r"4 of 4 steps, loss .*\nsaved in .*\n", first[0][1])  # nothing of Gloo's
    assert first[1][1] == ""

    (one,) = Run(tmp_path, ["w.py:one", "--steps", "7", "--metrics", "b.jsonl", *options], count=1).end()
    assert one[0] == 0 and "resumed at window 4" in one[2], one
    back = Run(tmp_path, ["w.py:own_rows", "--steps", "10", "--metrics", "c.jsonl", *options]).end()
    assert [code for code, _, _ in back] == [0, 0] and "resumed at window 7" in back[0][2], back

    (whole,) = Run(tmp_path, ["w.py:one", "--steps", "10", "--metrics", "d.jsonl", "--log-every", "1"], count=1).end()
    assert whole[0] == 0, whole
    # Gloo sums in another order than one process does.
    parts = {k: v for name in "abc" for k, v in losses(tmp_path / f"{name}.jsonl").items()}
    assert parts == pytest.approx(losses(tmp_path / "d.jsonl"), rel=2e-6) and len(parts) == 10


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_by_the_other_and_the_run_resumes(tmp_path, victim):
    arguments = ["w.py:slow", "--steps", "400", "--checkpoint-dir", "D", "--save-every", "5", "--log-every", "5"]
    run = Run(tmp_path, arguments)
    run.wait_for("step 20 ")
    run.processes[victim].kill()
    code, _, err = run.end()[1 - victim]
    said = err.strip().splitlines()[-1]
    assert code == 3 and "Check failure stack trace" not in err
    assert re.match(rf"jaxmem: process {victim} of 2 \(.*, pid {run.processes[victim].pid}\) is gone: ", said), err
    found = re.search(r"training resumes from window (\d+) of D\.$", said)
    assert found, said
    window = int(found[1])
    assert window >= 5

    again = Run(tmp_path, arguments)
    again.wait_for(f"resumed at window {window}")
    again.wait_for("step")
    again.processes[1].send_signal(signal.SIGTERM)  # one of them is told to stop: all do, after the same window
    ends = again.end()
    assert [code for code, _, _ in ends] == [143, 143], ends
    assert re.search(r"(\d+) of 400 steps.*; terminated\nsaved in .*/D/\1; the same command goes on", ends[0][1])


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("breaks", 2, "process 1 of 2 (HOST) failed: OSError: cannot read shard 7. Raised from w.py, line"),
        ("unlike", 2, "Wanted the first batch/x to be the same in all 2 processes; got float32[16, 4] with sha256"),
    ],
)
def test_an_error_of_one_process_reaches_the_user_from_the_others(tmp_path, function, code, said):
    ends = Run(tmp_path, [f"w.py:{function}", "--steps", "20"]).end()
    assert [end for end, _, _ in ends] == [code, code], ends
    assert said in re.sub(r"\([^()]*, pid \d+\)", "(HOST)", ends[0][2]), ends


def test_jax_that_is_set_otherwise_in_one_process_is_named(tmp_path):
    each = [["w.py", "--steps", "2"], ["w.py", "--steps", "2", "--precision", "bfloat16"]]
    ends = Run(tmp_path, each, environments=[{}, {"JAX_ENABLE_X64": "1"}]).end()
    assert [code for code, _, _ in ends] == [2, 2], ends
    assert "Wanted jax_enable_x64 to be the same in all 2 processes; got False in process 0 and True" in ends[0][2]
    ends = Run(tmp_path, each).end()
    assert "Wanted the config's precision to be the same" in ends[0][2], ends


def test_a_process_that_is_lost_before_jax_has_started_is_no_abort_without_a_word(tmp_path):
    alone = f"""
import jaxmem.cli._hosts as hosts
hosts.meet, hosts._START_SECONDS = lambda *given: None, 1  # the other was there, and is gone
with hosts.joined("127.0.0.1:{free_port()}", 2, 0):
    pass
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "4"}
    ended = subprocess.run([sys.executable, "-c", alone], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 3 and ended.stderr.startswith("jaxmem: JAX's coordinator did not start: "), ended


def test_rows_that_do_not_lie_here_are_refused_by_name():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = {"x": jax.sharding.NamedSharding(mesh, jax.P("data"))}
    whole = {"x": jax.ShapeDtypeStruct((16, 4), np.float32)}
    placed = _hosts.put({"x": np.ones((16, 4), np.float32)}, rows, whole)
    assert placed["x"].sharding == rows["x"]
    with pytest.raises(BatchError, match=re.escape("batch/x of shape (16, 4) from process 0")):
        _hosts.put({"x": np.ones((8, 4), np.float32)}, rows, whole)


def test_a_mesh_of_one_process_of_several_is_refused(monkeypatch):
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    _hosts.check_mesh(mesh)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ProcessError, match="devices of all 2 processes; got one with devices of process 0 alone"):
        _hosts.check_mesh(mesh)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"process": 1, "count": 3}, "the same --num-processes in all processes; got 4 in process 0 .* and 3 in"),
        ({"process": 0, "count": 4}, "a --process-id of its own in each process; got 0 in two"),
    ],
)
def test_processes_that_do_not_belong_together_are_told(others, said):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(_rendezvous.meet, "127.0.0.1", port, 4, 0, patience=20.0)
        hello = {"hello": "jaxmem processes 1", "who": "elsewhere, pid 7", **others}
        with pytest.raises(ProcessError, match=said):
            _rendezvous._join("127.0.0.1", port, hello, time.monotonic() + 20, 20.0)
        with pytest.raises(ProcessError, match=said):
            first.result()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("10.0.0.1:1234", None, None), "got --coordinator without --num-processes, --process-id"),
        ((None, None, 0), "got --process-id without --coordinator, --num-processes"),
        (("10.0.0.1", 2, 0), "a port from 1 to 65535; got '10.0.0.1'"),
        (("10.0.0.1:1234", 2, 2), "--process-id from 0 to 1, as there are 2 processes; got 2"),
        (("auto", 2, None), "--coordinator auto alone; got --num-processes besides"),
    ],
)
def test_options_that_do_not_belong_together(given, said):
    with pytest.raises(ProcessError, match=re.escape(said)):
        check_options(*given)


def test_it_is_said_who_does_not_come(tmp_path):
    port = free_port()
    with pytest.raises(ProcessError, match="no word of processes 1, 2, 3"):
        _rendezvous.meet("127.0.0.1", port, 4, 0, patience=0.2)
    with pytest.raises(ProcessError, match=rf"process 0 to answer at 127.0.0.1:{port}; got Connection refused"):
        _rendezvous.meet("127.0.0.1", port, 4, 1, patience=0.2)
    with socket.create_server(("", port)), pytest.raises(ProcessError, match=f"port {port} .* to be free"):
        _rendezvous.meet("127.0.0.1", port, 4, 0, patience=0.2)
