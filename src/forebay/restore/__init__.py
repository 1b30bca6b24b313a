"""Manifest to tensor: plan the reads, fetch and verify, and only then fill."""
