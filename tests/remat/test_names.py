"""Policies by name: what they keep, on which names they insist, and what JAX makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxmem.config import Memory
from jaxmem.errors import PolicyNotHonoured, RematWarning, UnmatchedNamesError
from jaxmem.policy import Policy
from jaxmem.remat import checkpoint, examine, residuals
from jaxmem.remat._lower import JaxPolicy, lower

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32))
VALUE = 6 * 6 * 4  # bytes


@jax.custom_vjp
def kernel(x):
    return checkpoint_name(jnp.sin(x), "primal")


def _forward(x):
    kept = checkpoint_name(jnp.cos(x), "kernel_residual")
    return jnp.sin(x), kept


kernel.defvjp(_forward, lambda kept, cotangent: (cotangent * kept,))


def block(x):
    """Names at the top, in jit, in a custom rule, in cond and in scan."""
    x = checkpoint_name(x @ x, "top")
    x = jax.jit(lambda x: checkpoint_name(jnp.exp(-x * x), "in_jit"))(x)
    x = kernel(x)
    x = jax.lax.cond(x[0, 0] > 0, lambda x: checkpoint_name(x * x, "in_cond"), lambda x: x, x)
    x, _ = jax.lax.scan(lambda x, _: (jnp.sin(checkpoint_name(jnp.tanh(x), "in_scan")), None), x, length=3)
    return x @ x


OFFERED = {"top", "in_jit", "kernel_residual", "in_cond", "in_scan"}


def test_what_is_offered_while_differentiating():
    found = examine(lambda checkpoint: lambda x: checkpoint(block, "full")(x).sum(), X, policy="full")
    assert set(found.names) == OFFERED and found.blocks == 1


@pytest.mark.parametrize("name, count", [("top", 1), ("in_jit", 1), ("kernel_residual", 1), ("in_scan", 3)])
def test_each_of_these_is_kept_when_named(name, count):
    full = residuals(block, X, policy="full")
    named = residuals(block, X, policy=Policy(save=(name,)))
    assert named.total_bytes - full.total_bytes == count * VALUE
    assert (name, count) in [(row.name, row.count) for row in named.rows if row.size_bytes == count * VALUE]


def test_gradients_are_unchanged():
    want = jax.grad(lambda x: block(x).sum())(X)
    for policy in (Policy(save=("top", "in_scan")), Policy(save=("re:in_.*",)), Policy(offload=("top",))):
        got = jax.jit(jax.grad(lambda x, p=policy: checkpoint(block, p)(x).sum()))(X)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "policy, missing, do",
    [
        (Policy(save=("tpo", "top")), "save='tpo'", "Did you mean top?"),
        (Policy(offload=("zzz",)), "offload='zzz'", "checkpoint_name"),
        (Policy(save=("re:.*",), recompute=("zzz",)), "recompute='zzz'", "checkpoint_name"),
        (Policy(save=("re:nothing.*", "top")), "save='re:nothing.*'", "checkpoint_name"),
    ],
)
def test_a_name_that_matches_nowhere_raises(policy, missing, do):
    block_of = checkpoint(block, policy)
    for differentiate in (jax.grad, lambda f: jax.jit(jax.value_and_grad(f))):
        with pytest.raises(UnmatchedNamesError) as error:
            differentiate(lambda x: block_of(x).sum())(X)
        assert error.value.wanted.startswith(f"{missing} to match")
        assert error.value.got == f"the names {', '.join(sorted(OFFERED))}"
        assert do in error.value.do


def test_one_match_of_an_expression_is_enough():
    jax.grad(lambda x: checkpoint(block, Policy(save=("re:zzz|top",)))(x).sum())(X)
    with pytest.raises(UnmatchedNamesError):
        jax.grad(lambda x: checkpoint(block, "minimal")(x).sum())(X)


def test_the_name_of_a_primal_with_its_own_rule_is_not_offered():
    with pytest.raises(
        UnmatchedNamesError, match="primal is in the program, but outside every block, or in the primal"
    ):
        examine(
            lambda checkpoint: lambda x: checkpoint(block, Policy(save=("primal",)))(x).sum(),
            X,
            policy=Policy(save=("primal",)),
        )


def test_on_a_whole_loss_each_name_may_be_in_another_block():
    policy = Policy(save=("a", "b"))

    def loss(checkpoint):
        first = checkpoint(lambda x: jnp.sin(checkpoint_name(x @ x, "a")), policy)
        second = checkpoint(lambda x: jnp.sin(checkpoint_name(x @ x, "b")), policy)
        return lambda x: second(first(x)).sum()

    assert examine(loss, X, policy=policy).names == ("a", "b")
    jax.grad(loss(checkpoint))(X)


def test_a_block_is_checked_under_every_transformation():
    good = checkpoint(block, Policy(save=("top",)))
    loss = lambda x: good(x).sum()  # noqa: E731
    jax.vmap(jax.grad(loss))(jnp.stack([X, X]))
    jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(X)
    jax.grad(lambda x: jax.lax.scan(lambda x, _: (good(x), None), x, length=2)[0].sum())(X)
    mesh = jax.make_mesh((1,), ("d",))
    spec = jax.sharding.PartitionSpec()
    jax.shard_map(lambda x: jax.lax.psum(jax.grad(loss)(x), "d"), mesh=mesh, in_specs=spec, out_specs=spec)(X)


# -- lowering ------------------------------------------------------------------------------------------


def test_equal_policies_do_not_trace_again():
    """A jitted function with the policy, or a memory handle, as a static argument; and JAX's own policy callable."""
    traces = []

    def grads(x, memory):
        traces.append(memory)
        return jax.grad(lambda x: memory.block(block)(x).sum())(x)

    jitted = jax.jit(grads, static_argnums=1)
    for _ in range(3):
        jitted(X, Memory(remat=Policy(save=("top",)) | Policy(dots="all"), checkpoint=checkpoint))
    assert len(traces) == 1 and jitted._cache_size() == 1
    assert lower(Policy(save=("a",))) == lower(Policy(save=("a",))) != lower(Policy(save=("b",)))
    assert hash(JaxPolicy(Policy())) == hash(JaxPolicy(Policy()))


