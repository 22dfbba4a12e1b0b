"""`python -m polyeps` is the command line."""

import sys
from pathlib import Path

if sys.path[:1] == [str(Path.cwd())]:  # which `python -m` looks into first: no folder may run code by surprise
    del sys.path[0]

from polyeps.cli import main

main()
