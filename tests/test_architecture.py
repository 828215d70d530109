"""The rules of the house, read from the source. Each rule is shown to fail on code that breaks it."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "src" / "wellhead",)
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 6

TORCH_ALLOWED = ("engines/transformers.py", "reference.py", "torch_view.py", "testing/models.py", "train/", "export/")
HEAVY = {"torch", "transformers", "tokenizers", "pyarrow", "accelerate", "httpx"}

Rule = Callable[[str, ast.Module], Iterator[str]]


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that can run: `if TYPE_CHECKING:` blocks are left out."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from (other, *nodes(other))
            continue
        yield child
        yield from nodes(child)


def imported(node: ast.AST) -> list[str]:
    """The full names of the modules that a node imports; `from a import b` gives a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return []


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Every call that can run, with what is called as text: `os.replace`, `path.parent.unlink`, `print`."""
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def core_is_standard_library(path: str, tree: ast.Module) -> Iterator[str]:
    if path != "core.py":
        return
    for node in nodes(tree):
        for name in imported(node):
            if name.partition(".")[0] not in sys.stdlib_module_names:
                yield f"imports {name}"


def torch_stays_in_its_places(path: str, tree: ast.Module) -> Iterator[str]:
    if path.startswith(TORCH_ALLOWED):
        return
    for node in nodes(tree):
        if any(name.partition(".")[0] == "torch" for name in imported(node)):
            yield f"line {node.lineno}: imports torch"  # type: ignore[attr-defined]


OS_NAMES = {
    "rename", "renames", "replace", "remove", "unlink", "rmdir", "removedirs", "link", "symlink", "fsync", "fdatasync",
    "sync", "truncate", "ftruncate", "rmtree", "move",
}  # fmt: skip
PATH_METHODS = {"rename", "unlink", "rmdir", "hardlink_to", "symlink_to"}


def only_atomic_changes_names(path: str, tree: ast.Module) -> Iterator[str]:
    if path == "store/atomic.py":
        return
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            yield from (f"imports {alias.name}" for alias in node.names if alias.name in OS_NAMES)
    for call, name in calls(tree):
        module, _, method = name.rpartition(".")
        # str.replace takes two arguments and datetime.replace keywords: one argument is a path's.
        one = method == "replace" and len(call.args) == 1 and not call.keywords and module != "dataclasses"
        if (module in ("os", "shutil") and method in OS_NAMES) or (module and (method in PATH_METHODS or one)):
            yield f"line {call.lineno}: calls {name}"


EXITS = {"print", "exit", "quit", "sys.exit", "os._exit", "os.abort", "SystemExit", "typer.echo", "typer.Exit", "input"}
STREAMS = ("sys.stdout.", "sys.stderr.", "sys.__stdout__.", "sys.__stderr__.")


def only_cli_prints_or_exits(path: str, tree: ast.Module) -> Iterator[str]:
    if path.startswith("cli/") or path == "__main__.py":
        return
    for call, name in calls(tree):
        if name in EXITS or name.endswith(".print") or name.startswith(STREAMS):
            yield f"line {call.lineno}: calls {name}"


UNSAFE = {
    "eval", "exec", "compile", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
    "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "joblib.load",
}  # fmt: skip
UNSAFE_FLAGS = {"trust_remote_code", "shell", "allow_pickle"}


def nothing_runs_foreign_code(path: str, tree: ast.Module) -> Iterator[str]:
    for call, name in calls(tree):
        if name in UNSAFE:
            yield f"line {call.lineno}: calls {name}"
        for keyword in call.keywords:
            safe = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in UNSAFE_FLAGS and not safe:
                yield f"line {call.lineno}: {keyword.arg} is not False"
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal"):
            yield f"line {node.lineno}: imports from {node.module}"


def functions_are_small(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        # A verb's parameters are its flags, a line or two each: its size is that of its body.
        verb = path == f"cli/{node.name}.py"
        lines = (node.end_lineno or node.lineno) - (node.body[0] if verb else node).lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in given)
        if count > MAX_PARAMETERS and not verb:
            yield f"{node.name} has {count} parameters"


RULES: tuple[Rule, ...] = (
    core_is_standard_library,
    torch_stays_in_its_places,
    only_atomic_changes_names,
    only_cli_prints_or_exits,
    nothing_runs_foreign_code,
    functions_are_small,
)

LONG = "def f():\n" + "    x = 1\n" * 60
BREAKS = [
    (core_is_standard_library, "core.py", "import numpy as np"),
    (core_is_standard_library, "core.py", "def f():\n    from wellhead.errors import UsageError"),
    (torch_stays_in_its_places, "capture.py", "import torch.nn as nn"),
    (torch_stays_in_its_places, "run.py", "def f():\n    from torch import Tensor"),
    (torch_stays_in_its_places, "run.py", "import importlib\nimportlib.import_module('torch')"),
    (only_atomic_changes_names, "store/writer.py", "os.replace(a, b)"),
    (only_atomic_changes_names, "store/writer.py", "path.replace(b)"),
    (only_atomic_changes_names, "store/writer.py", "(folder / 'x').unlink(missing_ok=True)"),
    (only_atomic_changes_names, "plan.py", "shutil.rmtree(folder)"),
    (only_atomic_changes_names, "plan.py", "from os import fsync"),
    (only_atomic_changes_names, "store/lock.py", "new.hardlink_to(old)"),
    (only_cli_prints_or_exits, "extract.py", "print('x')"),
    (only_cli_prints_or_exits, "extract.py", "raise SystemExit(3)"),
    (only_cli_prints_or_exits, "extract.py", "console.print('x')"),
    (only_cli_prints_or_exits, "verify.py", "sys.stdout.write('x')"),
    (nothing_runs_foreign_code, "run.py", "pickle.loads(data)"),
    (nothing_runs_foreign_code, "run.py", "from pickle import loads"),
    (nothing_runs_foreign_code, "config.py", "yaml.load(text, Loader=yaml.SafeLoader)"),
    (nothing_runs_foreign_code, "engines/transformers.py", "torch.load(path)"),
    (nothing_runs_foreign_code, "engines/transformers.py", "load(path, trust_remote_code=True)"),
    (nothing_runs_foreign_code, "engines/transformers.py", "load(path, trust_remote_code=asked)"),
    (functions_are_small, "run.py", LONG),
    (functions_are_small, "cli/f.py", LONG + "    x = 1\n"),
    (functions_are_small, "run.py", "def f(self, a, b, c, d, e, g, *, h): ..."),
    (functions_are_small, "cli/plan.py", "def helper(a, b, c, d, e, f, g): ..."),
]
KEEPS = [
    (core_is_standard_library, "core.py", "import json\nif TYPE_CHECKING:\n    import numpy as np"),
    (torch_stays_in_its_places, "torch_view.py", "import torch"),
    (torch_stays_in_its_places, "run.py", "if TYPE_CHECKING:\n    import torch"),
    (only_atomic_changes_names, "store/atomic.py", "os.replace(a, b)"),
    (only_atomic_changes_names, "x.py", "text.replace('a', 'b'); when.replace(tzinfo=UTC); disk.replace(temp, final)"),
    (only_atomic_changes_names, "x.py", "names.remove('a'); dataclasses.replace(item); disk.link(a, b)"),
    (only_cli_prints_or_exits, "cli/_shared.py", "print('x')"),
    (nothing_runs_foreign_code, "x.py", "yaml.safe_load(text); load(trust_remote_code=False); re.compile('x')"),
    (functions_are_small, "cli/f.py", LONG),
    (functions_are_small, "cli/plan.py", "def plan(a, b, c, d, e, f, g): ..."),
    (functions_are_small, "run.py", "def f(self, a, b, c, d, e, g): ..."),
]


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    """(path inside its package, its code) of every file that ships."""
    return [
        (file.relative_to(package).as_posix(), ast.parse(file.read_text(encoding="utf-8")))
        for package in PACKAGES
        for file in sorted(package.rglob("*.py"))
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule) -> None:
    assert [f"{path}: {what}" for path, tree in sources() for what in rule(path, tree)] == []


@pytest.mark.parametrize(("rule", "path", "code"), BREAKS)
def test_a_rule_sees_what_breaks_it(rule: Rule, path: str, code: str) -> None:
    assert list(rule(path, ast.parse(code)))


@pytest.mark.parametrize(("rule", "path", "code"), KEEPS)
def test_a_rule_lets_pass_what_keeps_it(rule: Rule, path: str, code: str) -> None:
    assert list(rule(path, ast.parse(code))) == []


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


def module_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports when it is imported itself (not inside functions)."""
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        late = {id(inner) for node in ast.walk(tree) if isinstance(node, FUNCTIONS) for inner in ast.walk(node)}
        names = [name for node in nodes(tree) if id(node) not in late for name in imported(node)]
        graph[module] = {name for name in names if name in trees and name != module}
    return graph


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def test_no_import_cycles() -> None:
    trees = {
        ".".join(("wellhead", *Path(path).with_suffix("").parts)).removesuffix(".__init__"): tree
        for path, tree in sources()
    }
    order = list(graphlib.TopologicalSorter(module_graph(trees)).static_order())
    assert order.index("wellhead.core") < order.index("wellhead.engines.base")


