"""The single promises of a config, each judged from numbers alone."""

from jaxmem._units import format_bytes, format_flops
from jaxmem.analysis import MemoryReport
from jaxmem.budget import is_auto
from jaxmem.config import MemoryConfig
from jaxmem.targets import Target
from jaxmem.train._verification import Check, Verdict

# Relative L2 distance that rounding may make in the worst leaf: some hundred times the dtype's epsilon in float32,
# where only the order of sums differs, a dozen times in the narrow ones, where every operation rounds.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# By how much a compiler's temporaries may grow by its choice of fusions and layouts.
_SLACK, _SLACK_BYTES = 0.02, 4096
_MERGED = 0.05  # share of asked recomputation that may be missing, or too much


def within(name: str, error: float, tolerance: float, detail: str) -> Check:
    return Check(name=name, verdict="pass" if error <= tolerance else "fail", detail=detail)  # NaN fails


def backend(target: Target, ran_on: str) -> Check | None:
    """Uncertain where gradients ran on another platform than the target's, or the target is not here; else None."""
    if target.platform == ran_on and not target.deviceless:
        return None
    return Check(
        name="backend",
        verdict="uncertain",
        detail=f"The numbers are of the program that is compiled for {ran_on}; that of {target.name} was not run.",
    )


def residuals(before: MemoryReport, after: MemoryReport) -> Check:
    old, new = before.saved_residual_bytes, after.saved_residual_bytes
    # A budget may be enough to keep everything.
    most = None if old is None else old if is_auto(after.remat) else old - 1
    verdict: Verdict = "uncertain" if most is None or new is None else "pass" if new <= most else "fail"
    detail = f"{format_bytes(new)} with remat, {format_bytes(old)} without."
    if verdict == "fail" and after.backend == "tpu":  # its compiler stores fewer residuals than are traced
        detail += " Without remat a TPU's compiler computes some where they are read: the temporaries tell."
        verdict = "uncertain"
    return Check(name="residuals", verdict=verdict, detail=detail)


def temps(before: MemoryReport, after: MemoryReport) -> Check:
    old, new = before.temp_bytes, after.temp_bytes
    detail = f"{format_bytes(new)} with remat, {format_bytes(old)} without."
    if old is None or new is None:
        return Check(name="temps", verdict="uncertain", detail=detail)
    if new <= old * (1 + _SLACK) + _SLACK_BYTES:
        return Check(name="temps", verdict="pass", detail=detail)
    if after.backend == "cpu":
        detail += " XLA:CPU's temporaries do not show what an accelerator's would."
        return Check(name="temps", verdict="uncertain", detail=detail)
    return Check(name="temps", verdict="fail", detail=detail)


def host(before: MemoryReport, after: MemoryReport) -> Check:
    old, new = before.host_temp_bytes, after.host_temp_bytes
    detail = f"{format_bytes(new)} on the host with offload, {format_bytes(old)} without."
    if after.backend == "cpu":
        detail = "XLA:CPU keeps host and device values in one memory, so offload is not evidenced."
        return Check(name="host", verdict="uncertain", detail=detail)
    if old is None or new is None:
        return Check(name="host", verdict="uncertain", detail=detail)
    return Check(name="host", verdict="pass" if new > old else "fail", detail=detail)


def recompute(after: MemoryReport) -> Check:
    asked, found = after.asked_recompute_flops, after.recompute_flops
    detail = f"{format_flops(asked)} asked for, {format_flops(found)} found in the compiled program."
    if asked is None or found is None:
        return Check(name="recompute", verdict="uncertain", detail=detail)
    if after.devices > 1 and asked:
        detail += f" The first is of all {after.devices} devices, the second of one."
        return Check(name="recompute", verdict="uncertain", detail=detail)
    if found < asked * (1 - _MERGED):
        detail += " The compiler merged the rest with the first computation: those residuals are kept."
        # XLA:CPU drops the barrier that keeps the two apart, whatever an accelerator's compiler does.
        return Check(name="recompute", verdict="uncertain" if after.backend == "cpu" else "fail", detail=detail)
    if found > asked * (1 + _MERGED):
        detail += " The compiler recomputes more of its own accord."
    return Check(name="recompute", verdict="pass", detail=detail)


def narrowest(config: MemoryConfig, of_its_own: frozenset[str]) -> str:
    """The narrowest floating dtype that a step rounds to, be it the config's or the loss's own."""
    dtypes = config.dtypes
    named = {name for name in (dtypes.compute, dtypes.accumulator, dtypes.params) if name in TOLERANCES} | of_its_own
    return max(named, key=lambda name: TOLERANCES[name])
