"""A training step under a remat budget: the compiled peak is within it, gradients are the plain step's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import MemoryConfig, Workload, compare, make_train_step, remat, verify
from jaxmem.analysis import _build
from jaxmem.errors import BudgetInfeasible, ConfigError
from jaxmem.targets import resolve_target
from jaxmem.train import _peaks
from jaxmem.train._peaks import Peak, Peaks


def _layer(x, w):
    return x + jax.nn.gelu(x @ w["in"]) @ w["out"], None


def _loss(params, batch):
    return jnp.mean(jax.lax.scan(_layer, batch, params)[0] ** 2)


def _workload(rows=256, loss=_loss):
    key = jax.random.key(0)
    params = {
        "in": jax.random.normal(key, (6, 16, 64)) * 0.1,
        "out": jax.random.normal(jax.random.fold_in(key, 1), (6, 64, 16)) * 0.1,
    }
    return Workload(loss, params, jax.random.normal(key, (rows, 16)), optax.adam(1e-2))


@pytest.fixture(scope="module")
def reports():
    return {
        name: make_train_step(_workload(), MemoryConfig(remat=name), target="cpu").report() for name in ("none", "full")
    }


@pytest.fixture(scope="module")
def peaks(reports):
    return {name: report.peak_bytes for name, report in reports.items()}


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
def test_the_compiled_peak_is_within_the_budget(peaks, share):
    budget = int(peaks["full"] + share * (peaks["none"] - peaks["full"]))
    step = make_train_step(_workload(), MemoryConfig(remat=f"auto:{budget}"), target="cpu")
    assert step.report().peak_bytes <= budget
    assert step.decision.peak_bytes == step.report().peak_bytes
    assert step.decision.compiles <= 6
    assert step.solution().promise == "compiled"


def test_a_loose_budget_is_as_fast_as_the_faster_policy(reports, peaks):
    step = remat.fit_budget(make_train_step(_workload()), 2 * peaks["none"], "cpu")
    assert step.report().step_seconds <= 1.001 * min(report.step_seconds for report in reports.values())
    assert step.config.budget.bytes == step.solution().budget_bytes == 2 * peaks["none"]


def test_what_fit_budget_cannot_use_is_refused():
    step = make_train_step(_workload())
    for budget in ("0.25", 0.25, 0, True):
        with pytest.raises(ConfigError, match="bytes"):
            remat.fit_budget(step, budget, "cpu")
    with pytest.raises(ConfigError, match="max_compiles"):
        remat.fit_budget(step, 2**20, "cpu", max_compiles=0)
    with pytest.raises(ConfigError, match="make_train_step"):
        remat.fit_budget(_loss, 2**20, "cpu")


def test_on_a_cpu_as_it_runs_a_refusal_says_what_hides_the_saving():
    with pytest.raises(BudgetInfeasible) as error:
        remat.fit_budget(make_train_step(_workload()), 50_000)
    assert "on local" in error.value.got and "arguments are" in error.value.got
    hidden = bool(resolve_target("cpu").compiler_options)
    assert ("target='cpu'" in error.value.do) == hidden


def test_no_budget_below_the_smallest_peak(peaks):
    with pytest.raises(BudgetInfeasible, match="smallest") as error:
        make_train_step(_workload(), MemoryConfig(remat=f"auto:{peaks['full'] // 2}"), target="cpu")
    assert "KiB" in error.value.got


def test_peaks_are_remembered(peaks, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    budget = (peaks["none"] + peaks["full"]) // 2
    first = remat.fit_budget(make_train_step(_workload()), budget, "cpu")
    again = remat.fit_budget(make_train_step(_workload()), budget, "cpu")
    assert first.decision.compiles > 0
    assert again.decision.compiles == 0
    assert again.decision.peak_bytes == first.decision.peak_bytes


def test_a_wrong_peak_on_disk_is_found_out(peaks, tmp_path, monkeypatch):
    """Entries that nothing betrays: what comes back, or is refused, rests on a compile of this process."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    budget = (peaks["none"] + peaks["full"]) // 2
    remat.fit_budget(make_train_step(_workload()), budget, "cpu", max_compiles=2)
    monkeypatch.setattr(_peaks, "_OWN", {})  # as in another process
    for path in tmp_path.glob("*.json"):
        Peaks(tmp_path).put(path.stem, Peak(1, 1e-9))
    monkeypatch.setattr(_peaks, "_OWN", {})
    step = remat.fit_budget(make_train_step(_workload()), budget, "cpu", max_compiles=2)
    assert step.decision.peak_bytes == step.report().peak_bytes <= budget
    assert step.decision.compiles > 0
    read = [Peaks(tmp_path).get(path.stem) for path in tmp_path.glob("*.json")]
    assert Peak(step.decision.peak_bytes, step.report().step_seconds) in read


