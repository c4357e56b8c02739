"""Nemotron-3 Nano: the model, its configs, the reference trainer, the command line."""
