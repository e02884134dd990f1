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
        ("No space left", "quota exceeded", "RESOURCE_EXHAUSTED"),
        "Free disk space, keep fewer checkpoints, or choose another folder.",
    ),
    (
        "a file system that is read-only",
        (errno.EROFS,),
        ("Read-only file system",),
        "Choose a folder on another file system, or mount this one for writing.",
    ),
    (
        "no permission to write there",
        (errno.EACCES, errno.EPERM),
        ("Permission denied", "PERMISSION_DENIED", "Operation not permitted"),
        "Change the permissions of the folder, or choose another one.",
    ),
    (
        "a folder or file that is gone",
        (errno.ENOENT, errno.ESTALE),
        ("No such file or directory", "NOT_FOUND", "Stale file handle"),
        "Find out what removed or unmounted it; a run must have its folder for itself.",
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
    return isinstance(error, jax.errors.JaxRuntimeError)


def explained(error: BaseException, wanted: str, folder: Path) -> CheckpointError:
    """A CheckpointError of one paragraph for what went wrong while files were written or read.

    >>> print(explained(OSError(errno.ENOSPC, "No space left on device"), "to save checkpoint 3", Path("/data")))
    Wanted to save checkpoint 3; got a disk that is full: /data. Free disk space, keep fewer checkpoints, or ...
    """
    if isinstance(error, CheckpointError):
        return error
    text = " ".join(str(error).split())
    for kind, codes, words, do in _KINDS:
        by_number = isinstance(error, OSError) and error.errno in codes
        if by_number or (not isinstance(error, OSError) and any(word in text for word in words)):
            where = error.filename if isinstance(error, OSError) and error.filename else folder
            return _from(error, CheckpointError(wanted=wanted, got=f"{kind}: {where}", do=do))
    got = f"{type(error).__name__}: {text[:300]}"
    return _from(error, CheckpointError(wanted=wanted, got=f"{got}, in {folder}", do="Its cause is shown above."))


def unreadable(error: BaseException, path: Path, wrote: str | None) -> CheckpointError:
    """For files that are what was written, and that Orbax does not read; `wrote` is the version of Orbax that did."""
    installed = version("orbax-checkpoint")
    if numbers(wrote) > numbers(installed):
        newer = CheckpointError(
            wanted=f"a checkpoint that orbax-checkpoint {installed} reads",
            got=f"{path}, written by orbax-checkpoint {wrote}",
            do=f'Run: pip install -U "orbax-checkpoint>={wrote}"',
        )
        return _from(error, newer)
    return explained(error, "to read a checkpoint", path)


def _from(error: BaseException, meant: CheckpointError) -> CheckpointError:
    meant.__cause__ = error
    return meant
