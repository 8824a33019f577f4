#!/bin/sh
# The study quantised.toml: its data, its runs, and what every run's model scores by layers, dimensions and bits, with
# the bytes of a stored vector. Run from the root of the checkout; after an interruption the same command goes on.
#   sh launch/studies/quantised.sh
# What it leaves in runs/quantised-study:
#   report/                        all arms in float32
#   bits/int8/report/, and so on   all arms at that precision, with seeds averaged and differences tested
#   bits/models/ARM/seed_N/        one model: a table by sizes and bits (quantised.md), quality over bytes (figures/)
set -eu
python=${PYTHON:-.venv/bin/python}
data=${DATA:-../shared/data}
jobs=${JOBS:-2}
study=launch/studies/quantised.toml
out=runs/quantised-study
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + jobs - 1) / jobs))}
export OMP_NUM_THREADS

PYTHON=$python sh launch/studies/prepare_minilm.sh
"$python" -m trainer.study "$study" --jobs "$jobs"

# A model's evaluation gets its name when it is complete.
models=$(cd "$out/runs/minilm" && ls -d */seed_*)
for model in $models; do
    [ -d "$out/bits/models/$model" ] || echo "$model"
done | xargs -P "$jobs" -I MODEL sh -c '
    mkdir -p "$3/bits/models/MODEL.partial"
    "$1" -m trainer.evaluate quantised --model "$3/runs/minilm/MODEL/model" --max-length 64 --dtype bfloat16 \
        --sts "$2/sts/stsb_test.tsv" --beir "$2/retrieval/scifact" "$2/retrieval/cranfield" \
        --output "$3/bits/models/MODEL.partial" > /dev/null
    mv "$3/bits/models/MODEL.partial" "$3/bits/models/MODEL"
' sh "$python" "$data" "$out"

# The report of a precision is the study's, made from that precision's raw results.
for precision in int8 binary binary_then_int8; do
    folder=$out/bits/$precision
    for model in $models; do
        mkdir -p "$folder/results/minilm/$model"
        cp "$out/bits/models/$model/$precision/raw.jsonl.gz" "$folder/results/minilm/$model/"
    done
    sed -e "s|^output = .*|output = \"$folder\"|" -e "s|\"recipes/|\"$PWD/launch/studies/recipes/|" \
        -e "s|^name = \"Quantised at every size\"|name = \"Quantised at every size: $precision\"|" \
        "$study" > "$folder/study.toml"
    "$python" -m trainer.study "$folder/study.toml" --report-only
done
