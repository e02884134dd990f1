"""With all of a TPU's memory as the budget: is a step ever slower than under the fastest policy that others name?

    python -m benchmarks.loose_budget --json - --cache loose.json
    python -m benchmarks.loose_budget --stacks mlp --policies full,dots,none

Four stacks of layers under scan as training steps with SGD: a GPT with the heads before the positions, a Llama with
grouped queries and SwiGLU, a wide MLP, and a GPT with 64-wide heads. Each with JAX's built-in policies and MaxText's,
with the same names in the same places, as `jax.checkpoint` of a layer, and as `fit_budget` of all that the chip has.
Seconds are those of the TPU's compiler. `loose_budget_over_fastest`: the largest ratio of ours to the fastest policy
that fits. With `--cache FILE` each policy's compile is saved as it ends; JAXMEM_CACHE_DIR remembers those of budgets.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import jax
import optax

from benchmarks._cells import PEERS, Cells, compilers
from benchmarks._harness import emit
from benchmarks._loose_stacks import LOOSE
from benchmarks._stacks import checkpointed
from jaxmem import TrainStep, Workload, make_train_step
from jaxmem.targets import resolve_target

TARGET = "tpu-v5e"
POLICIES = ("none", *PEERS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON file that remembers each policy's compile")
    parser.add_argument("--stacks", default=",".join(LOOSE))
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the plugins of absent chips fail to start

    cells, policies = Cells(options.cache), options.policies.split(",")
    rows = [row(cells, name, policies) for name in options.stacks.split(",")]
    emit(
        {
            "loose_budget_over_fastest": max(each["ratio"] for each in rows),
            "stacks": len(rows),
            "max_compiles": max(each["compiles"] for each in rows),
            "mean_compiles": sum(each["compiles"] for each in rows) / len(rows),
        },
        target=TARGET,
        provenance={"seconds": "modelled", "peak": "compiled"},
        notes={"compilers": compilers(), "policies": policies, "rows": rows},
        out=options.json,
    )


def row(cells: Cells, name: str, policies: list[str]) -> dict:
    """Ours and the policies' seconds and peaks for a stack."""
    ours = step_of(name, "none").fit_budget(resolve_target(TARGET).memory_bytes or 0)
    report, decision = ours.report(), ours.decision
    assert decision is not None
    found = {"stack": name, "ours": [report.step_seconds, report.peak_bytes], "compiles": decision.compiles}
    print(found, file=sys.stderr, flush=True)
    theirs = {policy: policy_record(cells, name, policy) for policy in policies}
    fitting = {policy: record["step_seconds"] for policy, record in theirs.items() if record["fits"] != "no"}
    fastest = min(fitting, key=fitting.__getitem__)
    found |= {"fastest": fastest, "ratio": (report.step_seconds or 0.0) / fitting[fastest]}
    found |= {"policies": {policy: [r["step_seconds"], r["peak_bytes"]] for policy, r in theirs.items()}}
    print(found, file=sys.stderr, flush=True)
    return found


def step_of(name: str, policy: str) -> TrainStep:
    """The training step of a stack, each layer under a policy."""
    stack = LOOSE[name]
    # Within a scan nothing merges a recomputation with its original, so it needs no barrier.
    wrap = (lambda block: block) if policy == "none" else checkpointed(PEERS[policy], prevent_cse=False)
    loss = stack.loss(wrap)
    params, batch = stack.shapes()
    workload = Workload(lambda params, batch: loss(params, batch), params, batch, optax.sgd(0.1))
    return make_train_step(workload, target=TARGET)


def policy_record(cells: Cells, name: str, policy: str) -> dict:
    """What the compiler says of a policy; policies that make the same program are one compile."""
    step = step_of(name, policy)
    content = hashlib.sha256(step.lower().as_text().encode()).hexdigest()[:20]

    def make(_: str) -> dict:
        report = step.report()
        return {"step_seconds": report.step_seconds, "peak_bytes": report.peak_bytes, "fits": report.fits}

    return cells.get(("loose", content), make)


if __name__ == "__main__":
    main()
