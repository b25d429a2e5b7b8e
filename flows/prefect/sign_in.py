"""Sign-in link of `gristmill up`, which signs a browser in to Prefect's pages and opens
the deployments.

Prefect's pages keep the password in the browser's storage under their own origin, so
the page that stores it must come from Prefect's server: it is added to the folder of
the server's pages, which is a setting of Prefect.
"""

from __future__ import annotations

import base64
import getpass
import os
import socket
import sys
from pathlib import Path

from gristmill.flows.prefect.server_settings import (
    SERVER_VARIABLE,
    password_file,
    prefect_folder,
)

PAGES_VARIABLE = "PREFECT_UI_STATIC_DIRECTORY"
PAGES = "v2"
"""Version of Prefect's pages that its server shows by default (3.8)."""
FILE = "gristmill.html"
KEY = "prefect-password"
"""Key of the browser's storage for `USER:PASSWORD` in base64 (ui-v2, `login`)."""
PAGE = f"""<!doctype html>
<meta charset="utf-8">
<title>gristmill</title>
<script>
if (location.hash.length > 1) localStorage.setItem("{KEY}", location.hash.slice(1));
location.replace("deployments");
</script>
"""


def pages_folder() -> Path:
    """Folder of the server's copy of Prefect's pages: the environment's, or one of this
    user.
    """
    return Path(
        os.environ.get(PAGES_VARIABLE) or prefect_folder() / "gristmill-pages"
    ).expanduser()


def add_sign_in_page() -> None:
    """Add the sign-in page to the server's pages, which exist once it answers."""
    folder = pages_folder() / PAGES
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(PAGE, encoding="utf-8")


def pages_of(api: str) -> str:
    """URL of a server's pages."""
    return f"{api.removesuffix('/api')}/{PAGES}"


def deployments_page(api: str) -> str:
    """URL of the page with the deployments."""
    return f"{pages_of(api)}/deployments"


def sign_in_link(port: int, password: str) -> str:
    """URL that signs in: the fragment after `#` stays in the browser, and is not sent
    to any server.
    """
    return f"http://127.0.0.1:{port}/{PAGES}/{FILE}#{base64.b64encode(password.encode()).decode()}"


def how_to_open(port: int, password: str) -> list[str]:
    """Lines on how to open the server's pages; the password is only shown on a
    terminal, not in a log.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = "USER"
    tunnel = (
        f"ssh -N -L {port}:127.0.0.1:{port} -L {port + 1}:127.0.0.1:{port + 1} "
        f"{user}@{socket.gethostname()}"
    )
    if sys.stdout.isatty():
        address_lines = [f"Prefect: {sign_in_link(port, password)}"]
    else:
        password_place = (
            f"in {SERVER_VARIABLE}"
            if os.environ.get(SERVER_VARIABLE)
            else f"in {password_file()}"
        )
        page = deployments_page(f"http://127.0.0.1:{port}/api")
        address_lines = [
            f"Prefect: {page}",
            "Its page asks each browser once for the password, which is "
            f"{password_place}",
        ]
    return [
        *address_lines,
        f"From another computer: {tunnel}",
        "and open the same address there.",
    ]
