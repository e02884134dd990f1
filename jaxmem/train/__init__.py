"""From a workload and a config to a jitted step, its state, and the loop."""

from jaxmem.train._cures import cured as cured
from jaxmem.train._cures import try_cures as try_cures
from jaxmem.train._equivalent import Equivalence as Equivalence
from jaxmem.train._equivalent import assert_equivalent as assert_equivalent
from jaxmem.train._leaves import LeafDifference as LeafDifference
from jaxmem.train._loop import train_loop as train_loop
from jaxmem.train._state import TrainState as TrainState
from jaxmem.train._step import TrainStep as TrainStep
from jaxmem.train._step import make_train_step as make_train_step
from jaxmem.train._variants import analyze as analyze
from jaxmem.train._variants import compare as compare
from jaxmem.train._variants import target_for as target_for
from jaxmem.train._verification import Check as Check
from jaxmem.train._verification import Verification as Verification
from jaxmem.train._verify import Verifier as Verifier
from jaxmem.train._verify import verify as verify

__all__ = [
    "Check",
    "Equivalence",
    "LeafDifference",
    "TrainState",
    "TrainStep",
    "Verification",
    "Verifier",
    "analyze",
    "assert_equivalent",
    "compare",
    "cured",
    "make_train_step",
    "target_for",
    "train_loop",
    "try_cures",
    "verify",
]
