"""Small training problems of other authors' packages, with random weights.

Each is made twice: as a workload, and as the plain function that a hand-written step differentiates. The package is
imported when the problem is made.
"""

import dataclasses
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._real_models import Model, label_loss, next_token_loss, tokens
from jaxmem import LossOutput, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A training problem.

    Args:
      workload: as jaxmem takes it.
      plain: the same loss without jaxmem, a function `(params, batch, rng, state) → (loss, new state)`.
    """

    workload: Workload
    plain: Callable


def plain_trial(loss: Callable, params, batch, state=None) -> Trial:
    """Of a loss `(params, batch, rng, state) → (loss, new state)`."""

    def output(params, batch, *, rng, state):
        value, new = loss(params, batch, rng, state)
        return LossOutput(value, state=new)

    return Trial(workload=Workload(output, params, batch, optax.sgd(0.1), state=state), plain=loss)


def pure_trial(loss: Callable, params, batch) -> Trial:
    """Of a loss `(params, batch) → loss`."""
    plain = lambda params, batch, rng, state: (loss(params, batch), state)  # noqa: E731
    return Trial(workload=Workload(loss, params, batch, optax.sgd(0.1)), plain=plain)


def linen_trial(module, loss: Callable, batch) -> Trial:
    """Of a linen module and a loss `(model, batch, rng) → loss`."""
    from flax import linen as nn

    def plain(params, batch, rng, state):
        run = nn.apply(lambda model, batch: loss(model, batch, rng), module, mutable=list(state))
        value, new = run({"params": params, **state}, batch, rngs={"dropout": rng})
        return value, {**state, **new}

    return Trial(workload=Workload.from_linen(module, loss, batch, optax.sgd(0.1)), plain=plain)


def nnx_trial(model, loss: Callable, batch) -> Trial:
    """Of an nnx model and a loss `(model, batch) → loss`."""
    from flax import nnx

    graph, _, _ = nnx.split(model, nnx.Param, ...)

    def plain(params, batch, rng, state):
        merged = nnx.merge(graph, params, state, copy=True)
        value = loss(merged, batch)
        return value, nnx.split(merged, nnx.Param, ...)[2]

    return Trial(workload=Workload.from_nnx(model, loss, batch, optax.sgd(0.1)), plain=plain)


def equinox_trial(made, loss: Callable, batch, is_leaf=None) -> Trial:
    """Of an Equinox model and a loss `(model, batch) → loss`."""
    import equinox as eqx

    params, rest = eqx.partition(made, eqx.is_inexact_array, is_leaf=is_leaf)
    return pure_trial(lambda params, batch: loss(eqx.combine(params, rest), batch), params, batch)


def normal(*shape: int) -> jax.Array:
    """Random normal numbers."""
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32))


# -- molecules: the loss holds forces, which are gradients ------------------------------------------

ATOMS = 5
SENDERS, RECEIVERS = (np.asarray(ends, np.int32) for ends in np.nonzero(~np.eye(ATOMS, dtype=bool)))


def molecules() -> dict[str, jax.Array]:
    """Positions, species, energies and forces."""
    return {"r": 2 * normal(8, ATOMS, 3), "z": tokens(8, ATOMS, 3), "e": normal(8), "f": normal(8, ATOMS, 3)}


def force_loss(energy: Callable, batch) -> jax.Array:
    """Errors of energies `energy(positions, species)` and of forces."""
    energies, slopes = jax.vmap(jax.value_and_grad(energy))(batch["r"], batch["z"])
    return jnp.mean((energies - batch["e"]) ** 2) + jnp.mean((slopes + batch["f"]) ** 2)


def nequix():
    from nequix.model import Nequix

    sizes = {"hidden_irreps": "8x0e + 8x1o", "n_layers": 2, "radial_mlp_size": 16, "avg_n_neighbors": 4.0}
    made = Nequix(jax.random.key(0), n_species=3, lmax=1, **sizes)

    def loss(model, batch):
        def energy(r, z):
            return model.node_energies(r[SENDERS] - r[RECEIVERS], z, SENDERS, RECEIVERS).sum()

        return force_loss(energy, batch)

    return equinox_trial(made, loss, molecules())


def graph_network():
    import haiku as hk
    import jraph

    def run(r, z):
        update = lambda x: hk.nets.MLP((32, 32), activation=jax.nn.silu)(x)  # noqa: E731
        updates = [jraph.concatenated_args(update)] * 3
        distances = jnp.sum((r[SENDERS] - r[RECEIVERS]) ** 2, -1, keepdims=True)
        graph = jraph.GraphsTuple(
            nodes=jax.nn.one_hot(z, 3), edges=distances, globals=jnp.zeros((1, 1)), senders=SENDERS,
            receivers=RECEIVERS, n_node=jnp.array([ATOMS]), n_edge=jnp.array([len(SENDERS)]),
        )  # fmt: skip
        graph = jraph.GraphMapFeatures(update, update, update)(graph)
        for _ in range(3):
            graph = jraph.GraphNetwork(*updates)(graph)
        return hk.Linear(1)(graph.globals)[0, 0]

    net, batch = hk.without_apply_rng(hk.transform(run)), molecules()
    params = net.init(jax.random.key(0), batch["r"][0], batch["z"][0])
    return pure_trial(lambda p, batch: force_loss(lambda r, z: net.apply(p, r, z), batch), params, batch)


# -- sequences -----------------------------------------------------------------------------------


def nano_moe():
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    config = NanoMoEConfig(vocab_size=256, n_layers=2, d_model=32, d_ff=64, block_size=24)

    def loss(model, ids, rng):
        logits, balance = model(ids, deterministic=False)
        return next_token_loss(logits, ids) + config.aux_loss_coeff * balance

    return linen_trial(NanoMoE(config), loss, tokens(8, 24, 256))


def mamba3():
    from flax import nnx
    from mamba3_jax import Mamba3Config, Mamba3ForCausalLM

    sizes = {"hidden_size": 32, "state_size": 16, "head_dim": 16, "chunk_size": 8, "num_hidden_layers": 2}
    model = Mamba3ForCausalLM(Mamba3Config(vocab_size=256, **sizes), rngs=nnx.Rngs(0))
    return nnx_trial(model, lambda model, ids: model(ids, labels=ids)["loss"], tokens(8, 24, 256))


def spiking():
    import spyx.nn as snn
    from flax import nnx

    rngs = nnx.Rngs(0)
    linear = lambda rows, columns: nnx.Linear(rows, columns, use_bias=False, rngs=rngs)  # noqa: E731
    layers = [linear(16, 32), snn.LIF((32,), rngs=rngs), linear(32, 32), snn.ALIF((32,), rngs=rngs), linear(32, 10)]

    def loss(model, batch):
        traces, _ = snn.run(model, batch["x"].transpose(1, 0, 2))
        return label_loss(traces.mean(0), batch["y"])

    model = snn.Sequential(*layers, snn.LI((10,), rngs=rngs))
    return nnx_trial(model, loss, {"x": jnp.abs(normal(8, 24, 16)), "y": jnp.arange(8)})


# -- images, fields, graphs, densities -------------------------------------------------------------


def fourier_operator():
    from pdequinox.arch import ClassicFNO

    made = ClassicFNO(2, 1, 1, hidden_channels=8, num_modes=4, num_blocks=3, key=jax.random.key(0))
    loss = lambda model, batch: jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
    return equinox_trial(made, loss, {"x": normal(8, 1, 16, 16), "y": normal(8, 1, 16, 16)})


def quantum_state():
    import netket

    def loss(model, spins, rng):
        """The energy of an Ising chain, as variational Monte Carlo differentiates it."""
        flipped = spins[:, None] * (1 - 2 * jnp.eye(spins.shape[1]))
        logs = model(spins)
        ratios = jnp.exp(model(flipped.reshape(-1, spins.shape[1])).reshape(len(spins), -1) - logs[:, None])
        local = jax.lax.stop_gradient(-ratios.sum(1) - (spins * jnp.roll(spins, 1, 1)).sum(1))
        return 2 * jnp.mean((jnp.conj(local) * logs).real) + 0.01 * jnp.mean(jnp.abs(logs) ** 2)

    return linen_trial(netket.models.RBM(param_dtype=jnp.complex64, alpha=8), loss, jnp.sign(normal(16, 16)))


def diffusion_unet():
    from flaxdiff.models.simple_unet import Unet

    options = {"attention_configs": (None, {"heads": 2}), "num_res_blocks": 1, "norm_groups": 4}
    module = Unet(emb_features=32, feature_depths=(16, 32), **options)

    def loss(model, batch, rng):
        noise = jax.random.normal(rng, batch["x"].shape)
        times = jax.random.uniform(jax.random.fold_in(rng, 1), (len(noise),))
        share = times[:, None, None, None]
        return jnp.mean((model((1 - share) * batch["x"] + share * noise, times, batch["text"]) - noise) ** 2)

    return linen_trial(module, loss, {"x": normal(8, 16, 16, 3), "text": normal(8, 4, 24)})


def keras_network():
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    given = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same")(given)
    for _ in range(3):
        y = layers.Activation("gelu")(layers.BatchNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Conv2D(16, 3, padding="same")(y))])
    model = keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))

    def loss(params, batch, rng, state):  # Keras keeps its key among the state
        logits, state = model.stateless_call(params, state, batch["x"], training=True)
        return label_loss(logits, batch["y"]), state

    params, state = ([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables))
    return plain_trial(loss, params, {"x": normal(8, 16, 16, 3), "y": jnp.arange(8)}, state=state)


def graph_attention():
    from flax import nnx
    from jraphx.nn.models import GAT

    edges = np.stack([SENDERS, RECEIVERS])

    def loss(model, batch):
        first = ATOMS * np.arange(len(batch["x"]))
        everywhere = (edges[:, None] + first[:, None]).reshape(2, -1)
        return label_loss(model(batch["x"].reshape(-1, 8), jnp.asarray(everywhere)), batch["y"].reshape(-1))

    # Of 8 graphs a micro-batch has ten nodes: statistics of so few round to 4e-5 of the gradients in any float32 step.
    model = GAT(8, 16, 3, 5, norm="batch_norm", rngs=nnx.Rngs(0))
    return nnx_trial(model, loss, {"x": normal(16, ATOMS, 8), "y": tokens(16, ATOMS, 5)})


def normalizing_flow():
    import paramax
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    options = {"base_dist": Normal(jnp.zeros(6)), "flow_layers": 4, "nn_width": 32}
    made = masked_autoregressive_flow(jax.random.key(0), **options)
    loss = lambda flow, x: -paramax.unwrap(flow).log_prob(x).mean()  # noqa: E731
    return equinox_trial(made, loss, normal(64, 6), is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable))


def optimal_transport():
    from flax import linen as nn
    from ott.tools.sinkhorn_divergence import sinkdiv

    module = nn.Sequential([layer for _ in range(4) for layer in (nn.Dense(16), nn.gelu)] + [nn.Dense(4)])

    def loss(model, batch, rng):
        return sinkdiv(model(batch["x"]), batch["y"], epsilon=1.0)[0]

    return linen_trial(module, loss, {"x": normal(32, 8), "y": 1 + normal(32, 4)})


MODELS = {
    "NanoMoE": Model(package="nano-moe-jax", kind="linen", what="4 experts, auxiliary loss, dropout", make=nano_moe),
    "Mamba-3": Model(package="mamba3-jax", kind="nnx", what="2 layers, state space", make=mamba3),
    "FNO": Model(package="pdequinox", kind="Equinox", what="spectral convolutions", make=fourier_operator),
    "RBM": Model(package="netket", kind="linen", what="complex parameters", make=quantum_state),
    "U-Net": Model(package="flaxdiff", kind="linen", what="diffusion, cross-attention", make=diffusion_unet),
    "Nequix": Model(package="nequix", kind="Equinox", what="equivariant, forces in the loss", make=nequix),
    "GraphNetwork": Model(package="jraph", kind="Haiku", what="forces in the loss", make=graph_network),
    "Keras": Model(package="keras", kind="Keras", what="batch norm, dropout by a key in the state", make=keras_network),
    "GAT": Model(package="jraphx", kind="nnx", what="graph attention, batch norm", make=graph_attention),
    "SNN": Model(package="spyx", kind="nnx", what="spikes with a derivative of their own", make=spiking),
    "MAF": Model(package="flowjax", kind="Equinox", what="scanned normalizing flow", make=normalizing_flow),
    "Sinkhorn": Model(package="ott-jax", kind="linen", what="a fixed point in the loss", make=optimal_transport),
}
