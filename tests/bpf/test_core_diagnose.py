# SPDX-License-Identifier: Apache-2.0
"""The drop monitor, on datagrams to a port where nobody listens."""

import socket
import sys
import time
from collections.abc import Iterator

import pytest
from pyroute2 import IPRoute

from oncache.core import diagnose
from oncache.core.errors import HostError
from tests.bpf import toy

pytestmark = [pytest.mark.root, pytest.mark.netns]

LOOPBACK = 1


@pytest.fixture
def loopback() -> Iterator[None]:
    with toy.namespace():
        with IPRoute() as netlink:
            netlink.link("set", index=LOOPBACK, state="up")
        yield


@pytest.mark.usefixtures("loopback")
def test_a_datagram_to_nobody_is_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # Traffic in place of the wait for it.
    monkeypatch.setattr(time, "sleep", lambda _seconds: send_to_nobody(7))
    path = list(sys.path)
    first = next(diagnose.drop_reasons(seconds=60))
    assert first == diagnose.Drop("SKB_DROP_REASON_NO_SOCKET", LOOPBACK, 7)
    assert sys.path == path


def test_without_bcc_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcc", None)
    with pytest.raises(HostError, match="bcc is not installed") as caught:
        next(diagnose.drop_reasons(seconds=1))
    assert "python3-bpfcc" in caught.value.hint


def send_to_nobody(count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(count):
            sender.sendto(b"x", ("127.0.0.1", 9))
