"""Rematerialisation: which values the forward pass keeps, and which the backward pass computes again."""

from jaxmem.policy import Policy as Policy
from jaxmem.policy import preset as preset
from jaxmem.remat._checkpoint import checkpoint as checkpoint
from jaxmem.remat._checkpoint import checkpoint_unchecked as checkpoint_unchecked
from jaxmem.remat._examine import Examination as Examination
from jaxmem.remat._examine import examine as examine
from jaxmem.remat._residuals import Residual as Residual
from jaxmem.remat._residuals import ResidualTable as ResidualTable
from jaxmem.remat._residuals import residual_bytes as residual_bytes
from jaxmem.remat._residuals import residuals as residuals

__all__ = [
    "Examination",
    "Policy",
    "Residual",
    "ResidualTable",
    "checkpoint",
    "checkpoint_unchecked",
    "examine",
    "preset",
    "residual_bytes",
    "residuals",
]
