"""`kill -9` in the middle of saves: what was complete stays, and what was not is never taken for good.

`python -m benchmarks.kill` does the same to whole training runs, more than a hundred times.
"""

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks._file_hook import FileHook, die
from jaxmem.checkpoint import Manager
from jaxmem.errors import CheckpointWarning

# Each process dies at another operation of those that change files: of a save, its manifest, or a deletion.
MOMENTS = (1, 6, 12, 15, 16, 17, 18)

KILLER = """
import json, sys
from pathlib import Path
import orbax.checkpoint
from benchmarks._forked import Forked
from tests.checkpoint.test_kill import MOMENTS, save_on

for moment in MOMENTS:
    process = Forked(save_on, Path(sys.argv[1], str(moment)), moment)
    print(json.dumps([process.end(60), process.value("complete"), process.output()[-500:]]))
"""


def state(number):
    return {"w": jnp.full(1000, number), "count": jnp.int32(number)}


def save_on(tell, folder: Path, moment: int):
    """Saves one checkpoint after another and tells which are complete; dies when two are."""
    hook = FileHook(folder, writing=True)
    with Manager(folder, keep=1) as manager:
        for number in itertools.count():
            if number == 2:
                hook.at = (hook.seen + moment, lambda: die(0))
            manager.save(state(number), number=number)
            manager.wait()
            tell("complete", number)


def test_what_was_complete_before_a_kill_is_restored_after_it(tmp_path):
    killer = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    ran, left = [json.loads(line) for line in killer.stdout.splitlines()], set()
    assert [ended for ended, *_ in ran] == ["killed"] * len(MOMENTS), ran
    for moment, (_, complete, _) in zip(MOMENTS, ran, strict=True):
        folder = tmp_path / str(moment)
        left |= {tuple(sorted(path.name for path in each.iterdir())) for each in folder.glob("[0-9]*")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # what the killed save left is removed
            with Manager(folder, keep=1) as manager:
                found = manager.latest()
                assert found is not None and found.number in (complete, complete + 1), moment
                restored = manager.restore(state(-1), found)
                assert np.array_equal(restored["w"], state(found.number)["w"])
                manager.save(state(found.number + 1), number=found.number + 1)
        assert [path.name for path in folder.glob("[0-9]*")] == [str(found.number + 1)]
    assert len(left) > 3, f"kills fell into few phases only: {left}"
