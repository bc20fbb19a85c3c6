"""The exception for errors that the user can mend, and the exit codes of the command line.

`UserError` carries a single sentence that names the key, file or tensor, and the fix. The command line prints it and
exits with BAD_INPUT. Every other exception is a defect of this package and keeps its traceback.
"""

BAD_INPUT, INTERRUPTED = 2, 130
"""130: interrupted; the run was saved and can be resumed. Launchers look for this code to start the run again."""


class UserError(ValueError):
    """Bad input. The message is one sentence that says what is wrong, where, and how to mend it."""


class StepRefused(UserError):
    """An optimizer step that must not be taken. It ends the run; weights are those of the step before."""


def single_line(error: Exception) -> str:
    """Return the message of an exception without line breaks."""
    return " ".join(str(error).split())
