"""`python examples/….py`: the part below `if __name__ == "__main__"`, with its 200 steps taken out."""

import runpy
from pathlib import Path
from unittest import mock

import pytest

import jaxmem

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "name, said",
    [("gpt", ()), ("llama", ()), ("vit_nnx", ("test accuracy",)), ("resnet_batchnorm", ("test accuracy",))],
)
def test_script(name, said, capsys, monkeypatch):
    def untrained(step, state, data, num_steps, *, on_metrics):
        assert num_steps == 200 and data(0).keys() == step.workload.batch.keys()
        on_metrics({"step": 10, "window": 9, "loss": 1.25, "accuracy": 0.5, "bits": 1.8, "seconds": 1.0})
        return state

    loop = mock.create_autospec(jaxmem.train_loop, side_effect=untrained)
    monkeypatch.setattr(jaxmem.train, "train_loop", loop)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    loop.assert_called_once()
    out = capsys.readouterr().out
    for text in ("step  10", "1.25", "50%", *said):
        assert text in out
