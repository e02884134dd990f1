"""Nothing is silent: a policy that saves nothing says so, and why."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxmem import MemoryConfig, Policy, Workload, analyze, compare, make_train_step
from jaxmem.analysis import Program
from jaxmem.errors import RematWarning, RematWithoutEffect, UnmatchedNamesError
from jaxmem.remat import examine

LAYERS = 4
W = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, 8, 8)).astype(np.float32)) / 3
X = jnp.ones((4, 8))


def layer(x, w):
    x = checkpoint_name(x, "input")
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return checkpoint_name(x + jnp.sin(hidden) @ w, "output")


def scanned(block, w, x):
    return jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0].sum()


def unrolled(block, w, x):
    for each in w:
        x = block(x, each)
    return x.sum()


def warnings_of(policy, loss):
    return " ".join(examine(loss, W, X, policy=policy).warnings)


@pytest.mark.parametrize(
    "policy", ["full", "dots", "dots_no_batch", Policy(save=("hidden",)), Policy(offload=("input",))]
)
@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_a_policy_round_each_layer_is_fine(policy, stack):
    def loss(checkpoint):
        block = checkpoint(layer, policy, scanned=stack is scanned)
        return lambda w, x: stack(block, w, x)

    assert warnings_of(policy, loss) == ""


@pytest.mark.parametrize("stack", [scanned, unrolled])
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_one_checkpoint_round_everything(policy, stack):
    loss = lambda checkpoint: lambda w, x: checkpoint(lambda w, x: stack(layer, w, x), policy)(w, x)  # noqa: E731
    assert "One block makes 100% of all values of the loss" in warnings_of(policy, loss)


def test_one_checkpoint_round_blocks_is_not_everything():
    def loss(checkpoint):
        block = checkpoint(layer, "full", scanned=True)
        return lambda w, x: checkpoint(lambda w, x: scanned(block, w, x), "full")(w, x)

    assert warnings_of("full", loss) == ""


@pytest.mark.parametrize("stack, found", [(unrolled, True), (scanned, False)])
def test_prevent_cse_false_outside_a_scan(stack, found):
    """Case 25."""
    loss = lambda checkpoint: lambda w, x: stack(checkpoint(layer, "full", scanned=True), w, x)  # noqa: E731
    assert (f"{LAYERS} of the blocks are marked scanned=True" in warnings_of("full", loss)) == found


def test_a_dots_rule_that_kept_nothing():
    """Case 27: all products batched, or none at all."""

    def batched(x, w):
        return jnp.sin(jnp.einsum("bij,bjk->bik", jnp.stack([x, x]), jnp.stack([w, w]))).sum(0)

    loss = lambda checkpoint: lambda w, x: scanned(checkpoint(batched, "dots_no_batch", scanned=True), w, x)  # noqa: E731
    assert "The dots rule of dots_no_batch kept nothing" in warnings_of("dots_no_batch", loss)
    loss = lambda checkpoint: lambda w, x: scanned(checkpoint(batched, "dots", scanned=True), w, x)  # noqa: E731
    assert warnings_of("dots", loss) == ""
    loss = lambda checkpoint: lambda w, x: scanned(checkpoint(lambda x, w: jnp.sin(x), "dots", scanned=True), w, x)  # noqa: E731
    assert "no block has a matrix product" in warnings_of("dots", loss)


@pytest.mark.parametrize("name, moves", [("output", False), ("input", True), ("hidden", True)])
def test_offloading_the_output_of_a_scans_body_moves_nothing(name, moves):
    policy = Policy(offload=(name,))
    loss = lambda checkpoint: lambda w, x: scanned(checkpoint(layer, policy, scanned=True), w, x)  # noqa: E731
    found = examine(loss, W, X, policy=policy)
    assert found.residuals.host_bytes == (LAYERS * X.size * 4 if moves else 0)
    assert bool(found.warnings) != moves
    assert moves or "name that input instead" in found.warnings[0]


def test_a_loss_that_marks_no_block():
    with pytest.raises(RematWithoutEffect, match="marks none"):
        examine(lambda checkpoint: lambda w, x: scanned(layer, w, x), W, X, policy="full")


# -- under a train step --------------------------------------------------------------------------------


def workload(stack=scanned, whole=False):
    def loss(params, batch, *, memory):
        if whole:
            return memory.block(lambda w, x: stack(layer, w, x))(params, batch)
        return stack(memory.block(layer, scanned=stack is scanned), params, batch)

    return Workload(loss, W, X, optax.sgd(0.1))


def test_names_are_those_of_the_whole_loss():
    step = make_train_step(workload(), MemoryConfig(remat=Policy(save=("hidden", "input"))))
    state, _ = step(step.init(), X)
    plain = make_train_step(workload())
    want, _ = plain(plain.init(), X)
    np.testing.assert_allclose(state.params, want.params, rtol=1e-5, atol=1e-6)
    wrong = make_train_step(workload(), MemoryConfig(remat=Policy(save=("hiden",))))
    for use in (lambda: wrong(wrong.init(), X), lambda: wrong.residuals(), lambda: analyze(wrong, target="cpu")):
        with pytest.raises(UnmatchedNamesError, match="the names hidden, input, output. Did you mean hidden?"):
            use()


def test_a_step_warns_once_when_it_is_traced():
    step = make_train_step(workload(whole=True), MemoryConfig(remat="full"))
    with pytest.warns(RematWarning, match="One block makes"):
        state, _ = step(step.init(), X)
    step(state, X)  # warnings are errors here


def test_compare_puts_the_reasons_into_the_rows():
    configs = {"none": MemoryConfig(), "whole": MemoryConfig(remat="full")}
    table = compare(configs, workload(whole=True), target="cpu")
    assert any("One block makes" in warning for warning in table["whole"].warnings)
    assert not any("One block makes" in warning for warning in table["none"].warnings)
    assert table["whole"].saved_residual_bytes < table["none"].saved_residual_bytes


def test_compare_does_not_believe_a_saving_that_the_compiler_does_not_make():
    """Two programs with the same temporaries, of which one claims fewer residuals."""
    lower = jax.jit(jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())).trace(jnp.ones(4096)).lower
    plain = Program(name="none", lower=lower, saved_residual_bytes=4000, plain_residual_bytes=4000)
    claims = Program(name="full", lower=lower, remat="full", saved_residual_bytes=100, plain_residual_bytes=4000)
    table = compare({"full": claims, "none": plain}, target="cpu")
    assert any(
        warning.startswith("The saving is not borne out: full keeps 3.8 KiB") for warning in table["full"].warnings
    )
    assert not any("borne out" in warning for warning in table["none"].warnings)


def test_compare_believes_a_saving_that_the_compiler_makes():
    big = Workload(workload().loss_fn, jnp.tile(W, (8, 4, 4)), jnp.ones((64, 32)), optax.sgd(0.1))
    table = compare({"none": MemoryConfig(), "full": MemoryConfig(remat="full")}, big, target="cpu")
    assert table["full"].temp_bytes < table["none"].temp_bytes
    assert not any("borne out" in warning for warning in table["full"].warnings)


def test_offload_on_the_cpu_is_not_evidenced():
    """Case 32: the CPU's compiler counts no host bytes, so no saving is claimed from them."""
    report = analyze(workload(), MemoryConfig(remat=Policy(offload=("input",))), target="cpu")
    assert report.host_temp_bytes == 0
    assert any(warning.startswith("Offload is not evidenced") for warning in report.warnings)


def test_a_model_of_one_layer_has_nothing_else_to_mark():
    loss = lambda checkpoint: lambda w, x: checkpoint(layer, "full")(x, w[0]).sum()  # noqa: E731
    assert warnings_of("full", loss) == ""
