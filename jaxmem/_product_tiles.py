"""How much of a GPU a matrix product keeps busy: by the tiles of its result and the waves in which they run.

After NVIDIA's "Matrix Multiplication Background User's Guide", DU-09799-001, February 2023, chapters 2.1 and 3: a
library computes a product tile by tile, one thread block each. Tiles at the edge are computed in full, and the last
wave of tiles takes as long as a full one. What a smaller tile loses in arithmetic intensity is left out. This is a
model: no kernel was timed for it.
"""

import math

# cuBLAS's as chapter 2.3 of the guide lists them, the most efficient first.
_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))


def busy_share(batch: int, rows: int, columns: int, multiprocessors: int) -> float:
    """The share of the arithmetic units' time that computes the result, for the tile with which it is the largest.

    A product of at most one wave counts as if it kept all multiprocessors busy but for its tiles at the edge: a library
    may split it along its contraction, which the guide does not count.

    Args:
      batch: how many products.
      rows, columns: of each result.
      multiprocessors: of the GPU.

    >>> busy_share(1, 1792, 1792, 108)  # on an A100 98 tiles of 256 x 128: one wave
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
