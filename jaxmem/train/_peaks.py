"""Compiled peaks by content, on disk. A remembered peak is a hint, which a compile confirms or corrects."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

_VARIABLE = "JAXMEM_CACHE_DIR"
_SCHEMA = 3
_MOST_BYTES = 1 << 16  # of an entry; ours have a few hundred, and some 40 more for each size of a product
_COMPILERS = (
    "jax jaxlib jaxmem libtpu jax-cuda12-plugin jax-cuda13-plugin jax-cuda12-pjrt jax-cuda13-pjrt "
    "nvidia-cuda-nvcc-cu12 nvidia-cudnn-cu12"
).split()
_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class Peak(NamedTuple):
    """What a compiler made of a program: bytes, and where it tells seconds of a step and of its forward pass, as of
    `analysis.step_time.forward_seconds`.
    """

    peak_bytes: int
    seconds: float | None
    forward: tuple[tuple[float, float], ...] = ()


# By folder and key, what this process put: it needs no second look.
_OWN: dict[tuple[Path, str], Peak] = {}


class Peaks:
    """Small JSON files in a folder, one a program; what is damaged, or cannot be read or written, is done without.

    >>> import tempfile
    >>> peaks = Peaks(tempfile.mkdtemp())
    >>> peaks.put("0" * 64, Peak(7, None)), peaks.get("0" * 64), peaks.get("1" * 64)
    (None, Peak(peak_bytes=7, seconds=None, forward=()), None)
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)

    @classmethod
    def on_disk(cls) -> "Peaks":
        """In JAXMEM_CACHE_DIR, else in the user's cache folder."""
        given = os.environ.get(_VARIABLE)
        if given:
            return cls(given)
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(os.path.join(base, "jaxmem"))

    def get(self, key: str) -> Peak | None:
        """What was put by the same versions, None where there is nothing that can be believed."""
        path = self.folder / f"{key}.json"
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if path.is_file():  # opening a pipe would wait for a writer
                with path.open("rb") as file:
                    return _peak(json.loads(file.read(_MOST_BYTES)), key)
        return None

    def own(self, key: str) -> Peak | None:
        """What this process put, whatever has become of the file."""
        return _OWN.get((self.folder, key))

    def put(self, key: str, peak: Peak) -> None:
        """Remembers; a reader sees all of it or nothing."""
        _OWN[self.folder, key] = peak
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
                json.dump(_entry(peak, key), file)
            try:
                os.replace(file.name, self.folder / f"{key}.json")
            except OSError:  # such as a folder in the entry's place
                os.unlink(file.name)


def _entry(peak: Peak, key: str) -> dict[str, Any]:
    fields = {"schema": _SCHEMA, "versions": dict(versions()), **peak._asdict()}
    said = json.dumps([key, fields], sort_keys=True)
    fields["forward"] = [list(pair) for pair in peak.forward]  # as JSON reads it back
    return {**fields, "checksum": hashlib.sha256(said.encode()).hexdigest()}


def _peak(entry: Any, key: str) -> Peak | None:
    """The peak of an entry that is as `_entry` writes it: damage shows in its checksum, and its types are looked at."""
    if not isinstance(entry, dict):
        return None
    size, seconds = entry.get("peak_bytes"), entry.get("seconds")
    if type(size) is not int or not 0 < size < 2**63:
        return None
    if seconds is not None and not (type(seconds) is float and math.isfinite(seconds) and seconds > 0):
        return None
    forward = entry.get("forward")
    if not isinstance(forward, list) or not all(map(_is_pair, forward)):
        return None
    peak = Peak(size, seconds, tuple(tuple(pair) for pair in forward))
    return peak if entry == _entry(peak, key) else None


def _is_pair(entry: Any) -> bool:
    """Whether it is FLOPs and seconds."""
    numbers = isinstance(entry, list) and len(entry) == 2 and all(type(n) in (int, float) for n in entry)
    return numbers and all(math.isfinite(n) and n >= 0 for n in entry)


@functools.lru_cache(maxsize=1)
def versions() -> tuple[tuple[str, str], ...]:
    """Of everything that decides what a program compiles to, as far as it is installed or set."""
    found = [(name, os.environ.get(name, "")) for name in _SETTINGS]
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return tuple(found)
