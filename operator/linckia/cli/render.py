"""``linckia render``: a run config becomes YAML for ``kubectl apply``."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from linckia.cli.arguments import ConfigArgument, OverridesArgument

COMMENT = """\
Written by: {command}
The RayJob carries config, code and prompts itself (LINCKIA_BUNDLE); the ConfigMap shows them to people.
To change the run, render it again, or add section.key=value to the entrypoint."""


def render(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    cluster: Annotated[
        str, typer.Option(metavar="NAME", help="The RayCluster that the chart made: its release name.")
    ] = "linckia",
    self_contained: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A RayCluster's YAML: the job brings a cluster of its own like that one."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Default: where kubectl applies it.")
    ] = None,
) -> None:
    """Write a ConfigMap and a RayJob that train a run on Kubernetes: `linckia render CONFIG | kubectl apply -f -`.

    Code and prompt files that the config names travel with the job.
    """
    from linckia.api import render as rendering
    from linckia.api.bundle_files import gather
    from linckia.api.load import load_config, written_values

    given = list(overrides or ())
    written = written_values(config, given)
    if not (written.get("run") or {}).get("name"):
        given.append(f"run.name={rendering.kubernetes_name(Path(config).stem)}")
    loaded = load_config(config, given, elsewhere=True)
    name = loaded.run.name
    rendering.check_name(name)
    rendering.check_directory(loaded.run.dir)
    bundle, further = gather(Path(config), given, loaded, Path.cwd())
    further += rendering.on_kubernetes(written, own_cluster=self_contained is not None)
    job = rendering.ray_job(
        name,
        namespace,
        bundle,
        [*given, *further],
        cluster=cluster if self_contained is None else None,
        cluster_spec=None if self_contained is None else _cluster_spec(self_contained),
    )
    comment = COMMENT.format(command=shlex.join(["linckia", "render", config, *(overrides or ())]))
    sys.stdout.write(rendering.to_yaml([rendering.config_map(name, namespace, bundle), job], comment))


def _cluster_spec(file: Path) -> dict[str, Any]:
    """The spec of the RayCluster in a YAML file that may hold other manifests too."""
    import yaml

    from linckia.api.errors import UserError

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        found = [one for one in yaml.safe_load_all(text) if isinstance(one, dict) and one.get("kind") == "RayCluster"]
    except (OSError, yaml.YAMLError) as error:
        raise UserError(
            "--self-contained", str(file), f"cannot be read ({error})", "give a RayCluster's YAML"
        ) from None
    if len(found) != 1:
        raise UserError(
            "--self-contained", str(file), f"it holds {len(found)} RayClusters", "give the YAML of one, such as "
            "`helm template NAME charts/linckia -f VALUES` writes it",
        )  # fmt: skip
    spec: dict[str, Any] = found[0]["spec"]
    return spec
