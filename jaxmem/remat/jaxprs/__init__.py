"""What is known of a jaxpr: its values and equations, how to run them, where values come from, which are kept."""

from jaxmem.remat.jaxprs._call import Call as Call
from jaxmem.remat.jaxprs._equations import BODIES as BODIES
from jaxmem.remat.jaxprs._equations import CHEAP as CHEAP
from jaxmem.remat.jaxprs._equations import RECOMPUTED as RECOMPUTED
from jaxmem.remat.jaxprs._equations import USER_CHECKPOINT as USER_CHECKPOINT
from jaxmem.remat.jaxprs._equations import WATCH as WATCH
from jaxmem.remat.jaxprs._equations import bodies as bodies
from jaxmem.remat.jaxprs._equations import body_key as body_key
from jaxmem.remat.jaxprs._equations import body_of as body_of
from jaxmem.remat.jaxprs._equations import has_checkpoint as has_checkpoint
from jaxmem.remat.jaxprs._equations import is_checkpoint as is_checkpoint
from jaxmem.remat.jaxprs._equations import is_float as is_float
from jaxmem.remat.jaxprs._equations import is_nested_scan as is_nested_scan
from jaxmem.remat.jaxprs._equations import is_on_host as is_on_host
from jaxmem.remat.jaxprs._equations import is_value as is_value
from jaxmem.remat.jaxprs._equations import nested_segments as nested_segments
from jaxmem.remat.jaxprs._equations import num_bytes as num_bytes
from jaxmem.remat.jaxprs._equations import segments_scope as segments_scope
from jaxmem.remat.jaxprs._facts import Facts as Facts
from jaxmem.remat.jaxprs._facts import without_checkpoint as without_checkpoint
from jaxmem.remat.jaxprs._origin import origin as origin
from jaxmem.remat.jaxprs._origin import scopes_of as scopes_of
from jaxmem.remat.jaxprs._run import evaluate_with as evaluate_with
from jaxmem.remat.jaxprs._run import function_of as function_of
from jaxmem.remat.jaxprs._run import inlined as inlined
from jaxmem.remat.jaxprs._run import jaxpr_of as jaxpr_of
from jaxmem.remat.jaxprs._run import keeping_nothing as keeping_nothing
from jaxmem.remat.jaxprs._run import reader as reader
from jaxmem.remat.jaxprs._run import scope_of as scope_of
from jaxmem.remat.jaxprs._run import with_rule as with_rule
from jaxmem.remat.jaxprs._tokens import Tokens as Tokens
from jaxmem.remat.jaxprs._vjp import vjp_residuals as vjp_residuals

__all__ = [
    "BODIES",
    "CHEAP",
    "RECOMPUTED",
    "USER_CHECKPOINT",
    "WATCH",
    "Call",
    "Facts",
    "Tokens",
    "bodies",
    "body_key",
    "body_of",
    "evaluate_with",
    "function_of",
    "has_checkpoint",
    "inlined",
    "is_checkpoint",
    "is_float",
    "is_nested_scan",
    "is_on_host",
    "is_value",
    "jaxpr_of",
    "keeping_nothing",
    "nested_segments",
    "num_bytes",
    "origin",
    "reader",
    "scope_of",
    "scopes_of",
    "segments_scope",
    "vjp_residuals",
    "with_rule",
    "without_checkpoint",
]
