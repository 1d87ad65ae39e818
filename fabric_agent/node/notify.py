# SPDX-License-Identifier: Apache-2.0
"""Tell the service manager how we are (sd_notify(3)); silent where there is none."""

import os
import socket


def notify(message: str) -> None:
    """Send ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1`` to the socket in NOTIFY_SOCKET."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    address = "\0" + path[1:] if path[0] == "@" else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(message.encode(), address)
        except OSError:
            return  # a manager that is gone or busy needs no news
