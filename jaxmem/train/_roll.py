"""Rolling as a lever: repeated unrolled layers run as one scan."""

import dataclasses
from collections.abc import Iterator

from jaxmem._signatures import declares
from jaxmem._units import format_bytes
from jaxmem.remat.roll import Rolled, what_rolls
from jaxmem.targets import Target
from jaxmem.train._lever import Lever, Told
from jaxmem.train._spec import StepSpec, loss_program, once

# "auto" leaves layers as they are: the stacked parameters and gradients may cost more than a scan saves. Full remat,
# compiled for an H100 by jax 0.10.2, unrolled → rolled: eight MLP layers of 32 MiB, peak 3.16 → 3.78 GiB,
# 46.0 → 48.0 ms; four GPT layers 2.26 → 2.40 GiB, 14.3 → 15.7 ms.


def _form(spec: StepSpec, target: Target) -> dict[str, bool]:
    return {"roll": spec.config.roll is True}


@once
def what_is_rolled(spec: StepSpec) -> Rolled:
    """What rolls in the loss of the first micro-batch; traced, not compiled."""
    if spec.decision is not None or not declares(spec.workload.loss_fn, "memory"):
        spec = spec.without_remat()  # its blocks are found in what was rolled
    return what_rolls(loss_program(spec.in_form(dataclasses.replace(spec.form, roll=False, order="free"))))


def _rivals(spec: StepSpec, target: Target) -> Iterator[dict[str, bool]]:
    if spec.config.roll == "auto" and what_is_rolled(spec).layers:
        yield {"roll": not spec.form.roll}


def _told(spec: StepSpec, target: Target) -> Told:
    if not spec.form.roll:
        return Told()
    found = what_is_rolled(spec)
    if not found.layers:
        why = " ".join(found.refused) or "no layers repeat outside of scans."
        return Told(notes=(f"roll=True does nothing: {why}",))
    stacked = ", ".join(f"{format_bytes(size)} in {dtype}" for dtype, size in _large(found.stacked_bytes).items())
    copy = f"; what is stacked for it takes {stacked} (modelled)" if stacked else ""
    counts = " and ".join(str(each.count) for each in found.layers)
    how = "one scan" if len(found.layers) == 1 else "a scan each"
    # What stays unrolled beside a scan, remat may not reach: it repeats no more.
    return Told(news=(f"{counts} equal layers run as {how}{copy}.",), notes=found.refused)


def _large(sizes: dict[str, int]) -> dict[str, int]:
    """Without keys and numbers."""
    return {dtype: size for dtype, size in sizes.items() if size > 0.01 * max(sizes.values())}


LEVER = Lever(form=_form, rivals=_rivals, told=_told)
