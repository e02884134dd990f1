"""The largest batch on 16e9 bytes with at most one extra forward pass, beside what Checkmate published.

    python -m benchmarks.checkmate_table --json -
    python -m benchmarks.checkmate_table --models vgg19,unet --seconds 20 --target none

The accounting is Checkmate's (arXiv:1910.02653): a value for each layer and one for its gradient, float32; parameters
and their gradients are always alive; the image and the convolutions' scratch are not counted. Bytes grow linearly with
the batch, so the largest batch follows from the lowest peak of a batch of one. HiGHS finds the schedule; its peak is
that of a run operation by operation (`benchmarks._checkmate_replay`), not the one that the program promised.

For each model: `max_batch`; `bound`, an upper bound for every schedule, at which one operation's inputs and output fill
the memory; `bound_in_reverse`, the bound for schedules that compute each gradient once, in reverse; `checkpoint_all`,
the batch if the forward pass's values stay to the end; `recomputed_share` of the forward pass's FLOPs; and `seconds`.

For comparison, compiled peaks of the same network and batch in JAX, value and gradient, as shares of the 16e9 bytes:
`compiled_plain` without remat, and `compiled_budget` with `remat.fit_budget`'s search for these bytes, or the smallest
peak if none fits. They are not Checkmate's quantity: a compiler fuses activations and normalisations into convolutions,
needs scratch and both layouts of an array, and jaxmem saves each block's inputs.
"""

import argparse
import sys
from pathlib import Path

import jax

from benchmarks._cells import Cells
from benchmarks._checkmate_graph import Graph, training_step
from benchmarks._checkmate_models import MODELS, Layers
from benchmarks._checkmate_networks import network
from benchmarks._checkmate_replay import replay
from benchmarks._checkmate_search import lowest_peak
from benchmarks._checkmate_stages import least_peak_bytes
from benchmarks._choices import Chosen
from benchmarks._harness import emit
from benchmarks._programs import program_record
from benchmarks._published import CHECKMATE
from jaxmem._stdout import stdout_to_stderr
from jaxmem.errors import BudgetInfeasible

MEMORY_BYTES = 16 * 10**9


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}, with commas")
    parser.add_argument("--seconds", type=float, default=75.0, help="of search for a model, before it settles for more")
    parser.add_argument("--target", default="gpu-h100", help='whose compiler stands beside; "none" leaves it out')
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON file that remembers each compile")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the plugins of absent chips fail to start
    cells = Cells(options.cache)
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"--models: wanted some of {', '.join(MODELS)}; got {', '.join(sorted(unknown))}")
    rows = []
    for name in names:
        with stdout_to_stderr():
            rows.append(row(name, training_step(MODELS[name]().graph()), options.seconds))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    quantities = ["max_batch", "bound", "bound_in_reverse", "checkpoint_all", "recomputed_share", "seconds"]
    if options.target != "none":
        quantities += ["compiled_plain", "compiled_budget"]
        for one in rows:
            one |= compiled(cells, one["model"], MODELS[one["model"]](), one["max_batch"], options.target)
    emit(
        {f"{one['model']}_{quantity}": one[quantity] for one in rows for quantity in quantities},
        target="16e9 bytes, by Checkmate's accounting",
        provenance={
            "max_batch": "a HiGHS schedule, run operation by operation",
            "bound": "the largest operation's inputs and output",
            "bound_in_reverse": "the same with the gradients that are alive beside it",
            "checkpoint_all": "the plain step run with all values of the forward pass kept to its end",
            "compiled_plain, compiled_budget": f"compiled for {options.target}",
            "published": "arXiv:1910.02653, figure 5",
        },
        notes={"rows": rows},
        out=options.json,
    )


def largest_batch(graph: Graph, peak_bytes: int) -> int:
    """The number of images that fit beside the parameters and their gradients, from the bytes of one."""
    return (MEMORY_BYTES - graph.fixed_bytes) // peak_bytes


def row(name: str, step: Graph, seconds: float) -> dict:
    """The figures of one model, and the published ones."""
    plan = lowest_peak(step, seconds=seconds)
    found = replay(step, plan.schedule)
    everything = replay(step, range(len(step.names)), hold_all=True)
    published, published_everything = CHECKMATE[name]
    return {
        "model": name,
        "layers": step.forward,
        "max_batch": largest_batch(step, found.peak_bytes),
        "published": published,
        "bound": largest_batch(step, step.largest_operation_bytes),
        "bound_in_reverse": largest_batch(step, least_peak_bytes(step)),
        "checkpoint_all": largest_batch(step, everything.peak_bytes),
        "published_checkpoint_all": published_everything,
        "recomputed_share": found.recomputed_flops / step.forward_flops,
        "seconds": plan.seconds,
        "image_bytes": found.peak_bytes,
        "fixed_bytes": step.fixed_bytes,
    }


def compiled(cells: Cells, name: str, net: Layers, batch: int, target: str) -> dict[str, float]:
    """Compiled peaks of the network's value and gradient, as shares of the memory."""
    loss, shapes = network(net, batch)
    plain = program_record(cells, loss, shapes, target, what=f"{name} plain")["peak_bytes"]
    chosen = Chosen(cells, name, loss, shapes, target)
    try:
        budget = chosen.fit(MEMORY_BYTES, "flops").record["peak_bytes"]
    except BudgetInfeasible:
        budget = min(record["peak_bytes"] for record in chosen.records.values())
    found = {"compiled_plain": plain / MEMORY_BYTES, "compiled_budget": budget / MEMORY_BYTES}
    print(name, {key: round(value, 3) for key, value in found.items()}, file=sys.stderr, flush=True)
    return found


def line(one: dict) -> str:
    """A row as text."""
    return (
        f"{one['model']:10} batch {one['max_batch']:5} (published {one['published']:5}, bound {one['bound']:5}), "
        f"everything kept {one['checkpoint_all']:4} (published {one['published_checkpoint_all'] or '–':>4}), "
        f"recomputed {one['recomputed_share']:.2f} of a forward pass, {one['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
