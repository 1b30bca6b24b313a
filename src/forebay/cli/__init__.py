"""The command line: one file a verb."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import forebay
from forebay.cli.output import say_error
from forebay.cli.stdout import UnreadError, checked
from forebay.errors import ForebayError

_STYLE: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_VERBS = (
    "ls",
    "show",
    "verify",
    "commit",
    "prune",
    "agent",
    "status",
    "plan",
    "simulate",
    "doctor",
    "demo",
)


class _Verbs(TyperGroup):
    """Verbs that are imported when they are asked for: each answers without waiting for others."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the group's own signature
        """All verbs, in the order of ``--help``."""
        return list(_VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The verb of that name, or None."""
        if cmd_name not in _VERBS:
            return None
        single = typer.Typer(add_completion=False, **_STYLE)
        import_module(f"forebay.cli.{cmd_name}").register(single)
        return get_command(single)


app = typer.Typer(
    name="forebay",
    cls=_Verbs,
    help="The checkpoint write path for very large PyTorch training runs.",
    no_args_is_help=True,
    add_completion=False,
    **_STYLE,
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


def main() -> None:
    """Entry point: one clear line for what went wrong, a traceback only for a bug."""
    try:
        with checked():
            app()
    except UnreadError:
        sys.exit(0)
    except ForebayError as error:
        say_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("FOREBAY_TRACEBACK"):
            raise
        say_error(
            f"a bug: {type(error).__name__}: {error} "
            "(FOREBAY_TRACEBACK=1 shows where; please report it)"
        )
        sys.exit(1)
