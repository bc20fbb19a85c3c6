# A Ray cluster over the nodes of a SLURM job, and a driver on the first of them. The lines before say what and how; put
# your own there to use this by hand. It runs again after every requeue, as another attempt of the same run.
#
#   attempt N: preflight -> Ray on every node -> driver -> end of all that it started
#   ends with the driver's exit code, but
#     told to stop (USR1: time is nearly over, or preempted)    saves, and the job is put into the queue again
#     its steps alone got SIGTERM (preempted, without that)     is put into the queue again
#     failed, and a node is bad now                             another job like this one, without that node

if ! setup; then
    echo "slurm.setup failed: its last command has another exit code than 0" >&2
    exit 2
fi
set -uo pipefail

if [[ -n ${SLURM_HET_SIZE:-} ]]; then
    mapfile -t TRAIN < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
    mapfile -t ALONE < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
else
    mapfile -t TRAIN < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ALONE=()
fi
NODES=("${TRAIN[@]}" "${ALONE[@]}")
HEAD=${NODES[0]}

attempt=0
while [[ -e $RUN_DIR/attempt-$attempt ]]; do attempt=$((attempt + 1)); done
export ATTEMPT_DIR=$RUN_DIR/attempt-$attempt
if ! mkdir "$ATTEMPT_DIR"; then
    echo "$HEAD cannot write to the run's folder $RUN_DIR: is it on a shared filesystem?" >&2
    exit 2
fi
echo "attempt $attempt of $RUN_ID, job $SLURM_JOB_ID on ${NODES[*]}: $ATTEMPT_DIR/job.log"
exec >"$ATTEMPT_DIR/job.log" 2>&1

if ((attempt > MAX_RESTARTS)); then
    echo "not again: this would be attempt $attempt, and MAX_RESTARTS is $MAX_RESTARTS; to go on, raise it in $RUN_DIR/job.sbatch"
    exit 1
fi

say() { echo "$(date '+%F %T') $*"; }

