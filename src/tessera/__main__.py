"""`python -m tessera`: the same as the `tessera` command."""

from .cli.main import main

main()
