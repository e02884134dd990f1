"""Who may write to a folder, and what may be removed from one."""

import os
import signal
import subprocess
import sys

import pytest

from jaxmem.checkpoint import _folder
from jaxmem.errors import CheckpointError, DamagedCheckpointError

pytestmark = pytest.mark.once

# Holds the folder, forks a child that outlives it, and says so.
HOLDER = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from jaxmem.checkpoint import _folder
lock = _folder.Lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_a_folder_is_held_until_its_process_is_killed(tmp_path):
    held = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert held.stdout
    child = int(held.stdout.readline())
    try:
        assert _folder.is_held(tmp_path)
        with pytest.raises(CheckpointError, match=rf"another run that writes there: process {held.pid} on \S+\."):
            _folder.Lock(tmp_path)
    finally:
        held.kill()
        held.wait()
    try:
        assert not _folder.is_held(tmp_path)
        lock = _folder.Lock(tmp_path)
        assert _folder.is_held(tmp_path)
        lock.close()
        assert not _folder.is_held(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        held.stdout.close()


def laid_out(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if "." in path.name else path.mkdir(exist_ok=True)


@pytest.mark.parametrize(
    "names, foreign",
    [
        (["model.py"], "model.py"),
        (["logs/events"], "logs"),
        (["40/default/d", "40/_CHECKPOINT_METADATA"], "40"),  # of Orbax's manager
        (["40/checkpoint.json", "41/default"], "41"),
        (["40.0", "40"], "40"),
        (["40/state/manifest.ocdbt", "41/state/manifest.ocdbt"], "40"),  # by Orbax, without jaxmem
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path, names, foreign):
    laid_out(tmp_path, *names)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=f"a folder of something else: {tmp_path / foreign}"):
        _folder.check(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "names",
    [
        [],
        [".DS_Store"],
        [".jaxmem.lock", "logs/events"],  # others may lie beside ours
        ["40/checkpoint.json", "40.damaged/checkpoint.json", "notes.txt"],
        [
            ".jaxmem.lock",
            "40/state.orbax-checkpoint-tmp-1/d",
            "41/state/d",
            "41/checkpoint.json.new",
            "42",
        ],  # killed saves
    ],
)
def test_a_folder_of_checkpoints_is_accepted(tmp_path, names):
    laid_out(tmp_path, *names)
    _folder.check(tmp_path)


def test_a_file_and_a_single_checkpoint_are_no_folder_of_a_run(tmp_path):
    laid_out(tmp_path, "40/checkpoint.json")
    with pytest.raises(CheckpointError, match=r"Use .*, and number=40"):
        _folder.check(tmp_path / "40")
    with pytest.raises(CheckpointError, match="got a file"):
        _folder.check(tmp_path / "40" / "checkpoint.json")


def test_what_was_left_of_saves_is_removed_and_nothing_else(tmp_path):
    laid_out(
        tmp_path, "3/state.orbax-checkpoint-tmp/d", "4/checkpoint.json", "4/state/d", "5", "4.damaged/state", "x.txt"
    )
    assert _folder.remove_unfinished(tmp_path) == [3, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "4.damaged", "x.txt"]


def test_a_checkpoint_half_removed_is_an_unfinished_one(tmp_path, monkeypatch):
    laid_out(tmp_path, "4/checkpoint.json", "4/state/d")
    monkeypatch.setattr("shutil.rmtree", lambda path: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        _folder.remove(tmp_path / "4")
    monkeypatch.undo()
    assert _folder.remove_unfinished(tmp_path) == [4] and _folder.numbers(tmp_path) == []


def test_damaged_checkpoints_are_moved_aside_under_names_of_their_own(tmp_path):
    def damaged(path):
        raise DamagedCheckpointError(wanted="", got="", do="")

    for aside in ("4.damaged", "4.damaged.2"):
        laid_out(tmp_path, "4/checkpoint.json")
        assert _folder.make_room(tmp_path / "4", damaged) == tmp_path / aside
    laid_out(tmp_path, "4/checkpoint.json")
    with pytest.raises(CheckpointError, match="got 4, which is a good checkpoint"):
        _folder.make_room(tmp_path / "4", lambda path: None)
    _folder.check(tmp_path)
