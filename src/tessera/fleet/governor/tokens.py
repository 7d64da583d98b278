"""Who may do what: tokens of a governor, kept as hashes in a file that only its owner can read.

A token is 256 random bits, so it cannot be guessed from its plain SHA-256. The file is read again when it changes, so a
revoked token is refused from the next request on.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from enum import StrEnum
from pathlib import Path

import msgspec

from ...errors import ArgumentError, GovernorError, did_you_mean
from ...output import replace_when_written

PREFIX = "tsg_"
"""Tokens begin with this prefix, so that scanners for leaked secrets can find them."""
ANY_NODE = "*"


class Role(StrEnum):
    """What a token is for. An operator may do everything."""

    NODE = "node"
    JOB = "job"
    READ = "read"
    OPERATOR = "operator"


class GovernorToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token: its name (that of the node it speaks for, or * for any), its role and its hash."""

    name: str
    role: Role
    sha256: str

    def may(self, role: Role, node: str | None = None) -> bool:
        """Return whether the token permits what needs this role, for this node."""
        if self.role is Role.OPERATOR or role is Role.READ:
            return True
        return self.role is role and (node is None or self.name in (node, ANY_NODE))


class TokenFile:
    """The file of tokens beside a governor's state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._by_hash: dict[str, GovernorToken] = {}

    def read(self) -> list[GovernorToken]:
        """Return all tokens; none if there is no file."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._stamp, self._by_hash = None, {}
            return []
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp != self._stamp:
            if status.st_mode & 0o077:
                fix = f"chmod 600 {self.path}"
                raise GovernorError(f"the tokens are open to other users: {self.path}", fix=fix)
            try:
                tokens = msgspec.json.decode(self.path.read_bytes(), type=list[GovernorToken])
            except (OSError, msgspec.DecodeError) as exc:
                raise GovernorError(f"the tokens cannot be read: {self.path}", why=str(exc)) from exc
            self._stamp, self._by_hash = stamp, {t.sha256: t for t in tokens}
        return list(self._by_hash.values())

    def find(self, secret: str) -> GovernorToken | None:
        """Return the token of this text. The look-up is by hash, so its time tells nothing about the text."""
        self.read()
        return self._by_hash.get(_hash(secret))

    def create(self, name: str, role: Role) -> str:
        """Add a token and return its text, which is stored nowhere."""
        tokens = self.read()
        if any(t.name == name and t.role is role for t in tokens):
            raise ArgumentError(
                f"there is a token {name!r} with the role {role} already", fix=f"tessera governor token revoke {name}"
            )
        secret = PREFIX + secrets.token_urlsafe(32)
        self._write([*tokens, GovernorToken(name=name, role=role, sha256=_hash(secret))])
        return secret

    def revoke(self, name: str) -> int:
        """Remove the tokens of a name; return how many there were."""
        tokens = self.read()
        kept = [t for t in tokens if t.name != name]
        if len(kept) == len(tokens):
            raise ArgumentError(f"there is no token {name!r}{did_you_mean(name, [t.name for t in tokens])}")
        self._write(kept)
        return len(tokens) - len(kept)

    def _write(self, tokens: list[GovernorToken]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replace_when_written(self.path) as part:
            os.chmod(part, 0o600)  # noqa: PTH101 - before anything is in it
            part.write_bytes(msgspec.json.format(msgspec.json.encode(tokens)))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def read_secret(path: Path) -> str:
    """Return the token in a client's file, which other users must not be able to read."""
    try:
        if path.stat().st_mode & 0o077:
            raise ArgumentError(f"the token in {path} is open to other users", fix=f"chmod 600 {path}")
        return path.read_text().strip()
    except OSError as exc:
        raise ArgumentError(
            f"the token cannot be read: {path}",
            why=exc.strerror,
            fix="give the file of a token that `tessera governor token create` printed",
        ) from exc
