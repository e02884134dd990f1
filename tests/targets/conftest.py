"""The backend is started once, before stderr is looked at."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def started_backend():
    """JAX 0.10 with the CUDA plugin logs two lines on start, which `start_jax` leaves alone where XLA_FLAGS is set."""
    jax.devices()
