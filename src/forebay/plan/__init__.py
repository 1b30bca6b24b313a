"""7. The arithmetic: what a checkpoint costs, and what has to be true for it. No I/O, no torch."""
