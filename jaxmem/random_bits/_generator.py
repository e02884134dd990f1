"""`drawing_by`: the keys of a loss carried over to another generator of random bits."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.objective import LossOutput

GIVEN = "given"


def drawing_by(loss: Callable, generator: str) -> Callable:
    """A loss that draws by a generator, with its keys carried over: `rng`, raw or typed, and typed keys in `state`.

    A key of seed s becomes the key of that seed of the other generator, and so do those that `fold_in` and `split` make
    of it: it does not matter whether a key is carried over before or after. Calls with equal keys draw equal numbers.
    Keys in the state come back as they came, or, where the loss replaced them, of the generator that they were of.
    Keys among parameters, and in a batch, whose rows may each have their own, are left as they are.

    "rbg" draws by the hardware. Its numbers depend on the chip, on how arrays are sharded, on the version of XLA, and
    under `jax.vmap` over keys on the other keys: a run is repeated exactly by the same program only.

    Args:
      loss: `(trainable, batch, *, rng, state)`.
      generator: "given" leaves the loss as it is, "rbg" or "threefry2x32".

    >>> import jax
    >>> loss = drawing_by(lambda params, batch, *, rng, state: jax.random.normal(rng), "rbg")
    >>> loss(0, 0, rng=jax.random.key(7), state=None) == jax.random.normal(jax.random.key(7, impl="rbg"))
    Array(True, dtype=bool)
    """
    if generator == GIVEN:
        return loss

    @functools.wraps(loss)
    def drawing(trainable, batch, *, rng=None, state=None, **keywords):
        raw = rng is not None and not is_key(rng)
        # A raw key does not say what draws with it: the default does.
        drawing_so = jax.default_prng_impl(generator) if raw else contextlib.nullcontext()
        carried = jax.tree.map(lambda leaf: carry_over(leaf, generator) if is_key(leaf) else leaf, state)
        with drawing_so:
            out = loss(trainable, batch, rng=_of_any(rng, generator), state=carried, **keywords)
        if not isinstance(out, LossOutput) or out.state is None:
            return out
        return dataclasses.replace(out, state=_back(out.state, state, carried))

    return drawing


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed key, or an array of them."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def generator_of(key: Any) -> str:
    """The generator of a typed key, or of a raw one, which is of JAX's default."""
    if not is_key(key):
        return jax.config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]
    return str(jax.random.key_impl(key))


def carry_over(key: jax.Array, generator: str) -> jax.Array:
    """Typed keys of any shape as keys of another generator.

    >>> import jax
    >>> carry_over(jax.random.key(7), "rbg") == jax.random.key(7, impl="rbg")
    Array(True, dtype=bool)
    """
    if generator_of(key) == generator:
        return key
    return jax.random.wrap_key_data(_words(jax.random.key_data(key), generator), impl=generator)


def _of_any(key: Any, generator: str) -> Any:
    if key is None or is_key(key):
        return key if key is None else carry_over(key, generator)
    return _words(key, generator)


def _words(data: jax.Array, generator: str) -> jax.Array:
    """The words of keys as another generator has them, over the last axis.

    A key of "rbg" is a threefry key, with which it splits and folds, twice over.
    """
    (count,) = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=generator))).shape
    return jnp.concatenate([data] * math.ceil(count / data.shape[-1]), axis=-1)[..., :count]


def _back(new: Any, given: Any, carried: Any) -> Any:
    """The state that a loss returned, with keys of the generators that the given ones are of."""
    if jax.tree.structure(new) != jax.tree.structure(given):
        return new  # whoever checks the state says so

    def back(new, given, carried):
        if new is carried:
            return given
        return carry_over(new, generator_of(given)) if is_key(new) and is_key(given) else new

    return jax.tree.map(back, new, given, carried)
