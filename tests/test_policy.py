"""`Policy`: a value that combines, refuses contradictions, and goes through JSON."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError, UnknownPolicyError
from jaxmem.policy import PRESETS, Policy, as_policy, preset

pytestmark = pytest.mark.once

NAMES = st.lists(st.sampled_from(["a", "b", "c_proj", "re:.*_proj", "re:a|b"]), max_size=3)


@st.composite
def policies(draw):
    fates = {fate: tuple(draw(NAMES)) for fate in ("save", "offload")}
    fates["offload"] = tuple(p for p in fates["offload"] if p not in fates["save"])
    return Policy(
        **fates,
        dots=draw(st.sampled_from(["none", "no_batch", "all"])),
        rest=draw(st.sampled_from(["recompute", "save"])),
    )


@given(policies())
def test_json_round_trip(policy):
    assert Policy.from_json(policy.to_json()) == policy
    assert hash(Policy.from_json(policy.to_json())) == hash(policy)
    config = MemoryConfig(remat=policy)
    assert MemoryConfig.from_json(config.to_json()) == config and config.policy == policy


@given(policies())
def test_combining_with_itself_and_with_full_changes_nothing(policy):
    assert policy | policy == policy
    assert policy | preset("full") == policy == preset("full") | policy


@given(policies(), st.randoms())
def test_the_order_of_patterns_is_no_part_of_the_value(policy, random):
    shuffled = {
        field: random.sample(patterns := getattr(policy, field), len(patterns)) for field in ("save", "offload")
    }
    assert dataclasses.replace(policy, **shuffled) == policy
    assert str(Policy(save=("b", "a", "b"))) == "save=a,b"


def test_a_preset_and_its_policy_are_one_setting():
    for name, policy in PRESETS.items():
        one, other = MemoryConfig(remat=name), MemoryConfig(remat=policy)
        assert one == other and hash(one) == hash(other) and one.remat == other.remat
    assert MemoryConfig(remat=Policy()).remat == "full"
    assert MemoryConfig(remat=Policy(save=("a",))).remat == Policy(save=("a",))


def test_a_combination_keeps_what_either_keeps():
    combined = Policy(save=("a",), dots="no_batch") | Policy(offload=("b", "re:c.*"), dots="all")
    assert combined == Policy(save=("a",), offload=("b", "re:c.*"), dots="all")
    assert [combined.fate(name) for name in ("a", "b", "cc", "d")] == ["save", "offload", "offload", None]
    assert (Policy() | preset("none")).keeps_everything
    with pytest.raises(TypeError):
        Policy() | "full"


@pytest.mark.parametrize("one, other", list(itertools.combinations(["save", "offload", "recompute"], 2)))
def test_a_name_has_one_fate(one, other):
    with pytest.raises(ConfigError, match=f"'x' in both {one} and {other}"):
        Policy(**{one: ("x", "y"), other: ("x",)})
    with pytest.raises(ConfigError, match=f"'x' in both {one} and {other}"):
        Policy(**{one: ("x",)}) | Policy(**{other: ("x",)})


def test_an_exact_name_wins_over_an_expression_and_two_expressions_do_not_agree():
    policy = Policy(save=("re:.*_proj",), offload=("q_proj",), recompute=("out_proj",))
    assert [policy.fate(n) for n in ("q_proj", "out_proj", "k_proj", "proj")] == ["offload", "recompute", "save", None]
    with pytest.raises(ConfigError, match="'q_proj' in both save and offload"):
        Policy(save=("re:.*_proj",), offload=("re:q.*",)).fate("q_proj")


def test_an_expression_is_for_the_whole_name():
    policy = Policy(save=("re:proj",))
    assert policy.fate("proj") == "save" and policy.fate("q_proj") is None


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"save": "a"}, r"Write save=\('a',\)"),
        ({"save": ("",)}, "names, or regular expressions"),
        ({"save": (3,)}, "got 3"),
        ({"save": None}, r"tuple of names; got None\. Write save=\('name',\)"),
        ({"save": {"a": 1}}, r"tuple of names; got \{'a': 1\}"),
        ({"save": b"ab"}, "tuple of names; got b'ab'"),
        ({"save": (["a"],)}, r"names, .* got \['a'\]"),
        ({"offload": ({},)}, r"names, .* got \{\}"),
        ({"offload": ("re:(",)}, r"'re:\('"),
        ({"dots": "some"}, "none, no_batch, all; got 'some'"),
        ({"rest": True}, "got True"),
        ({"recompute": ("a",), "dots": "all"}, "before it sees the value's name"),
        ({"recompute": ("a",), "rest": "save"}, "before it sees the value's name"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, match):
    with pytest.raises(ConfigError, match=match):
        Policy(**fields)


BAD = ["[]", "{", "null", None, b"\xff", '{"keep": ["a"]}', '{"save": "a"}', '{"save": {"a": 1}}', '{"save": [["a"]]}']


@pytest.mark.parametrize("text", [*BAD, "[" * 100_000], ids=[*map(repr, BAD), "deep"])
def test_bad_json_is_a_config_error(text):
    with pytest.raises(ConfigError):
        Policy.from_json(text)


def test_presets_are_distinct_and_known_by_name():
    by_policy = {}
    for name, policy in PRESETS.items():
        assert as_policy(name) is policy is preset(name)
        by_policy.setdefault(policy, []).append(name)
    assert [names for names in by_policy.values() if len(names) > 1] == [["save_qkv_proj", "save_qkv"]]
    assert str(PRESETS["minimal"]) == "minimal" and str(Policy(save=("a", "b"))) == "save=a,b"
    with pytest.raises(UnknownPolicyError, match="none, full, dots, .*minimal.*got 'save_everything'"):
        preset("save_everything")


def test_maxtexts_presets_hold_its_names():
    """Field notes, §4: what each keeps."""
    qkv, mlp = {"query_proj", "key_proj", "value_proj", "qkv_proj"}, {"mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"}
    everything = qkv | mlp | {"out_proj", "context", "other"}
    kept = {
        "minimal": qkv | mlp | {"out_proj"},
        "minimal_with_context": qkv | mlp | {"out_proj", "context"},
        "save_dot_with_context_except_mlp": qkv | {"out_proj", "context"},
        "save_dot_except_mlpwi": qkv | {"out_proj", "mlpwo"},
        "save_dot_except_mlp": qkv | {"out_proj"},
        "save_qkv_proj": qkv,
        "save_out_proj": {"out_proj"},
        "qkv_proj_offloaded": qkv,
        "minimal_offloaded": qkv | mlp | {"out_proj"},
    }
    for name, names in kept.items():
        fate = "offload" if name.endswith("offloaded") else "save"
        assert {n for n in everything if preset(name).fate(n) == fate} == names, name
        assert {n for n in everything if preset(name).fate(n) is None} == everything - names, name


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().save = ("a",)  # pyright: ignore[reportAttributeAccessIssue]
