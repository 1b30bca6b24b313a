"""The plan's inputs as flags: the verbs that plan take the same ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.plan import presets
from forebay.plan.figure import Figure
from forebay.plan.inputs import FIELDS, Inputs
from forebay.plan.resolve import RESTART, read_flags, resolve

_OWN_FLAGS = {f"failures.{RESTART.key}": RESTART}
_TEXT = str | None


def inputs_given(given: Mapping[str, Any]) -> Inputs:
    """Inputs from presets, file and flags, as the command line has them. Raises UsageError."""
    chosen: dict[str, str] = {}
    figures: dict[str, Figure] = {}
    if given["file"] is not None:
        from forebay.cli.plan_file import read_yaml  # PyYAML takes 40 ms to load

        chosen, figures = read_yaml(given["file"])
    flags = {name: given[_parameter(name)] for name in (*_OWN_FLAGS, *FIELDS)}
    return resolve(
        model=chosen.get("model") if given["preset"] is None else given["preset"],
        cluster=chosen.get("cluster") if given["cluster"] is None else given["cluster"],
        storage=chosen.get("storage") if given["storage"] is None else given["storage"],
        file=figures,
        flags=read_flags({name: text for name, text in flags.items() if text is not None}),
    )


def option(
    name: str, kind: Any, flag: str, text: str, panel: str | None = None, default: Any = None
) -> inspect.Parameter:
    """One option of a verb whose arguments come by name."""
    about = typer.Option(flag, help=text, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
    )


def with_flags(verb: Callable[..., None], own: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """``verb`` with the options of presets and file, its own, and one a field of the inputs.

    A field is described in one place, with what it is an input of.
    """
    shared = [
        option("preset", _TEXT, "--preset", f"Model: {', '.join(presets.MODELS)}."),
        option("cluster", _TEXT, "--cluster", f"Nodes: {', '.join(presets.CLUSTERS)}."),
        option("storage", _TEXT, "--storage", f"Store: {', '.join(presets.STORE_NAMES)}."),
        option("file", Path | None, "--file", "YAML with the same fields; flags go before it."),
    ]
    every = [*((name, given) for name, (_, given) in FIELDS.items()), *_OWN_FLAGS.items()]
    fields = [
        option(
            _parameter(name),
            _TEXT,
            "--" + given.key.replace("_", "-"),
            given.help,
            name.partition(".")[0],
        )
        for name, given in every
    ]
    signature = inspect.Signature([*shared, *own, *fields])
    verb.__signature__ = signature  # type: ignore[attr-defined]
    verb.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return verb


def _parameter(name: str) -> str:
    return name.replace(".", "_")
