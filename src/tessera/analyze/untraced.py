"""The table of any run, for analyses: see `tessera.profile.untraced`."""

from __future__ import annotations

from ..profile.untraced import table_of as table_of
from ..profile.untraced import untraced as untraced
