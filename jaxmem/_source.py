"""Whose code a source file is: the user's, a library's or Python's."""

import functools
import importlib.util
import os
import re
import sys
import sysconfig
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

_LIBRARIES = frozenset(
    "jax jaxlib flax optax orbax chex numpy jaxmem equinox haiku einops opt_einsum jaxtyping beartype typeguard"
    # and tools that call a user's code
    " click typer pytest _pytest pluggy IPython ipykernel".split()
)
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_PYTHON = re.compile(r"/lib(?:64)?/python\d\.\d+/")
_FRAME = re.compile(r"(.+?):(\d+)(?:[:\-][\d:\-]*)? \(")  # "FILE:LINE:COLUMN (FUNCTION)"
_SCRIPTS = sysconfig.get_path("scripts") + os.sep  # a command's own, which only calls a package
_CELL = "<ipython-input-"
_NUMBERED = re.compile(r"ipython-input-(\d{1,5})-")  # of IPython before 8, and of Colab
_NO_FILES = ("<frozen ", "<__array_function__", "<decorator-gen")  # not "<string>" or "<ipython-input-…>", the user's


@functools.lru_cache(maxsize=4096)
def is_library(path: str) -> bool:
    """Whether a file belongs to JAX, a framework on it, jaxmem or Python, on this machine or another.

    Other installed packages are not libraries in this sense: one may hold the model that is trained.

    >>> import json, jax
    >>> is_library(jax.__file__), is_library(json.__file__), is_library("/home/me/train.py")
    (True, True, False)
    >>> is_library("/env/lib/python3.9/site-packages/flax/core.py"), is_library("/env/site-packages/mymodel/net.py")
    (True, False)
    """
    if is_own(path) or path.startswith(_NO_FILES) or path.startswith(_SCRIPTS):
        return True
    package = package_of(path)
    return package in _LIBRARIES if package else is_python(path)


@functools.lru_cache(maxsize=4096)
def package_of(path: str) -> str:
    """The package that a file belongs to, installed here or elsewhere, or a library's checkout; "" for other files.

    >>> import jax
    >>> package_of(jax.__file__), package_of("/env/lib/python3.9/site-packages/zoo/net.py"), package_of("/home/me/a.py")
    ('jax', 'zoo', '')
    """
    plain = path.replace("\\", "/")
    for root in ("purelib", "platlib"):
        if path.startswith(sysconfig.get_path(root) + os.sep):
            return plain[len(sysconfig.get_path(root)) + 1 :].split("/")[0]
    if found := _INSTALLED.match(plain):
        return plain[found.end() :].split("/")[0]
    return next((name for name, place in _checkouts() if path.startswith(place)), "")


def is_python(path: str) -> bool:
    """Whether a file that belongs to no package is part of Python."""
    return bool(_PYTHON.search(path.replace("\\", "/"))) or path.startswith(sysconfig.get_path("stdlib") + os.sep)


def source_line(*equations: "JaxprEqn") -> str:
    """FILE:LINE of the innermost frame outside of libraries, for the first equation that has one.

    If none has one, the innermost frame of the first equation with frames; "" if no equation has frames.

    >>> import jax
    >>> source_line(*jax.make_jaxpr(lambda x: x + 1)(0).eqns).rpartition(":")[2]
    '1'
    """
    from jax.extend import source_info_util  # imports JAX, whose environment the command line sets after this module

    innermost: tuple[str, ...] = ()
    for equation in equations:
        frames = source_info_util.summarize(equation.source_info, num_frames=64).splitlines()
        for frame in filter(None, map(_FRAME.match, reversed(frames))):  # the innermost is last
            if not is_library(frame[1]):
                return f"{frame[1]}:{frame[2]}"
            innermost = innermost or frame.groups()
    return ":".join(innermost)


def short_name(path: str) -> str:
    """What people call a file: its name without folders; of a notebook's cell its number, such as In[3].

    >>> short_name("/home/me/train.py"), short_name("<ipython-input-3-0123456789ab>"), short_name("")
    ('train.py', 'In[3]', '')
    """
    ipython = sys.modules.get("IPython")
    compiler = getattr(ipython and ipython.get_ipython(), "compile", None)
    if named := getattr(compiler, "format_code_name", lambda path: None)(path):
        return named[1]  # of ("Cell", "In[3]")
    found = _NUMBERED.search(path)
    return f"In[{found[1]}]" if found else os.path.basename(path)


def short_place(place: str) -> str:
    """FILE:LINE as tables and sentences have it: "train.py:3", or "In[3]:1" in a notebook.

    >>> short_place("/home/me/train.py:3")
    'train.py:3'
    """
    file, colon, line = place.rpartition(":")
    return f"{short_name(file)}{colon}{line}"


def is_users(path: str) -> bool:
    """Whether a file is the user's own, or a cell: not of jaxmem, an installed package or Python."""
    if path.startswith(_CELL):
        return True
    return not (path.startswith("<") or is_own(path) or package_of(path) or is_python(path))


def is_own(path: str) -> bool:
    """Whether a file is part of the package jaxmem, to which its examples do not belong."""
    return path.startswith(_PACKAGE)


@functools.cache
def _checkouts() -> tuple[tuple[str, str], ...]:
    """(library, folder) for the libraries on this machine, including those installed from a checkout."""
    specs = [importlib.util.find_spec(name) for name in sorted(_LIBRARIES)]
    places = [(spec.name, spec.submodule_search_locations or ()) for spec in specs if spec]
    return tuple((name, place + os.sep) for name, found in places for place in found)
