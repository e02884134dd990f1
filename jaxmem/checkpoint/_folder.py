"""The folder of a run: which checkpoints lie there, who may write, and what is removed or moved aside."""

import fcntl
import os
import shutil
import socket
import weakref
from pathlib import Path
from typing import Literal

from jaxmem.checkpoint import _manifest
from jaxmem.errors import CheckpointError, DamagedCheckpointError

LOCK = ".jaxmem.lock"  # not ".lock", which others make, too: it tells whose folder it is
STATE = "state"  # Orbax writes below it, and beside it while it is not finished


class Lock:
    """Holds a folder for this process, until it is closed or the process ends, however it ends.

    Raises:
      CheckpointError: another process holds it; the message names host and pid.
    """

    def __init__(self, folder: Path):
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise CheckpointError(
                wanted=f"{folder} for this run alone",
                got=f"another run that writes there: {_holder(folder)}",
                do="Wait for its end, stop it, or choose another folder.",
            ) from error
        except OSError:
            pass  # a file system without locks
        os.ftruncate(file, 0)
        os.pwrite(file, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
        _HELD.add(file)
        self.close = weakref.finalize(self, _let_go, file)


_HELD: set[int] = set()


def _let_go(file: int) -> None:
    if file in _HELD:  # and not closed after a fork, when its number may be that of another file
        _HELD.discard(file)
        os.close(file)


def _let_go_of_all() -> None:
    for file in list(_HELD):
        _let_go(file)


# A forked child, such as a loader of data, must not hold a folder when its parent is gone.
os.register_at_fork(after_in_child=_let_go_of_all)


def is_held(folder: Path) -> bool:
    """Whether a process, maybe this one, writes there now."""
    try:
        with open(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def numbers(folder: Path) -> list[int]:
    """Of what lies there as a checkpoint, complete or not, in order.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("10", "9", "10.damaged", "notes"):
    ...         (Path(folder) / name).mkdir()
    ...     numbers(Path(folder))
    [9, 10]
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if _is_number(name))


def has_manifest(path: Path) -> bool:
    """Whether a checkpoint's folder holds what its save writes last."""
    return (path / _manifest.NAME).exists()


def is_unfinished(path: Path) -> bool:
    """Whether it is a folder without a manifest, and with nothing that a save would not have written."""
    return _kind(path) == "unfinished"


def _kind(path: Path) -> Literal["complete", "unfinished", "foreign"]:
    """What a folder is, by one look at its names: a run may complete it, or delete it, before a second one."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:  # it is removed by now
        return "unfinished"
    except NotADirectoryError:
        return "foreign"
    if _manifest.NAME in names:
        return "complete"
    ours = (".", f"{STATE}.orbax-checkpoint-tmp")
    known = all(name in (STATE, _manifest.UNFINISHED) or name.startswith(ours) for name in names)
    return "unfinished" if known else "foreign"


def check(folder: Path) -> None:
    """CheckpointError where a folder holds something else than checkpoints of jaxmem; it need not be there."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            wanted="a folder for checkpoints", got=f"a file: {folder}", do="Choose another path, or move the file away."
        )
    names = sorted(os.listdir(folder)) if folder.exists() else []
    if _manifest.NAME in names and _is_number(folder.name):
        raise CheckpointError(
            wanted="the folder of a run",
            got=f"one checkpoint of it: {folder}",
            do=f"Use {folder.parent}, and number={folder.name} to restore this one.",
        )
    # Before anything else a run makes its lock: without it, or a manifest, what looks like a save that did not end is
    # what somebody else saved by Orbax alone.
    ours = LOCK in names or any(has_manifest(folder / name) for name in filter(_is_number, names))
    others = [name for name in names if not (name.startswith(".") or _is_number(name.partition(".damaged")[0]))]
    for name in filter(_is_number, names):
        kind = _kind(folder / name)
        if kind == "foreign" or (kind == "unfinished" and not ours):
            raise _foreign(folder, name)
    if others and not ours:
        raise _foreign(folder, others[0])


def remove_unfinished(folder: Path) -> list[int]:
    """Removes what was left of saves that did not end; only while the folder is held. Returns their numbers."""
    left = [number for number in numbers(folder) if not has_manifest(folder / str(number))]
    for number in left:
        remove(folder / str(number))
    return left


def remove(path: Path) -> None:
    """Removes a checkpoint, its manifest first: if it is not removed to its end, it is unfinished and no damage.

    Of a link to one, which is another run's, the link.
    """
    if path.is_symlink():
        path.unlink()
        return
    (path / _manifest.NAME).unlink(missing_ok=True)
    _manifest.sync_folder(path)
    if path.exists():
        shutil.rmtree(path)


def make_room(path: Path, verify) -> Path | None:
    """Makes a number free to be saved: removes an unfinished save, moves a damaged checkpoint aside.

    Args:
      path: of the checkpoint to be saved.
      verify: raises DamagedCheckpointError for a path that holds no good checkpoint.

    Returns: where a damaged one now is.

    Raises:
      CheckpointError: there is a good one.
    """
    if not path.exists():
        return None
    if is_unfinished(path):
        remove(path)
        return None
    if not has_manifest(path):
        raise _foreign(path.parent, path.name)
    try:
        verify(path)
    except DamagedCheckpointError:
        aside, count = path.with_name(f"{path.name}.damaged"), 1
        while aside.exists():
            count += 1
            aside = path.with_name(f"{path.name}.damaged.{count}")
        path.rename(aside)
        return aside
    raise CheckpointError(
        wanted="a number that is not saved yet",
        got=f"{path.name}, which is a good checkpoint in {path.parent}",
        do="Save under another number, or remove that checkpoint.",
    )


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and name == str(int(name))


def _holder(folder: Path) -> str:
    host, _, pid = (folder / LOCK).read_text().strip().partition(" ")
    return f"process {pid} on {host}" if pid else "a process that has just begun"


def _foreign(folder: Path, name: str) -> CheckpointError:
    return CheckpointError(
        wanted="an empty folder, or one with checkpoints of jaxmem",
        got=f"a folder of something else: {folder / name}",
        do="Choose another folder.",
    )
