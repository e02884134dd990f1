"""What a compiled program needs: bytes, FLOPs, whether it fits, and what these numbers do not show."""

from jaxmem.analysis._analyze import analyze as analyze
from jaxmem.analysis._build import analyze_program as analyze_program
from jaxmem.analysis._compare import Comparison as Comparison
from jaxmem.analysis._compare import compare as compare
from jaxmem.analysis._compare import join_comparisons as join_comparisons
from jaxmem.analysis._jaxpr_flops import JaxprFlops as JaxprFlops
from jaxmem.analysis._jaxpr_flops import jaxpr_flops as jaxpr_flops
from jaxmem.analysis._kind_paths import kinds_by_path as kinds_by_path
from jaxmem.analysis._program import Program as Program
from jaxmem.analysis._program import as_program as as_program
from jaxmem.analysis._read import ReportReadError as ReportReadError
from jaxmem.analysis._records import KINDS as KINDS
from jaxmem.analysis._records import Buffer as Buffer
from jaxmem.analysis._records import DonationMiss as DonationMiss
from jaxmem.analysis._records import Finding as Finding
from jaxmem.analysis._records import LayerBytes as LayerBytes
from jaxmem.analysis._records import Loop as Loop
from jaxmem.analysis._records import Moment as Moment
from jaxmem.analysis._records import StepTime as StepTime
from jaxmem.analysis._records import Timeline as Timeline
from jaxmem.analysis._report import MemoryReport as MemoryReport
from jaxmem.analysis._schema import report_schema as report_schema
from jaxmem.analysis.hlo._flops import HloFlops as HloFlops
from jaxmem.analysis.hlo._flops import hlo_flops as hlo_flops
from jaxmem.analysis.oom import OomExplanation as OomExplanation
from jaxmem.analysis.oom import explain_oom as explain_oom
