"""Which environment variables look like secrets. Scripts, manifests and a scheduler's records would show their values.

By name: a word for a secret in it. By value, whatever the name: a URL with a password. Left out: long random values of
names that say nothing, which ids and digests are, too.
"""

import re

SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|_PWD$|(^|_)(KEY|PASS|AUTH)($|_)", re.IGNORECASE
)
"""Names of secrets. A tokenizer is none, nor are keyboards, authors and what passes by."""
SWITCH = re.compile(r"|[01]|true|false|yes|no|on|off", re.IGNORECASE)
NUMBER = re.compile(r"[0-9]+")
COUNT = re.compile(r"(^|_)(TOKENS|NUM|MAX|MIN|LEN|LENGTH|SIZE|LIMIT|TIMEOUT|SECONDS|PORT)($|_)", re.IGNORECASE)
"""Names for which a number is no secret: MAX_TOKENS, NUM_KEY_BLOCKS, AUTH_PORT. A password can be of digits, too."""
PATH = re.compile(r"/.*")
NAME_OF_PATH = re.compile(r"_(PATH|FILE|DIR|SOCK)$|^RAY_TLS_|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
"""Names for which a path is no secret: keys in base64 begin with a slash, too, one in 64."""
NO_SECRET = re.compile(r"_(MODE|TYPE)$|(KEY|TOKEN)_ID$", re.IGNORECASE)
"""Names of what is no secret: RAY_AUTH_MODE, EOS_TOKEN_ID, AWS_ACCESS_KEY_ID, which says whose key it is."""
URL_WITH_PASSWORD = re.compile(r"://[^/?#@\s]*:(?!\$\()[^/?#@\s]+@(?!sha256:)")
"""A password in a URL; not a variable of Kubernetes, $(NAME), in its place, nor an image's tag before its digest."""


def has_password(url: str) -> bool:
    return URL_WITH_PASSWORD.search(url) is not None


def looks_secret(name: str, value: str) -> bool:
    """Whether the environment variable looks like a secret."""
    if has_password(value):
        return True
    if not SECRET.search(name) or NO_SECRET.search(name) or SWITCH.fullmatch(value):
        return False
    if NUMBER.fullmatch(value):
        return not COUNT.search(name)
    return not (PATH.fullmatch(value) and NAME_OF_PATH.search(name))
