"""The one error that is meant for the user to read."""


class GatelensError(Exception):
    """A mistake the user can mend: one sentence that says what was asked, what exists and what to do.

    The command line prints it without a traceback and ends with exit code 2.
    """
