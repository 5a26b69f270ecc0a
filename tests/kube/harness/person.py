"""``make kube-up`` and ``make kube-down``: a cluster that stands until it is taken down."""

import sys
from pathlib import Path

from kube.harness.cluster import down, up


def main(action: str) -> None:
    marker = Path("build/kube")
    if action == "up":
        if marker.exists():
            sys.exit(f"a cluster stands already: export KUBECONFIG={marker.read_text().split()[1]}/kubeconfig")
        made = up()
        marker.parent.mkdir(exist_ok=True)
        marker.write_text(f"{made.network.name} {made.folder}")
        print(f"export KUBECONFIG={made.kubeconfig} PATH={made.parts.folder / 'bin'}:$PATH")
    elif marker.exists():
        name, folder = marker.read_text().split()
        down(name, Path(folder))
        marker.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