def test_what_is_remembered_is_compiled_once_to_confirm_it(peaks, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    budget = (peaks["none"] + peaks["full"]) // 2
    first = remat.fit_budget(make_train_step(_workload()), budget, "cpu")
    monkeypatch.setattr(_peaks, "_OWN", {})
    again = remat.fit_budget(make_train_step(_workload()), budget, "cpu")
    assert again.decision.compiles == 1 <= first.decision.compiles

    def never(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr("jaxmem.analysis._build.compile_program", never)
    assert again.report().peak_bytes == again.decision.peak_bytes  # of the program that confirmed it


def test_a_choice_that_the_compiler_refuses_is_no_choice(peaks, tmp_path, monkeypatch):
    """One choice that fails to compile costs no more than itself; where all do, the compiler's error is told."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    compile_program = _build.compile_program
    asked = []

    def fails(times):
        asked.clear()

        def compile_some(lowered, target, options):
            asked.append(lowered)
            if len(asked) <= times:
                jax.jit(jnp.dot)(jnp.ones(2), jnp.ones(3))  # raised by JAX
            return compile_program(lowered, target, options)

        monkeypatch.setattr(_build, "compile_program", compile_some)
        return make_train_step(_workload(rows=128))

    with pytest.raises(TypeError, match="dot_general"):
        remat.fit_budget(fails(times=9), 10**9, "cpu")
    step = remat.fit_budget(fails(times=1), 10**9, "cpu")
    assert len(asked) > 1 and step.report().peak_bytes == step.decision.peak_bytes


def test_a_step_remembers_what_was_tried(peaks, tmp_path, monkeypatch):
    """Whatever is on disk: a larger budget starts from what is known, and gets no slower choice."""
    step, seconds, compiles = make_train_step(_workload()), [], []
    for i, share in enumerate((0.2, 0.5, 0.8, 0.8)):
        monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / str(i)))
        step = remat.fit_budget(step, int(peaks["full"] + share * (peaks["none"] - peaks["full"])), "cpu")
        seconds.append(step.report().step_seconds)
        compiles.append(step.decision.compiles)
    assert seconds == sorted(seconds, reverse=True)
    assert compiles[0] > 0 == compiles[-1]
    with pytest.raises(BudgetInfeasible):
        remat.fit_budget(step, peaks["full"] // 2, "cpu")


@pytest.mark.parametrize("steps", [1, 4])
def test_training_is_the_plain_steps(steps):
    workload, losses = _workload(), {}
    for setting in ("none", "auto:0.3"):
        step = make_train_step(workload, MemoryConfig(remat=setting, accumulation_steps=steps))
        state = step.init()
        losses[setting] = []
        for _ in range(3):
            state, metrics = step(state, workload.batch)
            losses[setting].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses["auto:0.3"], losses["none"], rtol=1e-5)


def test_a_share_bounds_the_residuals():
    workload = _workload()
    plain = make_train_step(workload).residual_bytes()
    step = make_train_step(workload, MemoryConfig(remat="auto:0.3"))
    assert step.residual_bytes() <= 0.3 * plain
    assert step.solution().kept_bytes <= 0.3 * plain


def test_a_loss_that_marks_its_blocks_needs_no_other_way():
    def loss(params, batch, *, memory):
        return jnp.mean(jax.lax.scan(memory.block(_layer, scanned=True), batch, params)[0] ** 2)

    marked = make_train_step(_workload(loss=loss), MemoryConfig(remat="auto:0.3"))
    found = make_train_step(_workload(), MemoryConfig(remat="auto:0.3"))
    assert marked.residual_bytes() == found.residual_bytes()


def test_frozen_parameters_keep_nothing():
    workload = _workload()
    frozen = Workload(_loss, workload.params, workload.batch, optax.adam(1e-2), trainable=lambda path, _: "out" in path)
    all_of_it = make_train_step(frozen, MemoryConfig(remat="auto:0.99")).decision.problem
    # The inputs of the frozen product are read by nothing: only its gradient would.
    assert (
        all_of_it.plain_bytes < make_train_step(workload, MemoryConfig(remat="auto:0.99")).decision.problem.plain_bytes
    )


def test_verified_and_compared():
    workload = _workload()
    found = verify(make_train_step(workload, MemoryConfig(remat="auto:0.3"), target="cpu"), target="cpu")
    assert found.passed, str(found)
    names = ("none", "full", "auto:0.3")
    rows = compare({name: MemoryConfig(remat=name) for name in names}, workload, target="cpu")
    kept = {row.name: row.saved_residual_bytes for row in rows.rows}
    assert kept["full"] <= kept["auto:0.3"] <= 0.3 * kept["none"]


@pytest.mark.parametrize(
    "text", ["auto:", "auto:much", "auto:1.5", "auto:-3", "auto:6 parsecs", "auto:nan", "auto:60", "auto", "ful"]
)
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"auto:6GiB"):
        MemoryConfig(remat=text)


def test_budgets_are_equal_by_value_and_go_through_json():
    config = MemoryConfig(remat="auto:6GiB")
    assert config == MemoryConfig(remat="auto:6144MiB") == MemoryConfig.from_json(config.to_json())
    assert MemoryConfig(remat="auto:0.25").budget.share == 0.25


def test_a_step_without_a_budget_has_no_solution():
    with pytest.raises(ConfigError, match="auto:6GiB"):
        make_train_step(_workload()).solution()


def _with_head(params, batch, *, memory):
    x, _ = jax.lax.scan(memory.block(_layer, scanned=True), batch, params)
    return jnp.mean(jnp.sin(x[:, :, None] * jnp.arange(64.0)))


@pytest.mark.parametrize(
    "loss", [_with_head, lambda params, batch: _with_head(params, batch, memory=_Unmarked())], ids=["marked", "found"]
)
def test_full_says_what_it_leaves_outside_of_blocks(loss):
    report = make_train_step(_workload(loss=loss), MemoryConfig(remat="full"), target="cpu").report()
    (said,) = [warning for warning in report.warnings if warning.startswith("full leaves ")]
    assert "outside of blocks, the largest 1.0 MiB cos (" in said and "test_budget.py:" in said
    small = make_train_step(_workload(loss=loss), MemoryConfig(remat="auto:0.1"))
    assert small.residual_bytes() < report.saved_residual_bytes / 3  # which the head's own are a large part of
    nothing = make_train_step(_workload(), MemoryConfig(remat="full"), target="cpu").report()
    assert not any(warning.startswith("full leaves ") for warning in nothing.warnings)


class _Unmarked:
    def block(self, fn, **_):
        return fn


@pytest.mark.parametrize("steps", [1, 2])
def test_what_full_stays_within_is_no_refusal(steps):
    """Where to run again what follows the last block takes more than to keep it, it is kept."""

    def loss(params, x):
        def block(h, w):
            return h + jax.nn.gelu(h @ w[0]) @ w[1], None

        h, _ = jax.lax.scan(block, x, params["layers"])
        return jax.nn.logsumexp(jax.nn.gelu(jnp.sin(h @ params["head"])), -1).mean()

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    params = {"layers": (shape(6, 64, 256), shape(6, 256, 64)), "head": shape(64, 2000)}
    work = Workload(loss, params, shape(512, 64), optax.adam(1e-3))
    full = make_train_step(work, MemoryConfig(accumulation_steps=steps, remat="full"), target="cpu").report()
    config = MemoryConfig(accumulation_steps=steps, remat=f"auto:{full.peak_bytes}B")
    assert make_train_step(work, config, target="cpu").report().peak_bytes <= full.peak_bytes
