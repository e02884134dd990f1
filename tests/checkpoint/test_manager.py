"""Saving beside training, and finding again what is good."""

import errno
import math
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import checkpoint
from jaxmem.checkpoint import Manager, _files, _folder, _manifest
from jaxmem.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, InputError


def state(value=0.0):
    return {"w": jnp.full((4, 8), float(value)), "step": np.int64(value)}


def numbers(folder):
    return [path.number for path in Manager(folder).checkpoints()]


def damage(folder, number):
    """Flips one bit in the largest file of a checkpoint."""
    found = _manifest.read(folder / str(number))
    path = found.path / max(found.files, key=lambda name: found.files[name][0])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_saves_are_never_skipped_and_say_nothing(tmp_path, capfd):
    jax.devices()
    capfd.readouterr()  # JAX of missing drivers
    with Manager(tmp_path, keep=None) as manager:
        for number in range(6):
            manager.save(state(number), number=number, record={"at": number}, metrics={"loss": jnp.float32(number)})
    assert [(each.number, each.record, each.metrics) for each in manager.checkpoints()] == [
        (number, {"at": number}, {"loss": number}) for number in range(6)
    ]
    got = checkpoint.restore(tmp_path, state(), number=4)
    assert got["w"].tolist() == state(4)["w"].tolist() and got["step"] == 4
    assert capfd.readouterr() == ("", "")


def test_arrays_may_be_donated_and_overwritten_as_soon_as_they_are_saved(tmp_path):
    count = jax.jit(lambda x: x + 1, donate_argnums=0)
    device, host = jnp.zeros(2**20), np.zeros(2**18)
    with Manager(tmp_path, keep=None) as manager:
        for number in range(3):
            manager.save({"device": device, "host": host}, number=number)
            device = count(device)
            host += 1
    for number in range(3):
        got = checkpoint.restore(tmp_path, {"device": device, "host": host}, number=number)
        assert {name: (float(x.min()), float(x.max())) for name, x in got.items()} == {
            "device": (number, number),
            "host": (number, number),
        }


def test_the_newest_and_the_best_stay(tmp_path):
    losses = [5.0, 1.0, 4.0, None, float("nan"), 1.0, 3.0, 2.5]
    with Manager(tmp_path, keep=2, keep_best=2) as manager:
        for number, loss in enumerate(losses):
            manager.save(state(number), number=number, metrics={} if loss is None else {"loss": loss})
    assert numbers(tmp_path) == [1, 5, 6, 7]
    with Manager(tmp_path, keep=1, keep_best=1, best_mode="max") as manager:
        manager.save(state(), number=8, metrics={"other": 9.0})
    assert numbers(tmp_path) == [6, 8]


def test_a_damaged_checkpoint_is_passed_over_and_refused_by_its_number(tmp_path):
    for number in (10, 20, 30):
        checkpoint.save(tmp_path, state(number), number=number)
    damage(tmp_path, 30)
    (tmp_path / "20" / _manifest.NAME).write_text("{}")
    with pytest.warns(CheckpointWarning) as told:
        found = checkpoint.latest(tmp_path)
    assert found and found.number == 10 and found.verified
    assert [str(each.message).split(": ")[0] for each in told] == [
        f"passed over checkpoint {number} of {tmp_path}" for number in (30, 20)
    ]
    assert "other content than was written" in str(told[0].message)
    for number in (20, 30):
        with pytest.raises(DamagedCheckpointError, match=f"a complete checkpoint in {tmp_path}/{number}"):
            checkpoint.restore(tmp_path, state(), number=number)
    with pytest.warns(CheckpointWarning, match="passed over"), Manager(tmp_path) as manager:
        assert float(manager.restore(state())["w"][0, 0]) == 10


def test_damaged_checkpoints_neither_count_nor_go(tmp_path):
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, state(number), number=number)
    damage(tmp_path, 3)
    with Manager(tmp_path, keep=2) as manager:
        with pytest.warns(CheckpointWarning, match="passed over checkpoint 3"):
            assert manager.latest().number == 2
        for number in (4, 5):
            manager.save(state(number), number=number)
    assert numbers(tmp_path) == [3, 4, 5]


def test_a_damaged_checkpoint_is_moved_aside_where_its_number_is_saved_again(tmp_path):
    checkpoint.save(tmp_path, state(1), number=1)
    with pytest.raises(CheckpointError, match="got 1, which is a good checkpoint"):
        checkpoint.save(tmp_path, state(1), number=1)
    damage(tmp_path, 1)
    with pytest.warns(CheckpointWarning, match="checkpoint 1 of .* is damaged, and was moved to 1.damaged"):
        checkpoint.save(tmp_path, state(2), number=1)
    assert float(checkpoint.restore(tmp_path, state())["w"][0, 0]) == 2
    assert (tmp_path / "1.damaged" / _manifest.NAME).exists()


