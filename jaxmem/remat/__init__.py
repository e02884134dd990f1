"""Rematerialisation: which values the forward pass keeps, and which the backward pass computes again."""

from jaxmem.remat._checkpoint import checkpoint as checkpoint
from jaxmem.remat._residuals import residual_bytes as residual_bytes

__all__ = ["checkpoint", "residual_bytes"]
