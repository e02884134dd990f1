"""The public names and their signatures are a reviewed list: public_api.txt.

After a change that is meant: `python -m tests.test_public_api > tests/public_api.txt`, and say so in the CHANGELOG.
"""

import dataclasses
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxmem

pytestmark = pytest.mark.once

GOLDEN = Path(__file__).parent / "public_api.txt"


def describe(name: str, value) -> Iterator[str]:
    """The lines of one public name: a module's public names, a class with its public methods, or a function."""
    if isinstance(value, types.ModuleType):
        yield f"{name}: module"
        for inner in sorted(public_names(value)):
            member = getattr(value, inner)
            if member is getattr(jaxmem, inner, None):
                yield f"{name}.{inner}: see jaxmem.{inner}"
            else:
                yield from describe(f"{name}.{inner}", member)
    elif isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"{name}: class{signature(value)}" + (f" of {bases}" if bases else "")
        for inner, member in sorted(vars(value).items()):
            if inner.startswith("_"):
                continue
            if isinstance(member, (staticmethod, classmethod, types.FunctionType)):
                yield f"{name}.{inner}{signature(getattr(value, inner))}"
            elif hasattr(member, "__get__"):
                yield f"{name}.{inner}: property"
        if dataclasses.is_dataclass(value):
            yield from (f"{name}.{field.name}: field" for field in dataclasses.fields(value) if not field.init)
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def public_names(module: types.ModuleType) -> list[str]:
    """`__all__`, else the names without underscore that the module itself defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [n for n, v in vars(module).items() if not n.startswith("_") and _owner(v).startswith(module.__name__)]


def _owner(value) -> str:
    return getattr(value, "__module__", None) or ""


def signature(fn) -> str:
    """Names, kinds and defaults; no annotations, whose text differs between versions of Python and JAX."""
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _Written(p.default))
        for p in inspect.signature(fn).parameters.values()
    ]
    return str(inspect.Signature(parameters))


class _Written:
    """A default value whose repr is the same on every version: types by their name."""

    def __init__(self, value):
        self.text = getattr(value, "__name__", None) or repr(value)

    def __repr__(self):
        return self.text


def lines() -> list[str]:
    return [line for name in sorted(jaxmem.__all__) for line in describe(f"jaxmem.{name}", getattr(jaxmem, name))]


def test_public_names_and_signatures_are_the_reviewed_ones():
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text()


def test_every_public_name_is_documented_and_listed_once():
    assert len(jaxmem.__all__) == len(set(jaxmem.__all__))
    undocumented = [name for name in jaxmem.__all__ if not inspect.getdoc(getattr(jaxmem, name))]
    assert undocumented == []
    assert set(jaxmem.__all__) <= set(dir(jaxmem))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    assert not hasattr(jaxmem, "no_such_name")


def test_the_version_is_the_distributions():
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'\nversion = "{jaxmem.__version__}"\n' in pyproject


if __name__ == "__main__":
    print("\n".join(lines()))
