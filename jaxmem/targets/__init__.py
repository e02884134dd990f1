"""What a step is compiled for."""

from jaxmem.targets._target import KNOWN_TARGETS as KNOWN_TARGETS
from jaxmem.targets._target import Target as Target
from jaxmem.targets._target import on_target as on_target
from jaxmem.targets._target import resolve_target as resolve_target
