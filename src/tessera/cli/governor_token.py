"""`tessera governor token`: who may do what, on the governor's machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from .main import NearestGroup
from .options import WordChoice, json_option, print_json

ROLES = ["node", "job", "read", "operator"]


def default_state() -> Path:
    """Return where a governor of this user keeps its leases and tokens."""
    if os.geteuid() == 0:
        return Path("/var/lib/tessera-governor")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "tessera" / "governor"


state_option = click.option(
    "--state", type=click.Path(file_okay=False, path_type=Path), help="Folder of leases and tokens."
)


@click.group("token", cls=NearestGroup)
def command() -> None:
    """Create, list and revoke tokens, on the governor's machine.

    \b
    Example:
      tessera governor token create node1 --role node --out node1.token
    """


@command.command("create")
@click.argument("name")
@click.option("--role", type=WordChoice(ROLES), required=True, help="What it may do; an operator may do everything.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write it there, for its owner only."
)
@state_option
@json_option
def create_token(name: str, role: str, out: Path | None, state: Path | None, as_json: bool) -> None:
    """Print or write a new token, once: only its hash is kept. NAME is the node's name for a node, or * for any node.

    \b
    Example:
      tessera governor token create slurm --role job --out slurm.token

    A file that other users can read is refused by every call: --out writes one that they cannot.
    """
    from ..fleet.governor.tokens import Role, TokenFile
    from ..output import replace_when_written

    folder = state or default_state()
    tokens = TokenFile(folder / "tokens.json")
    if out is None:
        secret = tokens.create(name, Role(role))
        print_json({"name": name, "role": role, "token": secret}) if as_json else click.echo(secret)
        return
    with replace_when_written(out) as part:
        part.chmod(0o600)  # before anything is in it
        part.write_text(tokens.create(name, Role(role)) + "\n")
    if as_json:
        print_json({"name": name, "role": role, "file": str(out)})
    else:
        click.echo(f"wrote {out}; the governor whose state is in {folder} takes it", err=True)


@command.command("list")
@state_option
@json_option
def list_tokens(state: Path | None, as_json: bool) -> None:
    """List names and roles.

    \b
    Example:
      tessera governor token list
    """
    from ..fleet.governor.tokens import TokenFile

    found = [{"name": t.name, "role": t.role} for t in TokenFile((state or default_state()) / "tokens.json").read()]
    if as_json:
        print_json(found)
        return
    for one in found:
        click.echo(f"{one['role']:<9} {one['name']}")


@command.command("revoke")
@click.argument("name")
@state_option
def revoke_token(name: str, state: Path | None) -> None:
    """Revoke all tokens of a name. It takes effect at the next request.

    \b
    Example:
      tessera governor token revoke node1
    """
    from ..fleet.governor.tokens import TokenFile

    count = TokenFile((state or default_state()) / "tokens.json").revoke(name)
    click.echo(f"revoked {count}")
