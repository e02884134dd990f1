"""Order, roll, random masks and generator as options: single for a step, lists for the rows of a comparison."""

import inspect
import json

import pytest

from jaxmem._settled import SETTINGS, WORDS
from jaxmem.cli._fields import OPTIONS, Fields
from jaxmem.config import MemoryConfig
from tests.cli.helpers import LINEAR, assert_refused, run, write


def test_words_mean_the_settings_that_the_config_takes():
    for each in OPTIONS:
        assert each.field in inspect.signature(MemoryConfig).parameters
        if each.words:
            settings, _ = SETTINGS[each.field]
            assert {*each.words.values()} == {*settings} <= {*WORDS[each.field]}
    told = [word for words in WORDS.values() for word in words.values()]
    assert len(told) == len({*told})  # a row's name says which lever it means


def test_rows_are_the_product_and_a_single_value_is_for_all():
    texts = {"remat": "none,full", "order": "tied", "roll": "unrolled,true", "precision": "bfloat16"}
    rows = Fields(texts=texts).variants()
    assert list(rows) == ["none, unrolled", "none, rolled", "full, unrolled", "full, rolled"]
    assert rows["full, rolled"] == MemoryConfig(remat="full", order="tied", roll=True, precision="bfloat16")
    both = Fields(texts={"remat": "full", "order": "free,tied", "random": "free,fenced"}).variants()
    assert list(both) == ["full, free, unfenced", "full, free, fenced", "full, tied, unfenced", "full, tied, fenced"]
    assert list(Fields(texts={"remat": "full", "generator": "given,rbg"}).variants()) == [
        "full, own generator",
        "full, rbg",
    ]


@pytest.mark.parametrize(
    "options, words",
    [
        (("--order", "tie"), "--order to be one of auto, tied, free; got 'tie'. Did you mean tied?"),
        (("--roll", "rolled,true"), "--roll to be a list of different settings; got rolled,true"),
        (("--roll", "1"), "--roll to be one of auto, rolled, unrolled; got '1'"),
        (("--random", "fenced,,free"), "--random to be a list of different settings; got 'fenced,,free'"),
        (("--order", "free", "--order", "tied"), "--order once; got it 2 times. Separate its values by commas."),
    ],
)
def test_what_is_no_setting_is_said(capfd, tmp_path, options, words):
    assert_refused(run(capfd, "compare", write(tmp_path, LINEAR), *options), words)


def test_a_single_verb_takes_no_list(capfd, tmp_path):
    for verb in ("analyze", "residuals"):
        ran = run(capfd, verb, write(tmp_path, LINEAR), "--order", "free,tied")
        assert_refused(ran, "--order to be one of auto, tied, free; got 'free,tied'")


def test_rows_show_their_form_and_what_compiling_took(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    out, file = tmp_path / "rows.json", write(tmp_path, LINEAR)
    options = ("--remat", "none", "--order", "auto,tied", "--roll", "false,true", "--json", out)
    ran = run(capfd, "compare", file, "--target", "cpu", *options)
    assert ran.code == 0, ran.err
    heading = next(line.split() for line in ran.out.splitlines() if line.startswith("variant"))
    assert heading[-6:-3] == ["order", "layers", "compile^"] and "masks" not in heading
    assert "^ measured on this machine" in ran.out
    table = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in table] == [
        "none, order auto, unrolled",
        "none, order auto, rolled",
        "none, tied, unrolled",
        "none, tied, rolled",
    ]
    last, asked = table[-1], json.loads(table[0]["config"])
    assert (last["order"], last["roll"], last["random"], last["generator"]) == ("tied", True, "free", "threefry2x32")
    assert table[0]["order"] in ("tied", "free") and asked["order"] == "auto" and asked["roll"] is False
    assert last["compile_seconds"] > 0 and last["provenances"]["compile_seconds"] == "measured"
    again = run(capfd, "compare", file, "--target", "cpu", "--remat", "none,full")
    assert "compile^" not in again.out and "layers" not in again.out.partition("!")[0]


def test_forms_that_may_win_are_rows_where_that_is_asked_for(capfd, tmp_path):
    file, out = write(tmp_path, LINEAR), tmp_path / "rows.json"
    options = ("--target", "cpu", "--remat", "none", "--try-forms")
    assert run(capfd, "compare", file, *options, "--json", out).code == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["name"] == "none" and {row["order"] for row in rows} >= {"free", "tied"}
    assert_refused(run(capfd, "compare", file, *options, "--verify"), "--verify or --try-forms; got both")
