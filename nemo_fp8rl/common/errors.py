"""The one exception that is the user's to mend, and the command line's exit codes.

`UserError` carries a single sentence that names the key, file or tensor and the fix. The command line prints it and
exits with BAD_INPUT; every other exception is a defect of ours and keeps its traceback.
"""

BAD_INPUT, INTERRUPTED = 2, 130
"""130 also of a run that saved and is to go on: what launches it again looks for that."""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong, where, and how to mend it."""


class StepRefused(UserError):
    """An optimizer step that must not be taken. It ends the run; nothing has moved since the last one."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
