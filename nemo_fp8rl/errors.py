"""The one exception that is the user's to mend.

`UserError` carries a single sentence that names the key, file or tensor and the fix. The command line prints it and
exits with code 2; every other exception is a defect of ours and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong, where, and how to mend it."""
