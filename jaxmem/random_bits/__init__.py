"""Random bits that a step draws: fences round masks, and the generator."""

from jaxmem.random_bits._fences import fenced as fenced
from jaxmem.random_bits._generator import drawing_by as drawing_by

__all__ = ["drawing_by", "fenced"]
