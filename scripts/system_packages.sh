#!/bin/sh
# Install what tests use beside Python packages, where it is missing and may be installed (Debian or Ubuntu, root): a
# browser for the report's page, a packet filter and WireGuard for networks in namespaces.
set -eu
missing=
needs() { # a command, and the package that has it
    command -v "$1" >/dev/null || missing="$missing $2"
}
needs chromium chromium
needs chromedriver chromium-driver
needs ip iproute2
needs nft nftables
needs wireguard-go wireguard-go
needs wg wireguard-tools
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "Not here, and no right to install them:$missing. Tests that need them are skipped."
    exit 0
fi
echo "Installing for the tests:$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # a list of packages
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null 2>&1 ||
    echo "They could not be installed: tests that need them are skipped."
