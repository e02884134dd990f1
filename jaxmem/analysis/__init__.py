"""What a compiled program needs: bytes, FLOPs, whether it fits, and what these numbers do not show."""

from jaxmem.analysis._analyze import analyze as analyze
from jaxmem.analysis._build import analyze_program as analyze_program
from jaxmem.analysis._compare import Comparison as Comparison
from jaxmem.analysis._compare import compare as compare
from jaxmem.analysis._compare import join as join
from jaxmem.analysis._hlo_flops import HloFlops as HloFlops
from jaxmem.analysis._hlo_flops import hlo_flops as hlo_flops
from jaxmem.analysis._jaxpr_flops import JaxprFlops as JaxprFlops
from jaxmem.analysis._jaxpr_flops import jaxpr_flops as jaxpr_flops
from jaxmem.analysis._kind_paths import kinds_by_path as kinds_by_path
from jaxmem.analysis._program import Program as Program
from jaxmem.analysis._program import as_program as as_program
from jaxmem.analysis._read import ReportReadError as ReportReadError
from jaxmem.analysis._report import MemoryReport as MemoryReport
from jaxmem.analysis._schema import report_schema as report_schema
from jaxmem.analysis._units import format_bytes as format_bytes
from jaxmem.analysis._units import format_flops as format_flops
from jaxmem.analysis._units import format_seconds as format_seconds
from jaxmem.analysis.oom import OomExplanation as OomExplanation
from jaxmem.analysis.oom import explain_oom as explain_oom
