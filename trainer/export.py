"""Command: write one folder for each size, which `SentenceTransformer(path)` loads as it is, and the whole encoder.

    python -m trainer.export --model runs/x/model --output runs/x/export

trainer/exporting/folders.py describes the layout of the folders. Options:
- `--router 3x128:6x128` also writes a folder whose `encode_query` and `encode_document` have a size each;
- `--onnx float32,int8` writes ONNX files into each folder, checked and timed (trainer/exporting/onnx_files.py);
- `--weights float16` halves the files of encoders with layers, `--table int8` quarters the files of a token table.
`encoder/` is the whole encoder with barista.json, in float32, from which training can go on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as hf_logging

from data.ground.command import exit_code_of, log_to_stderr
from data.ground.options import Parser, listed, real
from trainer.exporting.folders import WEIGHTS
from trainer.exporting.sizes import export_sizes


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m trainer.export",
        description="Write one folder a size that SentenceTransformer(path) loads, and encoder/, the whole encoder.",
    )
    parser.add_argument("--model", required=True, type=Path, help="the model folder of a trained run")
    parser.add_argument("--output", required=True, type=Path, help="a new folder, or an earlier export to replace")
    parser.add_argument("--sizes", default="all", help='"all" of the ladder, or names: demi,short,3x48 (%(default)s)')
    parser.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="QUERY:DOCUMENT",
        help="also a folder that encodes queries and documents at a size each, such as 3x128:6x128; may be repeated",
    )
    parser.add_argument(
        "--onnx", default="", metavar="PRECISIONS", help="also ONNX files: float32, int8 or float32,int8 (none)"
    )
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="float32", help="of encoders with layers, in files (%(default)s)"
    )
    parser.add_argument(
        "--table", choices=("float32", "int8"), default="float32", help="of a static model's tokens (%(default)s)"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="results.json of the model, for the model cards")
    parser.add_argument(
        "--watts-per-rank",
        type=real(above=0),
        metavar="W",
        help="for the cards' energy estimate (50 on a CPU, 500 on a GPU)",
    )
    parser.add_argument(
        "--base-model", metavar="NAME", help="hub name for the cards (that with which the chain of runs began)"
    )
    args = parser.parse_args(argv)
    log_to_stderr()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()

    def export() -> None:
        folders = export_sizes(
            args.model,
            args.output,
            sizes=None if args.sizes == "all" else listed(args.sizes),
            routers=args.router,
            weights=args.weights,
            table=args.table,
            onnx=listed(args.onnx),
            results=args.results,
            watts_per_rank=args.watts_per_rank,
            base_model=args.base_model,
        )
        sys.stdout.write("".join(f"{name}\t{folder}\n" for name, folder in folders.items()))

    return exit_code_of(export)


if __name__ == "__main__":
    sys.exit(main())
