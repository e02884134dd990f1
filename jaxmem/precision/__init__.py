"""Mixed precision: compute in a narrow dtype, keep master parameters and sums in a wide one."""

from jaxmem.loss_scale import DynamicLossScale as DynamicLossScale
from jaxmem.precision._cast import cast_floating as cast_floating
from jaxmem.precision._cast import compute_in as compute_in
from jaxmem.precision._cast import uses_dtype as uses_dtype
from jaxmem.precision._loss_scale_state import LossScaleState as LossScaleState
from jaxmem.precision._loss_scale_state import next_loss_scale as next_loss_scale
from jaxmem.precision._loss_scale_state import start_loss_scale as start_loss_scale
from jaxmem.precision._narrow_gathers import Widened as Widened
from jaxmem.precision._narrow_gathers import narrow_gathers as narrow_gathers
from jaxmem.precision._narrow_gathers import widened_gathers as widened_gathers
from jaxmem.precision._optimizer_state import store_state_in as store_state_in

__all__ = [
    "DynamicLossScale",
    "LossScaleState",
    "Widened",
    "cast_floating",
    "compute_in",
    "narrow_gathers",
    "next_loss_scale",
    "start_loss_scale",
    "store_state_in",
    "uses_dtype",
    "widened_gathers",
]
