"""The block cutter: finds what is worth a checkpoint each in a jaxpr, and wraps it. Pure on jaxprs."""

from jaxmem.remat._mark import marked as marked
from jaxmem.remat.blocks._apply import evaluate as evaluate
from jaxmem.remat.blocks._apply import without_marked as without_marked
from jaxmem.remat.blocks._blocks import Block as Block
from jaxmem.remat.blocks._blocks import apply_at_blocks as apply_at_blocks
from jaxmem.remat.blocks._blocks import at_blocks as at_blocks
from jaxmem.remat.blocks._blocks import find_blocks as find_blocks
from jaxmem.remat.blocks._blocks import tied as tied
from jaxmem.remat.blocks._cover import cover as cover
from jaxmem.remat.blocks._names import HEAD as HEAD
from jaxmem.remat.blocks._names import scopes_name as scopes_name
from jaxmem.remat.blocks._plan import Part as Part
from jaxmem.remat.blocks._plan import Plan as Plan
from jaxmem.remat.blocks._plan import parts as parts
from jaxmem.remat.blocks._plan import scan_lengths as scan_lengths
from jaxmem.remat.blocks._repeats import find_repeat as find_repeat
