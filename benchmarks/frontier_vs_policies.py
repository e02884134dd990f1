"""A byte budget against hand-made policies: at each one's memory, who recomputes less, and whose step is faster?

    python -m benchmarks.frontier_vs_policies --json - --cache frontier.json
    python -m benchmarks.frontier_vs_policies --models gpt --targets gpu-h100

Layers of a GPT, a Llama and a vision transformer under scan, value and gradient. Each of JAX's built-in policies and
MaxText's, with the same names in the same places, gives a level: our budget is 1.01 of its compiled peak. With the
objective "flops" our compiled peak must be within the budget, and our recomputed FLOPs of products in the optimised HLO
at most theirs. With "seconds", on the TPU, the seconds that its compiler estimates must be at most 1.01 of theirs.
Policies whose program the target's compiler refuses give no level. With a loose budget, all of the chip, our step is
compared with the fastest policy's.

"Strictly better" at a level: 1 % of the forward pass less recomputed, or no more, and 1 % less time or 5 % less memory;
with "seconds" 1 % less time, or no more, and 5 % less memory.
With `--cache FILE` each compile is saved as it ends; a file of `benchmarks.oracles` works too.
"""

import argparse
import itertools
import sys
from pathlib import Path

import jax

from benchmarks._cells import Cells, compilers
from benchmarks._choices import Chosen
from benchmarks._harness import emit
from benchmarks._programs import MODELS, POLICIES, policy_record
from jaxmem.errors import BudgetInfeasible
from jaxmem.targets import resolve_target

TARGETS = ("gpu-h100", "tpu-v5e:1x1")
SLACK = 1.01
OBJECTIVES = {"gpu-h100": ("flops",), "tpu-v5e:1x1": ("flops", "seconds")}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON file that remembers each compile")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--objectives", default="flops,seconds")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the plugins of absent chips fail to start

    cells, rows, loose = Cells(options.cache), [], []
    for model, target in itertools.product(options.models.split(","), options.targets.split(",")):
        ours = Chosen(cells, model, MODELS[model].loss(), MODELS[model].shapes(), target)
        for objective in OBJECTIVES[target]:
            if objective in options.objectives.split(","):
                rows += levels(cells, ours, model, objective)
        loose += [fastest(cells, ours, model)] if "seconds" in OBJECTIVES[target] else []
    worse = [row for row in rows if row["worse"]]
    emit(
        {
            "worse_points": len(worse),
            "points": len(rows),
            "strictly_better_share": sum(row["better"] for row in rows) / max(1, len(rows)),
            # Only if it was measured.
            **({"loose_budget_over_fastest": max(row["ratio"] for row in loose)} if loose else {}),
            "max_compiles_of_a_level": max((row["compiles"] for row in rows), default=0),
            "compiles": cells.made,
        },
        target=options.targets.replace(",", ", "),
        provenance={"peak": "compiled", "flops": "compiled", "seconds": "modelled"},
        notes={
            "compilers": compilers(),
            "by_target_and_objective": summary(rows),
            "worse": [name(row) for row in worse],
            "loose_budgets": loose,
            "rows": rows,
        },
        out=options.json,
    )


def levels(cells: Cells, ours: Chosen, model: str, objective: str) -> list[dict]:
    """A row for each policy that compiles, by the memory it needs."""
    theirs = {policy: policy_record(cells, model, policy, ours.target) for policy in POLICIES}
    rows = []
    for policy, record in sorted(theirs.items(), key=lambda item: item[1]["peak_bytes"]):
        if record["fits"] == "no":
            continue
        row = {"model": model, "target": ours.target, "objective": objective, "policy": policy}
        try:
            found = ours.fit(int(SLACK * record["peak_bytes"]), objective)
        except BudgetInfeasible as error:
            rows.append({**row, "worse": True, "better": False, "compiles": 0, "error": str(error)})
            continue
        row |= judge(found.record, record, objective)
        row |= {"compiles": found.new, "gap_to_bound": found.assignment.gap}
        rows.append(row)
        print(name(row), "WORSE" if row["worse"] else "better" if row["better"] else "equal", file=sys.stderr)
        print("   ", {key: row[key] for key in row if "_" in key or key == "compiles"}, file=sys.stderr, flush=True)
    return rows


def judge(ours: dict, theirs: dict, objective: str) -> dict:
    """Our record against a policy's.

    >>> ours = {"peak_bytes": 99, "recompute_flops": 5, "forward_flops": 100, "step_seconds": 1.0}
    >>> theirs = {"peak_bytes": 100, "recompute_flops": 9, "forward_flops": 100, "step_seconds": 1.0}
    >>> row = judge(ours, theirs, "flops")
    >>> row["worse"], row["better"]
    (False, True)
    """
    memory = ours["peak_bytes"] / theirs["peak_bytes"]
    ratio = ours["step_seconds"] / theirs["step_seconds"]
    if objective == "flops":
        more = (ours["recompute_flops"] - theirs["recompute_flops"]) / theirs["forward_flops"]
        worse, better = more > 0, more <= -0.01 or (more <= 0 and (ratio <= 0.99 or memory <= 0.95))
    else:
        worse, better = ratio > SLACK, ratio <= 0.99 or (ratio <= 1 and memory <= 0.95)
    worse = worse or memory > SLACK
    return {
        "peak_bytes": [ours["peak_bytes"], theirs["peak_bytes"]],
        "recompute_share": [r["recompute_flops"] / r["forward_flops"] for r in (ours, theirs)],
        "step_seconds": [ours["step_seconds"], theirs["step_seconds"]],
        "worse": worse,
        "better": better and not worse,
    }


def fastest(cells: Cells, ours: Chosen, model: str) -> dict:
    """All of the chip's memory against the fastest policy that fits it."""
    theirs = {policy: policy_record(cells, model, policy, ours.target) for policy in POLICIES}
    fitting = {policy: r["step_seconds"] for policy, r in theirs.items() if r["fits"] != "no"}
    policy = min(fitting, key=fitting.__getitem__)
    budget = resolve_target(ours.target).memory_bytes or max(r["peak_bytes"] for r in theirs.values())
    found = ours.fit(budget, "seconds")
    seconds = found.record["step_seconds"]
    row = {"model": model, "target": ours.target, "policy": policy, "compiles": found.new}
    row |= {"step_seconds": [seconds, fitting[policy]], "ratio": seconds / fitting[policy]}
    return row


def summary(rows: list[dict]) -> dict:
    """Counts by target and objective."""
    found = {}
    for row in rows:
        counts = found.setdefault(f"{row['target']} {row['objective']}", {"points": 0, "worse": 0, "better": 0})
        counts["points"] += 1
        counts["worse"] += row["worse"]
        counts["better"] += row["better"]
    return found


def name(row: dict) -> str:
    return " ".join(row[key] for key in ("model", "target", "objective", "policy"))


if __name__ == "__main__":
    main()
