"""Renderers of the records: they format units and compute nothing else."""

from jaxmem.report.differences import Diff as Diff
from jaxmem.report.differences import diff as diff
from jaxmem.report.exports import buffers_csv as buffers_csv
from jaxmem.report.exports import chrome_trace as chrome_trace
from jaxmem.report.frontier import frontier_figure as frontier_figure
from jaxmem.report.html import html_report as html_report
from jaxmem.report.html import write_html as write_html
from jaxmem.report.shown import report_fragment as report_fragment
from jaxmem.report.terminal import print_comparison as print_comparison
from jaxmem.report.terminal import print_report as print_report
from jaxmem.report.terminal import render_comparison as render_comparison
from jaxmem.report.terminal import render_report as render_report
