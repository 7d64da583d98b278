#!/bin/bash
# Slurm's EpilogSlurmctld: gives the watts of a job back. Without it they are free when the lease ends.
set -euo pipefail
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin} # Slurm sets none
URL=${TESSERA_GOVERNOR_URL:-https://rack1:9410}
TOKEN_FILE=${TESSERA_GOVERNOR_TOKEN_FILE:-/etc/slurm/governor.token}
CA=${TESSERA_GOVERNOR_CA:-/etc/slurm/governor.pem}
restarts=$(scontrol show job "$SLURM_JOB_ID" -o | grep -oP ' Restarts=\K[0-9]+' || echo 0)
# The epilog of a run that is requeued may see the number of the next run: give back that of the run before, too.
for run in "$restarts" $((restarts > 0 ? restarts - 1 : 0)); do
    curl --silent --show-error --max-time 10 --retry 3 --retry-connrefused ${CA:+--cacert "$CA"} --request DELETE \
        --header @<(printf 'Authorization: Bearer %s\n' "$(<"$TOKEN_FILE")") \
        "$URL/v1/jobs/slurm-$SLURM_JOB_ID-$run" >/dev/null || true
done
exit 0
