#!/bin/sh
# What `make run` does, on any machine: profile a training loop, predict it on three other chips, compare.
# Every line it prints after a $ is a command that you can type. Nothing is overwritten: each run gets a new name.
# Arguments go to the training script: sh examples/first_look.sh --steps 10
set -eu
mkdir -p runs
n=1
while [ -e "runs/look$n.tessera" ]; do n=$((n + 1)); done
look=runs/look$n
model="examples.train:job --mode train --optimizer adamw"
export COLUMNS="${COLUMNS:-100}"
# Spinning threads make torch three times slower if other programs share the cores.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

# Print one command; options that do not fit go on their own lines.
say() { printf '$ tessera %s\n' "$1"; shift; for more in "$@"; do printf '    %s\n' "$more"; done; }

say "run --json --out $look.tessera examples/train.py${*:+ $*} > $look.json"
tessera run --json --out "$look.tessera" examples/train.py "$@" >"$look.json"
say "report $look.tessera --top 3"
tessera report "$look.tessera" --top 3
say "predict $model \\" "--on h200,a100,jetson-orin --html $look-chips.html"
# shellcheck disable=SC2086  # the model is a name and its options
tessera predict $model --on h200,a100,jetson-orin --html "$look-chips.html"
say "predict $model \\" "--on h200 --json > $look-h200.json"
# shellcheck disable=SC2086
tessera predict $model --on h200 --json >"$look-h200.json"
say "diff $look.tessera $look-h200.json --html $look-h200.html  # first rows:"
tessera diff "$look.tessera" "$look-h200.json" --html "$look-h200.html" | grep -E '^(energy|time) +[0-9]'
