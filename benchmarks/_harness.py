"""What every benchmark shares: the JSON envelope, and timings as ratios of paired runs."""

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib import metadata

import jax
import numpy as np

import jaxmem
from jaxmem.cli._output import clean_stdout


def emit(
    figures: dict[str, float],
    *,
    target: str,
    provenance: dict[str, str],
    notes: dict | None = None,
    out: str | None = None,
) -> None:
    """Writes one JSON object to `out`; without it, to the place that `--json` names ("-" is stdout)."""
    if out is None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
        out = parser.parse_args().json
    packages = ("jax", "jaxlib", "flax", "optax")
    record = {
        "figures": figures,
        "provenance": provenance,
        "target": target,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
            "jaxmem": jaxmem.__version__,
        },
        **(notes or {}),
    }
    text = json.dumps(record, indent=2)
    if out == "-":
        with clean_stdout(True) as stdout:
            stdout.write(text + "\n")
    else:
        with open(out, "w") as file:
            file.write(text + "\n")


def seconds(fn: Callable[[], object]) -> float:
    """Wall seconds of one call, its result awaited."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def paired_ratio(ours: Callable, theirs: Callable, pairs: int, *, warm_up: int = 2) -> dict[str, float]:
    """Median of ours / theirs over pairs of adjacent runs, in alternating order, with a 95 % interval.

    Adjacent runs share whatever else the machine is doing; the interval is a bootstrap of the median.
    """
    for _ in range(warm_up):
        seconds(ours), seconds(theirs)
    ratios = []
    for i in range(pairs):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        a, b = seconds(first), seconds(second)
        ratios.append(a / b if i % 2 else b / a)
    medians = np.median(np.random.default_rng(0).choice(ratios, (2000, pairs)), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}