def test_what_a_killed_save_left_is_passed_over_then_removed(tmp_path):
    checkpoint.save(tmp_path, state(1), number=1)
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    (tmp_path / "2" / _manifest.NAME).unlink()
    with pytest.warns(CheckpointWarning, match="passed over checkpoint 2 .*: its save was not finished"):
        found = checkpoint.latest(tmp_path)
    assert found and found.number == 1
    with pytest.warns(CheckpointWarning, match="removed checkpoint 2 .*, whose save was not finished"):
        Manager(tmp_path)
    assert not (tmp_path / "2").exists() and numbers(tmp_path) == [1]


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_in_the_background_is_told_by_the_next_call_and_costs_nothing_complete(tmp_path, monkeypatch, capfd):
    with Manager(tmp_path, keep=1) as manager:
        manager.save(state(1), number=1)
        manager.wait()
        for call in (
            lambda: manager.save(state(3), number=3),
            manager.wait,
            lambda: manager.__exit__(None, None, None),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(_files, "digests", full)
                manager.save(state(2), number=2)
                assert manager._pending
                manager._pending.join()
            with pytest.raises(CheckpointError, match="^Wanted to save checkpoint 2; got a disk that is full: .*\\.$"):
                call()
            assert sorted(path.name for path in tmp_path.iterdir()) == [".jaxmem.lock", "1"]
        manager.save(state(4), number=4)
    assert numbers(tmp_path) == [4] and capfd.readouterr() == ("", "")


def test_an_error_of_the_program_is_not_hidden_by_one_of_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "digests", full)
    with pytest.warns(CheckpointWarning, match="a disk that is full"), pytest.raises(ZeroDivisionError):
        dies_after_a_save(tmp_path)


def test_an_error_of_the_program_does_not_lose_a_save(tmp_path):
    with pytest.raises(ZeroDivisionError):
        dies_after_a_save(tmp_path)
    assert numbers(tmp_path) == [1]


def dies_after_a_save(folder):
    with Manager(folder) as manager:
        manager.save(state(1), number=1)
        raise ZeroDivisionError


# No context, an exception, and a file system on which the second save fails: TensorStore's own words for a full disk,
# by the limit of a file's size.
PROGRAM = """
import resource, sys
import jax.numpy as jnp, numpy as np
from jaxmem.checkpoint import Manager
manager = Manager(sys.argv[1], keep=None)
manager.save({"w": jnp.arange(1000.0)}, number=1)
manager.wait()
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
noise = np.random.default_rng(0).integers(0, 255, (4, 2**18), np.uint8)
manager.save({str(i): part for i, part in enumerate(noise)}, number=2)
1 / 0
"""


@pytest.mark.parametrize("disk", ["good", "full"])
def test_a_save_that_is_pending_when_the_program_dies_is_finished(tmp_path, disk):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore:.*:RuntimeWarning", "-c", PROGRAM, str(tmp_path), disk],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [
        line for line in ran.stderr.splitlines() if "absl::InitializeLog" not in line and "cudart_stub" not in line
    ]
    traceback = ["Traceback (most recent call last):", '  File "<string>", line 12, in <module>']
    assert ran.returncode == 1 and lines[:2] == traceback and "ZeroDivisionError: division by zero" in lines
    after = lines[lines.index("ZeroDivisionError: division by zero") + 1 :]
    if disk == "good":
        assert after == [] and numbers(tmp_path) == [1, 2]
    else:
        assert len(after) == 1 and after[0].startswith("jaxmem: Wanted to save checkpoint 2; got a disk that is full: ")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".jaxmem.lock", "1"]


def test_managers_of_one_process_share_a_folder_in_turn(tmp_path):
    first = Manager(tmp_path)  # as in a notebook, whose cell is run again
    first.save(state(1), number=1)
    second = Manager(tmp_path)
    second.save(state(2), number=2)
    second.wait()
    assert numbers(tmp_path) == [1, 2]
    del first
    assert _folder.is_held(tmp_path)


