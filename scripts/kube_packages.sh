#!/usr/bin/env bash
# Installs the Debian packages that a Kubernetes on this machine needs. Without root it only says what is missing.
set -euo pipefail

declare -A package=(
  [etcd]=etcd-server [containerd]=containerd [runc]=runc [debootstrap]=debootstrap [nft]=nftables [ip]=iproute2
  [openssl]=openssl [redis-server]=redis-server [buildah]=buildah [nsenter]=util-linux
)
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
[ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
if [ ${#missing[@]} -ne 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"
  else
    echo "missing Debian packages: ${missing[*]}; install them (apt-get install ${missing[*]}) and run make again" >&2
    exit 1
  fi
fi
command -v go >/dev/null || { echo "missing Go 1.25 or newer; install it from go.dev/dl and run make again" >&2; exit 1; }
