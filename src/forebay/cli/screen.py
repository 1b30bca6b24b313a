"""The terminal, for verbs that draw tables: apart, since rich takes 40 ms to load."""

from __future__ import annotations

from rich.console import Console

SCREEN = Console()
ASIDE = Console(stderr=True)
