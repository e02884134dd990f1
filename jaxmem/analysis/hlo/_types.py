"""HLO types as text: the arrays and the leaves of a tuple, and the bytes of an array with and without its padding."""

import functools
import math
import re
from typing import NamedTuple

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=?]*)\](?:\{([^}]*)\})?")
_TILES = re.compile(r"(?<=[T)])\(([\d,*]+)\)")
_BITS = re.compile(r"^[a-z]+?(\d+)(?:e\d.*|fn.*|b\d.*)?$")
_SPACE = re.compile(r"S\((\d+)\)")
_NUMPY = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf16": "bfloat16", "c64": "complex64"}
_COMMENT = re.compile(r"/\*.*?\*/")


class Array(NamedTuple):
    """One array of a type: its element type, its dimensions and its layout as the text has them."""

    text: str
    dtype: str
    sizes: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        """How many, padding left out."""
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Without padding."""
        return _bytes(self.elements, _bits(self.dtype, self.layout))

    @property
    def memory_space(self) -> int:
        """The number of the memory it lies in: 0 is the device's."""
        found = _SPACE.search(self.layout)
        return int(found.group(1)) if found else 0


@functools.lru_cache(maxsize=65536)
def arrays(type_text: str) -> tuple[Array, ...]:
    """The arrays of a type, in order; of a tuple's, those of its elements.

    >>> [(a.dtype, a.sizes, a.memory_space) for a in arrays("(bf16[4,8]{1,0:T(8,128)(2,1)}, f32[2]{0:S(5)})")]
    [('bf16', (4, 8), 0), ('f32', (2,), 5)]
    """
    return tuple(
        Array(found.group(), found.group(1), _dimensions(found.group(2)), found.group(3) or "")
        for found in _ARRAY.finditer(type_text)
    )


def parse_shape(type_text: str) -> tuple[int, ...]:
    """Dimensions of an array type; of a tuple, its first element's.

    >>> parse_shape("(bf16[4,8]{1,0}, u8[1024]{0})")
    (4, 8)
    """
    found = arrays(type_text)
    return found[0].sizes if found else ()


def dtype_name(name: str) -> str:
    """numpy's name of an HLO element type.

    >>> dtype_name("bf16"), dtype_name("s32"), dtype_name("pred")
    ('bfloat16', 'int32', 'bool')
    """
    if name in _NUMPY:
        return _NUMPY[name]
    return f"{_NUMPY[name[0]]}{name[1:]}" if name[:1] in "suf" and name[1:].isdigit() else name


def leaves(type_text: str) -> list[tuple[tuple[int, ...], str]]:
    """(index, type) of every part of a type, the tuples themselves first.

    >>> leaves("(f32[2]{0}, (s32[], pred[]))")[2:]
    [((1,), '(s32[], pred[])'), ((1, 0), 's32[]'), ((1, 1), 'pred[]')]
    """
    if not type_text.startswith("("):
        return [((), type_text)]
    found = [((), type_text)]
    for number, part in enumerate(_parts(type_text[1:-1])):
        found += [((number, *index), leaf) for index, leaf in leaves(part)]
    return found


def logical_bytes(type_text: str) -> int:
    """Bytes of an array type without padding; 0 of a tuple, a token or an opaque value.

    >>> logical_bytes("bf16[4,200]{1,0:T(8,128)(2,1)}")
    1600
    """
    return 0 if type_text.startswith("(") else full_bytes(type_text)


def full_bytes(type_text: str) -> int:
    """Bytes of a type without padding, tuples summed, wherever they lie."""
    return sum(array.size_bytes for array in arrays(type_text))


@functools.lru_cache(maxsize=65536)
def padded_bytes(type_text: str) -> int:
    """Bytes of an array type in memory: each dimension that is tiled is rounded up to its tile.

    >>> padded_bytes("bf16[4,200]{1,0:T(8,128)(2,1)}")
    4096
    >>> padded_bytes("f32[4,200]{1,0}")
    3200
    """
    found = arrays(type_text) if not type_text.startswith("(") else ()
    if not found:
        return 0
    _, dtype, sizes, layout = found[0]
    order, _, rest = layout.partition(":")
    minor_to_major = [int(n) for n in order.split(",")] if order else list(range(len(sizes)))[::-1]
    physical = [sizes[n] for n in reversed(minor_to_major)]
    for tile in _TILES.findall(rest):
        physical = _tiled(physical, tile.split(","))
    return _bytes(math.prod(physical), _bits(dtype, rest))


def _tiled(sizes: list[int], tile: list[str]) -> list[int]:
    """Dimensions, major to minor, after tiling the last of them: whole tiles, then what is in one."""
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    outer, inner = sizes[: len(sizes) - len(tile)], sizes[len(sizes) - len(tile) :]
    counts, within, carried = [], [], 1
    for size, part in zip(inner, tile, strict=True):
        if part == "*":  # this dimension is merged with the next one before that is tiled
            carried *= size
            continue
        counts.append(-(-carried * size // int(part)))
        within.append(int(part))
        carried = 1
    return outer + counts + within


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(d.lstrip("<=")) for d in text.split(",")) if text else ()


def _bits(dtype: str, layout: str) -> int:
    """Bits an element takes: its own, unless the layout packs it (`E(4)`)."""
    packed = re.search(r"E\((\d+)\)", layout)
    if packed:
        return int(packed.group(1))
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    found = _BITS.match(dtype)
    return max(8, int(found.group(1))) if found else 0


def _bytes(elements: int, bits: int) -> int:
    return (elements * bits + 7) // 8


def _parts(text: str) -> list[str]:
    """What commas outside any bracket separate."""
    parts, depth, start = [], 0, 0
    text = _COMMENT.sub("", text)
    for position in (m.start() for m in re.finditer(r"[()\[\]{},]", text)):
        character = text[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return parts + [last] if last else parts