def test_the_end_of_a_context_lets_go_of_the_folder(tmp_path):
    with Manager(tmp_path) as manager:
        assert _folder.is_held(tmp_path)
    assert not _folder.is_held(tmp_path)
    manager.save(state(1), number=1)  # takes it again
    assert _folder.is_held(tmp_path)
    manager.wait()
    with pytest.raises(CheckpointError, match="its own message"), Manager(tmp_path):
        raise CheckpointError(wanted="", got="its own message", do="")


def test_bad_places_are_one_paragraph(tmp_path):
    (tmp_path / "file").write_text("")
    for place, message in {
        tmp_path / "file": "wanted a folder for checkpoints; got a file",
        tmp_path / "file" / "below": "a path that leads through a file",
    }.items():
        with pytest.raises(CheckpointError, match=f"(?i){message}"):
            Manager(place)
    for place, message in {
        "": "got ''",
        "gs://bucket/run": "Only folders",
        "~nobody-here/run": "home",
        "a\0b": "null",
    }.items():
        for use in (Manager, checkpoint.latest, lambda place: checkpoint.restore(place, state())):
            with pytest.raises(CheckpointError, match=message):
                use(place)
    with pytest.raises(CheckpointError, match="got a NoneType"):
        checkpoint.latest(None)  # pyright: ignore[reportArgumentType]
    (tmp_path / "model.py").write_text("")
    with pytest.raises(CheckpointError, match="something else"):
        checkpoint.save(tmp_path, state(), number=1)
    assert checkpoint.latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="a good checkpoint in .*/nowhere; got none"):
        checkpoint.restore(tmp_path / "nowhere", state())


def test_what_others_put_there_is_not_overwritten(tmp_path):
    manager = Manager(tmp_path)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "thesis.txt").write_text("")
    with pytest.raises(CheckpointError, match=f"a folder of something else: {tmp_path}/1"):
        manager.save(state(), number=1)
    assert (tmp_path / "1" / "thesis.txt").exists()


@pytest.mark.parametrize("operation", ["os.fsync", "os.replace"])
def test_a_manifest_that_is_half_written_is_an_unfinished_save(tmp_path, monkeypatch, operation):
    checkpoint.save(tmp_path, state(), number=1)
    found = _manifest.read(tmp_path / "1")
    (found.path / _manifest.NAME).unlink()
    monkeypatch.setattr(operation, lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        _manifest.write(found)
    monkeypatch.undo()
    assert (found.path / _manifest.UNFINISHED).exists()
    with pytest.warns(CheckpointWarning, match="removed checkpoint 1"):
        Manager(tmp_path)


def test_a_folder_that_vanishes_is_named(tmp_path):
    manager = Manager(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=f"to save checkpoint 1; got a folder or file that is not there: {tmp_path}/run"
    ):
        manager.save(state(), number=1)


def test_a_checkpoint_by_a_newer_orbax_that_is_not_read_names_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmem.checkpoint._save.version", lambda name: "99.1")
    checkpoint.save(tmp_path, state(1), number=1)
    monkeypatch.undo()
    assert float(checkpoint.restore(tmp_path, state())["w"][0, 0]) == 1  # newer is no error in itself
    found = checkpoint.latest(tmp_path)
    (tmp_path / "1/state/_METADATA").write_text("another format")
    with pytest.raises(
        CheckpointError, match=r"orbax-checkpoint 0\..* reads; got .*/1, written by orbax-checkpoint 99\.1"
    ):
        checkpoint.restore(found, state())


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": True}, {"keep_best": -1}, {"best_mode": "least"}])
def test_wrong_arguments_are_named(tmp_path, wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Manager(tmp_path, **wrong)


def test_numbers_come_from_the_state_or_must_be_given(tmp_path):
    class State(dict):
        window = jnp.int32(7)

    jax.tree_util.register_pytree_node(State, lambda s: ((s["w"],), None), lambda _, leaves: State(w=leaves[0]))
    with Manager(tmp_path) as manager:
        manager.save(State(w=jnp.ones(2)))
        for number in (None, -1, 1.5, True, "7", math.nan, jnp.float32(2.5), jnp.ones(2, int)):
            with pytest.raises(CheckpointError, match="number of the checkpoint, 0 or more"):
                manager.save(state(), number=number)
        with pytest.raises(CheckpointError, match="a record that is JSON"):
            manager.save(state(), number=8, record={"x": object()})
        for metrics in ({"loss": jnp.ones(2)}, {"loss": None}, {"loss": "low"}, [1.0]):
            with pytest.raises(CheckpointError, match="metrics to be a dict, name → number"):
                manager.save(state(), number=8, metrics=metrics)
    assert numbers(tmp_path) == [7]
