# One attempt at a training run, and the reaction to its end. Inlined into the training jobs' scripts.
# The run's own files decide: DONE (trained), STOPPED (asked to stop, and saved). Exit codes are unreliable: if a node
# fails, srun returns the code with which it killed the other nodes.

say() { echo "[$(date '+%F %T')] $*"; }
content() { cat "$1" 2>/dev/null || true; }
attempt=${SLURM_RESTART_COUNT:-0}
logs=$job/logs/attempt-$(printf %03d "$attempt")

# Put this job back into the queue under its own number, so that jobs that depend on it keep waiting.
requeue() {
    if [ "$attempt" -ge "$max_requeues" ]; then
        say "$1; not requeued: $attempt times is all that --max-requeues allows"
        exit 75
    fi
    say "$1; requeued"
    trap - TERM
    scontrol requeue "$SLURM_JOB_ID" && sleep 300  # Slurm ends this shell meanwhile
    say "Slurm has it in the queue already, as after a node failure, or will not requeue it"
    exit 75
}

if [ -e "$run/DONE" ]; then
    say "$run is done already"
    exit 0
fi
stopped_before=$(content "$run/STOPPED")
rm -f "$run/STOPPED"
mkdir -p "$logs"
rm -f "$logs"/node-*.exit

# The first host is the master. The port depends on the job and the attempt, below the range of ephemeral ports.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
export MASTER_PORT=$((12000 + (SLURM_JOB_ID * 10 + attempt) % 20000))
# Since Slurm 22.05, srun does not inherit this from sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK > ranks ? SLURM_CPUS_PER_TASK / ranks : 1))}
fi

# scancel and the end of a preemption also signal this shell; the warning before a time limit and the beginning of a
# preemption signal only the nodes' tasks. While srun runs in the foreground, the trap waits for it.
cancelled=no
trap 'cancelled=yes' TERM
say "attempt $attempt on ${hosts[*]}, led by $MASTER_ADDR:$MASTER_PORT"
code=0
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=600 \
    python3 -m launch.node --ranks "$ranks" --logs "$logs" --contained "$contained" -- "${command[@]}" || code=$?

if [ -e "$run/DONE" ]; then
    say "done"
    exit 0
fi
if [ "$cancelled" = yes ]; then
    say "cancelled, or preempted to its end"
    exit 75
fi
if [ -e "$run/STOPPED" ]; then
    stopped=$(content "$run/STOPPED")
    if [ "$stopped" = "$stopped_before" ]; then
        say "stopped where the attempt before it did ($stopped); not requeued: give it more --time"
        exit 75
    fi
    requeue "stopped: $stopped"
fi
if [ "$code" = 0 ]; then
    say "ended without an error before the run is done, as train.stop_at_step asks; not requeued"
    exit 75
fi
if grep -qsx '[23]' "$logs"/node-*.exit; then
    say "refused (2) or given up (3), which another attempt would not change; the reason is above and in $logs"
    exit "$(cat "$logs"/node-*.exit | grep -m1 -x '[23]')"
fi
# A crash, or a dead node, which other nodes notice before Slurm does. Try again as long as attempts make progress.
# The file holds how many crashes there were in a row, and the newest checkpoint at the last of them.
saved=$(content "$run/checkpoints/latest")
crashes=0 saved_before=
if [ -e "$job/crashes" ]; then
    read -r crashes saved_before < "$job/crashes" || true
fi
if [ "$saved" != "$saved_before" ]; then
    crashes=0
fi
crashes=$((crashes + 1))
echo "$crashes $saved" > "$job/crashes"
if [ "$crashes" -le "$crash_requeues" ]; then
    requeue "crashed (srun: $code), see $logs; crash $crashes since the last new checkpoint"
fi
say "crashed (srun: $code), see $logs"
exit $((code ? code : 1))
