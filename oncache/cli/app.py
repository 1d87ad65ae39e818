# SPDX-License-Identifier: Apache-2.0
"""From arguments to an exit code, with the one outermost error handler.

Loaded by `oncache --help`, so nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from errno import EACCES, EPERM
from typing import Any, NoReturn

from oncache.cli.verbs import COMMON, VERBS, Argument, Verb
from oncache.core.errors import ConfigError, HostError, OncacheError

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser whose complaints look like all our other errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0 done, 1 failed, 2 wrong usage or configuration,
    3 not loaded or agent not running, 4 this host cannot."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parser().parse_args(arguments)
        with_defaults(args)
        code = importlib.import_module(verb_of(args.verb).module).run(args)
        sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left (`oncache caches filter | head`): nothing to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return report(error, verbose=wants_traceback(arguments))


def verb_of(name: str) -> Verb:
    return next(verb for verb in VERBS if verb.name == name)


def parser() -> Parser:
    """The whole command line, built from the table of verbs."""
    top = Parser(prog="oncache", description="The ONCache plane of this host.")
    add(top, COMMON, hidden_default=True)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb in VERBS:
        sub = verbs.add_parser(verb.name, help=verb.help, description=f"{verb.help}.")
        add(sub, verb.arguments)
        add(sub, COMMON, hidden_default=True)
    return top


def add(
    parser: argparse.ArgumentParser, arguments: Sequence[Argument], *, hidden_default: bool = False
) -> None:
    # A default of a verb's parser would overwrite what stood before the verb.
    default: dict[str, Any] = {"default": argparse.SUPPRESS} if hidden_default else {}
    for argument in arguments:
        parser.add_argument(*argument.names, **argument.keywords, **default)


def with_defaults(args: argparse.Namespace) -> None:
    for name in ("config", "bpf_dir", "run_dir"):
        setattr(args, name, getattr(args, name, None))
    args.verbose = getattr(args, "verbose", None) or 0


def wants_traceback(arguments: Sequence[str]) -> bool:
    """Seen without the parser, which may be what failed."""
    return any(a.startswith("-vv") for a in arguments) or (
        sum(a in ("-v", "--verbose") for a in arguments) > 1
    )


def report(error: Exception, *, verbose: bool) -> int:
    """Two lines on standard error, what and what next; returns the exit code."""
    if verbose:
        traceback = importlib.import_module("traceback")
        traceback.print_exception(error)
    known = error if isinstance(error, OncacheError) else translated(error)
    print(known.lines(), file=sys.stderr)
    return known.exit_code


def translated(error: Exception) -> OncacheError:
    if isinstance(error, OSError) and error.errno in (EPERM, EACCES):
        return HostError(f"not permitted: {error}", hint="run it as root")
    return OncacheError(
        f"{type(error).__name__}: {error}",
        hint="run it again with -vv and report what it prints",
    )
