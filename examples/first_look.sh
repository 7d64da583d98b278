#!/bin/sh
# The job of `make run`, on any machine: profile a training loop, predict it on three chips that are not here, compare.
# Every line it prints after a $ is a command to type yourself. Nothing is overwritten: each look has a name of its own.
# Arguments go to the training script: sh examples/first_look.sh --steps 10
set -eu
mkdir -p runs
n=1
while [ -e "runs/look$n.tessera" ]; do n=$((n + 1)); done
look=runs/look$n
model="examples.train:job --mode train --optimizer adamw"
export COLUMNS="${COLUMNS:-100}"
# Threads that spin while they wait make torch three times slower where other programs share the cores.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

# One command, its options on lines of their own where they would not fit: printed, not yet run.
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
