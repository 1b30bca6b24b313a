"""Where bytes rest: keys and buffers. Knows no checkpoints."""
