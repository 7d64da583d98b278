"""The commands: each parses its arguments and renders; the work is done elsewhere."""
