"""`python -m dualpath`: the command line."""

import sys

from dualpath.cli.main import main

__all__: list[str] = []

sys.exit(main())
