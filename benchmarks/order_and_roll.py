"""The evidence for "auto": order, roll and random masks, one lever at a time and together, on GPUs and TPUs.

    python -m benchmarks.order_and_roll --json - --cache forms.json
    python -m benchmarks.order_and_roll --models mlp,gpt --targets gpu-h100 --limit-seconds 600 --cache forms.json

Training steps with remat none, full and dots, compiled for chips that need not be here. The plain form of each is as
its user wrote it: order free, layers unrolled, masks free. "tied", "head" (a tie where the head begins, and no
other), "rolled" and "fenced" change one of these, "rbg" the generator, "auto" is what a `MemoryConfig` with nothing
else asked for becomes. A form is worse than the plain one of the same model, target and remat where its compiled peak
or its estimated seconds are more than 1 % higher; better where neither is, and one is more than 1 % lower.
`worse_points` counts "auto".

"by hand" is a step without jaxmem, with `jax.checkpoint` round each layer.

With `--cache FILE` each program is compiled once, whatever becomes of the rest: an interrupted run continues, and a
change of a default compiles what it makes different. `--limit-seconds 0` shows what is known.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from benchmarks._cells import compilers
from benchmarks._forms import AUTO, BY_HAND, PLAIN, REMATS, Cell, Forms, design
from benchmarks._harness import emit
from benchmarks._order_and_roll_models import MODELS

TARGETS = ("gpu-h100", "tpu-v5e")
# On other chips the masks only: which generation pays for a fence.
FENCE_TARGETS, FENCE_MODELS = ("tpu-v4", "tpu-v6e"), ("mlp", "gpt_linen", "examples_gpt2")
SLACK = 1.01
Records = dict[Cell, dict]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON file that remembers each compile")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas")
    parser.add_argument("--targets", default=",".join((*TARGETS, *FENCE_TARGETS)), help="with commas")
    parser.add_argument("--limit-seconds", type=float, metavar="S", help="compile nothing after that time")
    options = parser.parse_args(argv)
    models, targets = (tuple(getattr(options, name).split(",")) for name in ("models", "targets"))
    for what, names, known in (("models", models, MODELS), ("targets", targets, (*TARGETS, *FENCE_TARGETS))):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{what}: wanted some of {', '.join(known)}; got {', '.join(map(repr, unknown))}")
    jax.config.update("jax_platforms", "cpu")  # the plugins of absent chips fail to start

    wanted = cells_of(models, targets)
    store = Forms(options.cache, options.limit_seconds)
    made = {cell: store.get(cell) for cell in wanted}
    records = {cell: record for cell, record in made.items() if record is not None}
    rows = list(compared(records))
    console = Console(stderr=True, width=160)
    for target in targets:
        console.print(table(target, records, rows))
    emit(
        {
            **counts(rows),
            **shown(records),
            "cells": len(records),
            "cells_missing": len(wanted) - len(records),
            "refused": sum("refused" in record for record in records.values()),
            "compiles": store.made,
        },
        target=", ".join(targets),
        provenance={"peak": "compiled", "temps": "compiled", "seconds": "modelled", "compile_seconds": "measured"},
        notes={
            "compilers": compilers(),
            "by_target_and_form": by_form(rows),
            "worse": [row for row in rows if row["verdict"] == "worse" and row["form"] == AUTO],
            "rows": [{**cell._asdict(), **record} for cell, record in records.items()],
        },
        out=options.json,
    )


def cells_of(models: tuple[str, ...], targets: tuple[str, ...]) -> list[Cell]:
    """All cells, those of worth first."""
    cells = design(models, [target for target in targets if target in TARGETS])
    for target in targets:
        if target in FENCE_TARGETS:
            names = [name for name in models if name in FENCE_MODELS]
            cells += [Cell(name, target, "full", form) for form in (PLAIN, "fenced", AUTO) for name in names]
    return cells


def compared(records: Records) -> Iterator[dict]:
    """Each form beside the plain one of the same model, target and remat."""
    for cell, record in records.items():
        plain = records.get(cell._replace(form=PLAIN))
        if plain is not None and cell.form not in (PLAIN, BY_HAND):
            yield {**cell._asdict(), **judge(record, plain)}


def judge(ours: dict, plain: dict) -> dict:
    """A record against the plain form's.

    >>> plain = {"peak_bytes": 100, "step_seconds": 1.0, "fits": True}
    >>> judge({"peak_bytes": 90, "step_seconds": 1.005, "fits": True}, plain)["verdict"]
    'better'
    >>> judge({"peak_bytes": 90, "step_seconds": 1.02, "fits": True}, plain)["verdict"]
    'worse'
    """
    if "refused" in ours or "refused" in plain:
        both = "refused" in plain
        return {"verdict": "neither" if both else "worse", "memory": None, "time": None}
    memory = ours["peak_bytes"] / plain["peak_bytes"]
    times = ours["step_seconds"], plain["step_seconds"]
    time = times[0] / times[1] if all(times) else None
    ratios = [memory] if time is None else [memory, time]
    if ours["fits"] != plain["fits"]:
        verdict = "better" if ours["fits"] else "worse"
    elif not ours["fits"]:
        verdict = "neither"
    else:
        worse, better = max(ratios) > SLACK, min(ratios) < 2 - SLACK
        verdict = "worse" if worse else "better" if better else "equal"
    return {"verdict": verdict, "memory": memory, "time": time}


def counts(rows: list[dict]) -> dict[str, int]:
    """Of what "auto" chooses."""
    verdicts = [row["verdict"] for row in rows if row["form"] == AUTO]
    return {f"{name}_points": verdicts.count(name) for name in ("worse", "better", "equal")}


def by_form(rows: list[dict]) -> dict[str, dict]:
    """By target and form: how often it was worse and better, and the extremes of both ratios."""
    found: dict[str, dict] = {}
    for row in rows:
        key = f"{row['target']} {row['form']}"
        one = found.setdefault(key, {"points": 0, "worse": 0, "better": 0, "memory": [], "time": []})
        one["points"] += 1
        if row["verdict"] in ("worse", "better"):
            one[row["verdict"]] += 1
        for ratio in ("memory", "time"):
            if row[ratio] is not None and row["verdict"] != "neither":
                one[ratio].append(row[ratio])
    for one in found.values():
        for ratio in ("memory", "time"):
            one[ratio] = [min(one[ratio]), max(one[ratio])] if one[ratio] else None
    return found


def shown(records: Records) -> dict[str, float]:
    """Single figures, of cells that are there."""

    def known(model: str, target: str, remat: str, form: str, field: str) -> float | None:
        return records.get(Cell(model, target, remat, form), {}).get(field)

    wanted = {
        "gpt_h100_full_peak_gib": ("gpt_shared", "gpu-h100", "peak_bytes"),
        "mlp_v5e_temps_gib": ("mlp", "tpu-v5e", "temp_bytes"),
        "mlp_v5e_seconds": ("mlp", "tpu-v5e", "step_seconds"),
        "gpt2_v5e_temps_gib": ("examples_gpt2", "tpu-v5e", "temp_bytes"),
    }
    found: dict[str, float] = {}
    for name, (model, target, field) in wanted.items():
        value = known(model, target, "full", AUTO, field)
        if value is not None:
            found[name] = value / 2**30 if name.endswith("gib") else value
    losses = [
        ours / plain
        for remat in REMATS
        for field in ("peak_bytes", "step_seconds")
        if (ours := known("mlp", "gpu-h100", remat, AUTO, field))
        and (plain := known("mlp", "gpu-h100", remat, PLAIN, field))
    ]
    over = [
        ours / record["peak_bytes"]
        for cell, record in records.items()
        if cell.form == BY_HAND and record.get("fits") and (ours := known(*cell[:3], AUTO, "peak_bytes"))
    ]
    rolled = [
        record["compile_seconds"] / plain
        for cell, record in records.items()
        if cell.form == "rolled" and "refused" not in record and (plain := known(*cell[:3], PLAIN, "compile_seconds"))
    ]
    found |= {"mlp_h100_over_plain": max(losses)} if losses else {}
    found |= {"over_hand_written_max": max(over)} if over else {}
    found |= {"rolled_compile_ratio": statistics.median(rolled)} if rolled else {}
    return found


def table(target: str, records: Records, rows: list[dict]) -> Table:
    """Of a target: the plain form's bytes and seconds, and what each other form changes."""
    verdicts = {Cell(*(row[field] for field in Cell._fields)): row for row in rows if row["target"] == target}
    forms = sorted({cell.form for cell in verdicts}, key=lambda form: (form != AUTO, len(form.split()), form))
    made = Table(title=f"{target}: change of peak and of seconds, %", title_style="bold")
    for name in ("model", "remat", "GiB", "ms", *forms):
        made.add_column(name, justify="left" if name in ("model", "remat") else "right")
    for cell, record in records.items():
        if cell.target == target and cell.form == PLAIN and "refused" not in record:
            others = [_change(verdicts.get(cell._replace(form=form))) for form in forms]
            seconds = record["step_seconds"]
            ms = f"{seconds * 1e3:.1f}" if seconds else ""
            size = f"{record['peak_bytes'] / 2**30:.2f}" + ("" if record["fits"] else " !")
            made.add_row(cell.model, cell.remat, size, ms, *others)
    return made


def _change(row: dict | None) -> str:
    if row is None:
        return ""
    if row["memory"] is None:
        return "refused"
    style = {"worse": "red", "better": "green", "equal": "dim", "neither": "dim"}[row["verdict"]]
    numbers = " ".join("?" if ratio is None else f"{100 * ratio - 100:+.1f}" for ratio in (row["memory"], row["time"]))
    return f"[{style}]{numbers}[/]"


if __name__ == "__main__":
    main()
