"""Rematerialisation: which values the forward pass keeps, and which the backward pass computes again."""

from jaxmem.policy import Policy as Policy
from jaxmem.policy import preset as preset
from jaxmem.remat._apply import apply as apply
from jaxmem.remat._checkpoint import checkpoint as checkpoint
from jaxmem.remat._checkpoint import checkpoint_unchecked as checkpoint_unchecked
from jaxmem.remat._examine import Examination as Examination
from jaxmem.remat._examine import examine as examine
from jaxmem.remat._nested_pricing import NestedScanBytes as NestedScanBytes
from jaxmem.remat._nested_pricing import nested_scan_bytes as nested_scan_bytes
from jaxmem.remat._nested_scan import nested_scan as nested_scan
from jaxmem.remat._residuals import Residual as Residual
from jaxmem.remat._residuals import ResidualTable as ResidualTable
from jaxmem.remat._residuals import residual_bytes as residual_bytes
from jaxmem.remat._residuals import residuals as residuals
from jaxmem.remat.auto import Auto as Auto
from jaxmem.remat.auto import Frontier as Frontier
from jaxmem.remat.auto import FrontierPoint as FrontierPoint
from jaxmem.remat.auto import Solution as Solution
from jaxmem.remat.auto import SolvedValue as SolvedValue
from jaxmem.remat.auto import auto as auto
from jaxmem.remat.auto import fit_budget as fit_budget
from jaxmem.remat.auto import frontier as frontier

__all__ = [
    "Auto",
    "Examination",
    "Frontier",
    "FrontierPoint",
    "NestedScanBytes",
    "Policy",
    "Residual",
    "ResidualTable",
    "Solution",
    "SolvedValue",
    "apply",
    "auto",
    "checkpoint",
    "checkpoint_unchecked",
    "examine",
    "fit_budget",
    "frontier",
    "nested_scan",
    "nested_scan_bytes",
    "preset",
    "residual_bytes",
    "residuals",
]
