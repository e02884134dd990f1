"""FILE[:FUNCTION] → Workload: the user's file as a module, its function, its options."""

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence

from jaxmem._blame import users_frame
from jaxmem._suggest import meant
from jaxmem.cli._errors import DEBUG_HINT, describe
from jaxmem.cli._keywords import keywords_for
from jaxmem.errors import FileLoadError, JaxmemError
from jaxmem.workload import Workload

DEFAULT_FUNCTION = "workload"


def load_workload(spec: str, *, target: str | None = None, settings: Sequence[str] = ()) -> Workload:
    """The workload that FILE[:FUNCTION] makes.

    Args:
      spec: a Python file, and optionally the name of a function in it (default `workload`).
      target: the value of --target; a function that declares `target` is given it resolved, or its `mesh`.
      settings: the `NAME=VALUE` of each --set; the function must declare every NAME.

    Raises:
      FileLoadError: the file or function is missing, the file or the function raises, an option is
        not declared or not given, or what comes back is not a `Workload`. What jaxmem itself raises
        in the user's file passes unchanged, since it already says what to do.
    """
    path, name = split_spec(spec)
    module = load_module(path)
    found = getattr(module, name, None)
    if isinstance(found, Workload) and not settings:  # a module-level workload needs no function
        return found
    if not callable(found) or isinstance(found, type):
        raise _no_such_function(module, path, name)
    keywords = keywords_for(found, settings, target=target, where=f"{name}() in {path}")
    try:
        workload = found(**keywords)
    except JaxmemError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(error, wanted=f"{name}() in {path} to return a jaxmem.Workload", path=path) from error
    if not isinstance(workload, Workload):
        raise FileLoadError(
            wanted=f"{name}() in {path} to return a jaxmem.Workload",
            got="None" if workload is None else f"a {type(workload).__module__}.{type(workload).__qualname__}",
            do="End the function with `return jaxmem.Workload(loss_fn, params, batch, optimizer)`.",
        )
    return workload


def split_spec(spec: str) -> tuple[str, str]:
    """The file and the function of FILE[:FUNCTION].

    >>> split_spec("models/gpt.py:gpt2_124m")
    ('models/gpt.py', 'gpt2_124m')
    >>> split_spec("gpt.py")
    ('gpt.py', 'workload')
    """
    path, colon, name = spec.rpartition(":")
    if not colon or os.path.isfile(spec):
        return spec, DEFAULT_FUNCTION
    if not name.isidentifier():
        raise FileLoadError(
            wanted="FILE or FILE:FUNCTION, for example gpt.py:workload",
            got=repr(spec),
            do="Give the name of a Python function after the colon.",
        )
    return path, name


def load_module(path: str) -> types.ModuleType:
    """Runs a Python file as a module with its directory importable; FileLoadError if that fails."""
    _check_readable(path)
    directory, filename = os.path.split(os.path.abspath(path))
    if directory not in sys.path:
        sys.path.insert(0, directory)
    stem = os.path.splitext(filename)[0]
    # Under its own name, so that its neighbours' `import` finds this very module, unless that is taken.
    name = stem if stem not in sys.modules else f"jaxmem_file_{stem}"
    loader = importlib.machinery.SourceFileLoader(name, os.path.join(directory, filename))
    module = types.ModuleType(name)
    module.__file__, module.__loader__ = loader.path, loader
    module.__spec__ = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up
    try:
        loader.exec_module(module)
    except JaxmemError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(error, wanted=f"{path} to import", path=path) from error
    return module


def _check_readable(path: str):
    if os.path.isfile(path) and os.access(path, os.R_OK):
        return
    got = "a file that cannot be read" if os.path.exists(path) else "no such file"
    got = "a directory" if os.path.isdir(path) else got
    folder = os.path.dirname(path) or "."
    neighbours = sorted(name for name in os.listdir(folder) if name.endswith(".py")) if os.path.isdir(folder) else []
    others = [name for name in neighbours if name != os.path.basename(path)]
    close = meant(os.path.basename(path), others)
    raise FileLoadError(
        wanted=f"a Python file at {path}" if path else "FILE or FILE:FUNCTION",
        got=got,
        do=f"Did you mean {os.path.join(os.path.dirname(path), close)}?" if close else "Check the path.",
    )


def _raised(error: BaseException, *, wanted: str, path: str) -> FileLoadError:
    """What was raised while the user's file ran, with the line of that file."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        line, text = error.lineno, (error.text or "").strip()
        what = f"{type(error).__name__}: {error.msg}"
        file = error.filename or path
    else:
        frame = users_frame(error)
        line, text = (frame.lineno, frame.line) if frame else (None, "")
        what = describe(error).removesuffix(".")
        file = frame.filename if frame else path
    where = f" at line {line} of {os.path.basename(file)}" if line else ""
    code = f" (`{text}`)" if text else ""
    cure = "Fix that line."
    if isinstance(error, ModuleNotFoundError) and error.name:
        cure = f"Install the package that provides {error.name}, or put it next to {os.path.basename(path)}."
    elif isinstance(error, SystemExit):
        cure = 'Keep what ends the program under `if __name__ == "__main__":`.'
    return FileLoadError(wanted=wanted, got=f"{what}{where}{code}", do=f"{cure} {DEBUG_HINT}")


def _no_such_function(module: types.ModuleType, path: str, name: str) -> FileLoadError:
    found = getattr(module, name, None)
    functions = _own_functions(module)
    builders = [n for n, fn in functions.items() if _makes_workload(fn)]
    names = builders or sorted(functions)
    close = meant(name, names)
    if not names:
        do = f"Add `def {name}(): return jaxmem.Workload(...)`."
    elif close:
        do = f"Did you mean {path}:{close}?"
    else:
        do = f"Name one of them, as in {path}:{names[0]}, or define {name}()."
    kind = "functions that make a Workload" if builders else "functions"
    there = f"; its {kind}: {', '.join(names)}" if names else "; it defines no function"
    got = "none of that name" if found is None else f"a {type(found).__name__}"
    return FileLoadError(wanted=f"a function {name}() in {path}", got=f"{got}{there}", do=do)


def _own_functions(module: types.ModuleType) -> dict[str, Callable]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _makes_workload(fn) -> bool:
    """Whether a function says that it returns a Workload, or mentions one."""
    says = fn.__annotations__.get("return")
    if says is not None:
        return says is Workload or (isinstance(says, str) and says.split(".")[-1] == "Workload")
    return "Workload" in fn.__code__.co_names
