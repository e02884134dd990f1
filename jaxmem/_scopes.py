"""Named scopes of the train step, by which the analysis recognises its parts in compiled programs."""

ACCUMULATE_SCOPE = "accumulate_gradients"
"""Around the addition of a micro-batch's gradients to the accumulators."""

OPTIMIZER_SCOPE = "optimizer_update"
"""Around the optimizer's update and its application to the parameters."""
