"""The block cutter: finds what is worth a checkpoint each in a jaxpr, and wraps it. Pure on jaxprs."""

from jaxmem.remat.blocks._blocks import Block as Block
from jaxmem.remat.blocks._blocks import apply_at_blocks as apply_at_blocks
from jaxmem.remat.blocks._blocks import find_blocks as find_blocks
from jaxmem.remat.blocks._transform import at_blocks as at_blocks

__all__ = ["Block", "apply_at_blocks", "at_blocks", "find_blocks"]
