"""The errors that are this package's own.

Arguments that are not what they should be raise the built-in :class:`TypeError` and :class:`ValueError`; only what no
built-in error describes has a class here.
"""

__all__ = ["CacheFileError", "IntegrityError", "MetraleError", "RefcountError"]


class MetraleError(Exception):
    """Base of every error that is defined by this package."""


class IntegrityError(MetraleError):
    """A cache's own records contradict each other.

    Raised by an integrity check, which names the first fault it finds. It always means a defect in this package or
    memory overwritten by something else, never a mistake in an argument: drop the cache and report the message.
    """


class RefcountError(MetraleError, ValueError):
    """A release would take a reference that no sequence holds.

    Raised by a cache with ``strict=True``, which changes nothing then. The caller released twice, released more than
    it holds, or passed an unaligned ``matched_tokens`` to an insert.
    """


class CacheFileError(MetraleError, ValueError):
    """A file is not a saved cache, is damaged, or was written by a newer version. Nothing was loaded."""
