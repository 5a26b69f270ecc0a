"""Certificates of one cluster: an authority, and whoever has to show one."""

from collections.abc import Sequence
from pathlib import Path

from kube.harness.processes import command


def make_authority(folder: Path) -> None:
    """``ca.crt``, ``ca.key``, and the key pair ``sa.key``, ``sa.pub`` that signs the tokens of service accounts."""
    folder.mkdir(parents=True)
    command("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=linckia-tests",
            "-keyout", folder / "ca.key", "-out", folder / "ca.crt")  # fmt: skip
    command("openssl", "genrsa", "-out", folder / "sa.key", "2048")
    command("openssl", "rsa", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub")


def issue(folder: Path, name: str, subject: str, names: Sequence[str]) -> None:
    """``{name}.crt`` and ``{name}.key``. ``names`` such as ``DNS:node-a`` and ``IP:10.0.0.1``."""
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth,clientAuth\n")
    command("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", subject,
            "-keyout", folder / f"{name}.key", "-out", request)  # fmt: skip
    command("openssl", "x509", "-req", "-in", request, "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key",
            "-CAcreateserial", "-days", "30", "-out", folder / f"{name}.crt", "-extfile", extensions)  # fmt: skip


def kubeconfig(folder: Path, name: str, server: str, path: Path) -> Path:
    """Write a kubeconfig that shows the certificate of ``name``; the certificates are inside, so it can be copied."""
    import base64

    import yaml

    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    cluster = {"server": server, "certificate-authority-data": data("ca.crt")}
    user = {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "tests", "user": user}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    }
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path
