#!/bin/bash
# Slurm's PrologSlurmctld: asks the governor for the watts of a job before it starts. No SPANK plug-in is needed.
#
#   slurm.conf:  PrologSlurmctld=/etc/slurm/slurm_prolog.sh
#                EpilogSlurmctld=/etc/slurm/slurm_epilog.sh
#   a job:       sbatch --comment=watts=6000 --time=2:00:00 train.sh      (watts per node)
#
# A job without watts= in its comment is let through: it runs within the guaranteed share of its nodes. Slurm requeues a
# batch job whose PrologSlurmctld fails (and cancels an interactive one), so one that gets no watts within WAIT_S waits in
# Slurm's own queue. It comes back under its old id, and a governor starts no job twice: each run has a name of its own,
# slurm-ID-RESTARTS.
set -euo pipefail
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin} # Slurm sets none
URL=${TESSERA_GOVERNOR_URL:-https://rack1:9410}
TOKEN_FILE=${TESSERA_GOVERNOR_TOKEN_FILE:-/etc/slurm/governor.token}
CA=${TESSERA_GOVERNOR_CA:-/etc/slurm/governor.pem}
WAIT_S=${TESSERA_GOVERNOR_WAIT_S:-300}

watts=$(grep -oP '(?:^|[ ,;])watts=\K[0-9]+' <<<"${SLURM_JOB_COMMENT:-}" || true)
[ -n "$watts" ] || exit 0

call() { # METHOD PATH [BODY]; the token is read from a file, so that it is in no list of processes
    curl --silent --show-error --max-time 10 ${CA:+--cacert "$CA"} --request "$1" \
        --header @<(printf 'Authorization: Bearer %s\n' "$(<"$TOKEN_FILE")") \
        --header 'Content-Type: application/json' ${3:+--data "$3"} "$URL$2"
}

# Each node of the job with its watts: {"node1": 6000, "node2": 6000}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/.*/\"&\": $watts/" | paste -sd,)
shown=$(scontrol show job "$SLURM_JOB_ID" -o)
job=slurm-$SLURM_JOB_ID-$(grep -oP ' Restarts=\K[0-9]+' <<<"$shown" || echo 0)
# The lease lasts as long as the job may run, and a little longer; the epilog ends it earlier.
seconds=$(($(grep -oP ' TimeLimit=\K\S+' <<<"$shown" | awk -F'[-:]' '
    { n = NF; s = $n + 60 * $(n-1) + 3600 * $(n-2) + (n > 3 ? 86400 * $1 : 0); print (s > 0) ? s : 86400 }') + 600))
body="{\"job\": \"$job\", \"watts\": {$nodes}, \"user\": \"${SLURM_JOB_USER:-}\", \"ttl_s\": $seconds}"

answer=$(call POST /v1/jobs "$body")
for ((waited = 0; waited < WAIT_S; waited += 5)); do
    case $answer in
        *'"state":"active"'*) exit 0 ;;
        *'"state":"queued"'* | *'"state":"shed"'*) sleep 5 ;;
        *) echo "governor: $answer" >&2; exit 1 ;;
    esac
    answer=$(call GET "/v1/jobs/$job")
done
echo "governor: no watts for job $SLURM_JOB_ID within $WAIT_S s: $answer" >&2
call DELETE "/v1/jobs/$job" >/dev/null || true
exit 1
