"""WARC records and HTTP responses as bytes."""


def record(
    kind: str,
    content: bytes,
    number: int = 1,
    url: str = "http://a.example/",
    **headers: str,
) -> bytes:
    """One WARC record; its id is made from `number`."""
    http = (
        "application/http; msgtype=response"
        if kind in ("response", "revisit")
        else "text/plain"
    )
    lines = {
        "WARC-Type": kind,
        "WARC-Record-ID": f"<urn:uuid:{number:08d}-0000-0000-0000-000000000000>",
        "WARC-Target-URI": url,
        "WARC-Date": "2024-05-18T01:58:10Z",
        "Content-Type": http,
        "Content-Length": str(len(content)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return "".join(
        [
            "WARC/1.1\r\n",
            *(f"{key}: {value}\r\n" for key, value in lines.items()),
            "\r\n",
        ]
    ).encode() + (content + b"\r\n\r\n")


def http(
    body: bytes,
    status: str = "200 OK",
    content_type: str = "text/html; charset=utf-8",
    **headers: str,
) -> bytes:
    lines = {
        "Content-Type": content_type,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    headers = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{headers}\r\n".encode() + body


def arc(version: int, *records: tuple[str, str, bytes]) -> list[bytes]:
    """Records of an ARC file: (url, type, content) of each."""
    names = b"URL IP-address Archive-date Content-type Archive-length"
    if version == 2:
        names = b"URL IP-address Archive-date Content-type Result-code Checksum Location Offset Filename Archive-length"
    about = b"%d 0 InternetArchive\n%s\n" % (version, names)
    extra = " 200 - - 0 a.arc" if version == 2 else ""
    parts = [
        f"filedesc://a.arc 0.0.0.0 20080430204825 text/plain{extra} {len(about)}\n".encode()
        + about
        + b"\n"
    ]
    for url, kind, content in records:
        line = f"{url} 192.0.2.1 20080430204826 {kind}{extra} {len(content)}\n"
        parts.append(line.encode() + content + b"\n")
    return parts
