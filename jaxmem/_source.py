"""Whose code a source file is: the user's, or that of JAX, its libraries and Python itself."""

import functools
import os
import sysconfig

_LIBRARIES = frozenset(("jax", "jaxlib", "flax", "optax", "orbax", "chex", "numpy", "jaxmem"))
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"


@functools.lru_cache(maxsize=4096)
def is_library(path: str) -> bool:
    """Whether a file belongs to JAX's libraries, jaxmem or Python; other installed packages may hold the user's model.

    >>> import json, jax
    >>> is_library(jax.__file__), is_library(json.__file__), is_library("/home/me/train.py")
    (True, True, False)
    """
    if is_own(path) or path.startswith("<frozen "):
        return True
    for name in ("purelib", "platlib"):
        root = sysconfig.get_path(name) + os.sep
        if path.startswith(root):
            return path[len(root) :].split(os.sep)[0] in _LIBRARIES
    if _SITE_PACKAGES in path:
        return path.rsplit(_SITE_PACKAGES, 1)[1].split(os.sep)[0] in _LIBRARIES
    return path.startswith(sysconfig.get_path("stdlib") + os.sep)


def is_own(path: str) -> bool:
    """Whether a file is part of jaxmem."""
    return path.startswith(_PACKAGE)
