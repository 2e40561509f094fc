"""Measurements of the cache: what is run by hand, from a clone, and is no part of the installed package."""
