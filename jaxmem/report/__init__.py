"""Renderers of the records: they format units and compute nothing else."""

from jaxmem.report.terminal import print_comparison as print_comparison
from jaxmem.report.terminal import print_report as print_report
from jaxmem.report.terminal import render_comparison as render_comparison
from jaxmem.report.terminal import render_report as render_report
