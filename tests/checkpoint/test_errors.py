"""What file systems, TensorStore and Orbax say becomes one paragraph; what a device says does not."""

import errno
import logging
import os
from pathlib import Path

import jax
import pytest

from jaxmem.checkpoint import _errors

FULL, READ_ONLY, DENIED, GONE = "disk that is full", "read-only", "no permission", "not there"
TENSORSTORE = "Error opening file: /runs/3/state: [OS error {}: {}] [source locations='file.cc:1\nfile.cc:2']"


@pytest.mark.parametrize(
    "error, meant",
    [
        (OSError(errno.ENOSPC, "x"), FULL),
        (OSError(errno.EDQUOT, "x"), FULL),
        (OSError(errno.EROFS, "x", "/runs"), READ_ONLY),
        (PermissionError(errno.EACCES, "x", "/runs"), DENIED),
        (FileNotFoundError(errno.ENOENT, "x", "/runs"), GONE),
        (ValueError("RESOURCE_EXHAUSTED: " + TENSORSTORE.format(28, "ENOSPC No space left on device")), FULL),
        (ValueError("PERMISSION_DENIED: " + TENSORSTORE.format(13, "EACCES Permission denied")), DENIED),
        (ValueError("FAILED_PRECONDITION: " + TENSORSTORE.format(30, "EROFS Read-only file system")), READ_ONLY),
        (ValueError("NOT_FOUND: " + TENSORSTORE.format(2, "ENOENT No such file or directory")), GONE),
    ],
)
def test_errors_are_told_in_one_paragraph(error, meant):
    told = _errors.explained(error, "to save checkpoint 3", Path("/runs"))
    assert meant in told.got and "/runs" in told.got and "\n" not in str(told) and told.__cause__ is error
    assert not _errors.is_device_memory(error)


def test_an_unknown_error_is_told_in_its_own_words_when_saving_and_raised_when_reading():
    error = RuntimeError("quite\nnew")
    told = _errors.explained(error, "to save checkpoint 3", Path("/runs"))
    assert "got RuntimeError: quite new, in /runs" in str(told)
    assert _errors.unreadable(error, Path("/runs"), "0.0.1") is None


def test_a_device_without_memory_is_no_full_disk():
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")
    assert _errors.is_device_memory(error) and _errors.known(error, "to save checkpoint 3", Path("/runs")) is None


def test_this_machine_knows_its_own_errors(tmp_path):
    with pytest.raises(OSError) as told:  # noqa: PT011, which one it is is the question
        os.open(tmp_path / "nowhere" / "file", os.O_RDONLY)
    assert GONE in str(_errors.known(told.value, "to read", tmp_path))


@pytest.mark.parametrize("file, heard", [("/lib/orbax/path.py", False), ("/home/me/train.py", True)])
def test_a_write_of_orbax_that_nobody_waits_for_is_not_told(caplog, monkeypatch, file, heard):
    from jaxmem.checkpoint import _orbax

    monkeypatch.setattr(_orbax._QUIET, "_users", 1)
    try:
        exec(compile("raise OSError(28, 'No space left')", file, "exec"))
    except OSError:
        logging.getLogger("asyncio").exception("Future exception was never retrieved")
    assert bool(caplog.records) == heard
