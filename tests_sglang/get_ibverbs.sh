#!/bin/sh
# Mooncake's library wants libibverbs, also where it sends by TCP. If this system has none, its own package is
# unpacked into FOLDER: no root is needed, and nothing is installed. Usage: get_ibverbs.sh PYTHON FOLDER
set -eu
python=$1 folder=$2
"$python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null && exit 0
test -d "$folder" && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/packages"
download() (
    cd "$work/packages"
    timeout 120 apt-get -qq "$@" download libibverbs1 libnl-3-200 libnl-route-3-200 >/dev/null 2>"$work/error"
)
# A new machine has no package lists, and only root may fetch the system's.
private="-o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache -o Debug::NoLocking=1"
# shellcheck disable=SC2086
download || { timeout 120 apt-get -qq $private update >/dev/null 2>&1 && download $private; } || {
    cat "$work/error" >&2
    exit 1
}
mkdir -p "$work/root"
for package in "$work"/packages/*.deb; do dpkg-deb -x "$package" "$work/root"; done
cp -r "$work/root" "$folder"
