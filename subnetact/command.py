"""What all commands share: help, JSON and users' own code as options, and a quiet end on Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from subnetact.errors import SpecError, SubnetActError, UserCodeError
from subnetact.files.documents import parse_json

INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 and the number of SIGINT."""
NOBODY_READS = 141
"""The exit status if the output goes to a program that has ended: 128 and the number of SIGPIPE."""


class OptionFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults unless they are empty or explained already, and keeps the lines of texts."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is False or action.default in (None, (), {})
        explained = "default" in (action.help or "")
        return action.help if empty or explained else super()._get_help_string(action)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a command, and end the process with the exit status that it returns."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = NOBODY_READS
        # Python writes what is left when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # The work is done: an interrupt while Python shuts down would end the process by the signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def reported(
    run: Callable[[argparse.Namespace], int | None],
    options: argparse.Namespace,
    command: str | None = None,
    mistakes: tuple[type[Exception], ...] = (SubnetActError, OSError),
) -> int:
    """Run a command; return its exit status, or 2 after a user's error, one of `mistakes`, which it prints.

    An error goes to the standard error output if the name of the `command` is given.
    """
    try:
        return run(options) or 0
    except BrokenPipeError:  # nobody reads the output any more; `run_command` ends quietly
        raise
    except mistakes as error:
        if isinstance(error, UserCodeError):
            traceback.print_exception(error.__cause__)
        print(f"{command or 'error'}: {error}", file=sys.stderr if command else sys.stdout)
        return 2


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that an option of a command line holds, for `type=` of argparse."""
    found = None
    with suppress(ValueError):
        found = parse_json(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object such as '{{\"n_classes\": 10}}'")
    return found


def import_name(name: str) -> Any:
    """Return what `pkg.mod:attribute` names."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SpecError(f"{name!r} cannot be imported: write pkg.mod:name, a module and a name in it")
    try:
        with user_code(f"importing {module!r}", passing=(ImportError,)):
            imported = import_module(module)
        return getattr(imported, attribute)
    except (AttributeError, ImportError) as error:
        text = f"{name!r} cannot be imported ({error})"
        advice = "; run this in the folder of the module, or name the folder in PYTHONPATH"
        raise SpecError(text + advice * isinstance(error, ImportError)) from error


@contextmanager
def user_code(what: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise UserCodeError for every error inside the block, apart from those of `passing`; `what` was run."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (UserCodeError, *passing)):
            raise
        raise UserCodeError(f"{what} raised {type(error).__name__}: {error}") from error
