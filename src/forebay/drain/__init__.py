"""Staged bytes to shard file, object and record: the node agent, a process without torch."""
