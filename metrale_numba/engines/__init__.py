"""Adapters: each file binds the serving layer to one engine.

:mod:`metrale_numba.engines.transformers` runs models of the transformers library, and needs the extra of that name.
Importing this package loads none of them.
"""
