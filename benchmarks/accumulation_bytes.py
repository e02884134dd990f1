"""The bytes of gradient accumulation: K micro-batches against a single one, added by value and in place.

    python -m benchmarks.accumulation_bytes --json -

The scanned GPT and Llama examples with float32 parameters, compiled for a GPU and a TPU that need not be there. G is
the size of the gradients. The step of a lone micro-batch has its gradients among its temporaries. With K micro-batches
added by value the step needs one more accumulator, `value_over_floor` × (lone + G); added in place by the backward
pass, it needs about as much as the lone one, `in_place_over_lone`. `saved_of_g` is (lone + G - in place) / G. On a GPU
a layer's gradient is computed before it is added to its slice; that share of G, which shrinks with the number of
layers, is not saved. An unrolled stack of layers, for comparison, gains nothing: its gradients are never all alive.
"""

import dataclasses
import functools
import math
import sys
import time

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._harness import emit
from examples import gpt, llama
from jaxmem import accumulate
from jaxmem.analysis import hlo_flops
from tests.deviceless.compiling import TARGETS, compile_on

STEPS, ROWS = 4, 4  # micro-batches, and rows of each
SGD = optax.sgd(0.1)  # moments are arguments, and would take compilers longer than the layers
SHAPE = {
    "seq": 64,
    "layers": 16,
    "width": 1024,
}  # more than fits a TPU's on-chip memory, which is not counted
WORKLOADS = {
    "gpt": functools.partial(gpt.workload, **SHAPE),
    "llama": functools.partial(llama.workload, **SHAPE, hidden=2816),
}


def unrolled(batch: int, width: int = 1024, layers: int = 64) -> jaxmem.Workload:
    """Dense layers, one after another, each a parameter of its own."""

    def loss(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    params = {f"layer_{i}": jax.ShapeDtypeStruct((width, width), "float32") for i in range(layers)}
    return jaxmem.Workload(loss, params, jax.ShapeDtypeStruct((batch, width), "float32"), SGD)


WORKLOADS["unrolled"] = unrolled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Temporaries and FLOPs of one step, and how its gradients were added."""

    temp_bytes: int
    flops: int
    added: str


def compiled(target: str, example: str, steps: int, in_place: bool | None) -> Compiled:
    """The example's step with `steps` micro-batches of `ROWS` rows, compiled for a target."""
    workload = WORKLOADS[example](batch=steps * ROWS)
    step = jaxmem.make_train_step(workload, jaxmem.MemoryConfig(accumulation_steps=steps, remat=remat(example)))
    state, batch, loss, added = step.abstract_state(), step.abstract_batch(), step.spec.loss(), []

    def train(params, batch):
        gradients = accumulate.value_and_grad(loss, steps, in_place=in_place)
        out = gradients(params, batch, rng=jax.random.key(0), state=state.state)
        added.append(str(out.added or ""))
        return optax.apply_updates(params, SGD.update(out.grads, SGD.init(params), params)[0]), out.value

    program = compile_on(target, train, state.params, batch, donate_argnums=0)
    return Compiled(
        temp_bytes=program.memory_analysis().temp_size_in_bytes,
        flops=hlo_flops(program.as_text()).flops,
        added=added[-1],
    )


def remat(example: str) -> str:
    """Layers are recomputed if the example marks blocks."""
    return "none" if example == "unrolled" else "full"


def gradient_bytes(example: str) -> int:
    """G: parameters in float32."""
    params = jaxmem.make_train_step(WORKLOADS[example](batch=ROWS)).abstract_state().params
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def ratios(lone: Compiled, value: Compiled, in_place: Compiled, size: int) -> dict[str, float]:
    """The promised ratios.

    >>> one = lambda temps, flops: Compiled(temp_bytes=temps, flops=flops, added="")
    >>> ratios(one(100, 10), one(180, 40), one(102, 40), 80)["in_place_over_lone"]
    1.02
    """
    return {
        "value_over_floor": value.temp_bytes / (lone.temp_bytes + size),
        "in_place_over_lone": in_place.temp_bytes / lone.temp_bytes,
        # Parameters are as many bytes as gradients, and donated.
        "peak_over_lone": (size + in_place.temp_bytes) / (size + lone.temp_bytes),
        "in_place_over_bound": in_place.temp_bytes / (1.03 * (lone.temp_bytes + size) - 0.9 * size),
        "saved_of_g": (lone.temp_bytes + size - in_place.temp_bytes) / size,
        "body_flops_over_lone": in_place.flops / STEPS / lone.flops,
    }


def main():
    jax.config.update("jax_platforms", "cpu")  # the plugins of absent chips fail to start
    figures, table = {}, {}
    for target in TARGETS:
        for example in WORKLOADS:
            start, size = time.perf_counter(), gradient_bytes(example)
            lone = compiled(target, example, 1, None)
            value, in_place = (compiled(target, example, STEPS, way) for way in (False, None))
            found = ratios(lone, value, in_place, size)
            short = f"{target.partition('-')[0]}_{example}"
            figures |= {f"{short}_{name}": number for name, number in found.items()}
            table[f"{target} {example}"] = {
                "gradient_bytes": size,
                "temp_bytes": {"lone": lone.temp_bytes, "value": value.temp_bytes, "in_place": in_place.temp_bytes},
                "flops": {"lone": lone.flops, "value": value.flops, "in_place": in_place.flops},
                "added": in_place.added,
            }
            seconds = time.perf_counter() - start
            print(target, example, table[f"{target} {example}"], found, f"{seconds:.0f} s", file=sys.stderr, flush=True)
    emit(
        figures,
        target=", ".join(TARGETS),
        provenance={"temp_bytes": "compiled", "flops": "compiled"},
        notes={"micro_batches": STEPS, "rows": ROWS, "shape": SHAPE, "programs": table},
    )


if __name__ == "__main__":
    main()
