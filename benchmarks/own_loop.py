"""The table of docs/own-loop.md: its linen loop, plain and with its changes, at a larger size.

python -m benchmarks.own_loop --target gpu-h100 --target tpu-v5e --json own_loop.json
"""

import argparse
import re
from pathlib import Path

import jax

import jaxmem
from benchmarks._harness import emit
from jaxmem._units import format_bytes

PAGE = Path(__file__).parent.parent / "docs" / "own-loop.md"
ROWS, WIDTH, DEPTH = 8192, 1024, 12
PLAIN = "jax.value_and_grad(loss_fn, has_aux=True)"
CHANGES = {
    "the plain loop": PLAIN,
    "`accumulate.value_and_grad(loss_fn, 8, …)`": "accumulate.value_and_grad(loss_fn, 8, has_aux=True)",
    '`remat.apply(loss_fn, "full")`': 'jax.value_and_grad(remat.apply(loss_fn, "full"), has_aux=True)',
    "both": 'accumulate.value_and_grad(remat.apply(loss_fn, "full"), 8, has_aux=True)',
}


def report_of(change: str, target: str) -> jaxmem.MemoryReport:
    """The report of the loop's step, its state donated, with another gradient; nothing is allocated."""
    (text,) = re.findall(r"^## The plain loop, linen\n.*?^```python\n(.*?)^params = ", PAGE.read_text(), re.M | re.S)
    assert text.count(PLAIN) == 1
    names: dict = {"__name__": "own_loop", "accumulate": jaxmem.accumulate, "remat": jaxmem.remat}
    text = text.replace(PLAIN, change).replace("Classifier()", f"Classifier(width={WIDTH}, depth={DEPTH})")
    exec(compile(text.replace("@jax.jit\n", '@jax.jit(donate_argnames="state")\n'), str(PAGE), "exec"), names)

    def create(key):
        params = names["model"].init(key, names["jnp"].ones((1, 16)))["params"]
        tx = names["optax"].adam(1e-3)
        return names["TrainState"].create(apply_fn=names["model"].apply, params=params, tx=tx)

    batch = {"x": jax.ShapeDtypeStruct((ROWS, 16), "float32"), "y": jax.ShapeDtypeStruct((ROWS,), "int32")}
    return jaxmem.analyze(names["train_step"], jax.eval_shape(create, jax.random.key(0)), batch, target=target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="gpu-h100")
    parser.add_argument("--json", metavar="OUT", help='a file, or "-" for stdout')
    options = parser.parse_args()
    found = {name: report_of(change, options.target) for name, change in CHANGES.items()}
    if options.json:
        fields = ("temp_bytes", "peak_bytes", "step_seconds")
        figures = {f"{name}/{field}": getattr(r, field) for name, r in found.items() for field in fields}
        provenance = dict.fromkeys(figures, "compiled") | {k: "modelled" for k in figures if k.endswith("seconds")}
        emit(figures, target=options.target, provenance=provenance, out=options.json)
        return
    print("| | temporaries | peak | step |\n|---|---:|---:|---:|")
    for name, r in found.items():
        cells = format_bytes(r.temp_bytes), format_bytes(r.peak_bytes), f"{(r.step_seconds or 0) * 1e3:.1f} ms"
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
