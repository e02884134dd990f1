"""Random bits as a lever: whether masks are fenced, and which generator draws."""

from collections.abc import Iterator

import jax

from jaxmem import random_bits
from jaxmem._signatures import declares
from jaxmem._units import format_bytes
from jaxmem.random_bits import GIVEN, generator_of, is_key
from jaxmem.targets import Target, on_target
from jaxmem.train._lever import Lever, Told
from jaxmem.train._spec import StepSpec, loss_program, once

# What JAX calls the chips on which "auto" fences masks drawn by threefry: where the step recomputes, and its loss
# computes in 16 bits, or draws in no scan, and not for attention weights. Peak GiB and estimated ms of a step,
# free → fenced, dropout 0.1, jax 0.10.2, libtpu 0.0.52; two GPT-2 layers under scan at batch 8 × 1024 (vocabulary
# 8192), and eight unrolled MLP layers in float32:
#             GPT bfloat16, full             GPT float32, full             MLP, full
#   tpu-v5e   12.34 → 1.49   169.6 → 45.5    1.57 → 1.73   50.8 → 49.0     4.89 → 1.92 (temps)   272 → 182
#    unrolled                               1.31 → 1.60   49.4 → 47.0
#   gpu-h100   1.42 → 1.42     6.5 → 6.7                                   3.16 → 3.16          46.0 → 47.7
# Without remat a v5e's MLP peaks at 6.01 → 6.27 GiB, 146 → 143 ms.
_FENCED_ON = frozenset({"TPU v5 lite"})


def drawn(spec: StepSpec) -> random_bits.Drawn:
    """What the loss draws for one micro-batch, found once for all settings of a step that share a plain one."""
    return _drawn(spec.as_written)


@once
def _drawn(spec: StepSpec) -> random_bits.Drawn:
    return random_bits.drawn(loss_program(spec))


def _generators(spec: StepSpec) -> set[str] | None:
    """Those of the step's keys, of a loss that takes one and in the model state; None where only tracing would tell."""
    workload, state = spec.workload, spec.given()[1]
    if state is None and workload.state is not None:
        return None
    # Without a key of the workload's own it is one of JAX's default, as a raw one is; none can be made for a target.
    asked = {generator_of(workload.rng)} if declares(workload.loss_fn, "rng") else set()
    return asked | {generator_of(leaf) for leaf in jax.tree.leaves(state) if is_key(leaf)}


def _form(spec: StepSpec, target: Target) -> dict[str, str]:
    asked = spec.config.random
    return {"random": asked if asked != "auto" else "fenced" if _pays(spec, target) else "free"}


def _pays(spec: StepSpec, target: Target) -> bool:
    """Whether fences were never seen to be worse for such a loss on such a chip, and often better."""
    kind = target.devices[0].device_kind if target.chip is None else target.chip.kind
    if kind not in _FENCED_ON or not spec.config.recomputes or not _draws_by(spec, "threefry2x32"):
        return False
    found = _drawn_on(spec, target)
    return found.masks > 0 and (found.narrow or (not found.in_scans and found.most_axes < 4))


def _draws_by(spec: StepSpec, generator: str) -> bool:
    """Whether keys of the step may be of a generator, after they were carried over."""
    found = _generators(spec)
    if found == set() or spec.config.generator not in (GIVEN, generator):
        return False
    return found is None or generator in found or spec.config.generator == generator


def _drawn_on(spec: StepSpec, target: Target) -> random_bits.Drawn:
    try:
        with on_target(target):
            return drawn(spec)
    except Exception:  # whoever traces the step says what is wrong with it, and whose fault that is
        return random_bits.NOTHING


def _rivals(spec: StepSpec, target: Target) -> Iterator[dict[str, str]]:
    if spec.config.random != "auto" or _generators(spec) == set():
        return
    if _drawn_on(spec, target).masks:
        yield {"random": "free" if _form(spec, target)["random"] == "fenced" else "fenced"}


def _idle(spec: StepSpec) -> Iterator[str]:
    found, generator = _generators(spec), spec.config.generator
    if generator == GIVEN or found is None:
        return
    if not found:
        yield f"generator={generator!r} does nothing, as neither the loss nor the model state takes a key of the step."
    elif found == {generator}:
        yield f"generator={generator!r} does nothing, as the step's key is of that generator."


def _told(spec: StepSpec, target: Target) -> Told:
    config, fenced = spec.config, spec.form.random == "fenced"
    if _generators(spec) == set() and config.random != "fenced":
        return Told()
    notes, news = [], []
    if fenced:
        found = drawn(spec)
        if found.masks:
            masks = "1 random mask is" if found.masks == 1 else f"{found.masks} random masks are"
            news.append(
                f"{masks} fenced, {format_bytes(found.mask_bytes)} a micro-batch at a byte an element: each is drawn "
                "by itself, and not with what reads it."
            )
        elif config.random == "fenced":
            notes.append(
                f"random='fenced' does nothing, as the loss draws no mask of at least {random_bits.LEAST} elements."
            )
    if config.generator != GIVEN and not any(True for _ in _idle(spec)) and not drawn(spec).draws:
        notes.append(f"generator={config.generator!r} does nothing, as the loss draws no random numbers.")
    return Told(notes=tuple(notes), news=tuple(news))


LEVER = Lever(form=_form, rivals=_rivals, idle=_idle, told=_told)
