"""The error and the warning that are meant for the user to read."""


class GatelensError(Exception):
    """A mistake that the user can correct: one sentence that says what was asked, what exists and what to do.

    The command line prints it without a traceback and ends with exit code 2.
    """


class GatelensWarning(UserWarning):
    """Something the user should know before believing a result."""
