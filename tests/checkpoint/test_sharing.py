"""One folder, and several managers, threads, forks and links that lead to it."""

import multiprocessing
import os
import signal
import threading
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import checkpoint
from jaxmem.checkpoint import Manager, _files, _folder
from jaxmem.errors import CheckpointError, CheckpointWarning

LIKE = {"w": np.zeros(1_000_000, np.float32)}


def state(value: float):
    return {"w": jnp.full(1_000_000, float(value))}


def value_of(folder, number=None) -> float:
    values = np.unique(checkpoint.restore(folder, LIKE, number=number)["w"])
    assert values.size == 1
    return float(values[0])


def test_a_save_under_way_is_not_removed_through_a_link_to_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    manager = Manager(tmp_path / "run")
    manager.save(state(1), number=1)
    with Manager(tmp_path / "link") as other:
        other.save(state(2), number=2)
    manager.wait()
    assert [value_of(tmp_path / "link", number) for number in (1, 2)] == [1, 2]


def test_of_two_managers_with_one_number_the_second_is_refused(tmp_path):
    one, other = Manager(tmp_path), Manager(tmp_path)
    one.save(state(1), number=1)
    with pytest.raises(CheckpointError, match="a number that is not saved yet"):
        other.save(state(2), number=1)
    one.wait()
    assert value_of(tmp_path) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_threads_save_in_turn(tmp_path, shared):
    manager, errors = Manager(tmp_path, keep=None) if shared else None, []

    def save(number):
        try:
            if manager is None:
                checkpoint.save(tmp_path, state(number), number=number)
            else:
                manager.save(state(number), number=number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if manager is not None:
        manager.wait()
    assert errors == []
    assert [value_of(tmp_path, number) for number in range(4)] == [0, 1, 2, 3]


def open_in_a_child(folder, said):
    try:
        Manager(folder)
        said.put("opened")
    except CheckpointError as error:
        said.put(error.got)


def test_a_forked_child_is_another_run(tmp_path):
    """It has the memory of its parent, and neither its lock nor the thread that writes."""
    manager = Manager(tmp_path)
    manager.save(state(1), number=1)
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX and of Python, that forking is risky
        child = context.Process(target=open_in_a_child, args=(tmp_path, said))
        child.start()
    assert said.get().startswith(f"another run that writes there: process {os.getpid()} ")
    child.join()
    manager.wait()
    assert value_of(tmp_path) == 1


def test_of_a_link_to_a_checkpoint_of_another_run_the_link_is_removed(tmp_path):
    checkpoint.save(tmp_path / "old", state(4), number=4)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "4").symlink_to(tmp_path / "old" / "4")
    with Manager(tmp_path / "new", keep=1) as manager:
        assert float(manager.restore(LIKE)["w"][0]) == 4
        manager.save(state(5), number=5)
    assert [found.number for found in manager.checkpoints()] == [5]
    assert value_of(tmp_path / "old") == 4


def test_of_a_link_to_a_folder_that_looks_unfinished_the_link_is_removed(tmp_path):
    (tmp_path / "other" / "state").mkdir(parents=True)
    checkpoint.save(tmp_path / "run", state(1), number=1)
    (tmp_path / "run" / "4").symlink_to(tmp_path / "other")
    with pytest.warns(CheckpointWarning, match="removed checkpoint 4"):
        Manager(tmp_path / "run")
    assert (tmp_path / "other" / "state").exists() and not (tmp_path / "run" / "4").exists()


def test_a_lock_of_something_else_makes_no_folder_of_checkpoints(tmp_path):
    (tmp_path / ".lock").write_text("theirs")
    (tmp_path / "2024").mkdir()
    with pytest.raises(CheckpointError, match="a folder of something else: .*/2024"):
        checkpoint.save(tmp_path, state(1), number=1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "2024"] and (tmp_path / ".lock").read_text() == "theirs"


def test_a_save_outlives_a_ctrl_c_while_it_is_waited_for(tmp_path, monkeypatch):
    """Python 3.11 takes a thread for ended whose `join` was interrupted: then the save was lost, without a word."""
    begun, go_on = threading.Event(), threading.Event()

    def digests(*arguments, real=_files.digests):
        begun.set()
        go_on.wait()
        return real(*arguments)

    monkeypatch.setattr(_files, "digests", digests)
    with Manager(tmp_path) as manager:
        manager.save(state(1), number=1)
        begun.wait()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), manager:
            pass
        assert _folder.is_held(tmp_path)
        go_on.set()
    assert not _folder.is_held(tmp_path)
    assert value_of(tmp_path) == 1


def test_a_save_within_the_beginning_of_another_is_refused(tmp_path, monkeypatch):
    """As a handler of a signal does it."""
    manager = Manager(tmp_path)
    monkeypatch.setattr("jaxmem.checkpoint._save.window_facts", lambda *_: manager.save(state(2), number=2))
    with pytest.raises(CheckpointError, match="one save after the other"):
        manager.save(state(1), number=1)
    monkeypatch.undo()
    manager.save(state(1), number=1)
    manager.wait()
    assert value_of(tmp_path) == 1
