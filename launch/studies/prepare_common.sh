# Functions for the studies' data; the scripts beside it source this file with $data, $out, $python and $tokenizer set.

# tuples NAME ARGUMENT...: shards of queries and passages in $out/shards/NAME.
tuples() {
    name=$1
    shift
    "$python" -m data.prepare tuples "$@" --tokenizer "$tokenizer" --output "$out/shards/$name"
}

# Fine-tuning data of all studies. NLI triplets that share a sentence with an STS test are dropped (rows count from 0,
# after the header).
fine_tuning_tuples() {
    for name in snli_devtest cad_snli; do
        awk 'NR == FNR { drop[$1 + 2]; next } !(FNR in drop)' \
            "$data/nli/${name}_triplets.sts_overlap_rows.txt" "$data/nli/${name}_triplets.tsv" > "$out/$name.tsv"
    done
    tuples nli "$out/snli_devtest.tsv" "$out/cad_snli.tsv"
    tuples scifact-train "$data/retrieval/scifact" --split train
    tuples xquad "$data/retrieval/xquad-en" --split test
}
