"""Who looks for the newest checkpoint while a run saves and deletes finds one each time, and no damage."""

import threading

import jax.numpy as jnp

from jaxmem.checkpoint import Manager, latest


def test_a_reader_beside_a_run_always_finds_a_checkpoint(tmp_path):
    found, errors, done = [], [], threading.Event()

    def read():
        while not done.is_set() and not errors:
            try:
                checkpoint = latest(tmp_path)
                found.append(-1 if checkpoint is None else checkpoint.number)
            except Exception as error:  # a warning, too
                errors.append(error)

    with Manager(tmp_path, keep=1) as manager:
        manager.save({"w": jnp.zeros(1000)}, number=0)
        manager.wait()
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(1, 20):
                manager.save({"w": jnp.full(1000, number)}, number=number)
            manager.wait()
        finally:
            done.set()
            reader.join()
    assert not errors and len(found) > 20
    assert found == sorted(found) and found[0] == 0
