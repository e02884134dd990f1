"""Two processes write one checkpoint, and agree on what is good."""

import json
import os
import socket
import subprocess
import sys

# What a process says is a line of JSON. What one does alone stands in an `if`.
PROGRAM = """
import json, sys, warnings
import jax, jax.numpy as jnp, numpy as np
process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxmem.checkpoint import Manager, _files
from jaxmem.errors import CheckpointError
warnings.simplefilter("error")

mesh = Mesh(np.array(jax.devices()), "x")
rows = NamedSharding(mesh, PartitionSpec("x"))
make = jax.jit(lambda number: {"w": jnp.arange(64.0) + number}, out_shardings=rows)
said = {}
with Manager(folder, keep=2) as manager:
    for number in range(3):
        manager.save(make(number), number=number)
    said["kept"] = [each.number for each in manager.checkpoints()]
    newest = manager.latest()
    if process == 0:
        path = newest.path / max(newest.files, key=lambda name: newest.files[name][0])
        path.write_bytes(b"!" + path.read_bytes()[1:])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = manager.latest()  # the file is another's share
    said["latest"], said["told"] = found.number, [str(each.message) for each in told]
    got = manager.restore(make(0), found)["w"]
    said["values"] = [float(shard.data[0]) for shard in got.addressable_shards]
    if process == 1:
        def full(*args):
            raise OSError(28, "No space left on device")
        _files.digests = full
    manager.save(make(3), number=3)
    try:
        manager.wait()
    except CheckpointError as error:
        said["error"] = str(error)
print(json.dumps(said))
"""


def test_processes_share_the_work_and_fail_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(process), port, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    output = [process.communicate(timeout=100) for process in ran]
    assert [process.returncode for process in ran] == [0, 0], output
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in output)
    assert first["kept"] == second["kept"] == [1, 2]
    assert first["latest"] == second["latest"] == 1
    assert len(first["told"]) == 1 and "passed over checkpoint 2" in first["told"][0] and second["told"] == []
    assert (first["values"], second["values"]) == ([1.0, 17.0], [33.0, 49.0])
    assert "Wanted to save checkpoint 3; got a disk that is full" in second["error"]
    assert "(process 1)" in first["error"] and "a disk that is full" in first["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".jaxmem.lock", "1", "2"]
