# SPDX-License-Identifier: Apache-2.0
"""Laboratories as fixtures. Where namespaces cannot be built: skipped, but in CI a failure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from netns_tests.lab import Agent, Host, Lab, Shape, missing_capabilities

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.netns)


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = missing_capabilities()
    if not missing:
        return
    reason = f"network namespaces need {', '.join(missing)}: run as root"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture
def shape() -> Shape:
    """How pods hang on their hosts; a test may parametrize it."""
    return Shape.BRIDGE


@pytest.fixture
def hosts(lab: Lab, shape: Shape) -> tuple[Host, Host]:
    """Hosts a and b, joined by wire and overlay, with a pod p1 each; nothing of ours runs."""
    return lab.pair(shape=shape)


@pytest.fixture
def agents(hosts: tuple[Host, Host]) -> Iterator[tuple[Agent, Agent]]:
    """The node agents of `hosts`, attached and in step."""
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(host.agent()) for host in hosts)
        yield one, other
