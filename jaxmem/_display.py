"""What draws the records. Renderers stand above the records, so the top of the package names them here."""

from collections.abc import Callable
from typing import Any

_load: Callable[[], Any] | None = None


def draw_with(load: Callable[[], Any]) -> None:
    """Sets what loads the renderers; called once, when `jaxmem` is imported."""
    global _load
    _load = load


def renderers() -> Any:
    """The package of renderers, `jaxmem.report`, loaded when a record is first shown."""
    assert _load is not None, "importing any part of jaxmem imports its top, which says what draws"
    return _load()
