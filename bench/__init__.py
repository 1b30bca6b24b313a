"""Benchmarks: ratios against a limit measured in the same run, never absolute times."""
