"""The YAML file that ``plan`` and ``doctor`` take: presets and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from forebay.errors import UsageError
from forebay.plan.figure import Figure
from forebay.plan.resolve import read_file


class _Once(yaml.SafeLoader):
    """Refuses a key that stands twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, each key once."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"{key.value!r} stands twice{key.start_mark}")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> tuple[dict[str, str], dict[str, Figure]]:
    """Presets and figures of a file. Raises UsageError."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Once)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise UsageError(
            f"--file {path}: {error.strerror}: name a YAML file that can be read"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--file {path}: expected YAML: {error}") from None
    return read_file(document, str(path))
