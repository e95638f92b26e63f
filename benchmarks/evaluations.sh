#!/bin/sh
# Everything about tiny-hybrid that benchmarks/RESULTS.md and its model card state, one result file each:
#
#     sh benchmarks/evaluations.sh FOLDER PROCESSES
#
# About three hours of one core in all. Files that are there are not replaced; `sharded` goes on where its file ends.
set -eu
folder=$1
processes=$2
python=${PYTHON:-python3}
mkdir -p "$folder"

evaluate() { # name, module, options
    name=$1 module=$2
    shift 2
    begun=$(date +%s)
    if [ "$name" = sharded ] || [ ! -e "$folder/$name.json" ]; then
        "$python" -m "$module" "$@" --device cpu --processes "$processes" --out "$folder/$name.json" \
            > "$folder/$name.txt" 2>&1
    fi
    echo "$name: $(($(date +%s) - begun)) s"
}

evaluate accuracy training.evaluate --problems 200
evaluate sharded asyncllm_nb.evals.sharded --problems 300
evaluate sequential asyncllm_nb.evals.sequential --problems 300
evaluate logs asyncllm_nb.evals.logs --logs 300 --lines 12
evaluate patterns asyncllm_nb.evals.patterns --pattern all --problems 50
evaluate patterns-io asyncllm_nb.evals.patterns_io --pattern all
evaluate approximation asyncllm_nb.evals.approximation --problems 60 --concurrency 16
