# SPDX-License-Identifier: Apache-2.0
"""The NETCONF driver against the distribution's netconfd, over SSH."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from fabric_agent.ocs.drivers.base import Batch, DeviceError, MovedError, RefusedError
from fabric_agent.ocs.drivers.netconf import Endpoint, Netconf

HERE = Path(__file__).parent
SUBSYSTEM = Path("/usr/sbin/netconf-subsystem")
YUMA = Path("/usr/share/yuma/modules")
READY_SECONDS = 20.0
CONNECT = Batch(connect=((1, 18), (2, 17)))

missing = [
    name
    for name, there in {
        "netconfd": SUBSYSTEM.exists(),
        "sshd": shutil.which("sshd", path="/usr/sbin:/usr/bin") is not None,
        "ncclient": find_spec("ncclient") is not None,
        "root": os.geteuid() == 0,
    }.items()
    if not there
]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def ready(what: Path | int) -> None:
    """Wait for a socket file or a port."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if isinstance(what, Path) and what.exists():
            return
        if isinstance(what, int):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", what)) == 0:
                    return
        time.sleep(0.05)
    pytest.fail(f"{what} did not come up")


def key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def sshd_config(directory: Path, port: int, ncx: Path) -> Path:
    shutil.copy(directory / "user.pub", directory / "authorized")
    path = directory / "sshd_config"
    path.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\nUsePAM no\n"
        f"AuthorizedKeysFile {directory}/authorized\nStrictModes no\nPidFile none\n"
        f'Subsystem netconf "{SUBSYSTEM} --ncxserver-sockname={port}@{ncx}"\n'
    )
    return path


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    directory = tmp_path_factory.mktemp("netconf")
    port, ncx = free_port(), directory / "ncx.sock"
    key(directory / "host"), key(directory / "user")
    Path("/run/sshd").mkdir(exist_ok=True)
    with ExitStack() as stack:
        for command in (
            [
                "/usr/sbin/netconfd",
                "--module=optical-switch",
                f"--modpath={HERE}:{YUMA}",
                "--no-startup",
                f"--superuser={getpass.getuser()}",
                "--access-control=off",
                "--target=candidate",
                f"--ncxserver-sockname={ncx}",
                f"--port={port}",
            ],
            ["/usr/sbin/sshd", "-D", "-f", str(sshd_config(directory, port, ncx))],
        ):
            log = stack.enter_context((directory / "log").open("ab"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            ready(ncx if "netconfd" in command[0] else port)
        yield Endpoint(
            "127.0.0.1", getpass.getuser(), directory / "user", directory / "host.pub", port
        )


@pytest.fixture
def driver(switch: Endpoint) -> Netconf:
    """With an empty table."""
    one = Netconf("ocs-n", switch)
    held = one.read()
    one.apply(Batch(disconnect=tuple(held.pairs.items())), held.tag)
    return one


def test_a_batch_is_one_commit(driver: Netconf) -> None:
    made = driver.apply(CONNECT, driver.read().tag)
    assert made.pairs == {1: 18, 2: 17} == driver.read().pairs
    swapped = Batch(disconnect=((1, 18), (2, 17)), connect=((1, 17), (3, 18)))
    assert driver.apply(swapped, made.tag).pairs == {1: 17, 3: 18}


def test_another_tables_tag_changes_nothing(driver: Netconf) -> None:
    old = driver.read().tag
    driver.apply(CONNECT, old)
    with pytest.raises(MovedError):
        driver.apply(Batch(connect=((5, 20),)), old)
    assert driver.read().pairs == {1: 18, 2: 17}


@pytest.mark.parametrize("bad", [((1, 2),), ((3, 18), (4, 18))])
def test_the_device_refuses_whole(driver: Netconf, bad: tuple[tuple[int, int], ...]) -> None:
    held = driver.apply(CONNECT, driver.read().tag)
    with pytest.raises(RefusedError):
        driver.apply(Batch(disconnect=((1, 18),), connect=bad), held.tag)
    assert driver.read() == held


def test_ports_may_have_no_labels(driver: Netconf) -> None:
    assert driver.ports() == {}
    assert driver.capabilities().atomic


def test_another_host_key_is_refused(switch: Endpoint, tmp_path: Path) -> None:
    key(tmp_path / "other")
    other = Endpoint(switch.host, switch.user, switch.key, tmp_path / "other.pub", switch.port)
    with pytest.raises(DeviceError, match="no answer"):
        Netconf("ocs-n", other).read()
