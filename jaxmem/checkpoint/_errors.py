"""What an error of a file system, of Orbax or of TensorStore means to whoever saves or restores."""

import errno
from pathlib import Path

import jax

from jaxmem._installed import numbers, version
from jaxmem.errors import CheckpointError

# What it is, error numbers, what TensorStore's texts say, what to do.
_KINDS = (
    (
        "a disk that is full",
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        ("No space left", "quota exceeded", "File too large", "RESOURCE_EXHAUSTED"),
        "Free disk space, keep fewer checkpoints, or choose another folder.",
    ),
    (
        "a file system that is read-only",
        (errno.EROFS,),
        ("Read-only file system",),
        "Choose a folder on another file system, or mount this one for writing.",
    ),
    (
        "no permission",
        (errno.EACCES, errno.EPERM),
        ("Permission denied", "PERMISSION_DENIED", "Operation not permitted"),
        "Change the permissions of the folder, or choose another one.",
    ),
    (
        "a folder or file that is not there",
        (errno.ENOENT, errno.ESTALE),
        ("No such file or directory", "NOT_FOUND", "Stale file handle", "missing .zarray"),
        "Look at the path; if a run was using it, find out what removed or unmounted it.",
    ),
    (
        "a path that leads through a file",
        (errno.ENOTDIR, errno.EEXIST),
        ("Not a directory",),
        "Choose another folder.",
    ),
)


def is_device_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory, which says RESOURCE_EXHAUSTED as a full disk does."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def known(error: BaseException, wanted: str, folder: Path) -> CheckpointError | None:
    """A CheckpointError of one paragraph, where a file system says why files were not written or read.

    >>> print(known(OSError(errno.ENOSPC, "No space left on device"), "to save checkpoint 3", Path("/data")))
    Wanted to save checkpoint 3; got a disk that is full: /data. Free disk space, keep fewer checkpoints, or ...
    """
    if isinstance(error, CheckpointError):
        return error
    if is_device_memory(error):
        return None
    for kind, codes, words, do in _KINDS:
        if isinstance(error, OSError):
            meant, where = error.errno in codes, error.filename or folder
        else:
            meant, where = any(word in str(error) for word in words), folder
        if meant:
            return _from(error, CheckpointError(wanted=wanted, got=f"{kind}: {where}", do=do))
    return None


def explained(error: BaseException, wanted: str, folder: Path) -> CheckpointError:
    """The same where nothing is known of the cause, which is shown in its own words."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    unknown = CheckpointError(
        wanted=wanted, got=f"{text}, in {folder}", do="The whole error is the `__cause__` of this one."
    )
    return known(error, wanted, folder) or _from(error, unknown)


def unreadable(error: BaseException, path: Path, wrote: str | None) -> CheckpointError | None:
    """For files that are what was written, and that Orbax does not read; `wrote` is the version of Orbax that did."""
    installed = version("orbax-checkpoint")
    if numbers(wrote) > numbers(installed):
        newer = CheckpointError(
            wanted=f"a checkpoint that orbax-checkpoint {installed} reads",
            got=f"{path}, written by orbax-checkpoint {wrote}",
            do=f'Run: pip install -U "orbax-checkpoint>={wrote}"',
        )
        return _from(error, newer)
    return known(error, "to read a checkpoint", path)


def _from(error: BaseException, meant: CheckpointError) -> CheckpointError:
    meant.__cause__ = error
    return meant