export HOSTS="${NODES[*]}" GENERATION_NODES GPUS_PER_NODE GENERATION_GPUS_PER_NODE PORTS MIN_FREE_GIB SECRETS_FILE
export NEMO_FP8RL_RUN_ID=$RUN_ID WANDB_RUN_ID=$RUN_ID WANDB_RESUME=allow
export PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
ends=${SLURM_JOB_END_TIME:-$(($(date +%s) - SECONDS + TIME_SECONDS))}   # an older SLURM does not say
export NEMO_FP8RL_STOP_AT=$((ends - STOP_SECONDS))
export RAY_TMPDIR=$NODE_TMP/nfr-${RUN_ID##*-}-$attempt   # short: sockets are in it
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$ATTEMPT_DIR/ray_token
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")

# on INDEX LOG COMMAND...: the command on a node, in the background. A step a node: one that is gone stops no other.
# With all variables, of which sbatch --export=NONE would have srun hand on none.
STEPS=()
on() {
    local index=$1 log=$2 options=() gpus=$GPUS_PER_NODE
    shift 2
    ((index < ${#NODES[@]} - GENERATION_NODES)) || gpus=$GENERATION_GPUS_PER_NODE
    [[ -z ${SLURM_HET_SIZE:-} ]] || options=("--het-group=$((index >= ${#TRAIN[@]}))")
    ((gpus == 0 || GRES == 0)) || options+=("--gpus-per-node=$gpus")
    srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="${NODES[index]}" --cpu-bind=none --input=none \
        "${options[@]}" "${STEP_OPTIONS[@]}" --output="$log" --error="$log" --open-mode=append "$@" &
    STEPS+=($!)
}

# await SECONDS PID...: return when these have ended, or after so long.
await() {
    local end=$((SECONDS + $1)) pid
    shift
    for pid; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < end)); do sleep 0.3; done
    done
}

# A number of a process that has ended may be another's before the job is over.
forget_ended() {
    local pid alive=()
    for pid in "${STEPS[@]}"; do ! kill -0 "$pid" 2>/dev/null || alive+=("$pid"); done
    STEPS=("${alive[@]}")
}

# preflight NUMBER: 1 when the nodes are not good. The bad ones are then in bad_nodes, separated by commas; it is empty
# when none is known to be worse than the others.
bad_nodes=''
preflight() {
    local index answers good first=${#STEPS[@]} end=$((SECONDS + PREFLIGHT_SECONDS + 30))
    export PREFLIGHT_DIR=$ATTEMPT_DIR/preflight-$1
    mkdir -p "$PREFLIGHT_DIR"
    printf %s "$ATTEMPT_DIR" >"$PREFLIGHT_DIR/canary"
    for index in "${!NODES[@]}"; do
        on "$index" "$PREFLIGHT_DIR/${NODES[index]}.log" \
            "$PYTHON" -m nemo_fp8rl.commands.launch.slurm.preflight "$index" "$PREFLIGHT_SECONDS"
    done
    await $((end - SECONDS)) "${STEPS[first]}"
    if [[ ! -e $PREFLIGHT_DIR/store.json ]]; then   # the others still say how they are, and wait for the head no longer
        echo '{}' >"$PREFLIGHT_DIR/store.part"
        mv "$PREFLIGHT_DIR/store.part" "$PREFLIGHT_DIR/store.json"
        await $((end - SECONDS)) "${STEPS[@]:first}"
    fi
    await 5 "${STEPS[@]:first}"
    kill "${STEPS[@]:first}" 2>/dev/null
    forget_ended
    [[ -z $cancelled ]] || return 1
    grep -hs '^preflight: ' "$PREFLIGHT_DIR/$HEAD.log"
    answers=("$PREFLIGHT_DIR"/[0-9]*.json)
    if [[ -f $PREFLIGHT_DIR/bad_nodes ]]; then
        bad_nodes=$(paste -sd, "$PREFLIGHT_DIR/bad_nodes")
    elif [[ -f $PREFLIGHT_DIR/0.joined ]]; then
        say "preflight: the nodes could not reduce a number together; see $PREFLIGHT_DIR"
    elif [[ -f $PREFLIGHT_DIR/0.json ]]; then   # it says above, or in its log, what it made of the others' answers
        say "preflight: no node is known to be worse than the others, so none is left out; see $PREFLIGHT_DIR/$HEAD.log"
    elif [[ ! -e ${answers[0]} ]]; then
        say "preflight: no node started its checks, so none is left out: is the image there, with this package, and is" \
            "PREFLIGHT_SECONDS=$PREFLIGHT_SECONDS enough to import it? see $PREFLIGHT_DIR/$HEAD.log"
    else
        good=$(grep -l '"faults": \[\]' "${answers[@]}" | wc -l)
        if ((2 * good >= ${#NODES[@]})); then
            say "preflight: the head node $HEAD came to no end, see $PREFLIGHT_DIR/$HEAD.log"
            bad_nodes=$HEAD
        else
            say "preflight: most nodes did not come through their checks, so none is left out: see $PREFLIGHT_DIR"
        fi
    fi
    [[ -f $PREFLIGHT_DIR/bad_nodes && -z $bad_nodes ]]
}

# How to look inside, from a login node.
tell_how_to_attach() {
    local address dashboard option options=() path=()
    [[ $PYTHON != /* ]] || path=("PATH=$(dirname "$PYTHON"):$PATH")   # else it is the container's, and so is the path
    address=$(sed -n 's/.*"address": "\(.*\)".*/\1/p' "$ATTEMPT_DIR/cluster.json")
    dashboard=$(sed -n 's/.*"dashboard": "\(.*\)".*/\1/p' "$ATTEMPT_DIR/cluster.json")
    for option in "${STEP_OPTIONS[@]}"; do   # variables of a login node are not to win against the image's
        [[ $option == --container-env=* ]] || options+=("$option")
    done
    {
        echo '#!/bin/bash'
        echo "# A shell on the head node, $HEAD, from which ray and python see the cluster."
        printf '%q ' exec srun --overlap "--jobid=$SLURM_JOB_ID" --nodes=1 --ntasks=1 "--nodelist=$HEAD" --cpu-bind=none \
            "${options[@]}" --pty env "RAY_ADDRESS=$address" RAY_AUTH_MODE=token \
            "RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH" "RAY_TMPDIR=$RAY_TMPDIR" "${path[@]}" bash
        echo
    } >"$RUN_DIR/attach.sh"
    say "Ray's head is at $address; a shell there: bash $RUN_DIR/attach.sh"
    say "its dashboard: ssh -L 8265:$dashboard LOGIN_NODE, then http://localhost:8265 with the token of" \
        "$RAY_AUTH_TOKEN_PATH"
}

# Ends all that this attempt started, in bounded time, and nothing else.
tear_down() {
    trap '' USR1
    : >"$ATTEMPT_DIR/ended"
    await 75 "${STEPS[@]}"   # on NFS a node may see a new file a minute late
    kill -TERM "${STEPS[@]}" 2>/dev/null
    await 10 "${STEPS[@]}"
    kill -KILL "${STEPS[@]}" 2>/dev/null
    rm -f "$RAY_AUTH_TOKEN_PATH" "$RUN_DIR/attach.sh"
    trap - EXIT USR1 TERM
}
trap tear_down EXIT

may_restart() {
    [[ -z $cancelled ]] || return 1
    ((attempt < MAX_RESTARTS)) && return
    say "not again: this was attempt $attempt, and MAX_RESTARTS is $MAX_RESTARTS; to go on, raise it in $RUN_DIR/job.sbatch and sbatch that"
    return 1
}

requeue() {
    may_restart || return
    tear_down
    [[ -z $cancelled ]] || exit 1
    say "back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && sleep 600   # until SLURM ends this script
    exit 1
}

# The same script as another job, without the nodes that were bad in this run.
without_bad_nodes() {
    local next=$RUN_DIR/job-$((attempt + 1)).sbatch before=$RUN_DIR/attempt-$((attempt - 1)) exclude name
    [[ -n $bad_nodes ]] || return
    # One node has no other to be compared with, but for that of the attempt before.
    if ((${#NODES[@]} == 1)) && [[ -s $ATTEMPT_DIR/preflight-0/bad_nodes && -s $before/preflight-0/bad_nodes ]]; then
        say "not again: the attempt before ended in its preflight, too, on another node, so the fault may be the job's"
        return
    fi
    may_restart || return
    tr ',' '\n' <<<"$bad_nodes" >>"$RUN_DIR/excluded_nodes"
    exclude=$(sort -u "$RUN_DIR/excluded_nodes" | paste -sd,)
    sed "/^#SBATCH --exclude=/d; s/^#SBATCH --nodes=.*/&\n#SBATCH --exclude=$exclude/" "$RUN_DIR/job.sbatch" >"$next"
    scontrol update "JobId=$SLURM_JOB_ID" Requeue=0
    tear_down
    [[ -z $cancelled ]] || exit 1
    for name in $(compgen -e SLURM_); do   # of this job, which sbatch would take for the next one's
        [[ $name =~ ^SLURM_(CONF|CONF_SERVER|JWT|CLUSTERS)$ ]] || unset "$name"
    done
    say "again without $exclude, as job $(sbatch --parsable "$next" || echo "that sbatch refused: $next")"
    exit 1
}

stopping='' cancelled='' driver_step=''
# shellcheck disable=SC2317,SC2329  # a trap calls it
stop() {
    say "told to stop: the driver saves, within $STOP_SECONDS s"
    stopping=$SECONDS
    tell_driver
}
tell_driver() { [[ -z $stopping || -z $driver_step ]] || kill -USR1 "$driver_step"; }
trap stop USR1
trap 'say "told to end"; cancelled=1' TERM   # the driver was told, too; SLURM kills what is left after its own time

if ! preflight 0; then
    without_bad_nodes
    exit 1
elif [[ -n $stopping ]]; then
    requeue
    exit 1
elif [[ -n $cancelled ]]; then
    exit 1
fi

for index in "${!NODES[@]}"; do
    on "$index" "$ATTEMPT_DIR/node-${NODES[index]}.log" "$PYTHON" -m nemo_fp8rl.commands.launch.slurm.node "$index"
done
RAY_STEPS=("${STEPS[@]: -${#NODES[@]}}")
on 0 "$ATTEMPT_DIR/driver.log" "$PYTHON" -m nemo_fp8rl.commands.launch.slurm.ready "$READY_SECONDS" "${DRIVER[@]}"
driver_step=${STEPS[-1]}
say "the driver's output: $ATTEMPT_DIR/driver.log"
tell_driver

# end_driver WHY: SLURM ends the driver when its srun is told to end, but not when that is killed.
end_driver() {
    if [[ -z $ending ]]; then
        say "$1: killed"
        ending=$SECONDS
        kill -TERM "$driver_step"
    elif ((SECONDS > ending + 10)); then
        kill -KILL "$driver_step"
    fi
}

told='' lost='' ending=''
while kill -0 "$driver_step" 2>/dev/null; do
    sleep 1 &
    wait $!
    if [[ -z $told && -f $ATTEMPT_DIR/cluster.json ]]; then
        told=1
        tell_how_to_attach
    fi
    for pid in "${RAY_STEPS[@]}"; do
        [[ -n $lost ]] || kill -0 "$pid" 2>/dev/null || { lost=$SECONDS; say "Ray ended on a node"; }
    done
    if [[ -n $lost ]] && ((SECONDS > lost + LOST_SECONDS)); then
        end_driver "the driver goes on without it"
    elif [[ -n $stopping ]] && ((SECONDS > stopping + STOP_SECONDS - 60)) && ((STOP_SECONDS > 60)); then
        end_driver "the driver has not stopped"
    fi
done
wait "$driver_step"
code=$?
say "the driver ended with exit code $code"

if ((code == 0)) || [[ -n $cancelled ]]; then
    exit "$code"
elif [[ -n $stopping || -e $ATTEMPT_DIR/terminated ]] || ((code == UNFINISHED)); then
    requeue
elif ! preflight 1; then
    without_bad_nodes
fi
exit "$code"
