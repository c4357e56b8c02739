"""FSDP2 units, activation checkpointing and precision for a model whose experts live on another mesh."""
