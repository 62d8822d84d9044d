#!/bin/sh
# Install Debian's chromium and its driver for the tests of the report page, or say that these will be skipped.
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium for the tests of the report page"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; then
        exit 0
    fi
fi
echo "chromium and chromedriver are missing and cannot be installed here (that takes apt-get, as root):" >&2
echo "the tests that open the report page in a browser will be skipped" >&2
