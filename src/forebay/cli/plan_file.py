"""The YAML file that ``plan`` and ``doctor`` take: presets and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from forebay.errors import UsageError
from forebay.plan.figure import Figure
from forebay.plan.resolve import read_file

MAX_FILE_BYTES = 2**18
_MOST_BRACKETS = 16
_NO_VALUE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What PyYAML lets through of tags and values that do not fit each other."""


class _Once(yaml.SafeLoader):
    """Refuses a key that stands twice: the second would silently win."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """A bracket opens; PyYAML takes quadratic time over very many of them."""
        if self.flow_level >= _MOST_BRACKETS:
            raise yaml.YAMLError(f"more than {_MOST_BRACKETS} brackets in each other")
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, each key once."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key is no word{key.start_mark}")
            if key.value in seen:
                raise yaml.YAMLError(f"{key.value!r} stands twice{key.start_mark}")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> tuple[dict[str, str], dict[str, Figure]]:
    """Presets and figures of a file. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"--file {path}: {error.strerror}: name a YAML file that can be read"
        ) from None
    return parse_yaml(data, path)


def parse_yaml(data: bytes, path: Path) -> tuple[dict[str, str], dict[str, Figure]]:
    """Presets and figures of what a file holds. Raises UsageError."""
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"--file {path}: more than {MAX_FILE_BYTES} bytes: expected a plan's YAML")
    try:
        document = yaml.load(data.decode(), _Once)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, *_NO_VALUE, RecursionError) as error:
        raise UsageError(f"--file {path}: expected YAML: {error}") from None
    return read_file(document, str(path))
