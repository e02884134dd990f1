"""Buffer assignments of compiled programs: from a dump, from XLA:CPU's message, or from the scheduled HLO alone."""

from jaxmem.analysis.assignment._dump import BufferDump as BufferDump
from jaxmem.analysis.assignment._liveness import liveness as liveness
from jaxmem.analysis.assignment._records import Allocation as Allocation
from jaxmem.analysis.assignment._records import Assignment as Assignment
from jaxmem.analysis.assignment._records import Value as Value
from jaxmem.analysis.assignment._sweep import Span as Span
from jaxmem.analysis.assignment._sweep import Sweep as Sweep
from jaxmem.analysis.assignment._sweep import sweep as sweep
from jaxmem.analysis.assignment._text import read_text as read_text
from jaxmem.analysis.hlo._types import logical_bytes as logical_bytes
from jaxmem.analysis.hlo._types import padded_bytes as padded_bytes
