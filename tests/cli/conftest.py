"""The command line runs in this process: its backend is started once, before stderr is looked at."""

import jax
import pytest

from jaxmem import _status


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No lines about what takes long: how long is the machine's affair."""
    monkeypatch.setattr(_status, "_PATIENCE_SECONDS", 3600.0)


@pytest.fixture(scope="session", autouse=True)
def started_backend():
    """JAX 0.10 with the CUDA plugin logs two lines on start, which `start_jax` leaves alone where XLA_FLAGS is set."""
    jax.devices()
