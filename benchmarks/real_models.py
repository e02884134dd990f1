"""Other authors' models under a budget: are values and gradients unchanged, and are the bytes saved?

    pip install transformers==4.57.3 flaxmodels==0.1.3 dm-haiku==0.0.17 mamba2-jax==1.1.2 equimo==1.1.0
    pip install --no-deps recurrentgemma==1.0.1 PaLM-jax==0.1.2  # they ask for older NumPy and einops
    python -m benchmarks.real_models --json -
    python -m benchmarks.real_models --models GPT-2,LSTM

Each model's loss is differentiated by its parameters, plain and as `remat.auto(loss, 0.3)`, with random weights and
numbers. Models whose package is not installed are skipped and named. For each: `difference`, the largest between the
two gradients or losses, as a share of the largest number of that array; `kept_share`, traced residual bytes over the
plain ones; and `promised_share`, the share that the solution promises, which is the smallest if 0.3 is refused.
"""

import argparse
import sys
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._harness import emit
from benchmarks._real_models import MODELS, Model
from jaxmem import remat
from jaxmem.errors import BudgetInfeasible

SHARE = 0.3
TOLERANCE = 2e-4  # of an array's largest number: float32, in another order of fusion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}, with commas")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"--models: wanted some of {', '.join(MODELS)}; got {', '.join(sorted(unknown))}")
    jax.config.update("jax_platforms", "cpu")
    rows, missing = [], []
    for name in names:
        model = MODELS[name]
        version = version_of(model.package)
        if version is None:
            missing.append(name)
            continue
        row = {"model": name, "package": f"{model.package} {version}", "kind": model.kind, "what": model.what}
        rows.append(row | tried(model))
        print(rows[-1], file=sys.stderr, flush=True)
    emit(
        {
            "models": len(rows),
            "wrong": sum(row["difference"] > TOLERANCE for row in rows),
            "over_promise": sum(row["kept_share"] > row["promised_share"] + 1e-3 for row in rows),
            "refused": sum(row["promised_share"] > SHARE for row in rows),
        },
        target="cpu",
        provenance={"difference": "measured", "kept_share": "traced", "promised_share": "modelled"},
        notes={"budget": SHARE, "tolerance": TOLERANCE, "models": rows, "not_installed": missing},
        out=options.json,
    )


def version_of(package: str) -> str | None:
    """The installed version, None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tried(model: Model, share: float = SHARE) -> dict[str, float]:
    """The figures of one model, or its failure."""
    loss, params, batch = model.make()
    small = remat.auto(loss, share)
    start = time.perf_counter()
    try:
        solution = small.solve(params, *batch)
    except BudgetInfeasible:
        small = remat.auto(loss, 0.0)  # the least
        solution = small.solve(params, *batch)
    seconds = time.perf_counter() - start
    # Integers among the parameters, if there are any, get no gradient.
    gradients = [jax.jit(jax.value_and_grad(fn, allow_int=True))(params, *batch) for fn in (loss, small)]
    plain_bytes = remat.residual_bytes(loss, params, *batch)
    return {
        "difference": difference(*gradients),
        "kept_share": remat.residual_bytes(small, params, *batch) / plain_bytes,
        "promised_share": solution.kept_bytes / solution.plain_bytes,
        "plain_bytes": plain_bytes,
        "gap": solution.gap,
        "solve_seconds": round(seconds, 1),
    }


def difference(want, got) -> float:
    """The largest difference of two trees of arrays, each array's as a share of its largest number.

    Arrays a millionth as large as the largest are rounding errors themselves, such as the gradient of an attention's
    key bias, which is zero: they are held to that millionth.

    >>> difference({"w": np.array([2.0, 1.0])}, {"w": np.array([2.0, 1.5])})
    0.25
    """
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
        if jnp.issubdtype(a.dtype, jnp.inexact)
    ]
    largest = [np.abs(a).max(initial=0.0) for a, _ in pairs]
    least = max(1e-6 * max(largest, default=0.0), 1e-30)
    apart = [np.abs(a - b).max(initial=0.0) for a, b in pairs]
    return max((float(d / max(a, least)) for d, a in zip(apart, largest, strict=True)), default=0.0)


if __name__ == "__main__":
    main()
