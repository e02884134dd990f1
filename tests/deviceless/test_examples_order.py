"""A sample of `benchmarks/policy_order.py`, which takes an hour: training steps need what the policies promise.

`test_blocks.py` has the rest of the sample, on gradients alone: all four examples, and a TPU.
"""

from benchmarks.policy_order import REMATS, TOLERANCE, temp_bytes, violations


def test_a_step_under_a_policy_that_keeps_more_needs_more():
    """Blocks are found; without them `full` would need what `none` does."""
    temps = {remat: temp_bytes("gpu-h100", "llama", remat, handle=False) for remat in ("full", "none")}
    assert violations(temps) == []
    assert temps["full"] < temps["none"] * 2 / 3


def test_violations_are_told():
    temps = {"none": 1000, "dots": 900, "dots_no_batch": 905, "full": 100}
    assert violations(temps) == []  # within the tolerance
    assert violations(temps | {"dots": 800}) == ["dots 800 < dots_no_batch 905"]
    falling = {remat: int(1000 * (1 - 2 * TOLERANCE) ** i) for i, remat in enumerate(REMATS)}
    assert len(violations(falling)) == 6
