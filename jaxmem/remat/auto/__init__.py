"""Remat under a byte budget: capture what a block keeps, choose what it should keep, realise the choice."""

from jaxmem.remat.auto._assignment import Assignment as Assignment
from jaxmem.remat.auto._assignment import smallest as smallest
from jaxmem.remat.auto._auto import Auto as Auto
from jaxmem.remat.auto._auto import auto as auto
from jaxmem.remat.auto._auto import fit_budget as fit_budget
from jaxmem.remat.auto._frontier import Frontier as Frontier
from jaxmem.remat.auto._frontier import FrontierPoint as FrontierPoint
from jaxmem.remat.auto._frontier import frontier as frontier
from jaxmem.remat.auto._problem import Problem as Problem
from jaxmem.remat.auto._problem import build_problem as build_problem
from jaxmem.remat.auto._rates import Rates as Rates
from jaxmem.remat.auto._residual_plan import ResidualPlan as ResidualPlan
from jaxmem.remat.auto._search import MAX_COMPILES as MAX_COMPILES
from jaxmem.remat.auto._search import REFUSED as REFUSED
from jaxmem.remat.auto._search import fit as fit
from jaxmem.remat.auto._solution import Solution as Solution
from jaxmem.remat.auto._solution import SolvedValue as SolvedValue
from jaxmem.remat.auto._solution import describe as describe
from jaxmem.remat.auto._solution import in_the_way as in_the_way
from jaxmem.remat.auto._stored import Stored as Stored
from jaxmem.remat.auto._stored import versions as versions
from jaxmem.remat.auto._trial import Measured as Measured
from jaxmem.remat.auto._trial import Trial as Trial
from jaxmem.remat.auto._within import within_share as within_share
