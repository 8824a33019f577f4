"""Command: one model whose weights are the mean of several models' (model soup, Wortsman et al. 2022).

    python -m trainer.soup --models runs/a/model runs/b/model --output runs/soup [--weights 2 1]

It is for runs that started from the same weights and differ in seed, data or schedule. Models with different shapes,
tokenizers or settings are refused, because their mean would load and be useless. Heads (models/heads.py) are averaged
with the weights. Means are taken in float64, one tensor at a time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import logging as hf_logging

from data.ground.command import exit_code_of, log_to_stderr
from data.ground.errors import ConfigError
from data.ground.files import reading
from data.ground.options import Parser
from data.ground.records import read_json
from data.ground.whole_folder import check_place, written_whole
from data.model_folders import MODULES_FILE, read_modules
from data.tokens import load_tokenizer, tokenizer_fingerprint
from models.encoder import load_encoder
from models.heads import HEADS_FILE
from models.loading import NOT_COMPUTED_WITH, check_finite
from models.settings import EmbeddingSettings

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
_COPIED = (".json", ".txt", ".model", ".jinja")  # configuration, settings and tokenizer


def soup(models: Sequence[Path], output: Path, *, weights: Sequence[float] = ()) -> Path:
    """Write the mean model, with the first one's configuration and tokenizer; it appears whole or not at all."""
    if len(models) < 2:
        raise ConfigError(f"--models names {len(models)} folder; a mean needs two or more")
    wrong = len(weights) != len(models) or not all(0 <= weight < math.inf for weight in weights)
    if weights and (wrong or not 0 < sum(weights) < math.inf):
        raise ConfigError(f"--weights {list(weights)} must be {len(models)} finite numbers of at least 0, not all 0")
    if output.exists():
        raise ConfigError(f"--output {output} exists; give a new folder")
    check_place(output)
    _check_alike(models)
    shares = [weight / sum(weights) for weight in weights] if weights else [1 / len(models)] * len(models)
    files = [WEIGHTS_FILE, *[HEADS_FILE] * _have_heads(models)]
    means = {file: _mean([folder / file for folder in models], shares) for file in files}
    with written_whole(output) as partial:
        # Links and folders beside a model's own files are not part of the model.
        for path in sorted(models[0].iterdir()):
            if path.is_file() and not path.is_symlink() and path.suffix in _COPIED:
                shutil.copyfile(path, partial / path.name)
        for file, mean in means.items():
            save_file(mean, partial / file, metadata={"format": "pt"})
    log.info("the mean of %d models is in %s", len(models), output)
    return output


def _check_alike(models: Sequence[Path]) -> None:
    """Refuse models whose mean would be useless."""
    places: dict[Path, Path] = {}
    for folder in models:
        if not (folder / WEIGHTS_FILE).is_file():
            raise ConfigError(f"{folder} holds no {WEIGHTS_FILE}; give the model folders of trained runs")
        if read_modules(folder) is not None:
            raise ConfigError(
                f"{folder} is a folder of sentence-transformers ({MODULES_FILE}), whose other modules would be lost; "
                "give the model folders of trained runs"
            )
        if (other := places.setdefault((folder / WEIGHTS_FILE).resolve(), folder)) is not folder:
            raise ConfigError(f"--models names {other} and {folder}, which are one folder; weight it by --weights")
    first = models[0]
    same = tokenizer_fingerprint(load_tokenizer(first)), EmbeddingSettings.load(first)
    config = _config(first)
    for folder in models[1:]:
        if (tokenizer_fingerprint(load_tokenizer(folder)), EmbeddingSettings.load(folder)) != same:
            raise ConfigError(f"{folder} has another tokenizer or barista.json than {first}; mix models of one recipe")
        other_config = _config(folder)
        for key in sorted({*config, *other_config}):
            if config.get(key) != other_config.get(key):
                raise ConfigError(
                    f"{folder} has another {key} in its config.json than {first}; mix models of one architecture"
                )
    # The mean gets the first model's configuration, so that model must load.
    load_encoder(first)


def _config(folder: Path) -> dict[str, Any]:
    """What config.json says of the architecture."""
    values = read_json(folder / "config.json", what="model configuration", hint="give a sound model folder")
    if not isinstance(values, dict):
        raise ConfigError(f"model configuration {folder / 'config.json'} holds no object; give a sound model folder")
    return {key: value for key, value in values.items() if key not in NOT_COMPUTED_WITH}


def _have_heads(models: Sequence[Path]) -> bool:
    """Whether the models have heads; either all of them have some, or none."""
    having = {folder: (folder / HEADS_FILE).is_file() for folder in models}
    for folder in models[1:]:
        if having[folder] != having[models[0]]:
            one, other = (folder, models[0]) if having[folder] else (models[0], folder)
            raise ConfigError(f"{one} has heads ({HEADS_FILE}) and {other} has none; mix models of one architecture")
    return having[models[0]]


def _mean(paths: Sequence[Path], shares: Sequence[float]) -> dict[str, torch.Tensor]:
    """The weighted mean of each tensor over files of the same tensors."""
    first = paths[0]
    mean: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            with reading(path, what="weights", hint="copy the model folder again"):
                files.append(stack.enter_context(safe_open(path, framework="pt")))
        names = sorted(files[0].keys())
        for path, file in zip(paths, files):
            if sorted(file.keys()) != names:
                raise ConfigError(f"{path} has other tensors than {first}; mix models of one architecture")
        for name in names:
            tensors = [file.get_tensor(name) for file in files]
            for path, tensor in zip(paths, tensors):
                if tensor.shape != tensors[0].shape:
                    raise ConfigError(
                        f"{name} is {list(tensor.shape)} in {path} and {list(tensors[0].shape)} in {first}; "
                        "mix models of one architecture"
                    )
                check_finite([(name, tensor)], f"model {str(path.parent)!r}")
            total = sum(share * tensor.double() for share, tensor in zip(shares, tensors))
            assert isinstance(total, torch.Tensor)
            mean[name] = total.to(tensors[0].dtype)
    return mean


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m trainer.soup", description="Average the weights of models.")
    add = parser.add_argument
    add("--models", required=True, nargs="+", type=Path, metavar="FOLDER", help="model folders of one architecture")
    add("--output", required=True, type=Path, help="a new folder")
    add("--weights", nargs="+", type=float, default=[], help="of each model; none: all alike")
    args = parser.parse_args(argv)
    log_to_stderr()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    return exit_code_of(lambda: soup(args.models, args.output, weights=args.weights))


if __name__ == "__main__":
    sys.exit(main())
