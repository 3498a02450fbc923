"""The one exception that a user sees as one line: what is wrong, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A failure that the user can mend. The command line prints it as one line and exits with 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known name, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names) or 'none'}"
