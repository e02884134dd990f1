"""How findings group buffers and speak of them."""

from collections.abc import Callable, Iterable, Sequence

from jaxmem._units import format_bytes
from jaxmem.analysis._records import Buffer


def groups(buffers: Iterable[Buffer], key: Callable) -> dict:
    found: dict = {}
    for buffer in buffers:
        found.setdefault(key(buffer), []).append(buffer)
    return found


def names(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    shown = [f"{b.name} {b.shape} {format_bytes(b.size_bytes)}{f' {b.source}' if b.source else ''}" for b in buffers]
    return (*shown[:4], f"and {len(shown) - 4} more") if len(shown) > 5 else tuple(shown)


def within(layer: str) -> str:
    return f" in {layer}" if layer else ""


def common(layers: Sequence[str]) -> str:
    parts = [layer.split("/") for layer in layers]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "/".join(shared)
