"""Unit tests look for counterexamples with hypothesis, without its clock and its files."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("forebay", deadline=None, database=None, max_examples=100)
settings.load_profile("forebay")
