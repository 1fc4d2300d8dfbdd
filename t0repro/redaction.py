"""Keeps passwords and tokens out of messages, logs and files."""

from __future__ import annotations

import re

# The user and password of an address: all up to the last @ before its path.
_USER = re.compile(r"(?<=://)[^\s/?#'\"<>]*@")
_SECRET_WORDS = r"token(?![a-z])|secret|passw(?:or)?d|passphrase|credential|signature|api_?key"
_QUERY = re.compile(rf"([?&][^=&#\s]*(?:{_SECRET_WORDS})[^=&#\s]*=)[^&#\s'\"]+", re.IGNORECASE)
_NAME = re.compile(rf"{_SECRET_WORDS}|(?:^|_)keys?(?:_|$)|_pwd(?:_|$)", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """The text with `***` for each user and password, and each secret parameter, of an address."""
    return _QUERY.sub(r"\1***", _USER.sub("***@", text))


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable looks like a secret, by its name or a password in it."""
    return bool(_NAME.search(name)) or without_passwords(value) != value
