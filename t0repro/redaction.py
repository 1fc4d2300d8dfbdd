"""Keeps passwords and tokens out of messages, logs and files."""

from __future__ import annotations

import os
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


def without_secrets(text: str) -> str:
    """The text without passwords of addresses, and without the secrets in this environment."""
    for name, value in os.environ.items():
        # A short value also occurs in other text, and a path only shows where a secret is.
        if len(value) >= 8 and not os.path.isabs(value) and _NAME.search(name):
            text = text.replace(value, "***")
    return without_passwords(text)
