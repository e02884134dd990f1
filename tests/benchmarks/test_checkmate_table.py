"""Checkmate's accounting, its published figures, and schedules checked against all that there are."""

import itertools
import json

import jax
import pytest

from benchmarks import checkmate_table
from benchmarks._checkmate_graph import Graph, training_step
from benchmarks._checkmate_models import MODELS
from benchmarks._checkmate_networks import network
from benchmarks._checkmate_program import Program
from benchmarks._checkmate_replay import replay
from benchmarks._checkmate_search import lowest_peak
from benchmarks._checkmate_stages import cut_stages, lay_out, least_peak_bytes

CHAIN = Graph(
    names=("a", "b", "c", "d", "e"),
    inputs=((), (0,), (1,), (2,), (3,)),
    bytes=(9, 8, 3, 7, 2),
    flops=(1, 4, 2, 6, 3),
    forward=5,
)
SKIP = Graph(  # a and c meet in d
    names=("a", "b", "c", "d", "e"),
    inputs=((), (0,), (1,), (0, 2), (3,)),
    bytes=(4, 9, 4, 4, 2),
    flops=(3, 2, 6, 1, 1),
    forward=5,
)


@pytest.mark.parametrize(
    "name, parameters, forward_flops",
    [  # as their papers and Keras count them; MobileNet's and ResNet's FLOPs within their normalisations
        ("vgg19", 143_667_240, 19.63e9),
        ("mobilenet", 4_253_864, 0.57e9),
        ("resnet50", 25_636_712, 3.86e9),
    ],
)
def test_the_models_are_those_of_the_papers(name, parameters, forward_flops):
    graph = MODELS[name]().graph()
    assert graph.fixed_bytes == 2 * 4 * parameters
    assert graph.forward_flops == pytest.approx(forward_flops, rel=0.05)
    assert all(max(inputs, default=-1) < op for op, inputs in enumerate(graph.inputs))
    unread = [op for op, users in enumerate(graph.users) if not users]
    assert unread == [graph.forward - 1]


def test_the_accounting_gives_the_batch_that_checkmates_log_shows():
    """Its published log of VGG19 has the incumbent 289.03459: the room over the largest operation."""
    step = training_step(MODELS["vgg19"]().graph())
    room = checkmate_table.MEMORY_BYTES - step.fixed_bytes
    assert room / step.largest_operation_bytes == pytest.approx(289.03459, abs=5e-6)


@pytest.mark.parametrize("schedule, what", [([1, 0], "before"), ([0], "every operation")])
def test_a_schedule_that_cannot_run_is_refused(schedule, what):
    graph = Graph(names=("a", "b"), inputs=((), (0,)), bytes=(1, 1), flops=(1, 1), forward=2)
    with pytest.raises(ValueError, match=what):
        replay(graph, schedule)


def test_a_value_made_again_is_not_alive_in_between():
    graph = Graph(
        names=("a", "b", "c", "d"), inputs=((), (0,), (1,), (0, 2)), bytes=(10, 4, 1, 1), flops=(1, 2, 4, 8), forward=4
    )
    assert replay(graph, [0, 1, 2, 3]).peak_bytes == 10 + 4 + 1
    again = replay(graph, [0, 1, 2, 0, 3])
    assert again.peak_bytes == 10 + 4 and again.recomputed_flops == 1


@pytest.mark.parametrize("inputs", [((), (0,), (1,)), ((), (0,), (0, 1))])
@pytest.mark.parametrize("sizes, flops", [((9, 8, 3), (1, 4, 2)), ((2, 9, 4), (5, 1, 3)), ((5, 5, 5), (1, 1, 1))])
@pytest.mark.parametrize("at_once", [0, 14])
def test_the_program_finds_what_trying_every_choice_finds(inputs, sizes, flops, at_once):
    layers = Graph(names=("a", "b", "c"), inputs=inputs, bytes=sizes, flops=flops, forward=3)
    step = training_step(layers)
    stages = cut_stages(step, at_once)
    program = Program(step, stages)
    found = []
    for chosen in itertools.product((False, True), repeat=len(program.keep)):
        kept = frozenset(itertools.compress(program.keep, chosen))
        found.append(replay(step, lay_out(step, stages, kept)))
    for peak in {one.peak_bytes for one in found}:
        least = min(one.recomputed_flops for one in found if one.peak_bytes <= peak)
        answer = program.solve(peak, seconds=10)
        assert answer.recomputed * step.forward_flops == pytest.approx(least)
        mine = replay(step, lay_out(step, stages, answer.kept))
        assert mine.peak_bytes <= peak and mine.recomputed_flops == least
    assert program.solve(min(one.peak_bytes for one in found) - 1, seconds=10).kept is None


@pytest.mark.parametrize("layers", [CHAIN, SKIP])
def test_no_schedule_of_few_repeats_is_below_the_bound(layers):
    step = training_step(layers)
    plain = list(range(len(step.names)))
    for where, op in itertools.product(range(step.forward, len(plain)), range(step.forward)):
        peak = replay(step, [*plain[:where], op, *plain[where:]]).peak_bytes
        assert peak >= least_peak_bytes(step) >= step.largest_operation_bytes


@pytest.mark.parametrize("recompute", [0.0, 0.3, 1.0])
def test_a_plan_stays_within_its_recomputation(recompute):
    step = training_step(SKIP)
    plan = lowest_peak(step, recompute=recompute, seconds=5)
    found = replay(step, plan.schedule)
    assert (found.peak_bytes, found.recomputed_flops) == (plan.peak_bytes, plan.recomputed_flops)
    assert found.recomputed_flops <= recompute * step.forward_flops
    assert found.peak_bytes >= least_peak_bytes(step)


def test_small_models_reach_the_bound_and_the_published_figures(capsys):
    checkmate_table.main(["--models", "vgg19,unet,mobilenet", "--target", "none"])
    printed = json.loads(capsys.readouterr().out)
    for row in printed["rows"]:
        assert row["published"] <= row["max_batch"] == row["bound"]
        assert row["recomputed_share"] <= 1
        assert row["checkpoint_all"] < row["max_batch"]
    assert printed["figures"]["vgg19_max_batch"] == 289


@pytest.mark.parametrize("name", MODELS)
def test_what_is_compiled_is_what_is_counted(name):
    """The same parameters, but for the running statistics of normalisations, and the same values."""
    net = MODELS[name](*((64, 96) if name == "unet" else (64,)))
    loss, (params, images) = network(net, 1)
    channels = sum(net.shape[i][-1] for i, layer in enumerate(net.layers) if layer.kind == "norm")
    assert sum(x.size for x in jax.tree.leaves(params)) == net.parameters - 2 * channels
    gradients = jax.eval_shape(jax.grad(loss), params, images)
    assert jax.tree.map(lambda x: x.shape, gradients) == jax.tree.map(lambda x: x.shape, params)
    jaxpr = jax.make_jaxpr(loss)(params, images)
    products = [e for e in jaxpr.eqns if e.primitive.name in ("conv_general_dilated", "dot_general")]
    counted = [i for i, layer in enumerate(net.layers) if layer.kind in ("conv", "depthwise", "dense")]
    assert [e.outvars[0].aval.shape[1:] for e in products] == [net.shape[i] for i in counted]


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        checkmate_table.main(["--models", "vgg16"])
    assert "wanted some of" in capsys.readouterr().err
