"""`python -m polyeps` is the command line."""

from polyeps.cli import main

main()
