"""Remat under a byte budget: capture what a block keeps, choose what it should keep, realise the choice."""

from jaxmem.remat.auto._auto import Auto as Auto
from jaxmem.remat.auto._auto import auto as auto
from jaxmem.remat.auto._solution import Solution as Solution
from jaxmem.remat.auto._solution import SolvedValue as SolvedValue

__all__ = ["Auto", "Solution", "SolvedValue", "auto"]
