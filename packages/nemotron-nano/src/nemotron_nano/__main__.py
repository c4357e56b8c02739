"""`python -m nemotron_nano` is the command `nemotron-nano`."""

import sys

from nemotron_nano.cli import main

sys.exit(main())
