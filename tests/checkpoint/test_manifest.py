"""A manifest comes back as it was written, or is an error."""

import dataclasses
import re
from pathlib import Path

import pytest

from jaxmem.checkpoint import Checkpoint, _manifest
from jaxmem.checkpoint._leaves import Leaf
from jaxmem.errors import CheckpointError, DamagedCheckpointError

pytestmark = pytest.mark.once


def written(folder: Path) -> Checkpoint:
    (folder / "40").mkdir()
    checkpoint = Checkpoint(
        number=40,
        path=folder / "40",
        leaves={"params/w": Leaf(shape=(2, 3), dtype="bfloat16"), "rng": Leaf(shape=(2,), dtype="uint32", key="rbg")},
        record={"config": {"remat": "full"}, "é": [1, None]},
        metrics={"loss": 0.1},
        versions={"jaxmem": "0.1.0"},
        processes=2,
        mid_window={"opt_state": {"mini_step": 1}},
        files={"state/d/1": (17, "ab" * 32)},
    )
    _manifest.write(checkpoint)
    return checkpoint


def test_it_comes_back_as_it_was_written(tmp_path):
    checkpoint = written(tmp_path)
    assert _manifest.read(checkpoint.path) == checkpoint and checkpoint.size_bytes == 17
    assert [path.name for path in checkpoint.path.iterdir()] == [_manifest.NAME]


def test_every_flipped_bit_and_every_truncation_is_noticed(tmp_path):
    path = written(tmp_path).path
    whole = (path / _manifest.NAME).read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    cut = [whole[:end] for end in range(0, len(whole), 7)]
    for content in [*flipped, *cut, whole + b" "]:
        (path / _manifest.NAME).write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=re.escape(str(path))):
            _manifest.read(path)


def test_one_that_is_not_there_is_an_unfinished_save(tmp_path):
    with pytest.raises(DamagedCheckpointError, match="the save was not finished"):
        _manifest.read(tmp_path)


def test_one_under_another_number_is_damage(tmp_path):
    path = written(tmp_path).path.rename(tmp_path / "50")
    with pytest.raises(DamagedCheckpointError, match=r"50; got the checkpoint\.json of checkpoint 40"):
        _manifest.read(path)


def test_a_newer_format_names_the_version_that_wrote_it(tmp_path, monkeypatch):
    checkpoint = written(tmp_path)
    monkeypatch.setattr(_manifest, "FORMAT", 2)
    _manifest.write(dataclasses.replace(checkpoint, versions={"jaxmem": "7.8.9"}))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format 1, .* got format 2 in .*/40, written by jaxmem 7\.8\.9") as told:
        _manifest.read(checkpoint.path)
    assert not isinstance(told.value, DamagedCheckpointError)
