#!/bin/sh
# The data of the studies that start from random weights, from the data sets beside the checkout and the documentation of
# the installed packages. Run from the root of the checkout; finished parts are skipped, unfinished ones continue.
#   sh launch/studies/prepare_starbucks.sh
set -eu
python=${PYTHON:-.venv/bin/python}
data=${DATA:-../shared/data}
out=${OUT:-runs/study-data}
tokenizer=$out/tokenizer
. "$(dirname "$0")/prepare_common.sh"
mkdir -p "$out"

[ -f "$out/docs/documents.jsonl" ] || "$python" -m data.prepare installed-docs --output "$out/docs"
[ -f "$tokenizer/tokenizer.json" ] || "$python" -m data.prepare tokenizer \
    "$data/text/*.jsonl.gz" "$out/docs/documents.jsonl" --vocab-size 8192 --output "$tokenizer"

# Pre-training: all text, and the documentation.
"$python" -m data.prepare documents "$data/text/*.jsonl.gz" "$out/docs/documents.jsonl" \
    --tokenizer "$tokenizer" --output "$out/shards/documents"

fine_tuning_tuples
tuples docs "$out/docs/pairs.jsonl"
# For matryoshka.toml.
tuples stsb "$data/sts/stsb_train.tsv" --format sts
