"""Who gave no sign is gone; what JAX tells first waits until all others show that they live."""

import threading
import time

from jaxmem._peers import Peers


class Words:
    """The part of JAX's coordinator that `Peers` uses."""

    def __init__(self):
        self.said: dict[str, str] = {}

    def key_value_set(self, key, text, allow_overwrite=False):
        self.said[key] = text

    def key_value_dir_get(self, key):
        return [(name, text) for name, text in self.said.items() if name.startswith(key)]


def watch_of_three() -> Peers:
    watch = Peers.__new__(Peers)  # without its thread
    watch.process, watch.count, watch._client = 0, 3, Words()
    watch._beats, watch._ended = {}, threading.Event()
    return watch


def test_one_that_gave_no_sign_at_all_is_gone():
    watch = watch_of_three()
    for beat in range(20):
        watch._set("beat/1", str(beat))
        watch._look_for_gone(2.0)
    assert [name for name, _ in watch._dir("news/gone")] == ["jaxmem/processes/news/gone/2"]


def test_what_jax_tells_is_held_back_until_all_others_show_that_they_live():
    watch = watch_of_three()
    watch._set("beat/1", "7")
    waits = threading.Thread(target=watch._wait_for_signs, daemon=True)
    waits.start()
    for process in (1, 2):
        waits.join(1.2)
        assert waits.is_alive()
        for beat in ("8", "9"):
            watch._set(f"beat/{process}", beat)
            time.sleep(0.6)
    waits.join(5)
    assert not waits.is_alive()
