"""Batches of text for training and validation, as functions of the step."""
