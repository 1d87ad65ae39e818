# SPDX-License-Identifier: Apache-2.0
"""`oncache flush`, `attach`, `detach`: the agent does it, for it alone writes our maps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from oncache.cli.output import say, show
from oncache.cli.places import Places, places
from oncache.core.control import call
from oncache.core.errors import NotLoadedError

DONE = {
    "flush": "forgotten: every flow is learned again at its next packets",
    "attach": "attached",
    "detach": "detached: nothing of ours is left on this host's packet path",
}


def run(args: argparse.Namespace) -> int:
    where = places(args)
    by = detach(where) if args.verb == "detach" else ask(where, args.verb)
    show({"done": args.verb, "by": by}, render, as_json=args.json)
    return 0


def ask(where: Places, verb: str) -> str:
    call(where.run_dir, verb)
    return "agent"


def detach(where: Places) -> str:
    """Through the agent if one runs; what a dead one left is taken off by ourselves."""
    try:
        return ask(where, "detach")
    except NotLoadedError:
        from oncache.host import detach_host

        say("agent not running: detaching without it")
        detach_host(where.bpf_dir, where.run_dir)
        return "oncache"


def render(result: Mapping[str, str]) -> str:
    return DONE[result["done"]]
