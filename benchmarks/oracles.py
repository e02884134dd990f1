"""The reference tables of jaxmem's claims, recomputed: temporaries under remat by compiler, and the peers' policies.

    python -m benchmarks.oracles --json - --cache oracles.json
    python -m benchmarks.oracles --table peers --models gpt --targets gpu-h100

`traps`: temporaries of an eight-layer transformer by checkpoint policy, unrolled and under scan, from XLA:CPU with and
without its memory-minimising scheduler and from the TPU's compiler; and which of each compiler's fields are true.
`peers`: MaxText's policies on a GPT's and a Llama's layers under scan, for a GPU and a TPU that need not be here. Each
number is shown beside the one published before. One JSON object; the tables go to stderr. With `--cache FILE` each
compile is saved as it ends, so an interrupted run continues.
"""

import argparse
import contextlib
import itertools
import sys
from pathlib import Path

import jax

from benchmarks._cells import PEERS, Cells, compilers, peer, traps
from benchmarks._harness import emit
from benchmarks._published import PEERS_GIB, PEERS_SECONDS, PEERS_SHARE, TRAPS_MIB

TARGETS = ("gpu-h100", "tpu-v5e:1x1")
MODELS = ("gpt", "llama")
POLICIES = ("none", *PEERS)
# The fields are read off a plain scan, and off one whose layers offload 48 MiB between them.
FIELDS = tuple(itertools.product(("none", "offload"), ("scan",), ("cpu-default", "gpu-h100", "tpu-v5e")))
OFFLOADED_BYTES = 8 * 4 * 512 * 3 * 256 * 4  # layers x batch x time x (query, key, value) x float32


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON file that remembers each compile")
    parser.add_argument("--table", choices=("traps", "peers"), help="only this table")
    parser.add_argument("--models", default=",".join(MODELS), help="of the peers' table, with commas")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of the peers' table, with commas")
    parser.add_argument("--targets", default=",".join(TARGETS), help="of both tables, with commas")
    options = parser.parse_args(argv)
    chosen = {name: _chosen(parser, name, getattr(options, name)) for name in ("models", "policies", "targets")}
    jax.config.update("jax_platforms", "cpu")  # the plugins of absent chips fail to start

    cells = Cells(options.cache)
    figures: dict[str, float] = {}
    rows: list[dict] = []
    notes: dict = {"compilers": compilers(), "rows": rows}
    stopped = contextlib.suppress(KeyboardInterrupt) if options.cache else contextlib.nullcontext()
    finished = False
    with stopped:
        if options.table != "peers":
            rows += traps_rows(cells, chosen["targets"])
            notes["fields"] = fields(cells, chosen["targets"])
        if options.table != "traps":
            rows += peers_rows(cells, chosen["models"], chosen["policies"], chosen["targets"])
        finished = True
    if not finished:
        print(f"stopped: the rest is made by the same command, {options.cache} has what is done", file=sys.stderr)
        raise SystemExit(130)
    figures |= {row["name"]: row["ours"] for row in rows}
    figures |= summary(rows)
    figures |= {"compiles": len(rows) and cells.made}
    for line in lines(rows):
        print(line, file=sys.stderr)
    emit(
        figures,
        target=", ".join(("cpu", *chosen["targets"])),
        provenance={"temp": "compiled", "residuals": "modelled", "share": "compiled", "seconds": "modelled"},
        notes=notes,
        out=options.json,
    )


def _chosen(parser: argparse.ArgumentParser, what: str, text: str) -> tuple[str, ...]:
    known = {"models": MODELS, "policies": POLICIES, "targets": TARGETS}[what]
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        parser.error(f"--{what}: wanted some of {', '.join(known)}; got {text!r}")
    return names


def row(table: str, name: str, unit: str, ours: float, published: float | None, **more) -> dict:
    """Our number beside the published one; their ratio if both are positive."""
    ratio = ours / published if published else None
    return {"table": table, "name": name, "unit": unit, "ours": ours, "published": published, "ratio": ratio, **more}


