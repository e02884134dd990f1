"""Digests of files: taken when a checkpoint is written, compared before it is read."""

import concurrent.futures
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

# Reading is what takes long; more threads than these gain nothing on disks, and little on network file systems.
_THREADS = min(8, os.cpu_count() or 1)
Files = Mapping[str, tuple[int, str]]


def names_below(folder: Path) -> list[str]:
    """Of all files below a folder, relative to it, in order.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / "d").mkdir()
    ...     _ = (Path(folder) / "d" / "a").write_text("x")
    ...     names_below(Path(folder))
    ['d/a']
    """
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def digests(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Name → size in bytes and sha256, of files that were just written; they are on disk when it returns."""

    def digest(name: str) -> tuple[int, str]:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()

    return _in_threads(digest, list(names))


def faults(folder: Path, files: Files) -> list[str]:
    """What is wrong with files, in words that name them; sizes first, and contents only where all sizes are right."""
    found = {name: _wrong_size(folder / name, size) for name, (size, _) in files.items()}
    if not any(found.values()):
        found = _in_threads(lambda name: _wrong_content(folder / name, files[name][1]), list(files))
    return [f"{name} {fault}" for name, fault in found.items() if fault]


def share(files: Files, part: int, parts: int) -> dict[str, tuple[int, str]]:
    """One of `parts` shares of about equal bytes; the shares together are all files.

    >>> files = {"a": (9, ""), "b": (5, ""), "c": (4, ""), "d": (0, "")}
    >>> [list(share(files, part, 2)) for part in range(2)]
    [['a', 'd'], ['b', 'c']]
    """
    loads, mine = [0] * parts, {}
    for name in sorted(files, key=lambda name: (-files[name][0], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name][0]
        if lightest == part:
            mine[name] = files[name]
    return mine


def _wrong_size(path: Path, size: int) -> str:
    try:
        found = path.stat().st_size
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return "" if found == size else f"has {found} bytes, not {size}"


def _wrong_content(path: Path, digest: str) -> str:
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found == digest else "has other content than was written: its sha256 differs"


def _in_threads(function: Callable, names: list[str]) -> dict:
    if len(names) < 2:
        return {name: function(name) for name in names}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(function, names), strict=True))
