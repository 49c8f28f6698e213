"""Rules of the house that no linter knows: what may be imported where, what a file looks like, what it may read.

Every failure names file and line.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ipc", "gateway", "scheduler", "rose", "services")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# whatever turns bytes from elsewhere into objects of any type
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLE_CALLS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}

Found = Iterator[tuple[int, str]]


def sources(*folders: str, root: Path = ROOT) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def imported(tree: ast.Module) -> Found:
    """Every absolute name that a module imports, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def no_pickle(tree: ast.Module, lines: list[str]) -> Found:
    for line, name in imported(tree):
        if PICKLES & set(name.split(".")):
            yield line, f"imports {name}: no pickle, at any depth"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PICKLE_CALLS:
            yield node.lineno, f"{node.attr} unpickles what a socket brings"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            yield node.lineno, "torch.load unpickles: read safetensors"
        allows = isinstance(node, ast.keyword) and node.arg == "allow_pickle"
        if allows and not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield node.value.lineno, "allow_pickle"


def no_environment(tree: ast.Module, lines: list[str]) -> Found:
    for line, name in imported(tree):
        if name.startswith("os.") and name.split(".")[1] in ENVIRONMENT:
            yield line, f"imports {name}: settings come from services/config.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os":
            yield node.lineno, f"os.{node.attr}: settings come from services/config.py"


def has_docstring(tree: ast.Module, lines: list[str]) -> Found:
    if tree.body and not ast.get_docstring(tree):
        yield 1, "the module does not say what it is"


def broad_excepts_say_why(tree: ast.Module, lines: list[str]) -> Found:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        names = (
            {"BaseException"} if node.type is None else {part.id for part in ast.walk(node.type) if hasattr(part, "id")}
        )
        passes_on = isinstance(node.body[-1], ast.Raise)  # cleaned up and raised again
        if names & {"Exception", "BaseException"} and not passes_on:
            comment = lines[node.lineno - 1].partition("#")[2].replace("noqa: BLE001", "")
            if len(comment.strip(" -:")) < 10:
                yield node.lineno, "a broad except whose line does not say why (`# noqa: BLE001 - why`)"


def short_enough(tree: ast.Module, lines: list[str]) -> Found:
    if len(lines) > MAX_FILE_LINES:
        yield len(lines), f"{len(lines)} lines in a file, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


Rule = Callable[[ast.Module, list[str]], Found]
RULES: dict[Rule, list[Path]] = {
    no_pickle: sources(*PACKAGES),
    no_environment: [path for path in sources(*PACKAGES) if path != ROOT / "services" / "config.py"],
    has_docstring: sources(*PACKAGES, "bench", "tests"),
    broad_excepts_say_why: sources(*PACKAGES, "bench"),
    short_enough: sources(*PACKAGES, "bench", "tests/fakes"),
}


def violations(rule: Rule, text: str) -> list[tuple[int, str]]:
    return list(rule(ast.parse(text), text.splitlines()))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in RULES[rule]
        for line, what in violations(rule, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (no_pickle, "import pickle"),
        (no_pickle, "from multiprocessing.reduction import pickle"),
        (no_pickle, "def f():\n    import cloudpickle as c"),
        (no_pickle, "socket.recv_pyobj()"),
        (no_pickle, "torch.load(path, weights_only=True)"),
        (no_pickle, "np.load(path, allow_pickle=True)"),
        (no_environment, "import os\nos.environ['A']"),
        (no_environment, "from os import getenv"),
        (has_docstring, "import os"),
        (broad_excepts_say_why, "try:\n    f()\nexcept Exception:\n    pass"),
        (broad_excepts_say_why, "try:\n    f()\nexcept (OSError, BaseException):  # noqa: BLE001\n    pass"),
        (broad_excepts_say_why, "try:\n    f()\nexcept:\n    pass"),
        (short_enough, "def f():\n" + "    pass\n" * 60),
        (short_enough, "pass\n" * 401),
    ],
)
def test_each_rule_finds_what_it_is_for(rule: Rule, text: str) -> None:
    assert violations(rule, text)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (no_pickle, "import msgspec\nnp.load(path, allow_pickle=False)"),
        (has_docstring, ""),
        (broad_excepts_say_why, "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
        (broad_excepts_say_why, "try:\n    f()\nexcept Exception:  # noqa: BLE001 - the loop must go on\n    pass"),
        (broad_excepts_say_why, "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
    ],
)
def test_no_rule_finds_more(rule: Rule, text: str) -> None:
    assert not violations(rule, text)


def run_python(code: str, *args: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules(*folders: str, root: Path = ROOT) -> list[str]:
    names = (path.relative_to(root).with_suffix("").parts for path in sources(*folders, root=root))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


def test_torch_is_not_loaded_outside_rose() -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"torch", "transformers", "scipy", "pandas"} & set(sys.modules)
    assert not heavy, f"{name} loads {heavy}"
"""
    run_python(code, *modules("ipc", "gateway", "scheduler"))


def test_text_and_http_are_not_loaded_outside_the_gateway() -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"aiohttp", "tokenizers"} & set(sys.modules)
    assert not heavy, f"{name} loads {heavy}"
"""
    run_python(code, *modules("ipc", "scheduler"))


def test_every_module_can_be_imported_first(tmp_path: Path) -> None:
    """Each in a process of its own, forked from one that has only third parties loaded: a cycle shows at once.

    Of a copy, since that takes a while, in which the files may be edited.
    """
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import contextlib, importlib, os, sys, traceback
for name in ("torch", "triton", "aiohttp.web", "tokenizers", "zmq", "uvloop", "supervisor.xmlrpc", "safetensors.torch"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
failed = []
for name in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        try:
            found = importlib.import_module(name).__file__
            assert found.startswith(os.getcwd()), f"{name} comes from {found}"
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        failed.append(name)
sys.exit(f"cannot be imported alone: {', '.join(failed)}" if failed else 0)
"""
    names = [name for name in modules(*PACKAGES, root=tmp_path) if not name.endswith("__main__")]
    run_python(code, *names, cwd=tmp_path)


@pytest.mark.parametrize(
    "readme", [path for package in PACKAGES for path in sorted((ROOT / package).rglob("README.md"))], ids=str
)
def test_a_readme_names_every_module_beside_it(readme: Path) -> None:
    words = set(re.findall(r"\w+", readme.read_text(encoding="utf-8")))
    modules = {path.stem for path in readme.parent.glob("*.py")} - {"__init__"}
    assert not modules - words, f"{readme} says nothing of {', '.join(sorted(modules - words))}"
