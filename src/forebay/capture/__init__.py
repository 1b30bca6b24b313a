"""Tensor to staged bytes, in the trainer. The pause lives here."""
