"""``linckia operator``: what the chart's operator container runs."""


def operator() -> None:
    """Look after the runs in a Kubernetes namespace; the Helm chart starts it, with its settings in the environment."""
    from linckia.api.errors import UserError

    try:
        from linckia.kube.operator import run_operator
    except ModuleNotFoundError as error:
        raise UserError(
            "linckia operator", None, f"{error.name} is missing", "pip install 'linckia[operator]'"
        ) from None
    run_operator()
