"""jaxmem: does my training step fit, what is the cheapest way to make it fit, and can I trust the answer?"""

import importlib
from typing import TYPE_CHECKING

from jaxmem import _display

if TYPE_CHECKING:
    from jaxmem import accumulate as accumulate
    from jaxmem import analysis as analysis
    from jaxmem import checkpoint as checkpoint
    from jaxmem import errors as errors
    from jaxmem import precision as precision
    from jaxmem import remat as remat
    from jaxmem import report as report
    from jaxmem import targets as targets
    from jaxmem import train as train
    from jaxmem.analysis import Comparison as Comparison
    from jaxmem.analysis import MemoryReport as MemoryReport
    from jaxmem.config import Memory as Memory
    from jaxmem.config import MemoryConfig as MemoryConfig
    from jaxmem.config import Precision as Precision
    from jaxmem.objective import Last as Last
    from jaxmem.objective import LossOutput as LossOutput
    from jaxmem.objective import Max as Max
    from jaxmem.objective import Sum as Sum
    from jaxmem.objective import WeightedMean as WeightedMean
    from jaxmem.policy import Policy as Policy
    from jaxmem.train import TrainState as TrainState
    from jaxmem.train import TrainStep as TrainStep
    from jaxmem.train import analyze as analyze
    from jaxmem.train import assert_equivalent as assert_equivalent
    from jaxmem.train import compare as compare
    from jaxmem.train import cured as cured
    from jaxmem.train import make_train_step as make_train_step
    from jaxmem.train import train_loop as train_loop
    from jaxmem.train import try_cures as try_cures
    from jaxmem.train import verify as verify
    from jaxmem.workload import Workload as Workload

__version__ = "0.1.0.dev0"

# Everything is loaded on first use: the command line sets XLA's environment before JAX starts, and nobody waits for
# optax, flax or the parsers of compiler output before they are needed.
_NAMES = {
    "Comparison": "jaxmem.analysis",
    "Last": "jaxmem.objective",
    "LossOutput": "jaxmem.objective",
    "Max": "jaxmem.objective",
    "Memory": "jaxmem.config",
    "MemoryConfig": "jaxmem.config",
    "MemoryReport": "jaxmem.analysis",
    "Policy": "jaxmem.policy",
    "Precision": "jaxmem.config",
    "Sum": "jaxmem.objective",
    "TrainState": "jaxmem.train",
    "TrainStep": "jaxmem.train",
    "WeightedMean": "jaxmem.objective",
    "Workload": "jaxmem.workload",
    "analyze": "jaxmem.train",  # train teaches analysis what a Workload is
    "assert_equivalent": "jaxmem.train",
    "compare": "jaxmem.train",
    "cured": "jaxmem.train",
    "make_train_step": "jaxmem.train",
    "train_loop": "jaxmem.train",
    "try_cures": "jaxmem.train",
    "verify": "jaxmem.train",
}
_PACKAGES = ("accumulate", "analysis", "checkpoint", "errors", "precision", "remat", "report", "targets", "train")

__all__ = [*_NAMES, *_PACKAGES]  # pyright: ignore[reportUnsupportedDunderAll]


_display.draw_with(lambda: importlib.import_module("jaxmem.report.shown"))


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"jaxmem.{name}")
    close = "" if name.startswith("_") else importlib.import_module("jaxmem._suggest").did_you_mean(name, __all__)
    raise AttributeError(f"module 'jaxmem' has no attribute {name!r}. {close}".strip())


def __dir__():
    return sorted(__all__)
