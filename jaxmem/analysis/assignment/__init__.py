"""Buffer assignments of compiled programs: from a dump, from XLA:CPU's message, or from the scheduled HLO alone."""

from jaxmem.analysis.assignment._dump import BufferDump
from jaxmem.analysis.assignment._liveness import liveness
from jaxmem.analysis.assignment._proto import read_proto
from jaxmem.analysis.assignment._records import Allocation, Assignment, Value
from jaxmem.analysis.assignment._text import read_text
from jaxmem.analysis.hlo._types import logical_bytes, padded_bytes

__all__ = [
    "Allocation",
    "Assignment",
    "BufferDump",
    "Value",
    "liveness",
    "logical_bytes",
    "padded_bytes",
    "read_proto",
    "read_text",
]