def test_offloaded_values_are_in_host_memory():
    table = residuals(block, X, policy=Policy(offload=("top",), save=("in_jit",)))
    assert {row.name: row.memory for row in table.rows if row.name} == {"top": "host", "in_jit": "device"}
    assert (table.host_bytes, table.device_bytes) == (VALUE, table.total_bytes - VALUE)


def test_everything_else_may_be_saved():
    table = residuals(block, X, policy=Policy(offload=("top",), rest="save"))
    assert table.host_bytes == VALUE
    # All that the plain block keeps and no more, but for what jax.checkpoint keeps of cond and scan as a whole.
    assert table.device_bytes >= table.before.total_bytes - 2 * VALUE


def test_a_device_without_host_memory_is_refused(monkeypatch):
    """Case 32: JAX takes any name of a memory, and leaves the value where it is."""

    class Kind:
        kind = "device"

    class Device:
        device_kind = "Toaster 9"
        addressable_memories = staticmethod(lambda: [Kind()])

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(PolicyNotHonoured, match="pinned_host memory to offload to; got Toaster 9, which has device"):
        checkpoint(block, Policy(offload=("top",)))


def test_jax_itself_takes_a_memory_that_does_not_exist():
    """When this fails, JAX validates memory kinds, and a policy may name another than pinned_host."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["top"],
        offload_src="device",
        offload_dst="pinned_hots",
    )
    rows = residuals(jax.checkpoint(block, policy=policy), X).rows
    assert [row.memory for row in rows if row.name == "top"] == ["device"]


@pytest.mark.parametrize(
    "policy",
    [Policy(save=("top",)), Policy(offload=("top",)), Policy(dots="all"), Policy(offload=("top",), rest="save")],
)
def test_under_the_rewrite_of_remat_a_policy_is_honoured_or_refused(policy):
    """jax_remat3 asks a policy about nothing (0.10), or about names and products only (0.12)."""
    default = residuals(block, X, policy=policy)
    refused = policy.rest == "save" or jax.__version_info__ < (0, 12)
    jax.config.update("jax_remat3", True)
    try:
        if refused:
            with pytest.raises(PolicyNotHonoured, match="jax_remat3=True; got .*, of which it ignores"):
                residuals(block, X, policy=policy)
        else:
            table = residuals(block, X, policy=policy)
            assert table.host_bytes == default.host_bytes
            assert table.total_bytes >= default.total_bytes > 0
    finally:
        jax.config.update("jax_remat3", False)


def test_a_policy_that_keeps_everything_says_that_it_is_none():
    assert checkpoint(block, Policy(rest="save")) is block
    with pytest.warns(RematWarning, match="keeps everything, so it is none"):
        assert checkpoint(block, Policy(rest="save", dots="all")) is block
