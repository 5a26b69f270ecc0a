"""Arguments that several commands take."""

from typing import Annotated

import typer

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The run config, a YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values that win over the file's, such as run.seed=2."),
]
