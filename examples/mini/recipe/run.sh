#!/usr/bin/env bash
# remake the mini pair from the Python source installed on this machine; run from the root of the checkout
set -euo pipefail
recipe=examples/mini/recipe
python "$recipe/corpus.py" --tokenizer examples/mini/target --out runs/mini/corpus
python -m dspine_hub train "$recipe/target.yaml"
python "$recipe/regenerate.py" --target runs/mini/target --tokens runs/mini/corpus/train.bin \
    --out runs/mini/regenerated.npz --rows 12288 --batch-size 2048 --prompt-lengths 64,128
python -m dspine_hub train "$recipe/drafter.yaml"
# the comparison: the same backbone, data and budget, without injection and transition cache
python -m dspine_hub train "$recipe/drafter.yaml" --set output=runs/mini/backbone --set objective.injection=false
