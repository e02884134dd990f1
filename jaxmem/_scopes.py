"""Named scopes that tell the parts of a compiled program: those that the train step opens, and JAX's own."""

ACCUMULATE_SCOPE = "accumulate_gradients"
"""Around the addition of a micro-batch's gradients to the accumulators."""

OPTIMIZER_SCOPE = "optimizer_update"
"""Around the optimizer's update and its application to the parameters."""

REMAT_SCOPE = "rematted_computation"
"""JAX's, around what a checkpoint computes a second time."""

BACKWARD_SCOPE = "transpose("
"""How JAX's scope of everything that the backward pass computes begins."""

FORWARD_SCOPE = "jvp("
"""How JAX's scope of everything that is differentiated begins; that of its backward pass is within it."""