def traps_rows(cells: Cells, targets: tuple[str, ...]) -> list[dict]:
    """Temporaries of the eight layers, MiB, in the published order of cells."""
    rows = []
    for (policy, layout, compiler), published in TRAPS_MIB.items():
        if compiler.startswith("tpu") and not any(name.startswith("tpu") for name in targets):
            continue
        record = cells.get(("traps", policy, layout, compiler), traps)
        name = f"small_{policy}_{layout}_{compiler}".replace("-", "_")
        quantity = "residual" if compiler == "residuals" else "temp"
        name = name.removesuffix("_residuals") + f"_{quantity}_mib"
        rows.append(row("traps", name, "MiB", record["temp_bytes"] / 2**20, published))
    return rows


def fields(cells: Cells, targets: tuple[str, ...]) -> dict:
    """By compiler: the error of each of its fields against the program's real bytes."""
    found = {}
    for policy, layout, compiler in FIELDS:
        if compiler.startswith("cpu") or any(name.startswith(compiler) for name in targets):
            record = cells.get(("traps", policy, layout, compiler), traps)
            verdict = found.setdefault(compiler, {})
            if policy == "none":
                counted = record["cost_analysis_flops"]
                verdict["compiler_peak_share_of_sum"] = record["compiler_peak_bytes"] / record["sum_bytes"]
                verdict["cost_analysis_flops_share"] = counted / record["flops"] if counted else None
                verdict["cost_analysis_seconds"] = record["cost_analysis_seconds"]
            else:
                verdict["host_temp_share_of_offloaded"] = record["host_temp_bytes"] / OFFLOADED_BYTES
    return found


def peers_rows(cells: Cells, models, policies, targets) -> list[dict]:
    """Temporaries in GiB, shares of recomputation, and seconds by the TPU compiler's cycles."""
    rows = []
    for target, model, policy in itertools.product(targets, models, policies):
        record = cells.get(("peers", model, policy, target), peer)
        chip = target.partition(":")[0].partition("-")[2]
        name, refused = f"{model}_{chip}_{policy}", record["fits"] == "no" and target.startswith("tpu")
        held = record["peak_bytes"] if refused else record["temp_bytes"]
        quantity = "needed" if refused else "temp"
        published = PEERS_GIB.get((model, policy, target))
        rows.append(row("peers", f"{name}_{quantity}_gib", "GiB", held / 2**30, published, fits=record["fits"]))
        if record["recompute_flops"] is not None and record["forward_flops"] and not refused:
            share = record["recompute_flops"] / record["forward_flops"]
            rows.append(row("peers", f"{name}_recompute_share", "share", share, PEERS_SHARE.get((model, policy))))
        if record["cycle_seconds"] and not refused:
            published = PEERS_SECONDS.get((model, policy))
            more = {"with_roofline": record["step_seconds"]}
            rows.append(row("peers", f"{name}_cycle_seconds", "s", record["cycle_seconds"], published, **more))
    return rows


def summary(rows: list[dict]) -> dict[str, float]:
    """The largest factor between our number and the published one, by unit; and the largest difference of shares."""
    worst: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        worst[name] = max(worst.get(name, 0.0), value)

    for one in rows:
        if one["published"] is None:
            continue
        if one["unit"] == "share":
            note("max_share_difference_to_notes", abs(one["ours"] - one["published"]))
        else:
            what = "seconds" if one["unit"] == "s" else "residual" if "residual" in one["name"] else "temp"
            factor = max(one["ratio"], 1 / one["ratio"])
            note(f"max_{what}_ratio_to_notes", factor)
            if what == "temp":
                note(f"{one['table']}_max_temp_ratio_to_notes", factor)
    return worst


def lines(rows: list[dict]):
    """The rows as aligned text."""
    yield f"{'':60} {'ours':>9} {'published':>9} {'ratio':>6}"
    for one in rows:
        published = "" if one["published"] is None else f"{one['published']:g}"
        ratio = "" if one["ratio"] is None else f"{one['ratio']:.2f}"
        yield f"{one['name']:60} {one['ours']:9.4g} {published:>9} {ratio:>6} {one['unit']}"


if __name__ == "__main__":
    main()
