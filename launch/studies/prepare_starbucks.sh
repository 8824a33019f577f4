#!/bin/sh
# The data of the studies in this folder, from the data sets beside the checkout and the documentation of the installed
# packages. Run from the root of the checkout; what is done already is skipped, an unfinished part goes on.
#   sh launch/studies/prepare_starbucks.sh
set -eu
python=${PYTHON:-.venv/bin/python}
data=${DATA:-../shared/data}
out=${OUT:-runs/study-data}
mkdir -p "$out"

[ -f "$out/docs/documents.jsonl" ] || "$python" -m data.prepare installed-docs --output "$out/docs"
[ -f "$out/tokenizer/tokenizer.json" ] || "$python" -m data.prepare tokenizer \
    "$data/text/*.jsonl.gz" "$out/docs/documents.jsonl" --vocab-size 8192 --output "$out/tokenizer"

# Pre-training: all text, and the documentation.
"$python" -m data.prepare documents "$data/text/*.jsonl.gz" "$out/docs/documents.jsonl" \
    --tokenizer "$out/tokenizer" --output "$out/shards/documents"

# Fine-tuning. NLI triplets that share a sentence with an STS test are dropped (rows count from 0, after the header).
for name in snli_devtest cad_snli; do
    awk 'NR == FNR { drop[$1 + 2]; next } !(FNR in drop)' \
        "$data/nli/${name}_triplets.sts_overlap_rows.txt" "$data/nli/${name}_triplets.tsv" > "$out/$name.tsv"
done
"$python" -m data.prepare tuples "$out/snli_devtest.tsv" "$out/cad_snli.tsv" \
    --tokenizer "$out/tokenizer" --output "$out/shards/nli"
"$python" -m data.prepare tuples "$data/retrieval/scifact" --split train \
    --tokenizer "$out/tokenizer" --output "$out/shards/scifact-train"
"$python" -m data.prepare tuples "$data/retrieval/xquad-en" --split test \
    --tokenizer "$out/tokenizer" --output "$out/shards/xquad"
"$python" -m data.prepare tuples "$out/docs/pairs.jsonl" --tokenizer "$out/tokenizer" --output "$out/shards/docs"
# For matryoshka.toml.
"$python" -m data.prepare tuples "$data/sts/stsb_train.tsv" --format sts --tokenizer "$out/tokenizer" --output "$out/shards/stsb"
