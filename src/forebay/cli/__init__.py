"""The command line: one file a verb."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import typer

import forebay
from forebay.cli.output import say_error
from forebay.errors import ForebayError

_VERBS = ("ls", "show", "verify", "commit", "prune", "agent", "status", "demo")

app = typer.Typer(
    name="forebay",
    help="The checkpoint write path for very large PyTorch training runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"forebay {forebay.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print it."
    ),
) -> None:
    """The checkpoint write path for very large PyTorch training runs."""


for verb in _VERBS:
    import_module(f"forebay.cli.{verb}").register(app)


def main() -> None:
    """Entry point: one clear line for what went wrong, a traceback only for a bug."""
    try:
        app()
    except ForebayError as error:
        say_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("FOREBAY_TRACEBACK"):
            raise
        say_error(
            f"a bug: {type(error).__name__}: {error} "
            "(FOREBAY_TRACEBACK=1 shows where; please report it)"
        )
        sys.exit(1)
