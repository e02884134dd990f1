"""The oracles on stacks small enough for a test: cells, their file, and the comparison with what was published."""

import dataclasses
import json

import jax
import pytest

from benchmarks import _cells, oracles
from benchmarks._published import PEERS_GIB, PEERS_SECONDS, PEERS_SHARE, TRAPS_MIB
from benchmarks._stacks import STACKS
from jaxmem.policy import PRESETS


@pytest.fixture
def tiny(monkeypatch):
    for name in ("gpt", "llama"):
        small = {"batch": 4, "time": 128, "width": 64, "heads": 4, "hidden": 256, "vocabulary": 64, "layers": 3}
        kv_heads = 4 if name == "gpt" else 2
        monkeypatch.setitem(STACKS, name, dataclasses.replace(STACKS[name], kv_heads=kv_heads, **small))


def test_the_models_keep_what_the_published_one_kept():
    """The published model was not written down: its residuals tell its batch, width, heads and vocabulary.

    Newer versions of JAX keep one mask for all layers where 0.10 kept one for each: 64 MiB of 1412.
    """
    masks = 0 if jax.__version__.startswith("0.10.") else 64
    cells = _cells.Cells()
    for (policy, layout, compiler), published in TRAPS_MIB.items():
        if compiler == "residuals":
            record = cells.get(("traps", policy, layout, compiler), _cells.traps)
            expected = published - (masks if policy == "none" else 0)
            assert record["temp_bytes"] / 2**20 == pytest.approx(expected, abs=0.5)


def test_a_run_of_one_target_and_what_is_remembered_of_it(tiny, tmp_path, capsys):
    command = ["--table", "peers", "--models", "llama", "--targets", "gpu-h100", "--policies", "none,full"]
    command += ["--cache", str(tmp_path / "cells.json")]
    printed = []
    for _ in range(2):
        oracles.main(command)
        printed.append(json.loads(capsys.readouterr().out))
    first, second = (record["figures"] for record in printed)
    assert (first.pop("compiles"), second.pop("compiles")) == (2, 0)
    assert first == second
    none, full = (first[f"llama_h100_{policy}_temp_gib"] for policy in ("none", "full"))
    assert full < none
    shares = [first[f"llama_h100_{policy}_recompute_share"] for policy in ("none", "full")]
    assert shares[0] == 0 and 0.5 < shares[1] < 1
    rows = {row["name"]: row for row in printed[0]["rows"]}
    row = rows["llama_h100_none_temp_gib"]
    assert row["published"] == PEERS_GIB["llama", "none", "gpu-h100"] and row["ratio"] == none / row["published"]
    assert first["max_temp_ratio_to_notes"] >= row["published"] / none > 100  # the tiny stack needs far less
    assert printed[0]["versions"]["jax"] in printed[0]["compilers"]


def test_a_stopped_run_keeps_what_it_has(tiny, tmp_path, monkeypatch, capsys):
    def stop(*key):
        raise KeyboardInterrupt

    command = ["--table", "peers", "--models", "gpt", "--targets", "gpu-h100", "--policies", "full,dots"]
    command += ["--cache", str(tmp_path / "cells.json")]
    real = _cells.peer
    # By name, since a cell's name depends on the source of what makes it.
    monkeypatch.setattr(oracles, "peer", lambda *key: stop() if "dots" in key else real(*key))
    with pytest.raises(SystemExit) as stopped:
        oracles.main(command)
    assert stopped.value.code == 130 and capsys.readouterr().out == ""
    (name,) = json.loads((tmp_path / "cells.json").read_text())
    assert name.startswith("peers gpt full gpu-h100")


@pytest.mark.parametrize("option", ["--models=bert", "--targets=gpu-h10", "--policies="])
def test_unknown_parts_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        oracles.main([option])
    assert "wanted some of" in capsys.readouterr().err


def test_a_ratio_counts_either_way_and_a_share_by_its_difference():
    rows = [
        oracles.row("peers", "a_temp_gib", "GiB", 1.0, 2.0),
        oracles.row("traps", "b_temp_mib", "MiB", 3.0, 2.0),
        oracles.row("peers", "c_recompute_share", "share", 0.5, 0.6),
        oracles.row("peers", "d_cycle_seconds", "s", 1.0, None),
    ]
    figures = oracles.summary(rows)
    assert figures["max_temp_ratio_to_notes"] == figures["peers_max_temp_ratio_to_notes"] == pytest.approx(2.0)
    assert figures["traps_max_temp_ratio_to_notes"] == pytest.approx(1.5)
    assert figures["max_share_difference_to_notes"] == pytest.approx(0.1)
    assert "max_seconds_ratio_to_notes" not in figures


def test_the_peers_names_are_those_of_jaxmems_presets():
    for name, saved in _cells._NAMED.items():
        assert PRESETS[name].save == (f"re:{'|'.join(saved)}",)
    assert {policy for _, policy, _ in PEERS_GIB} | {policy for _, policy in (*PEERS_SECONDS, *PEERS_SHARE)} <= set(
        oracles.POLICIES
    )
