"""Where a model's shape comes from: a small file kept here, a config.json, or the hub; importing needs no torch."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from helpers.fit.vocabulary import UnknownModel

SHAPES = Path(__file__).parent / "shapes"


def known_models() -> list[str]:
    """Names of the models whose shapes are kept here."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def find(model: str) -> Path | None:
    """The file that holds this model's shape; None for what may be a hub id.

    A known name is found in any spelling of case and with or without its organisation. Raises UnknownModel with the
    nearest names for anything else.
    """
    local = Path(model).expanduser()
    path = local / "config.json" if local.is_dir() else local
    if path.is_file():
        return path
    kept = SHAPES / f"{model.lower().split('/')[-1]}.json"
    if kept.is_file():
        return kept
    if model.count("/") == 1 and local.suffix != ".json" and not model.startswith((".", "/", "~")):
        return None
    raise UnknownModel(f"The model {model!r} is unknown. {_nearest(model)} A config.json or a hub id does as well.")


def load(model: str) -> Any:
    """The Transformers config of a known name, a config.json or its folder, or a hub id; UnknownModel otherwise."""
    path = find(model)
    from transformers import AutoConfig

    if path is None:
        try:
            return AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UnknownModel(f"The hub gave no config for {model!r}: {reason} {_nearest(model)}") from error
    try:
        values = json.loads(path.read_text())
        kind = values.pop("model_type")
    except (KeyError, ValueError) as error:
        raise UnknownModel(f"{path} is not the config of a Transformers model: it has no model_type.") from error
    try:
        return AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k not in ("source", "auto_map")})
    except ValueError as error:
        raise UnknownModel(f"{path} has model_type {kind!r}, which this Transformers does not know.") from error


def _nearest(model: str) -> str:
    near = difflib.get_close_matches(model.lower().split("/")[-1], known_models(), n=3, cutoff=0.4)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known_models())}."
