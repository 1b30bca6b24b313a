"""The demo: a training run killed while a save drains, resumed, and compared bit for bit."""
