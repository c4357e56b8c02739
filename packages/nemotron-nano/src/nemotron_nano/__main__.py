"""`python -m nemotron_nano` is the command `nemotron-nano`."""

from nemotron_nano.cli import command

command()
