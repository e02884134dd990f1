"""Whatever happens to a file of a checkpoint is noticed, named and passed over; nothing else changes."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._damage import MANIFEST, content, damages
from jaxmem.checkpoint import latest, restore, save
from jaxmem.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError


def state(value):
    return {"params": {"w": jnp.full((8, 4), value)}, "count": jnp.int32(value), "empty": jnp.zeros((0, 3))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints 1 to 3, and one of another run."""
    root = tmp_path_factory.mktemp("saved")
    for number in (1, 2, 3):
        save(root / "run", state(number / 4), number=number)
        save(root / "other", state(number / 8), number=number)
    return root


def test_every_damage_is_named_and_passed_over(saved, tmp_path):
    run, path = tmp_path / "run", tmp_path / "run" / "3"
    shutil.copytree(saved / "run", run)
    tried = set()
    for name, damage in damages(path, other=run / "1", stranger=saved / "other" / "3", flips=2):
        damage(path)
        before, removed = content(run), name == f"{MANIFEST}: removed"
        with pytest.warns(CheckpointWarning, match=f"passed over checkpoint 3 of {run}") as told:
            found = latest(run)
        assert found is not None and found.number == 2 and len(told) == 1, name
        with pytest.raises(CheckpointError, match=str(path)) as refused:
            restore(run, state(0.0), number=3)
        file = name.partition(":")[0]
        assert removed or not file.startswith("state/") or file in str(refused.value), (name, str(refused.value))
        assert content(run) == before, name
        shutil.rmtree(path)
        shutil.copytree(saved / "run" / "3", path)
        tried.add(file)
    assert tried > set(content(saved / "run" / "3"))
    found = restore(run, state(0.0), number=3)
    assert np.array_equal(found["params"]["w"], state(3 / 4)["params"]["w"])


def test_what_lies_below_is_restored_where_the_newest_are_damaged(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved / "run", run)
    (run / "3" / MANIFEST).write_text("{}")
    shutil.rmtree(run / "2" / "state")
    with pytest.warns(CheckpointWarning) as told:
        found = restore(run, state(0.0))
    assert [str(each.message).split(" of ")[0] for each in told] == [f"passed over checkpoint {n}" for n in (3, 2)]
    assert np.array_equal(found["params"]["w"], state(1 / 4)["params"]["w"])
    (run / "1" / MANIFEST).write_text("")
    words = f"a good checkpoint in {run}; got none that is not damaged: 1, 2, 3"
    with pytest.warns(CheckpointWarning), pytest.raises(DamagedCheckpointError, match=words):
        restore(run, state(0.0))


def test_a_checkpoint_and_another_number_are_refused(saved):
    newest = latest(saved / "run")
    with pytest.raises(CheckpointError, match="number=3, or none, with a Checkpoint; got 1"):
        restore(newest, state(0.0), number=1)
    assert np.array_equal(restore(newest, state(0.0), number=3)["params"]["w"], state(3 / 4)["params"]["w"])
