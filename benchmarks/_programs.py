"""Stacks of layers with policies, and with choices of ours: compiled once by the content of the program."""

import hashlib
from collections.abc import Callable

import jax

import jaxmem
from benchmarks._cells import PEERS, Cells, peer
from benchmarks._stacks import STACKS, checkpointed
from benchmarks._vit_stack import VIT
from jaxmem.targets import on_target, place, resolve_target

MODELS = {"gpt": STACKS["gpt"], "llama": STACKS["llama"], "vit": VIT}
POLICIES = ("none", *PEERS)


def policy_record(cells: Cells, model: str, policy: str, target: str) -> dict:
    """The compiler's record of a stack under a peer's policy."""
    if model in STACKS:
        return cells.get(("peers", model, policy, target), peer)
    stack = MODELS[model]
    # Within a scan nothing merges a recomputation with its original, so it needs no barrier.
    wrap = (lambda block: block) if policy == "none" else checkpointed(PEERS[policy], prevent_cse=False)
    return program_record(cells, stack.loss(wrap), stack.shapes(), target, what=f"{model} {policy}")


def program_record(cells: Cells, loss: Callable, shapes: tuple, target: str, *, what: str) -> dict:
    """The compiler's record of the value and gradient of `loss(*shapes)`; `what` names it in the progress output.

    Programs of the same content are one compile.
    """
    step = jax.value_and_grad(loss)
    placed = place(shapes, resolve_target(target))
    with on_target(placed.target):
        text = jax.jit(step).trace(*placed.args).lower().as_text()
    content = hashlib.sha256(text.encode()).hexdigest()[:20]

    def make(content: str, target: str) -> dict:
        report = jaxmem.analyze(step, *shapes, target=target)
        return {
            "what": what,
            "temp_bytes": report.temp_bytes,
            "peak_bytes": report.peak_bytes,
            "fits": report.fits,
            "forward_flops": report.forward_flops,
            "recompute_flops": report.recompute_flops,
            "step_seconds": report.step_seconds,
        }

    return cells.get(("program", content, target), make)
