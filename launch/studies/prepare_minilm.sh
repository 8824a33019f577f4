#!/bin/sh
# The data of minilm.toml and the two models that it starts from, all-MiniLM-L6-v2 unchanged and with the closed form's
# maps, from the data sets beside the checkout and the package that contains the model (data/minilm.py). Run from the
# root of the checkout; finished parts are skipped, unfinished ones continue.
#   sh launch/studies/prepare_minilm.sh
set -eu
python=${PYTHON:-.venv/bin/python}
data=${DATA:-../shared/data}
out=${OUT:-runs/minilm-study/data}
tokenizer=$out/resize/start
. "$(dirname "$0")/prepare_common.sh"
mkdir -p "$out"

model=$("$python" -c "from data.ground.command import run_command
from data.minilm import minilm_folder
run_command(lambda: print(minilm_folder()))")

# Texts without labels, for the masked backbones and for resizing alike; no sentence of an STS set is among them.
[ -f "$out/texts.jsonl" ] || "$python" -m data.excerpts "$data/text/*.jsonl.gz" \
    --without "$data"/sts/sts1?.tsv "$data"/sts/stsb_*.tsv --output "$out/texts.jsonl"

# resize/start, the model; resize/shards, the texts; resize/closed_form, a linear map a depth, fitted without training.
"$python" -m trainer.resize "$model" --texts "$out/texts.jsonl" --sizes 1x32,2x64,4x192,6x384 \
    --output "$out/resize" --prepare-only

fine_tuning_tuples