def test_a_cycle_is_seen() -> None:
    code = {"a": "from b import x", "b": "import c", "c": "def f(): import a\nif TYPE_CHECKING:\n    import a"}
    trees = {name: ast.parse(text) for name, text in code.items()}
    assert list(graphlib.TopologicalSorter(module_graph(trees)).static_order()) == ["c", "b", "a"]
    trees["c"] = ast.parse("import a")
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(module_graph(trees)).static_order())


def test_files_are_not_long() -> None:
    files = [
        file for folder in ("src", "tests", "demo", "scripts", "benchmarks") for file in ROOT.glob(f"{folder}/**/*.py")
    ]
    assert len(files) > 20
    lines = {file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def least_cpu_seconds(command: list[str], env: dict[str, str], tries: int = 5) -> float:
    """Processor seconds of the cheapest of several runs. On an idle machine that is the time it takes, and on a busy
    one the clock would measure the neighbours."""
    seconds = []
    for _ in range(tries):
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        seconds.append(usage.ru_utime + usage.ru_stime)
    return min(seconds)


def test_importing_and_asking_for_help_are_quick(env: dict[str, str]) -> None:
    assert least_cpu_seconds([sys.executable, "-c", "import wellhead"], env) < 0.3
    assert least_cpu_seconds([sys.executable, "-m", "wellhead", "--help"], env) < 1.0


def test_help_and_verbs_import_nothing_heavy(env: dict[str, str]) -> None:
    script = (
        "import sys\n"
        "from wellhead.cli._app import build, shipped\n"
        "build(shipped())\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
