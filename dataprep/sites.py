"""Site of a web address."""

from __future__ import annotations

SITE = r"^[a-zA-Z]+://(?:[^/@]*@)?(?:www\.)?(?P<host>[^/:?#]+)"
"""Pattern of an address whose group is its site: the host without user, port and a
leading `www.`, to be written in lower case. Subdomains stay: `blog.mill.org` is a site
of its own.
"""
