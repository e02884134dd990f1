"""Compiled peaks by content, on disk: asking twice compiles once."""

import contextlib
import functools
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Any

_VARIABLE = "JAXMEM_CACHE_DIR"
_FIELDS = ("peak_bytes", "seconds")
_COMPILERS = (
    "jax jaxlib jaxmem libtpu jax-cuda12-plugin jax-cuda13-plugin jax-cuda12-pjrt jax-cuda13-pjrt "
    "nvidia-cuda-nvcc-cu12 nvidia-cudnn-cu12"
).split()
_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class Peaks:
    """Small JSON files in a folder, one a program; what cannot be read or written is done without.

    >>> import tempfile
    >>> peaks = Peaks(tempfile.mkdtemp())
    >>> peaks.put("0" * 64, {"peak_bytes": 7, "seconds": None}), peaks.get("0" * 64), peaks.get("1" * 64)
    (None, {'peak_bytes': 7, 'seconds': None}, None)
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

    def get(self, key: str) -> dict[str, Any] | None:
        """What was put, None where there is nothing that can be read."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.folder / f"{key}.json").read_text())
            if isinstance(found, dict) and set(found) == set(_FIELDS):
                return found
        return None

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Remembers; a reader sees all of it or nothing."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
                json.dump(value, file)
            os.replace(file.name, self.folder / f"{key}.json")


@functools.lru_cache(maxsize=1)
def versions() -> tuple[tuple[str, str], ...]:
    """Of everything that decides what a program compiles to, as far as it is installed or set."""
    found = [(name, os.environ.get(name, "")) for name in _SETTINGS]
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return tuple(found)
