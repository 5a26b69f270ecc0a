"""Container images without a container engine: a Debian tree, and static programs, packed as archives to import."""

import hashlib
import io
import json
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from kube.harness.build import Parts
from kube.harness.processes import command

PACKAGES = "ca-certificates,libgomp1,libnuma1,libstdc++6,procps,wget"
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PAUSE = """
#include <signal.h>
#include <unistd.h>
static void stop(int number) { (void)number; _exit(0); }
int main(void) { signal(SIGTERM, stop); signal(SIGINT, stop); for (;;) pause(); }
"""


def make(parts: Parts) -> None:
    """``pause``, ``kuberay`` and ``base`` (Debian, for a Python environment mounted from this machine), each once."""
    (parts.folder / "images").mkdir(parents=True, exist_ok=True)
    if not parts.image("pause").exists():
        source, program = parts.folder / "pause.c", parts.folder / "pause"
        source.write_text(_PAUSE)
        command("cc", "-Os", "-static", "-o", program, source)
        _pack(parts.image("pause"), "localhost/pause:1", ["/pause"], {"pause": program}, user="65535")
    kuberay = parts.image("kuberay")
    if not kuberay.exists() or kuberay.stat().st_mtime < parts.binary("kuberay").stat().st_mtime:
        _pack(kuberay, "localhost/kuberay:1", ["/manager"], {"manager": parts.binary("kuberay")}, user="65532")
    if not parts.image("base").exists():
        tree = parts.folder / "base"
        if not (tree / ".complete").exists():
            print("making a Debian tree, once", file=sys.stderr, flush=True)
            command("rm", "-rf", tree)
            command("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", tree, *_mirror())
            command("rm", "-rf", *sorted((tree / "var/cache/apt/archives").glob("*.deb")), tree / "usr/share/doc")
            (tree / ".complete").touch()
        layer = parts.folder / "base.layer.tar"
        command("tar", "-C", tree, "--exclude=./dev/*", "-cf", layer, ".")
        _write(parts.image("base"), "localhost/base:1", ["/bin/sh"], layer, user="0")
        layer.unlink()


def _mirror() -> Sequence[str]:
    """The Debian mirror that this machine itself uses."""
    for file in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        for line in file.read_text().splitlines() if file.is_file() else []:
            if found := re.match(r"(?:URIs:|deb (?:\[.*?\] )?)\s*(http\S+/debian)/?(\s|$)", line):
                return [found[1]]
    return []


def _pack(archive: Path, name: str, entrypoint: Sequence[str], files: dict[str, Path], user: str) -> None:
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        for inside, file in files.items():
            tar.add(file, inside)
    _write(archive, name, entrypoint, layer, user)
    layer.unlink()


def _write(archive: Path, name: str, entrypoint: Sequence[str], layer: Path, user: str) -> None:
    """A docker archive of one layer, as ``ctr images import`` takes it."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "Env": [PATH], "User": user},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    half = archive.with_suffix(".half")
    with tarfile.open(half, "w") as tar:
        for inside, data in ((config_name, config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(inside)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        tar.add(layer, "layer.tar")
    half.rename(archive)
