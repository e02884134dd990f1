"""The overhead of jaxmem's accumulation over a hand-written scan, and over the full batch.

    python -m benchmarks.accumulate_overhead --json -

The model is the tiny GPT of `examples/gpt.py` on 64 rows, K = 8, AdamW. The hand-written step relies on
equal numbers of tokens in all micro-batches, so it averages; jaxmem's step sums the weights.
"""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import optax

from benchmarks._harness import emit, paired_ratio, seconds
from jaxmem import Memory, MemoryConfig, make_train_step
from jaxmem._signatures import call_loss
from jaxmem.analysis import hlo_flops

K = 8
PAIRS = 30


def load_example():
    path = pathlib.Path(__file__).parent.parent / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.workload(batch=64)


def handwritten_step(workload, k):
    """A careful hand-written step: one scan over (K, B/K) micro-batches, float32 accumulators, donation."""

    def loss(params, batch, rng):
        out = call_loss(workload.loss_fn, params, batch, rng=rng, state={}, memory=Memory())
        ((_, term),) = out.objective.terms()
        return term.total / term.weight, out.metrics["accuracy"]

    def step(state, batch):
        params, opt_state, rng = state
        batch = jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)

        def body(carry, xs):
            i, micro = xs
            value, grads, correct, count = carry
            (v, accuracy), g = jax.value_and_grad(loss, has_aux=True)(params, micro, jax.random.fold_in(rng, i))
            grads = jax.tree.map(jnp.add, grads, g)
            return (value + v, grads, correct + accuracy.total, count + accuracy.weight), None

        zero = jnp.zeros(())
        init = (zero, jax.tree.map(jnp.zeros_like, params), zero, zero)
        (value, grads, correct, count), _ = jax.lax.scan(body, init, (jnp.arange(k), batch))
        grads = jax.tree.map(lambda g: g / k, grads)
        updates, opt_state = workload.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, rng), (value / k, correct / count)

    return jax.jit(step, donate_argnums=0)


def runner(step, state, batch):
    """A function that takes one more step, keeping its own (donated) state."""
    held = [state]

    def run():
        held[0], metrics = step(held[0], batch)
        return metrics

    return run


def compile_seconds(workload, k):
    lowered = make_train_step(workload, MemoryConfig(accumulation_steps=k)).lower()
    return seconds(lambda: lowered.compile() and None)


def main():
    workload = load_example()
    batch = jax.tree.map(jnp.asarray, workload.batch)
    ours, full = (make_train_step(workload, MemoryConfig(accumulation_steps=k)) for k in (K, 1))
    theirs = handwritten_step(workload, K)

    def their_state():
        state = ours.init()
        return state.params, state.opt_state, state.rng

    compiled = {
        "ours": ours.compile(),
        "theirs": theirs.lower(jax.eval_shape(their_state), batch).compile(),
        "full": full.compile(),
    }
    flops = {name: hlo_flops(c.as_text()).flops for name, c in compiled.items()}
    temps = {name: c.memory_analysis().temp_size_in_bytes for name, c in compiled.items()}
    versus_hand = paired_ratio(runner(ours, ours.init(), batch), runner(theirs, their_state(), batch), PAIRS)
    versus_full = paired_ratio(runner(ours, ours.init(), batch), runner(full, full.init(), batch), PAIRS)
    compiles = sorted(compile_seconds(workload, 64) / compile_seconds(workload, 8) for _ in range(5))
    emit(
        {
            "flops_ratio_vs_handwritten": flops["ours"] / flops["theirs"],
            "temp_ratio_vs_handwritten": temps["ours"] / temps["theirs"],
            "step_ratio_vs_handwritten": versus_hand["median"],
            "step_ratio_vs_handwritten_low": versus_hand["low"],
            "step_ratio_vs_handwritten_high": versus_hand["high"],
            "step_ratio_vs_full_batch": versus_full["median"],
            "temp_ratio_vs_full_batch": temps["ours"] / temps["full"],
            "flops_ratio_vs_full_batch": flops["ours"] / flops["full"],
            "compile_ratio_k64_vs_k8": compiles[len(compiles) // 2],
            "pairs": PAIRS,
        },
        target=jax.default_backend(),
        provenance={"flops": "compiled", "temp": "compiled", "step": "measured", "compile": "measured"},
        notes={"temp_bytes": temps, "flops": flops},
    )


if __name__ == "__main__":
    main()
