"""`python -m tessera`: the same as the `tessera` command."""

import sys

# Python puts the working folder first in `sys.path`: a msgspec.py in that folder would run in place of the package.
if not sys.flags.safe_path:
    del sys.path[0]

from .cli.main import main

main()
