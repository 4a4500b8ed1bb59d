"""Recognise files that are probably secrets, by their names and first bytes. Pure, except for reading these bytes."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

# Patterns for fnmatch, in lower case. A pattern with a slash matches the end of a path.
_SECRET = {
    "a file of environment variables": (".env", ".env.*", ".envrc"),
    "a private key": (
        *("*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore"),
        *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk", ".ssh/*", ".gnupg/*"),
    ),
    "a cloud's credentials": (
        *("*credential*.json", "*service_account*.json", "*service-account*.json", "client_secret*.json"),
        *(".aws/*", ".config/gcloud/*", ".azure/*", ".oci/*", ".kube/config", "kubeconfig", ".boto", ".s3cfg"),
    ),
    "a password or a token": (
        *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".git-credentials", ".pypirc", ".npmrc", ".dockercfg"),
        *(".docker/config.json", ".htpasswd", "kaggle.json", "huggingface/token", ".huggingface/token"),
    ),
    "a state of Terraform, which has secrets in it": ("*.tfstate", "*.tfstate.backup"),
}
_HARMLESS = (
    *(".env.example", ".env.sample", ".env.template", ".env.dist"),
    *(".ssh/*.pub", ".ssh/config", ".ssh/known_hosts", ".ssh/authorized_keys", ".aws/config"),
)
_KEY = re.compile(rb"\s*-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")
_KEY_IN_JSON = re.compile(rb'"private_key"\s*:\s*"-----BEGIN')
_LOOK = 8 << 10  # bytes at a file's beginning; a key is found there or not at all


def kind(root: Path, name: Path) -> str | None:
    """The kind of secret that the file `name` below `root` looks like; None: it looks like no secret."""
    for what, patterns in _SECRET.items():
        if _matches(name, patterns):
            return None if _matches(name, _HARMLESS) else what
    path = root / name
    if path.is_symlink():
        return None  # the file that it points to is in the folder, and is checked itself
    with path.open("rb") as file:
        beginning = file.read(_LOOK)
    if _KEY.match(beginning) or (name.suffix.lower() == ".json" and _KEY_IN_JSON.search(beginning)):
        return "a private key"
    return None


def _matches(name: Path, patterns: tuple[str, ...]) -> bool:
    path = PurePosixPath(name.as_posix().lower())
    return any(
        fnmatchcase("/" + str(path), f"*/{pattern}") if "/" in pattern else fnmatchcase(path.name, pattern)
        for pattern in patterns
    )
