"""The errors that are this package's own.

Arguments that are not what they should be raise the built-in :class:`TypeError` and :class:`ValueError`; only what no
built-in error describes has a class here.
"""

__all__ = ["IntegrityError", "MetraleError"]


class MetraleError(Exception):
    """Base of every error that is defined by this package."""


class IntegrityError(MetraleError):
    """A cache's own records contradict each other.

    Raised by an integrity check, which names the first fault it finds. It always means a defect in this package or
    memory overwritten by something else, never a mistake in an argument: drop the cache and report the message.
    """
