"""Tokens to their experts and back; experts sharded over the expert-parallel axis."""
