"""The one exception of the data package that means "the user can mend this".

Commands print its message and exit with code 2; every other exception is a fault of ours and keeps its traceback.
"""

from __future__ import annotations


class DataError(ValueError):
    """A user's mistake about data: one sentence that names the thing and the mend."""
