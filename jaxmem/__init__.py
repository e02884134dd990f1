"""jaxmem: does my training step fit, what is the cheapest way to make it fit, and can I trust the answer?"""

import importlib
from typing import TYPE_CHECKING

from jaxmem import errors as errors
from jaxmem.config import Memory as Memory
from jaxmem.config import MemoryConfig as MemoryConfig
from jaxmem.config import Precision as Precision
from jaxmem.objective import Last as Last
from jaxmem.objective import LossOutput as LossOutput
from jaxmem.objective import Max as Max
from jaxmem.objective import Sum as Sum
from jaxmem.objective import WeightedMean as WeightedMean
from jaxmem.workload import Workload as Workload

if TYPE_CHECKING:
    from jaxmem import accumulate as accumulate
    from jaxmem import analysis as analysis
    from jaxmem import precision as precision
    from jaxmem import remat as remat
    from jaxmem import train as train
    from jaxmem.analysis import Comparison as Comparison
    from jaxmem.analysis import MemoryReport as MemoryReport
    from jaxmem.train import TrainState as TrainState
    from jaxmem.train import TrainStep as TrainStep
    from jaxmem.train import analyze as analyze
    from jaxmem.train import compare as compare
    from jaxmem.train import make_train_step as make_train_step
    from jaxmem.train import train_loop as train_loop

__version__ = "0.1.0.dev0"

# What costs more than JAX itself to import (optax, flax, the compilers' parsers) is loaded on first use.
# `analyze` and `compare` come from train, which teaches them what a Workload is.
_LAZY_NAMES = {
    "Comparison": "jaxmem.analysis",
    "MemoryReport": "jaxmem.analysis",
    "TrainState": "jaxmem.train",
    "TrainStep": "jaxmem.train",
    "analyze": "jaxmem.train",
    "compare": "jaxmem.train",
    "make_train_step": "jaxmem.train",
    "train_loop": "jaxmem.train",
}
_LAZY_PACKAGES = ("accumulate", "analysis", "precision", "remat", "train")

__all__ = [
    "Last", "LossOutput", "Max", "Memory", "MemoryConfig", "Precision", "Sum", "WeightedMean", "Workload", "errors",
    *_LAZY_NAMES, *_LAZY_PACKAGES,
]  # fmt: skip


def __getattr__(name: str):
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    if name in _LAZY_PACKAGES:
        return importlib.import_module(f"jaxmem.{name}")
    raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
