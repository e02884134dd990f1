"""What costs bytes without need, each kind with its cure."""

from jaxmem.analysis.findings._find import findings as findings
