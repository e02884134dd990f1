"""Folders that `jaxmem train --checkpoint-dir` cannot use: one paragraph, exit code 2, and every file as it was."""

import dataclasses
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint
import pytest

from benchmarks._damage import content
from jaxmem.checkpoint import _files, _manifest
from tests.cli.helpers import LINEAR, assert_refused, run, write

# Holds a folder as a run does, without loading JAX.
HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
os.ftruncate(file.fileno(), 0)
os.pwrite(file.fileno(), f"elsewhere {os.getpid()}\\n".encode(), 0)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with checkpoints of 1 and 2 steps of the model with 4 columns."""
    from jaxmem.cli import main

    root = tmp_path_factory.mktemp("trained")
    path = write(root, LINEAR)
    command = ["train", path, "--steps", "2", "--checkpoint-dir", str(root / "run"), "--save-every", "1"]
    assert main(command) == 0
    return root / "run"


@pytest.fixture
def refused(capfd, tmp_path, trained):
    """Trains on a copy of `trained`, or in another folder, and checks the refusal; files stay as they were."""
    model, copy = write(tmp_path, LINEAR), tmp_path / "run"
    shutil.copytree(trained, copy)

    def check(*words, folder=copy, options=()):
        before = content(tmp_path)
        assert_refused(run(capfd, "train", model, "--steps", 4, "--checkpoint-dir", folder, *options), *words)
        after = {name: digest for name, digest in content(tmp_path).items() if "__pycache__" not in name}
        assert after == before

    check.folder = copy
    return check


def written_by(folder, **versions):
    """Seals a checkpoint as it now is, as if those versions had written it."""
    checkpoint = _manifest.read(folder / "2")
    files = _files.digests(folder / "2", checkpoint.files)
    _manifest.write(dataclasses.replace(checkpoint, files=files, versions={**checkpoint.versions, **versions}))


def test_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("text")
    refused("a file", str(tmp_path / "file"), folder=tmp_path / "file")
    refused(str(tmp_path / "file"), folder=tmp_path / "file" / "run")


def test_a_place_that_nobody_may_write_to(refused):
    """Below /sys nothing can be made, not even by root, who may write to what is read-only for others."""
    refused("/sys/kernel", folder="/sys/kernel/jaxmem-checkpoints")


def test_a_folder_of_something_else(refused, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("text")
    refused("a folder of something else", "todo.txt", folder=tmp_path / "notes")
    refused("one checkpoint", "number=2", folder=refused.folder / "2")


def test_another_models_checkpoint(refused):
    refused("params/layers/0", "float32[4, 4] instead of float32[8, 8]", options=("--set", "width=8"))
    refused("layers/2", options=("--set", "depth=3"))


def test_a_newer_jaxmem(refused, monkeypatch):
    monkeypatch.setattr(_manifest, "FORMAT", _manifest.FORMAT + 1)
    written_by(refused.folder, jaxmem="7.8.9")
    monkeypatch.undo()
    refused("format 2", "7.8.9", str(refused.folder / "2"))


def test_a_newer_orbax(refused):
    (refused.folder / "2" / "state" / "_METADATA").write_text("another format")
    written_by(refused.folder, **{"orbax-checkpoint": "99.0"})
    refused("orbax-checkpoint 99.0", 'pip install -U "orbax-checkpoint>=99.0"', str(refused.folder / "2"))


def test_nothing_but_damage(capfd, tmp_path, trained):
    """Training does not begin anew where it was asked to go on."""
    model, folder = write(tmp_path, LINEAR), tmp_path / "run"
    shutil.copytree(trained, folder)
    for number in ("1", "2"):
        (folder / number / "state" / "_METADATA").write_text("{}")
    before = content(folder)
    ran = run(capfd, "train", model, "--steps", 4, "--checkpoint-dir", folder)
    assert ran.code == 2 and ran.out == "" and content(folder) == before
    *warnings, error = ran.err.splitlines()
    for number, warning in zip((2, 1), warnings, strict=True):
        assert warning.startswith(
            f"jaxmem: warning: passed over checkpoint {number} of {folder}: state/_METADATA has 2 b"
        )
    assert error.startswith(f"jaxmem: error: Wanted a good checkpoint in {folder}; got none that is not damaged: 1, 2.")


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax, read without jaxmem
def test_the_newest_damaged(capfd, tmp_path, trained):
    """Training goes on from the one before and ends as it would have; what is damaged is moved aside."""
    model, folder = write(tmp_path, LINEAR), tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "2" / "state" / "_METADATA").write_text("{}")
    damaged = content(folder / "2")
    ran = run(capfd, "train", model, "--steps", 3, "--checkpoint-dir", folder, "--save-every", 1)
    assert ran.code == 0 and f"jaxmem: resumed at window 1 from {folder / '1'}\n" in ran.err, ran
    assert content(folder / "2.damaged") == damaged
    assert run(capfd, "train", model, "--steps", 3, "--checkpoint-dir", tmp_path / "whole", "--save-every", 1).code == 0
    for number in (2, 3):  # what plain Orbax reads
        states = [
            orbax.checkpoint.PyTreeCheckpointer().restore(p / str(number) / "state")
            for p in (folder, tmp_path / "whole")
        ]
        jax.tree.map(np.testing.assert_array_equal, *states)


def test_two_runs_in_one_folder(refused):
    held = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(refused.folder / ".jaxmem.lock")], stdout=subprocess.PIPE
    )
    try:
        assert held.stdout and held.stdout.readline()
        refused("another run", f"process {held.pid} on elsewhere")
    finally:
        held.kill()
        held.communicate()


def test_a_disk_that_gets_full(capfd, tmp_path):
    """No file may grow beyond a KiB, which manifests do; Python ignores the signal, so that writing fails."""
    model, folder = write(tmp_path, LINEAR), tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        ran = run(capfd, "train", model, "--steps", 4, "--checkpoint-dir", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ran.code == 2 and ran.out == "", ran
    assert ran.err.splitlines()[-1].startswith("jaxmem: error: Wanted to save checkpoint 4; got a disk that is full: ")
    assert content(folder) == {}


@pytest.mark.parametrize("name", ["2/checkpoint.json", ".jaxmem.lock"])
def test_metrics_are_not_written_into_a_checkpoint(refused, name):
    refused("--metrics to name a file of its own", "metrics.jsonl", options=("--metrics", refused.folder / name))
