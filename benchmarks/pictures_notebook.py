"""Pictures of what a notebook shows of GPT-2 on an H100: light, dark, and 390 pixels wide.

    pip install -e '.[dev,gpu-aot,notebooks]' && python -m benchmarks.pictures_notebook FOLDER

A notebook is executed by a kernel of its own, about two minutes on two cores, then rendered by nbconvert in Jupyter's
light and dark theme. Beside the pictures the folder holds the notebook; the sizes of its outputs are printed, and those
of a report and a comparison together must stay below `LIMIT_BYTES`.
"""

import json
import shutil
import sys
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_BYTES = 300_000
WIDTHS = (1100, 390)
CELLS = {
    "report": """
import os
os.environ["JAX_PLATFORMS"] = "cpu"  # with a CUDA plugin and no GPU, JAX would complain
import sys
sys.path.insert(0, ROOT)
import jaxmem
from examples import gpt

workload = gpt.gpt2_124m()
jaxmem.analyze(workload, target="gpu-h100")""",
    "comparison": """
configs = {name: jaxmem.MemoryConfig(remat=name) for name in ("none", "full", "dots", "dots_no_batch")}
comparison = jaxmem.compare(configs, workload, target="gpu-h100")
comparison""",
    "diff": """
jaxmem.report.diff(comparison["none"], comparison["dots"])""",
    "workload": """
workload""",
    "residuals": """
jaxmem.make_train_step(workload).residuals(remat="dots")""",
    "solution": """
import jax.numpy as jnp

def mlp(weights, x):
    for w in weights:
        x = x + jnp.tanh(jnp.tanh(x) @ w)
    return jnp.mean(x**2)

arguments = [jnp.ones((512, 512))] * 12, jnp.ones((2048, 512))
jaxmem.remat.auto(mlp, "80MiB").solve(*arguments)""",
    "frontier": """
jaxmem.remat.frontier(mlp)(*arguments)""",
    "equivalence": """
import optax

small = jaxmem.Workload(mlp, [jnp.ones((64, 64)) / 64] * 4, jnp.ones((32, 64)), optax.adamw(1e-3))
jaxmem.assert_equivalent(small, jaxmem.MemoryConfig(accumulation_steps=4))""",
}


def notebook_pictures(folder: str | Path) -> dict[str, int]:
    """Executes the notebook, takes the pictures, and returns the bytes of each output as it stands in the notebook."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    notebook = executed()
    (folder / "notebook.ipynb").write_text(json.dumps(notebook, indent=1))
    cells = zip(CELLS, notebook["cells"], strict=True)
    sizes = {name: len(json.dumps(cell["outputs"]).encode()) for name, cell in cells}
    for theme in ("light", "dark"):
        page = folder / f"notebook_{theme}.html"
        page.write_text(rendered(notebook, theme), encoding="utf-8")
        take(page, folder, theme)
    assert sizes["report"] + sizes["comparison"] < LIMIT_BYTES, sizes
    return sizes


def executed():
    """The notebook with its outputs."""
    import nbclient
    import nbformat

    root = f"ROOT = {str(Path(__file__).parent.parent)!r}"
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.values()]
    notebook.cells[0].source = f"{root}\n{notebook.cells[0].source}"
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    for cell in notebook.cells:  # what libraries print on stderr is no output of jaxmem's
        cell.outputs = [output for output in cell.outputs if output.output_type != "stream"]
    return notebook


def rendered(notebook, theme: str) -> str:
    """The notebook as JupyterLab shows it."""
    from nbconvert import HTMLExporter

    return HTMLExporter(template_name="lab", theme=theme).from_notebook_node(notebook)[0]


def take(page: Path, folder: Path, theme: str) -> None:
    """A picture of each output at each width; the chart of the report with the pointer over it."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for width in WIDTHS:
            tab = browser.new_page(viewport={"width": width, "height": 900})
            tab.goto(page.resolve().as_uri(), wait_until="domcontentloaded")
            for name, output in zip(CELLS, tab.locator("div.jaxmem").all(), strict=True):
                chart = output.locator(".chart")
                if chart.count():
                    chart.scroll_into_view_if_needed()
                    box = chart.bounding_box()
                    tab.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.6 * box["height"])
                output.screenshot(path=folder / f"{name}_{theme}_{width}.png")
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(json.dumps(notebook_pictures(sys.argv[1]), indent=2))
