"""Mixed precision: compute in a narrow dtype, keep master parameters and sums in a wide one."""

from jaxmem.precision._cast import cast_floating as cast_floating
from jaxmem.precision._cast import compute_in as compute_in
from jaxmem.precision._cast import uses_dtype as uses_dtype

__all__ = ["cast_floating", "compute_in", "uses_dtype"]
