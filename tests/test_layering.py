"""The shape of the package: imports point down, each library behind its wall, no name that hides another."""

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pretrain"
CORPUS = {"corpus", "tokenization"}
LEVELS: tuple[set[str], ...] = (
    {"token_files", "histogram", "boxes"},
    {"config", "shards", "order", "launched", "ranks", "hashed_file", "initial", "interception", "groups"},
    {
        "loader",
        "optim",
        "launch",
        "machine",
        "stopping",
        "runfolder",
        "spikes",
        "pieces",
        "throughput",
        "collectives",
        "document_mask",
        *CORPUS,
    },
    {
        "model",
        "checkpoint",
        "tracking",
        "evaluation",
        "generation",
        "strategies",
        "token_bytes",
        "staging",
        "network",
        "tracing",
        "snapshot",
    },
    {"resume", "saver", "precision", "export", "report", "inspection", "set_contents", "sweep", "plan"},
    {"job", "evaluate_trained", "supervise", "set_inspection"},
    {"watch", "step_parts"},
    {"rollback"},
    {"train"},
    {"parity", "doctor", "compare"},
    {"cli"},
)
# Top-level package -> the only modules that may import it.
WALLS = {
    "datasets": CORPUS,
    "tokenizers": CORPUS | {"token_bytes"},
    "tiktoken": CORPUS,
    "pyarrow": CORPUS,
    "wandb": {"tracking", "report"},
    "matplotlib": {"report", "histogram", "compare"},
    "accelerate": {"strategies", "tracking", "launch"},
}
FILES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def module_of(path: Path) -> str:
    """`strategies` for every file of that folder."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """(line, dotted module, level of a relative import); `from pretrain import x` counts as pretrain.x."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "pretrain":
            yield from ((node.lineno, f"pretrain.{alias.name}", node.level) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", node.level


def ours(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module of the package)."""
    for line, name, _ in imports(path):
        if name.startswith("pretrain.") and name != "pretrain.__version__":
            yield line, name.split(".")[1]


def test_every_module_has_a_level() -> None:
    assert {module_of(path) for path in FILES} - {"__init__"} == set().union(*LEVELS)
    assert sum(map(len, LEVELS)) == len(set().union(*LEVELS))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    level = {name: k for k, names in enumerate(LEVELS) for name in names}
    me = module_of(path)
    for line, other in ours(path):
        if me != "parity":  # whose workers run updates and never the script
            assert other != "train", f"{path}:{line}: pretrain.train runs as __main__; importing it would run it again"
        together = {me, other} <= CORPUS or me == other
        assert other == "config" or together or level[other] < level[me], (
            f"{path}:{line}: {me} (level {level[me]}) imports {other} (level {level[other]}); hand it over as an argument, or move what both need down"
        )


@pytest.mark.parametrize("path", [*FILES, *SCRIPTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_our_own_modules_are_imported_by_their_full_names(path: Path) -> None:
    """As a script, the folder of the entry file comes first on sys.path: `import config` would work, and make a second copy of it."""
    stems = {module_of(p) for p in FILES} - {"__init__"}
    for line, name, relative in imports(path):
        assert not relative, f"{path}:{line}: a relative import fails in a file that is run"
        assert name.split(".")[0] not in stems, f"{path}:{line}: write `from pretrain.{name} import …`"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_stay_behind_their_walls(path: Path) -> None:
    for line, name, _ in imports(path):
        allowed = WALLS.get(name.split(".")[0])
        assert allowed is None or module_of(path) in allowed, f"{path}:{line}: {name} is for {', '.join(sorted(allowed or ()))}"


def test_the_package_itself_imports_nothing() -> None:
    """So that `pretrain --help` answers at once."""
    assert list(imports(PACKAGE / "__init__.py")) == []


def test_no_file_hides_a_module() -> None:
    taken = (sys.stdlib_module_names | packages_distributions().keys()) - {"pretrain"}
    for folder in (PACKAGE, ROOT / "scripts"):
        stems = {p.stem if p.is_file() else p.name for p in folder.iterdir() if not p.name.startswith(("_", "."))}
        assert not stems & taken, f"{folder} hides {stems & taken} from every script in it"


def test_light_verbs_import_nothing_heavy() -> None:
    """cli imports the rest inside its verbs."""
    tree = ast.parse((PACKAGE / "cli.py").read_text("utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"pretrain"}
