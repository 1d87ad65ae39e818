# SPDX-License-Identifier: Apache-2.0
"""The table of verbs: from it come the parser, the help and the check of the documents.

Named tuples, because importing dataclasses would cost `--help` a third of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CACHES = ("filter", "egress", "ingress")
PROTOCOLS = ("tcp", "udp", "icmp")


class Argument(NamedTuple):
    """One argument: its names, and what argparse is told about it."""

    names: tuple[str, ...]
    keywords: Mapping[str, Any]


class Verb(NamedTuple):
    """One verb; `module` is loaded only when it is called; its `run(args)` gives the exit code."""

    name: str
    help: str
    module: str
    arguments: tuple[Argument, ...] = ()


def argument(*names: str, **keywords: Any) -> Argument:
    return Argument(names, keywords)


JSON = argument("--json", action="store_true", help="for programs: JSON on standard output")

# Accepted before and after the verb.
COMMON = (
    argument("-c", "--config", metavar="FILE", help="configuration (/etc/oncache/config.yaml)"),
    argument("--bpf-dir", metavar="DIR", help="where maps and programs are pinned"),
    argument("--run-dir", metavar="DIR", help="where the agent's socket is"),
    argument("-v", "--verbose", action="count", help="-vv: a traceback with an error"),
)

VERBS = (
    Verb("doctor", "check this host: facts, each with its remedy", "oncache.cli.doctor", (JSON,)),
    Verb("status", "what is loaded, attached and known", "oncache.cli.status", (JSON,)),
    Verb(
        "stats",
        "hits, base-path packets by reason, drops",
        "oncache.cli.stats",
        (JSON, argument("--watch", action="store_true", help="every second, with rates")),
    ),
    Verb(
        "caches",
        "contents of one cache",
        "oncache.cli.caches",
        (argument("cache", choices=CACHES, help="flows, remote paths or local pods"), JSON),
    ),
    Verb(
        "explain",
        "is this flow fast, and if not, why",
        "oncache.cli.explain",
        (
            argument("protocol", choices=PROTOCOLS),
            argument("source", help="ADDRESS:PORT, [ADDRESS]:PORT; for icmp ADDRESS[:ID]"),
            argument("destination", help="the same"),
            JSON,
        ),
    ),
    Verb("flush", "forget everything that was learned", "oncache.cli.control", (JSON,)),
    Verb("attach", "attach again after a detach", "oncache.cli.control", (JSON,)),
    Verb("detach", "take everything off this host", "oncache.cli.control", (JSON,)),
    Verb(
        "trace",
        "count where the kernel drops packets, and why",
        "oncache.cli.trace",
        (
            argument("--seconds", type=float, default=5.0, metavar="N", help="how long (5)"),
            JSON,
        ),
    ),
    Verb("demo", "two hosts in namespaces, before and after", "oncache.cli.demo", (JSON,)),
    Verb(
        "bench",
        "the benchmark, in shares of host-to-host",
        "oncache.cli.bench",
        (
            argument("--rounds", type=int, metavar="N", help="how often each mode is measured"),
            argument("--ip6", action="store_true", help="also request-response over IPv6"),
            argument(
                "--json", nargs="?", const="-", metavar="FILE", help="JSON, into FILE if given"
            ),
        ),
    ),
)
