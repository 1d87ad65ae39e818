# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, and each foreign library is known to one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("oncache", "xmasq", "fabric_agent")
PROJECT = (*PRODUCT, "netns_tests", "bench", "tests")

# From the most to the least particular: who may import what of this project.
DIRECTIONS = {
    "oncache.core": ("oncache.core",),
    # The demo and the benchmark live in a checkout, beside the package.
    "oncache.cli": ("oncache", "netns_tests", "bench"),
    "oncache": ("oncache",),
    "xmasq": ("xmasq", "oncache.core"),
    "fabric_agent.node": ("fabric_agent", "oncache", "xmasq"),
    "fabric_agent.cli": ("fabric_agent", "oncache"),
    # Neither a plane nor a kernel: these run anywhere. Errors are the same everywhere.
    "fabric_agent": (
        *("fabric_agent.slices", "fabric_agent.ocs", "fabric_agent.store"),
        "oncache.core.errors",
    ),
    "bench": ("bench", "netns_tests", "oncache", "xmasq", "fabric_agent"),
    "netns_tests": ("netns_tests", "bench", "oncache", "xmasq", "fabric_agent"),
}

# Foreign library -> the modules that know it; elsewhere in the product it is an error.
CONFINED = {
    "pyroute2": ("oncache.core.netlink", "oncache.core.tc", "oncache.core.conntrack"),
    "bcc": ("oncache.core.diagnose",),
    "ncclient": ("fabric_agent.ocs.drivers.netconf",),
    "scapy": (),
    "subprocess": (),
    "pty": (),
}

# Ways to start another program. We speak to the kernel ourselves.
SHELLS = {
    ("os", "system"),
    ("os", "popen"),
    ("os", "posix_spawn"),
    ("os", "posix_spawnp"),
    ("asyncio", "create_subprocess_exec"),
    ("asyncio", "create_subprocess_shell"),
}


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(*packages: str) -> dict[str, ast.Module]:
    return {
        module_name(path): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def imported(importer: str, tree: ast.Module) -> Iterator[str]:
    """Every module that is imported anywhere in a file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer}: relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if is_module(name) else base for name in names)
        elif isinstance(node, ast.Call) and called(node) == ("importlib", "import_module"):
            yield from (
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )


def called(node: ast.Call) -> tuple[str, str]:
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id, function.attr
    return "", ""


def wrong_directions(importer: str, tree: ast.Module) -> list[str]:
    scope = next((prefix for prefix in DIRECTIONS if within(importer, prefix)), None)
    if scope is None:
        return [f"{importer}: not in the table of directions"]
    return [
        f"{importer} -> {target}"
        for target in imported(importer, tree)
        if target.split(".")[0] in PROJECT
        and not any(within(target, allowed) for allowed in DIRECTIONS[scope])
    ]


def test_imports_point_one_way() -> None:
    trees = modules(*PRODUCT, "bench", "netns_tests")
    wrong = [line for name, tree in trees.items() for line in wrong_directions(name, tree)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", CONFINED)
def test_a_foreign_library_is_known_to_few(library: str) -> None:
    knowing = {
        name
        for name, tree in modules(*PRODUCT).items()
        if any(within(target, library) for target in imported(name, tree))
    }
    assert not knowing - set(CONFINED[library])


def test_one_module_opens_libbpf() -> None:
    knowing = {
        name
        for name, tree in modules(*PRODUCT).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(("libbpf.so", "libbcc.so"))
    }
    assert not knowing - {"oncache.core.libbpf"}


def test_nothing_starts_another_program() -> None:
    starts = [
        f"{name}:{node.lineno}"
        for name, tree in modules(*PRODUCT).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (called(node) in SHELLS or called(node)[1].startswith(("exec", "spawn")))
        and called(node)[0] in {"os", "asyncio"}
    ]
    assert not starts


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("oncache.core.x", "from oncache import plane"),
        ("oncache.plane", "import fabric_agent.node"),
        ("xmasq.plane", "def f():\n    from oncache.plane import Plane"),
        ("fabric_agent.slices.x", "import oncache.core"),
    ],
)
def test_a_new_direction_is_seen(importer: str, source: str) -> None:
    assert wrong_directions(importer, ast.parse(source))
