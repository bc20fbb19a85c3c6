"""Environment variables that look like secrets: scripts, manifests and a scheduler's records would show their values.

A variable looks secret by its name, if that contains a word for a secret, or by its value, if that is a URL with a
password. Long random values under other names are not detected: ids and digests look the same.
"""

import re

SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|_PWD$|(^|_)(KEY|PASS|AUTH)($|_)", re.IGNORECASE
)
"""Names of secrets. Words such as tokenizer, keyboard, author and bypass do not match."""
SWITCH = re.compile(r"|[01]|true|false|yes|no|on|off", re.IGNORECASE)
NUMBER = re.compile(r"[0-9]+")
COUNT = re.compile(r"(^|_)(TOKENS|NUM|MAX|MIN|LEN|LENGTH|SIZE|LIMIT|TIMEOUT|SECONDS|PORT)($|_)", re.IGNORECASE)
"""Names whose numbers are no secrets: MAX_TOKENS, NUM_KEY_BLOCKS, AUTH_PORT. Under other names a number may be a
password.
"""
PATH = re.compile(r"/.*")
NAME_OF_PATH = re.compile(r"_(PATH|FILE|DIR|SOCK)$|^RAY_TLS_|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
"""Names whose paths are no secrets. Under other names a value with a slash may be a key: of the keys in base64, one in
64 begins with a slash.
"""
NO_SECRET = re.compile(r"_(MODE|TYPE)$|(KEY|TOKEN)_ID$", re.IGNORECASE)
"""Names that are never secrets: RAY_AUTH_MODE, EOS_TOKEN_ID, AWS_ACCESS_KEY_ID, which names the owner of a key."""
URL_WITH_PASSWORD = re.compile(r"://[^/?#@\s]*:(?!\$\()[^/?#@\s]+@(?!sha256:)")
"""A password in a URL. A variable of Kubernetes, $(NAME), is no password, nor is an image's tag before its digest."""


def has_password(url: str) -> bool:
    return URL_WITH_PASSWORD.search(url) is not None


def looks_secret(name: str, value: str) -> bool:
    """Return True when the environment variable looks like a secret."""
    if has_password(value):
        return True
    if not SECRET.search(name) or NO_SECRET.search(name) or SWITCH.fullmatch(value):
        return False
    if NUMBER.fullmatch(value):
        return not COUNT.search(name)
    return not (PATH.fullmatch(value) and NAME_OF_PATH.search(name))
