"""Rendering: text and tables for people. Nothing here computes; nothing else renders."""
