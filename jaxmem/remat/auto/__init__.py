"""Remat under a byte budget: capture what a block keeps, choose what it should keep, realise the choice."""

from jaxmem.remat.auto._assign import Assignment as Assignment
from jaxmem.remat.auto._auto import Auto as Auto
from jaxmem.remat.auto._auto import auto as auto
from jaxmem.remat.auto._decision import Decision as Decision
from jaxmem.remat.auto._decision import pose_call as pose_call
from jaxmem.remat.auto._fit import MAX_COMPILES as MAX_COMPILES
from jaxmem.remat.auto._fit import Measured as Measured
from jaxmem.remat.auto._fit import fit as fit
from jaxmem.remat.auto._fit import fit_budget as fit_budget
from jaxmem.remat.auto._frontier import Frontier as Frontier
from jaxmem.remat.auto._frontier import FrontierPoint as FrontierPoint
from jaxmem.remat.auto._frontier import frontier as frontier
from jaxmem.remat.auto._problem import Problem as Problem
from jaxmem.remat.auto._rates import Rates as Rates
from jaxmem.remat.auto._search import REFUSED as REFUSED
from jaxmem.remat.auto._search import Trial as Trial
from jaxmem.remat.auto._share import within_share as within_share
from jaxmem.remat.auto._solution import Solution as Solution
from jaxmem.remat.auto._solution import SolvedValue as SolvedValue
from jaxmem.remat.auto._solution import describe as describe
from jaxmem.remat.auto._solution import in_the_way as in_the_way

__all__ = [
    "MAX_COMPILES",
    "REFUSED",
    "Assignment",
    "Auto",
    "Decision",
    "Frontier",
    "FrontierPoint",
    "Measured",
    "Problem",
    "Rates",
    "Solution",
    "SolvedValue",
    "Trial",
    "auto",
    "describe",
    "fit",
    "fit_budget",
    "frontier",
    "in_the_way",
    "pose_call",
    "within_share",
]
