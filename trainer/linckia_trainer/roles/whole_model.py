"""Models whose folder holds all of their weights: transformers draws what is missing at random and only warns."""

from typing import Any

from linckia.api.errors import UserError


def load_whole(auto_class: Any, path: str, field: str, next_step: str, **settings: Any) -> Any:
    """``auto_class.from_pretrained(path)``; UserError naming ``field`` if a weight is not in the folder."""
    model, found = auto_class.from_pretrained(path, output_loading_info=True, **settings)
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        reason = f"as a {type(model).__name__} it lacks {', '.join(missing[:3])}{more}, which would be drawn at random"
        raise UserError(field, path, reason, next_step)
    return model
