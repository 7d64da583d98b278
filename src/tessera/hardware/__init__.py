"""What chips can do and what that costs: the catalogue (`catalog/*.toml` and the user's files) and how to search it."""

from __future__ import annotations

from .host import host_cpu as host_cpu
from .index import add_file as add_file
from .index import catalogue as catalogue
from .index import identify_board as identify_board
from .index import lookup as lookup
from .index import user_folder as user_folder

__all__ = ["add_file", "catalogue", "host_cpu", "identify_board", "lookup", "user_folder"]
