#!/bin/sh
# Install the browser that tests of the report's page use, where it is missing and may be installed: Debian or Ubuntu, root.
set -eu
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "No Chromium with its driver, and no right to install them: tests of the report in a browser are skipped."
    exit 0
fi
echo "Installing Chromium and its driver, for the tests of the report's page."
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 ||
    echo "They could not be installed: tests of the report in a browser are skipped."
