"""Whether the Hugging Face hub can be reached, found out in no time: its library asks for a minute."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def unreachable(name: str) -> bool:
    """Tell whether a name must be on the hub, whose address cannot be looked up. A local path or a proxy settles it."""
    import huggingface_hub.constants as hub

    proxied = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if hub.HF_HUB_OFFLINE or proxied or Path(name).exists():
        return False
    host = hub.ENDPOINT.split("://")[-1].split("/")[0].split(":")[0]
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return True
    return False
