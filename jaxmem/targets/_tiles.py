"""`Tiles`: how many bytes an array takes in the memory of a TPU, which stores it in tiles."""

import dataclasses
import functools
import itertools
import math

from jaxmem._shown import Brief

_WORD = 4  # bytes of an element of a register; smaller elements are packed into it, larger ones take several
_LARGEST_ROW = 1024  # elements of the tile of a one-dimensional array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles(Brief):
    """The tiles of a TPU: two axes are padded, to a multiple of the rows and of the lanes of a tile.

    Read off layouts like `{1,0:T(8,128)(2,1)}` that libtpu 0.0.52 gives to arguments, whose axes it permutes for the
    least padding. Within a program an operation may want another order of axes, and so more padding.

    Args:
      rows: of a tile. An array of fewer has a lower tile, of a power of two rows.
      lanes: columns of a tile.
      least: 4-byte rows of the lowest tile; two 2-byte elements, or four 1-byte elements, lie in one.
    """

    rows: int = 8
    lanes: int = 128
    least: int = 1

    def stored_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of an array with the order of axes that pads the least.

        Args:
          shape: of the array, on one device.
          itemsize: bytes of an element; a bool takes one.

        >>> Tiles().stored_bytes((16, 1024, 768), 2) == 2 * 16 * 1024 * 768  # no padding
        True
        >>> Tiles().stored_bytes((8, 32, 32, 3), 4) // (4 * 8 * 32 * 32 * 3)  # 32 of 128 lanes
        4
        """
        return _stored_bytes(self, tuple(shape), itemsize)


MODERN = Tiles()  # from v4 on


@functools.lru_cache(maxsize=65536)
def _stored_bytes(tiles: Tiles, shape: tuple[int, ...], itemsize: int) -> int:
    elements = math.prod(shape)
    packed = max(1, _WORD // itemsize)
    if not elements:
        return 0
    if len(shape) < 2:
        row = min(_tile(elements, tiles.lanes * packed * tiles.least), _LARGEST_ROW)
        return _padded(elements, row) * itemsize

    def padded(columns: int, rows: int) -> int:
        tile = min(_tile(rows, packed * tiles.least), max(tiles.rows, packed * tiles.least))
        return elements // (columns * rows) * _padded(columns, tiles.lanes) * _padded(rows, tile)

    return min(padded(*pair) for pair in itertools.permutations(shape, 2)) * itemsize


def _tile(size: int, least: int) -> int:
    """The smallest power of two times `least` that holds a size."""
    return least << max(0, math.ceil(math.log2(size / least)))


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile
