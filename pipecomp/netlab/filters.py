"""What nftables does in a lab: routers that hide a node behind their own address, and packets lost at random."""

from __future__ import annotations

import shutil

from pipecomp.netlab.namespaces import Run

_TABLE = "pipecomp"
_NEEDED = {"nft": "nftables", "sysctl": "procps"}  # program -> Debian's package
_DRAWN = 10**6  # a packet is lost if a number below this is below the share


def missing() -> str | None:
    """Say what this machine lacks for it, None if nothing."""
    lacking = [package for program, package in _NEEDED.items() if shutil.which(program) is None]
    return f"no packet filter here: install {' and '.join(lacking)}" if lacking else None


def lose_packets(namespace: str, interface: str, share: float, run: Run) -> None:
    """Lose this share of the packets that come in at an interface, each for itself.

    Each packet then has to be one on the wire: the kernel hands over up to 64 KiB as one otherwise.
    """
    run(f"ip -n {namespace} link set {interface} gso_max_segs 1")
    nft = f"ip netns exec {namespace} nft add"
    run(f"{nft} table inet {_TABLE}")
    run(f"{nft} chain inet {_TABLE} loss {{ type filter hook prerouting priority -300 ; }}")
    random = f"numgen random mod {_DRAWN} < {round(share * _DRAWN)}"
    run(f"{nft} rule inet {_TABLE} loss iifname {interface} {random} counter drop")


def masquerade(router: str, outside: str, run: Run) -> None:
    """Let a namespace pass on what comes from within under its own address, and take no connection from outside."""
    pass_on(router, run)
    nft = f"ip netns exec {router} nft add"
    run(f"{nft} table ip {_TABLE}")
    run(f"{nft} chain ip {_TABLE} out {{ type nat hook postrouting priority 100 ; }}")
    run(f"{nft} rule ip {_TABLE} out oifname {outside} masquerade")
    for hook in ("input", "forward"):
        run(f"{nft} chain ip {_TABLE} {hook} {{ type filter hook {hook} priority 0 ; }}")
        run(f"{nft} rule ip {_TABLE} {hook} iifname {outside} ct state new drop")


def pass_on(namespace: str, run: Run) -> None:
    """Let a namespace forward packets."""
    run(f"ip netns exec {namespace} sysctl -q -w net.ipv4.ip_forward=1")
