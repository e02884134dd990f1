"""`drawing_by`: the keys of a loss carried over to another generator of random bits."""

from collections.abc import Callable


def drawing_by(loss: Callable, generator: str) -> Callable:
    """A loss, `(trainable, batch, *, rng, state)`, that draws by a generator; "given" leaves it as it is."""
    return loss
