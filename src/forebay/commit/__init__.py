"""Records to manifest: a checkpoint is complete or absent."""
