"""Named scopes that the train step opens, by which the analysis knows its parts again in compiled programs."""

ACCUMULATE_SCOPE = "accumulate_gradients"
"""Round the addition of a micro-batch's gradients to the accumulators."""

OPTIMIZER_SCOPE = "optimizer_update"
"""Round the optimizer's update and its application to the parameters."""
