"""Imports point one way, techniques do not know one another, and one module touches private names."""

import ast
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxmem"
TESTS = ROOT / "tests"
ONCE = "pytestmark = pytest.mark.once"

# A module may import from its own package and from what is named here; everything may import BASE.
BASE = frozenset(
    {
        "errors",
        "objective",
        "workload",
        "config",
        "loss_scale",
        "policy",
        "_blame",
        "_cell",
        "_compat",
        "_display",
        "_flax",
        "_installed",
        "_jaxpr_costs",
        "_miscompilations",
        "_peers",
        "_processes",
        "_last_window",
        "_product_flops",
        "_product_tiles",
        "_status",
        "_stdout",
        "_suggest",
        "_scopes",
        "_settled",
        "_shown",
        "_signatures",
        "_source",
        "_trainable",
        "_units",
        "budget",
    }
)
_TECHNIQUES = frozenset({"accumulate", "precision", "random_bits", "remat"})
_TRAIN = BASE | _TECHNIQUES | {"targets", "jaxprs", "analysis", "checkpoint"}
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(("accumulate", "targets"), BASE),
    "jaxprs": BASE | {"targets"},  # bytes of a value are those of a chip's tiles
    **dict.fromkeys(("precision", "random_bits"), BASE | {"jaxprs"}),
    "remat": BASE | {"jaxprs", "targets"},  # a budget is spent by the speed of a chip
    "analysis": BASE | {"targets"},  # what a program needs is always asked of a target
    "checkpoint": BASE,  # of any pytree; `train` says what of a step goes into one
    "train": _TRAIN,
    "report": _TRAIN | {"train"},
    "cli": _TRAIN | {"train", "report"},
}
# Packages inside of remat, and those beside them that they may know.
INSIDE_REMAT = {"blocks": set(), "roll": {"blocks"}, "auto": {"blocks"}}
GUARDED_LIBRARIES = frozenset({"jax", "jaxlib", "flax", "optax", "orbax"})


def _unit(path: Path) -> str:
    """The first name below `jaxmem`: `accumulate` for jaxmem/accumulate/_split.py, `config` for jaxmem/config.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _sources() -> list[Path]:
    """Every module but `__init__` and `__main__` at the top, which name things from everywhere."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.name.startswith("__"))


def imported(source: str, package: str = "jaxmem") -> list[tuple[int, str]]:
    """(line, dotted name) of every import, at any depth; `from a import b` gives `a.b`, `from . import b` too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            found += [(node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return found


def _is_import_call(func: ast.expr) -> bool:
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    return name in ("import_module", "__import__")


def upward_imports(source: str, unit: str, package: str = "jaxmem") -> list[str]:
    """Imports of jaxmem modules that `unit` may not know."""
    faults = []
    for line, name in imported(source, package):
        parts = name.split(".")
        if parts[0] != "jaxmem" or (len(parts) > 1 and parts[1] in (unit, "__version__")):
            continue
        if len(parts) == 1:  # its names come from everywhere
            faults.append(f"line {line}: {unit} may not import all of jaxmem")
            continue
        if parts[1] not in MAY_IMPORT[unit]:
            faults.append(f"line {line}: {unit} may not import {name}")
    return faults


def faults_inside_remat(module: str, source: str) -> list[str]:
    """Imports by a module of remat of a package inside that it may not know, or of a private module of one."""
    own = package_inside_remat(module)
    faults = []
    for line, name in imported(source):
        package, rest = package_inside_remat(name), name.split(".")[3:]
        if package in ("", own):
            continue
        if package not in INSIDE_REMAT.get(own, INSIDE_REMAT) or (rest and rest[0].startswith("_")):
            faults.append(f"line {line}: {own or 'remat'} may not import {name}")
    return faults


def package_inside_remat(name: str) -> str:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["jaxmem", "remat"] and len(parts) > 2 and parts[2] in INSIDE_REMAT else ""


def imports_between(root: Path, package: str = "jaxmem") -> dict[str, set[str]]:
    """Module → modules of the package that it imports anywhere, also for types; without the top, which names them all.

    `from a import b` is an import of the module a.b where there is one, else of the package a.
    """
    files = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del files[package]
    found = {}
    for module, path in files.items():
        within = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named = (name for _, name in imported(path.read_text(), within))
        ends = (name if name in files else name.rpartition(".")[0] for name in named)
        found[module] = {end for end in ends if end in files and end != module}
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or by way of others."""

    def reached(module: str) -> set[str]:
        seen, todo = set(), [module]
        while todo:
            new = imports[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {module: reached(module) for module in imports}
    groups = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in imports
        if module in reach[module]
    }
    return sorted(sorted(group) for group in groups)


