"""Where each byte comes from: kind, layer, operation, source line, and the timeline of live bytes."""

from jaxmem.analysis.attribution._attribute import Attribution as Attribution
from jaxmem.analysis.attribution._attribute import attribute as attribute
from jaxmem.analysis.attribution._findings import findings as findings
from jaxmem.analysis.attribution._kinds import program_arguments as program_arguments
