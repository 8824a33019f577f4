"""Command: one model whose weights are the mean of several models' (model soup, Wortsman et al. 2022).

    python -m trainer.soup --models runs/a/model runs/b/model --output runs/soup [--weights 2 1]

For runs that differ in seed, data or schedule and started from the same weights. Models of other shapes, tokenizers or
settings are refused: their mean would load and mean nothing. Means are taken in float64, a tensor at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from data.command import exit_code_of, log_to_stderr
from data.tokens import load_tokenizer, tokenizer_fingerprint
from models.encoder import EmbeddingSettings
from trainer.config import ConfigError

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"


def soup(models: Sequence[Path], output: Path, *, weights: Sequence[float] = ()) -> Path:
    """Write the mean model, with the first one's configuration and tokenizer; it appears whole or not at all."""
    if len(models) < 2:
        raise ConfigError(f"--models names {len(models)} folder; a mean needs two or more")
    if weights and (len(weights) != len(models) or min(weights) < 0 or sum(weights) <= 0):
        raise ConfigError(f"--weights {list(weights)} must be {len(models)} numbers of at least 0, and not all 0")
    if output.exists():
        raise ConfigError(f"--output {output} exists; give a new folder")
    for folder in models:
        if not (folder / WEIGHTS_FILE).is_file():
            raise ConfigError(f"{folder} holds no {WEIGHTS_FILE}; give the model folders of trained runs")
    first = models[0]
    same = tokenizer_fingerprint(load_tokenizer(first)), EmbeddingSettings.load(first)
    for folder in models[1:]:
        if (tokenizer_fingerprint(load_tokenizer(folder)), EmbeddingSettings.load(folder)) != same:
            raise ConfigError(f"{folder} has another tokenizer or barista.json than {first}; mix models of one recipe")
    shares = [weight / sum(weights) for weight in weights] if weights else [1 / len(models)] * len(models)
    mean: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(folder / WEIGHTS_FILE, framework="pt")) for folder in models]
        names = sorted(files[0].keys())
        for folder, file in zip(models, files):
            if sorted(file.keys()) != names:
                raise ConfigError(f"{folder} has other tensors than {first}; mix models of one architecture")
        for name in names:
            tensors = [file.get_tensor(name) for file in files]
            for folder, tensor in zip(models, tensors):
                if tensor.shape != tensors[0].shape:
                    raise ConfigError(
                        f"{name} is {list(tensor.shape)} in {folder} and {list(tensors[0].shape)} in {first}; "
                        "mix models of one architecture"
                    )
            total = sum(share * tensor.double() for share, tensor in zip(shares, tensors))
            assert isinstance(total, torch.Tensor)
            mean[name] = total.to(tensors[0].dtype)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        shutil.copytree(first, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(mean, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        partial.chmod(0o755)  # mkdtemp's folders are private
        partial.replace(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    log.info("the mean of %d models is in %s", len(models), output)
    return output


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.soup", description="Average the weights of models.")
    add = parser.add_argument
    add("--models", required=True, nargs="+", type=Path, metavar="FOLDER", help="model folders of one architecture")
    add("--output", required=True, type=Path, help="a new folder")
    add("--weights", nargs="+", type=float, default=[], help="of each model; none: all alike")
    args = parser.parse_args(argv)
    log_to_stderr()
    return exit_code_of(lambda: soup(args.models, args.output, weights=args.weights))


if __name__ == "__main__":
    sys.exit(main())
