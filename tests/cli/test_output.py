"""Results are written whole or not at all, and stdout holds nothing but them."""

import os
import subprocess
import sys

import pytest

from jaxmem.cli import _output
from jaxmem.cli._output import OutputError, check_writable, clean_stdout, show, write_result, write_text

pytestmark = pytest.mark.once


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("old")
    monkeypatch.setattr(_output.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(str(path), "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_permissions_and_links_are_kept(tmp_path):
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_text(str(link), "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    write_text(str(tmp_path / "fresh.json"), "x")
    os.umask(umask := os.umask(0))
    assert (tmp_path / "fresh.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_is_not_a_regular_file_is_not_replaced():
    write_text(os.devnull, "gone")
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("name, what", [("no/out.json", "no directory"), (".", "a directory")])
def test_a_path_that_cannot_be_written_is_found_out_first(tmp_path, name, what):
    with pytest.raises(OutputError, match=what):
        check_writable(str(tmp_path / name), "--json")


def test_checking_leaves_nothing(tmp_path):
    check_writable(str(tmp_path / "out.json"), "--json")
    check_writable("-", "--json")
    check_writable(None, "--json")
    assert os.listdir(tmp_path) == []


def test_everything_but_the_json_goes_to_stderr():
    program = """
import ctypes, os, subprocess, sys
from jaxmem.cli._output import clean_stdout, write_result
with clean_stdout(True) as out:
    print("python")
    os.write(1, b"library\\n")
    ctypes.CDLL(None).printf(b"held back\\n")
    subprocess.run(["echo", "child"])
    write_result("-", '{"a": 1}', out, "--json")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == '{"a": 1}\nafter\n'
    for line in ("python", "library", "held back", "child"):
        assert line in done.stderr.splitlines()


def test_without_json_stdout_is_left_alone(capsys):
    with clean_stdout(False) as out:
        print("table")
        assert out is sys.stdout
    assert capsys.readouterr().out == "table\n"


def test_a_captured_stdout_works_too(capsys):
    with clean_stdout(True) as out:
        print("noise")
        write_result("-", "[]", out, "--json")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[]\n", "noise\n")


def test_a_reader_that_has_seen_enough_does_not_change_how_a_command_ends(tmp_path, monkeypatch):
    """The verdict, exit code 1 of what does not fit, comes after the table."""
    there, here = os.pipe()
    os.close(there)
    with os.fdopen(here, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        show("a table")
        write_result("-", "{}", stream, "--json")
        print("more")
