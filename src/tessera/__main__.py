"""`python -m tessera`: the same as the `tessera` command."""

import sys

# Python puts the working folder first: a msgspec.py that lies there would be run in place of the package.
if not sys.flags.safe_path:
    del sys.path[0]

from .cli.main import main

main()
