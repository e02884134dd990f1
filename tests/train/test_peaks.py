"""The peaks on disk: what is put is got, whatever lies in its place is done without and written anew."""

import json
import os
import subprocess
import sys

import pytest

from jaxmem.train._peaks import Peak, Peaks

pytestmark = pytest.mark.once

KEY, PEAK = "a" * 64, Peak(4096, 0.25, ((0, 0.125), (1024, 0.0625)))


def changed(**fields) -> str:
    """An entry that was right, with other fields: its checksum does not fit them."""
    return json.dumps({"schema": 3, "peak_bytes": 4096, "seconds": 0.25, "forward": [], **fields})


DAMAGED = {
    "nothing": b"",
    "half": b'{"peak_bytes": 40',
    "a list": b"[]",
    "no fields": b"{}",
    "an older schema": b'{"peak_bytes": 1, "seconds": 1e-9}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "not text": bytes(range(128, 256)),
    "long": b'{"peak_bytes": ' + b"9" * 100_000 + b"}",
    "NaN": changed(seconds=float("nan")).encode(),
    "infinite": changed(seconds=float("inf")).encode(),
    "a truth": changed(peak_bytes=True).encode(),
    "negative": changed(peak_bytes=-1).encode(),
    "text": changed(peak_bytes="4096").encode(),
    "fraction": changed(peak_bytes=4096.5).encode(),
    "no pairs": changed(forward=[[1]]).encode(),
    "a pair of texts": changed(forward=[["1", "2"]]).encode(),
    "endless seconds": changed(forward=[[1, float("inf")]]).encode(),
    "huge": changed(peak_bytes=2**64).encode(),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_done_without_and_mended(tmp_path, text):
    peaks = Peaks(tmp_path)
    (tmp_path / f"{KEY}.json").write_bytes(text)
    assert peaks.get(KEY) is None
    peaks.put(KEY, PEAK)
    assert peaks.get(KEY) == PEAK


@pytest.mark.parametrize("field", ["schema", "versions", "peak_bytes", "seconds", "forward", "checksum"])
def test_an_entry_that_was_changed_is_no_entry(tmp_path, field):
    peaks, path = Peaks(tmp_path), tmp_path / f"{KEY}.json"
    peaks.put(KEY, PEAK)
    entry = json.loads(path.read_text())
    others = {"schema": 1, "versions": {**entry["versions"], "jaxlib": "0.0.1"}, "peak_bytes": 1, "seconds": None}
    others["forward"] = [[0, 0.5]]
    path.write_text(json.dumps({**entry, field: {**others, "checksum": "0" * 64}[field]}))
    assert peaks.get(KEY) is None
    path.write_text(json.dumps({**entry, "more": 1}))
    assert peaks.get(KEY) is None
    path.write_text(json.dumps(entry))
    assert peaks.get(KEY) == PEAK
    path.rename(tmp_path / f"{'b' * 64}.json")
    assert peaks.get("b" * 64) is None  # of another program


def test_without_seconds(tmp_path):
    Peaks(tmp_path).put(KEY, Peak(1, None))
    assert Peaks(tmp_path).get(KEY) == Peak(1, None)


def test_what_is_no_file_is_left_alone(tmp_path):
    peaks, path = Peaks(tmp_path), tmp_path / f"{KEY}.json"
    path.mkdir()
    peaks.put(KEY, PEAK)
    assert peaks.get(KEY) is None and list(tmp_path.iterdir()) == [path]  # and nothing is left over
    os.mkfifo(tmp_path / f"{'b' * 64}.json")
    assert peaks.get("b" * 64) is None  # without waiting for a writer


@pytest.mark.parametrize("folder", ["file/folder", "file", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, folder):
    (tmp_path / "file").write_text("")
    peaks = Peaks(tmp_path / folder)
    peaks.put(KEY, PEAK)
    assert peaks.get(KEY) is None
    assert peaks.own(KEY) == PEAK


def test_a_reader_never_sees_half_of_what_several_write(tmp_path):
    code = (
        "import sys; from jaxmem.train._peaks import Peak, Peaks\n"
        "for i in range(300): Peaks(sys.argv[1]).put(sys.argv[2], Peak(i + 1, None))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), KEY]) for _ in range(2)]
    seen = []
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / f"{KEY}.json").exists():
            seen.append(Peaks(tmp_path).get(KEY))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen and None not in seen
    assert Peaks(tmp_path).get(KEY) == Peak(300, None)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.json"]
