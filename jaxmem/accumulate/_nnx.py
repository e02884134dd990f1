"""An nnx module as the first argument of a loss: parameters, and state that is updated once."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxmem._flax import is_nnx_object, with_state
from jaxmem._signatures import call_loss
from jaxmem.errors import InputError


class _Slot:
    """Stands for an nnx object among the arguments of a loss."""

    def __init__(self, number: int):
        self.number = number


class NnxCall:
    """A call of a loss with an nnx module: the pure loss, its parameters and its state.

    Args:
      loss_fn: `loss_fn(model, *args, **keywords)`.
      model: an nnx module.
      args, keywords: may hold nnx objects, such as `nnx.Rngs`, whose state is carried like the model's.
      wrt: nnx filter of what is differentiated.
      has_aux: the loss returns (loss, aux).
      state: None.
    """

    def __init__(self, loss_fn: Callable, model: Any, args: tuple, keywords: dict, wrt: Any, has_aux: bool, state: Any):
        from flax import nnx

        if state is not None:
            raise InputError(
                wanted="no state beside an nnx module, which holds its own",
                got=f"state={type(state).__name__}",
                do="Leave state out: the module's BatchNorm statistics and counts are carried, and updated once.",
            )
        if not isinstance(model, nnx.Module):
            raise InputError(
                wanted="parameters, or an nnx module, as the first argument",
                got=f"an nnx {type(model).__name__}",
                do="Pass what is differentiated first, as nnx.value_and_grad has it: (model, batch).",
            )
        self._loss_fn, self._model, self._has_aux = loss_fn, model, has_aux
        self._wrt = nnx.Param if wrt is None else wrt
        leaves, tree = jax.tree.flatten((args, keywords), is_leaf=is_nnx_object)
        self._objects = [leaf for leaf in leaves if is_nnx_object(leaf)]
        numbers = iter(range(len(self._objects)))
        self.args, self.keywords = tree.unflatten([_Slot(next(numbers)) if is_nnx_object(x) else x for x in leaves])
        self._graph, self.params, own = self._split(nnx.merge(*nnx.split(model)))
        parts = [nnx.split(x) for x in self._objects]
        self._graphs = [graph for graph, _ in parts]
        self.state = (own, [state for _, state in parts])
        self._current: list = []

    @property
    def loss(self) -> Callable:
        """The user's loss, of arguments with slots in place of nnx objects; it has the user's signature."""

        def loss(*args, **keywords):
            filled = lambda x: self._current[x.number] if isinstance(x, _Slot) else x  # noqa: E731
            args, keywords = jax.tree.map(filled, (args, keywords), is_leaf=is_nnx_object)
            return self._loss_fn(*args, **keywords)

        loss.__name__ = getattr(self._loss_fn, "__name__", "loss")
        loss.__signature__ = inspect.signature(self._loss_fn)  # pyright: ignore[reportFunctionMemberAccess]
        return loss

    def pure(self, loss: Callable) -> Callable:
        """`loss(model, batch, ...)`, which is made of `self.loss`, as a loss of parameters with state."""

        def pure(params, batch, *, rng, state):
            from flax import nnx

            # Without copies, BatchNorm and Dropout would write to variables of an outer trace.
            model = nnx.merge(self._graph, params, state[0], copy=True)
            self._current = [nnx.merge(*each, copy=True) for each in zip(self._graphs, state[1], strict=True)]
            output = call_loss(loss, model, batch, rng=rng, state=None)
            new = (self._split(model)[2], [nnx.state(x) for x in self._current])
            if not self._has_aux or not isinstance(output, tuple) or len(output) != 2:
                return with_state(output, new)
            return with_state(output[0], new), output[1]

        pure.__name__ = getattr(loss, "__name__", "loss")
        return pure

    def update(self, state: Any) -> None:
        """Writes the state after the batch to the caller's objects."""
        from flax import nnx

        for x, new in zip((self._model, *self._objects), (state[0], *state[1]), strict=True):
            nnx.update(x, new)

    def _split(self, model):
        from flax import nnx

        nnx.pop(model, nnx.Intermediate)  # what was sown for inspection would make the state grow with every call
        return nnx.split(model, self._wrt, ...)
