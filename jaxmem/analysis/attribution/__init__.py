"""Where each byte comes from: kind, layer, operation, source line, and the timeline of live bytes."""

from jaxmem.analysis.attribution._attribute import attribute as attribute
from jaxmem.analysis.attribution._kinds import program_arguments as program_arguments
from jaxmem.analysis.attribution._scopes import parse_scope as parse_scope