def private_touches(source: str) -> list[str]:
    """Names that begin with one underscore in a guarded library, by import or by attribute."""
    faults, aliases = [], {}
    tree = ast.parse(source)
    for line, name in imported(source):
        if _is_private(name):
            faults.append(f"line {line}: import of {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        name = _dotted(node) if isinstance(node, ast.Attribute) else None
        if name is None:
            continue
        head, _, rest = name.partition(".")
        library = aliases.get(head, "").split(".")[0]
        if library in GUARDED_LIBRARIES and _is_private(f"{library}.{rest}"):
            faults.append(f"line {node.lineno}: use of {name}")
    return faults


def _is_private(name: str) -> bool:
    library, *parts = name.split(".")
    return library in GUARDED_LIBRARIES and any(p.startswith("_") and not p.startswith("__") for p in parts)


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return None


def test_imports_point_one_way():
    unknown = {_unit(path) for path in _sources()} - set(MAY_IMPORT)
    assert not unknown, "add them to MAY_IMPORT and say what they stand on"
    faults = {}
    for path in _sources():
        package = ".".join(path.relative_to(ROOT).parent.parts)
        faults[str(path.relative_to(PACKAGE))] = upward_imports(path.read_text(), _unit(path), package)
    assert {path: found for path, found in faults.items() if found} == {}


def test_no_modules_import_one_another():
    assert circles(imports_between(ROOT)) == []


def test_packages_inside_remat_point_one_way():
    for path in sorted((PACKAGE / "remat").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert faults_inside_remat(module, path.read_text()) == [], module


@pytest.mark.parametrize(
    ("module", "source", "faulty"),
    [
        ("jaxmem.remat.blocks._find", "from jaxmem.remat.roll import roll", True),
        ("jaxmem.remat.blocks._plan", "from jaxmem.remat.auto import auto", True),
        ("jaxmem.remat.auto._problem", "from jaxmem.remat.blocks._plan import Plan", True),
        ("jaxmem.remat._examine", "def f():\n    from jaxmem.remat.blocks._plan import Plan", True),
        ("jaxmem.remat.auto._problem", "from jaxmem.remat.blocks import Plan", False),
        ("jaxmem.remat.auto._problem", "from jaxmem.remat.auto._solve import Group", False),
    ],
)
def test_an_import_inside_remat_is_judged(module, source, faulty):
    assert bool(faults_inside_remat(module, source)) == faulty


def test_a_circle_is_seen(tmp_path):
    package = tmp_path / "jaxmem" / "inner"
    package.mkdir(parents=True)
    for name, source in {
        "../__init__": "from jaxmem import a",
        "../a": "from jaxmem.inner import c",
        "__init__": "from jaxmem.inner.b import x",
        "b": "from . import c",
        "c": "def f():\n    from jaxmem.inner import b",
    }.items():
        (package / f"{name}.py").write_text(source)
    assert circles(imports_between(tmp_path)) == [["jaxmem.inner.b", "jaxmem.inner.c"]]


def test_only_compat_touches_private_names():
    touches = {str(path.relative_to(PACKAGE)): private_touches(path.read_text()) for path in _sources()}
    assert {path: found for path, found in touches.items() if found and path != "_compat.py"} == {}


def test_what_runs_once_does_not_name_the_libraries_whose_versions_differ():
    """Marked `once` are tests without programs; what they call inside jaxmem is their author's word."""
    marked = {path: text for path in sorted(TESTS.rglob("test_*.py")) if ONCE in (text := path.read_text())}
    assert Path(__file__) in marked
    named = {path.name: {name.split(".")[0] for _, name in imported(text)} for path, text in marked.items()}
    assert {name: found for name, found in named.items() if found & {*GUARDED_LIBRARIES, "examples"}} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from jaxmem.train import make_train_step",
        "from jaxmem import train",
        "import jaxmem.train as t",
        "from ..train import loop",
        "from .. import train",
        "def f():\n    from jaxmem.remat import checkpoint",
        "import importlib\nimportlib.import_module('jaxmem.train')",
        "from jaxmem import make_train_step",
        "import jaxmem",
        "def f():\n    import jaxmem as j",
    ],
)
def test_an_upward_or_sideways_import_is_seen(source):
    assert upward_imports(source, "accumulate", "jaxmem.accumulate")


def test_a_downward_import_passes():
    source = "from jaxmem.errors import BatchError\nfrom jaxmem.accumulate import x\nfrom . import y\nimport jax"
    assert upward_imports(source, "accumulate", "jaxmem.accumulate") == []


@pytest.mark.parametrize(
    "source",
    [
        "from jax._src import core",
        "import jax\njax._src.core",
        "import optax as o\no._src.base",
        "from flax.linen import transforms as t\nt._private()",
        "from jax import _src",
        "__import__('jax._src.core')",
    ],
)
def test_a_private_touch_is_seen(source):
    assert private_touches(source)


def test_a_public_touch_passes():
    source = """
        import jax
        from jax import tree_util
        jax.__version__, tree_util.tree_map, self._src, jax.numpy.ones
    """
    assert private_touches(textwrap.dedent(source)) == []
