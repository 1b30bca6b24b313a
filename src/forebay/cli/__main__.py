"""``python -m forebay.cli``."""

from forebay.cli import main

main()
