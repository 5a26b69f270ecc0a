"""The parts of a cluster, built once into a cache: Kubernetes, KubeRay, helm and CoreDNS from pinned Go modules."""

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from kube.harness.processes import command

PARTS = Path(__file__).parents[1] / "parts"
KUBERNETES = "v1.34.4"
_VERSION = " ".join(
    f"-X {module}.{name}={value}"
    for module in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for name, value in (("gitVersion", KUBERNETES), ("gitMajor", "1"), ("gitMinor", "34"))
)
BINARIES = {
    "kubernetes": tuple(
        f"k8s.io/kubernetes/cmd/{name}"
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
    ),
    "kuberay": ("github.com/ray-project/kuberay/ray-operator",),
    "helm": ("helm.sh/helm/v3/cmd/helm",),
    "coredns": (".",),
}
PROGRAMS = ("etcd", "containerd", "runc", "ctr", "debootstrap", "nft", "ip", "nsenter", "openssl", "go")


@dataclass(frozen=True)
class Parts:
    """Where everything lies: ``binary("kubelet")``, ``image("base")``."""

    folder: Path

    def binary(self, name: str) -> Path:
        return self.folder / "bin" / name

    def image(self, name: str) -> Path:
        return self.folder / "images" / f"{name}.tar"


def cache_folder() -> Path:
    return Path(os.environ.get("LINCKIA_KUBE_CACHE") or Path.home() / ".cache" / "linckia" / "kube")


def build() -> Parts:
    """Build what is missing or was built from other sources. RuntimeError that names every program that is not there."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        who = "root" if os.geteuid() != 0 else ""
        raise RuntimeError(
            f"a cluster on this machine needs {' and '.join(filter(None, [who, ', '.join(lacking)]))}; "
            "`make kube-parts` installs what Debian has, Go 1.25 or newer comes from go.dev"
        )
    parts = Parts(cache_folder())
    for module, packages in BINARIES.items():
        _build_module(parts, module, packages)
    return parts


def _build_module(parts: Parts, module: str, packages: tuple[str, ...]) -> None:
    source = PARTS / module
    key = hashlib.sha256()
    for file in sorted(source.iterdir()):
        key.update(file.read_bytes())
    done = parts.folder / "bin" / f".{module}-{key.hexdigest()[:16]}"
    if done.exists():
        return
    print(f"building {module}, once", file=sys.stderr, flush=True)
    done.parent.mkdir(parents=True, exist_ok=True)
    flags = "-s -w" + (f" {_VERSION}" if module == "kubernetes" else "")
    for package in packages:
        name = module if package == "." or module == "kuberay" else package.rsplit("/", 1)[-1]
        command(
            "env", "CGO_ENABLED=0", "go", "build", "-C", source, "-trimpath", "-ldflags", flags,
            "-o", parts.binary(name), package,
        )  # fmt: skip
    done.touch()


if __name__ == "__main__":
    from kube.harness import images

    images.make(build())
