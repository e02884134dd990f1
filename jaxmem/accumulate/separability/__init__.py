"""Separability: whether a loss is a sum or mean over rows, told by abstract evaluation of its jaxprs."""

from jaxmem.accumulate.separability._outputs import Output as Output
from jaxmem.accumulate.separability._outputs import outputs_by_rows as outputs_by_rows
from jaxmem.accumulate.separability._verdict import Separability as Separability
from jaxmem.accumulate.separability._verdict import check_separable as check_separable
from jaxmem.accumulate.separability._verdict import separable_by_rows as separable_by_rows
