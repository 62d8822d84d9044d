"""The error and the warning that are meant for the user to read, and how they show values."""

import reprlib

_SHOWN = 200  # characters of a value in a message


def shortened(text: str) -> str:
    """A text for a message: the middle of a long one is left out."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def shown(value: object) -> str:
    """Any value for a message, as Python writes it. It may be very large or nested very deeply."""
    plain = reprlib.Repr()
    plain.maxstring = plain.maxother = plain.maxlong = _SHOWN
    return shortened(plain.repr(value))


class GatelensError(Exception):
    """A mistake that the user can correct: one sentence that says what was asked, what exists and what to do.

    The command line prints it without a traceback and ends with exit code 2.

    Example:
        try:
            gatelens.task("iou", model)
        except gatelens.GatelensError as error:
            print(error)  # no task 'iou': tasks are ... Did you mean 'ioi'? ...
    """


class GatelensWarning(UserWarning):
    """Something the user should know before believing a result."""
