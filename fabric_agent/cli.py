# SPDX-License-Identifier: Apache-2.0
"""The ``fabric-agent`` command: verbs, logging, and the one outermost error handler."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from fabric_agent.ocs import commands as ocs
from fabric_agent.slices import commands as slices
from oncache.core import config
from oncache.core.errors import ConfigError, HostError, OncacheError

DEFAULT_CONFIG: Final = Path("/etc/oncache/config.yaml")
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
INTERRUPTED: Final = 130


class Parser(argparse.ArgumentParser):
    """A parser whose complaints look like all our other errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0 done, 1 failed, 2 wrong usage or configuration, 3 not
    loaded, 4 this host cannot."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = sum(a.count("v") for a in arguments if a.strip("v") == "-")
    try:
        args = parser().parse_args(arguments)
        level = logging.DEBUG if verbose else logging.INFO
        logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr)
        logging.getLogger("pyroute2").setLevel(logging.WARNING)
        run: Callable[[argparse.Namespace], int | None] = args.run
        return run(args) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _report(error, verbose=verbose > 1)


def parser() -> Parser:
    """The whole command line."""
    common = Parser(add_help=False)
    common.add_argument("-c", dest="config", type=Path, default=DEFAULT_CONFIG, metavar="FILE")
    common.add_argument("-v", dest="verbose", action="count", help="-vv: tracebacks too")
    top = Parser(prog="fabric-agent", description="The agents of this fabric.")
    verbs = top.add_subparsers(metavar="VERB", required=True)
    node = verbs.add_parser("node", parents=[common], help="run the agent of this node")
    node.add_argument("--ready-fd", type=int, metavar="N", help="write a byte there when attached")
    node.add_argument(
        "--detach-on-exit", action="store_true", help="take everything off again at the end"
    )
    node.set_defaults(run=_node)
    check = verbs.add_parser("check-config", parents=[common], help="check a configuration file")
    check.set_defaults(run=_check)
    slices.mount(verbs)
    ocs.mount(verbs.add_parser("ocs", help="the optical circuits between the pods"), [common])
    return top


def _node(args: argparse.Namespace) -> None:
    from fabric_agent.node import agent

    options = agent.Options(ready_fd=args.ready_fd, detach_on_exit=args.detach_on_exit)
    asyncio.run(agent.run(config.load(args.config), options))


def _check(args: argparse.Namespace) -> None:
    for key, value in config.keys(config.load(args.config)):
        print(f"{key}: {value}")


def _report(error: Exception, *, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exception(error)
    known = _known(error)
    print(known.lines(), file=sys.stderr)
    return known.exit_code


def _known(error: BaseException) -> OncacheError:
    """The error to show; a task group wraps what its tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        return _known(error.exceptions[0])
    if isinstance(error, OncacheError):
        return error
    if isinstance(error, PermissionError):
        return HostError(f"not permitted: {error}", hint="run it as root")
    return OncacheError(
        f"{type(error).__name__}: {error}",
        hint="run it again with -vv and report what it prints",
    )


if __name__ == "__main__":
    sys.exit(main())
