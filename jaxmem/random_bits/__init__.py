"""Random bits that a step draws: fences round masks, and the generator."""

from jaxmem.random_bits._fences import LEAST as LEAST
from jaxmem.random_bits._fences import NOTHING as NOTHING
from jaxmem.random_bits._fences import Drawn as Drawn
from jaxmem.random_bits._fences import drawn as drawn
from jaxmem.random_bits._fences import fenced as fenced
from jaxmem.random_bits._generator import GIVEN as GIVEN
from jaxmem.random_bits._generator import drawing_by as drawing_by
from jaxmem.random_bits._generator import generator_of as generator_of
from jaxmem.random_bits._generator import is_key as is_key

__all__ = ["Drawn", "drawing_by", "drawn", "fenced"]
