"""Damage of files is found by their digests."""

import re

import pytest

from jaxmem.checkpoint import _files

pytestmark = pytest.mark.once


@pytest.fixture
def files(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("a", "d/b", "d/empty"):
        (tmp_path / name).write_bytes(b"" if name == "d/empty" else name.encode() * 1000)
    return _files.digests(tmp_path, _files.names_below(tmp_path))


def test_untouched_files_have_no_faults(tmp_path, files):
    assert list(files) == ["a", "d/b", "d/empty"] and files["d/b"][0] == 3000
    assert _files.faults(tmp_path, files) == []


@pytest.mark.parametrize(
    "damage, fault",
    [
        (lambda path: path.unlink(), "d/b is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "d/b has 2999 bytes, not 3000"),
        (lambda path: path.write_bytes(path.read_bytes() + b"!"), "d/b has 3001 bytes, not 3000"),
        (lambda path: path.write_bytes(b"e" + path.read_bytes()[1:]), "d/b has other content"),
        (lambda path: (path.unlink(), path.mkdir()), "d/b has .* bytes, not 3000"),
    ],
)
def test_damage_is_named(tmp_path, files, damage, fault):
    damage(tmp_path / "d/b")
    (found,) = _files.faults(tmp_path, files)
    assert re.match(fault, found)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_shares_are_all_files_once(files, parts):
    shares = [_files.share(files, part, parts) for part in range(parts)]
    assert sorted(name for share in shares for name in share) == sorted(files)
