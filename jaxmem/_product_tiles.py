"""How much of a GPU a matrix product keeps busy: by the tiles of its result and the waves in which they run.

After NVIDIA's "Matrix Multiplication Background User's Guide", sections 2.1 and 4: a library computes a product tile by
tile, one thread block each. Tiles at the edge are computed in full, and the last wave of tiles takes as long as a full
one. What a smaller tile loses in arithmetic intensity the guide shows in charts only, so that it is left out.
"""

import math

# The guide's list for cuBLAS, the most efficient first.
_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))


def busy_share(batch: int, rows: int, columns: int, multiprocessors: int) -> float:
    """The share of the arithmetic units' time that computes the result, for the tile with which it is the largest.

    A product of fewer tiles than multiprocessors may be split along its contraction instead, so that only its tiles at
    the edge count.

    Args:
      batch: how many products.
      rows, columns: of each result.
      multiprocessors: of the GPU.

    The guide's example: on an A100 of 108 multiprocessors, 1792 columns are 98 tiles of 256 x 128, so one wave.

    >>> busy_share(1, 1792, 1792, 108)
    1.0
    >>> round(busy_share(1, 4096, 65, 108), 2), round(busy_share(1, 4096, 64, 108), 2)
    (0.51, 1.0)
    """
    return max(_share(batch, rows, columns, tile, multiprocessors) for tile in _TILES)


def _share(batch: int, rows: int, columns: int, tile: tuple[int, int], multiprocessors: int) -> float:
    tiles = batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    filled = batch * rows * columns / (tiles * tile[0] * tile[1])
    waves = math.ceil(tiles / multiprocessors)
    return filled * (tiles / (waves * multiprocessors) if waves > 1 else 1.0)
