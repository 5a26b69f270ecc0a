#!/usr/bin/env bash
# Installs the Debian packages that pip cannot bring: libnuma1 (vLLM's CPU build links it) and a C
# compiler (DeepSpeed and two others build from source). Without root it only says what is missing.
set -euo pipefail

missing=()
ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || missing+=(libnuma1)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
"${PYTHON:-python3}" - <<'PY' || missing+=(python3-dev)
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
PY
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"
else
  echo "missing Debian packages: ${missing[*]}; install them (apt-get install ${missing[*]}) and run make again" >&2
  exit 1
fi
