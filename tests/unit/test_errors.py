# SPDX-License-Identifier: Apache-2.0
"""Errors say what and what next, and know their exit code."""

import pytest

from oncache.core import errors

EXIT_CODES = [
    (errors.OncacheError, 1),
    (errors.ConfigError, 2),
    (errors.NotLoadedError, 3),
    (errors.HostError, 4),
    (errors.LayoutError, 1),
    (errors.BusyError, 1),
]


@pytest.mark.parametrize(("kind", "code"), EXIT_CODES)
def test_every_error_knows_its_exit_code(kind: type[errors.OncacheError], code: int) -> None:
    error = kind("no such device: eth7", hint="list devices with 'ip link'")
    assert error.exit_code == code
    assert isinstance(error, errors.OncacheError)


def test_the_message_alone_is_the_text() -> None:
    error = errors.HostError("no bpffs", hint="mount it")
    assert str(error) == error.message == "no bpffs"
    assert error.hint == "mount it"


def test_two_lines_for_the_operator() -> None:
    error = errors.HostError("no bpffs", hint="mount it")
    assert error.lines() == "error: no bpffs\nnext: mount it"
