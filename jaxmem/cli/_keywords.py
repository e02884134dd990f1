"""The keywords of the user's function: --target and the options of --set, as far as it declares them."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem._suggest import did_you_mean
from jaxmem.errors import FileLoadError

# Keywords that the command line fills in by itself.
RESERVED = ("target", "mesh")
_NEXT = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=(?!=))")  # the comma before another NAME=
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def keywords_for(function: Callable, settings: Sequence[str], *, target: str | None, where: str) -> dict[str, Any]:
    """What to call `function` with.

    `target`, the resolved one, and its `mesh` are passed if they are declared and --target is given (or they have no
    default). Every name of `settings` must be declared.

    >>> def workload(*, seq=128, preset="tiny", target=None): ...
    >>> keywords = keywords_for(workload, ["seq=8192"], target="tpu-v5e:2x2", where="workload()")
    >>> keywords["seq"], keywords["target"].device_count
    (8192, 4)
    """
    declared, takes_any = _declared(function)
    options = {name: p for name, p in declared.items() if name not in RESERVED}
    keywords: dict[str, Any] = {}
    for setting in _one_by_one(settings, options):
        name, value = parse_setting(setting)
        if name in RESERVED:
            raise FileLoadError(
                wanted="--set to name an option of the user's function",
                got=f"--set {setting}",
                do=f"Use --{name} instead." if name == "target" else f"This version of jaxmem cannot set {name}.",
            )
        if name not in options and not takes_any:
            raise _undeclared(name, options, where)
        if name in keywords:
            raise FileLoadError(wanted="each option once", got=f"--set {name}=… more than once", do="Keep one of them.")
        keywords[name] = _fitting(name, value, setting, options.get(name))
    missing = [n for n, p in options.items() if p.default is inspect.Parameter.empty and n not in keywords]
    if missing:
        raise FileLoadError(
            wanted=f"a value for each option without a default of {where}",
            got=f"none for {', '.join(missing)}",
            do=f"Add {' '.join(f'--set {name}=…' for name in missing)}.",
        )
    needed = [
        n for n in RESERVED if n in declared and (target is not None or declared[n].default is inspect.Parameter.empty)
    ]
    if not needed:
        return keywords
    from jaxmem.targets import resolve_target

    resolved = resolve_target(target)
    return keywords | {name: resolved if name == "target" else resolved.mesh for name in needed}


def _one_by_one(settings: Sequence[str], options: dict[str, inspect.Parameter]) -> list[str]:
    """`a=1,b=2` as two settings; as one where `a` is a text, and `b` no option.

    >>> options = inspect.signature(lambda *, seq=1, sizes=(), note="": None).parameters
    >>> _one_by_one(["seq=2,sizes=(1, 2)", "note=x,y=z", "note=x,seq=3"], dict(options))
    ['seq=2', 'sizes=(1, 2)', 'note=x,y=z', 'note=x', 'seq=3']
    """
    found = []
    for setting in settings:
        parts = _NEXT.split(setting)
        names = [part.partition("=")[0].strip() for part in parts]
        default = options[names[0]].default if names[0] in options else None
        whole = isinstance(default, str) and not set(names) <= set(options)
        found += [setting] if whole else parts
    return found


def parse_setting(setting: str) -> tuple[str, Any]:
    """A name and its value: a Python literal where it is one (true, false, none in any case), else text.

    >>> parse_setting("layers=12"), parse_setting("sizes=(1, 2)"), parse_setting("bias=false"), parse_setting("k=a=b")
    (('layers', 12), ('sizes', (1, 2)), ('bias', False), ('k', 'a=b'))
    """
    name, equals, text = setting.partition("=")
    name = name.strip()
    if not equals or not name.isidentifier():
        raise FileLoadError(
            wanted="--set NAME=VALUE with a Python name",
            got=f"--set {setting}",
            do="Write for example --set seq=8192.",
        )
    if text.strip().lower() in _WORDS:
        return name, _WORDS[text.strip().lower()]
    try:
        return name, ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, text


def _declared(function: Callable) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters that can be passed by keyword, and whether `**kwargs` takes any other."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {p.name: p for p in parameters if p.kind in kinds}, takes_any


def _undeclared(name: str, options: dict[str, inspect.Parameter], where: str) -> FileLoadError:
    listed = ", ".join(n if p.default is inspect.Parameter.empty else f"{n}={p.default!r}" for n, p in options.items())
    return FileLoadError(
        wanted=f"an option that {where} declares ({listed or 'it declares none'})",
        got=f"--set {name}=…",
        do=did_you_mean(name, options).strip() or "Use one of those, or add the parameter to the function.",
    )


def _fitting(name: str, value, setting: str, parameter: inspect.Parameter | None):
    """`value`, or its text where the default is a text; a text is refused where the default is a number."""
    default = None if parameter is None else parameter.default
    if isinstance(default, str) and not isinstance(value, str) and value is not None:
        return setting.partition("=")[2]
    if isinstance(default, (bool, int, float)) and isinstance(value, str):
        raise FileLoadError(
            wanted=f"{name} to be a {type(default).__name__}, like its default {default!r}",
            got=f"the text {value!r}",
            do=f"Write for example --set {name}={default!r}.",
        )
    return value
