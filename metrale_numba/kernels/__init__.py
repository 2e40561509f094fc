"""Everything that is compiled: plain functions over flat arrays, and the arrays themselves.

Nothing in here knows of a class, a lock, an environment setting of the cache or a Python object;
the classes above validate, lock, and call one of these functions. Importing this package loads
Numba but compiles nothing; :mod:`metrale_numba.kernels.compile` does that at first use.
"""
