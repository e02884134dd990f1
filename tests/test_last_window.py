"""After which window the processes that train together stop."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from jaxmem._last_window import Windows
from jaxmem.errors import ProcessError


class Store:
    """The part of `Peers` that `Windows` uses, of two processes in this one."""

    count = 2

    def __init__(self, process: int, words: dict):
        self.process, self.words = process, words

    def _set(self, key, text):
        self.words[key] = text

    def _dir(self, key):
        return [(name, text) for name, text in self.words.items() if name.startswith(f"{key}/")]


def both(*asked):
    """What `stop` and `ended` say in two processes: each is given windows with (method, window, reason)."""
    words: dict = {}
    runs = [Windows(0, first=0) for _ in asked]
    said: list[list] = [[] for _ in asked]
    done = threading.Event()

    def train(run, calls, heard):
        for name, *given in calls:
            time.sleep(0.005)
            try:
                heard.append(getattr(run, name)(*given))
            except ProcessError as error:
                heard.append(error)
            if heard[-1]:
                return

    def watch():
        while not done.wait(0.01):
            for process, run in enumerate(runs):
                run.settle(Store(process, words))

    with ThreadPoolExecutor() as pool:
        pool.submit(watch)
        trained = [pool.submit(train, *each) for each in zip(runs, asked, said, strict=True)]
        for each in trained:
            each.result(timeout=20)
        done.set()
    return said


def test_all_stop_after_the_window_that_the_furthest_has_dispatched():
    asks = [("stop", window, "interrupted" if window == 2 else "") for window in range(200)]
    goes_on = [("stop", window, "") for window in range(200)]
    first, second = both(asks, goes_on)
    assert first[-1] == second[-1] == "interrupted" and len(first) == len(second) >= 3


def test_data_that_ends_sooner_in_one_process_is_an_error_in_both():
    short = [("stop", 0, ""), ("ended", 0)]
    more = [("stop", window, "") for window in range(5)] + [("ended", 4)]
    for heard in both(short, more):
        assert "which ends after window 0" in str(heard[-1]) or heard[-1] == "data ended"
    same = both(more, more)
    assert [heard[-1] for heard in same] == ["data ended", "data ended"]
