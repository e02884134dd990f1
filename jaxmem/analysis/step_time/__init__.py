"""How long one call of a compiled program would take on a chip that is not here: always an estimate."""

from jaxmem.analysis.step_time._chip import NOMINAL_CPU as NOMINAL_CPU
from jaxmem.analysis.step_time._chip import ChipSpeed as ChipSpeed
from jaxmem.analysis.step_time._estimate import step_time as step_time
from jaxmem.analysis.step_time._forward import forward_seconds as forward_seconds
