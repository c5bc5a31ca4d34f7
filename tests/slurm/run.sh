#!/bin/sh
# A suite as an array job on a real Slurm: one host acts as three nodes, in a temporary folder, and everything is ended at the
# end. Tasks are killed, one is requeued, a node goes down and comes back; what is joined must be what an undisturbed run
# makes, bit for bit.
#
#   tests/slurm/run.sh [EFFATTN]      exit code 0: passed, or skipped by name; 1: failed
set -eu
program=${1:-target/release/effattn}
root=$(cd "$(dirname "$0")/../.." && pwd)
case $program in /*) ;; *) program=$root/$program ;; esac
say() { printf 'slurm: %s\n' "$*"; }
skip() { printf 'skipped: slurm cannot be installed here (%s)\n' "$*"; exit 0; }

missing() { for name in slurmctld slurmd sbatch munged; do command -v "$name" >/dev/null 2>&1 || return 0; done; return 1; }
PATH=$PATH:/usr/sbin:/sbin
if missing; then
    [ "$(id -u)" = 0 ] || skip "slurm-wlm and munge are missing and this is not root"
    command -v apt-get >/dev/null 2>&1 || skip "there is no apt-get"
    export DEBIAN_FRONTEND=noninteractive
    install() { timeout 300 apt-get install -y --no-install-recommends slurm-wlm munge >/dev/null 2>&1; }
    install || { timeout 120 apt-get update >/dev/null 2>&1 && install; } || skip "apt-get does not bring slurm-wlm and munge"
    ! missing || skip "the packages lack a program"
fi

scratch=$(mktemp -d)
finish() {
    code=$?
    if [ "$code" -ne 0 ]; then
        say "failed; what was logged:"
        tail -n 20 "$scratch"/slurmctld.log "$scratch"/suite/jobs/*/*.log 2>/dev/null || true
        squeue -r -t all 2>/dev/null || true
    fi
    for file in "$scratch"/slurmd.*.pid "$scratch"/slurmctld.pid "$scratch"/munge.pid; do
        [ ! -f "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    done
    sleep 1
    for file in "$scratch"/slurmd.*.pid "$scratch"/slurmctld.pid; do
        [ ! -f "$file" ] || kill -KILL "$(cat "$file")" 2>/dev/null || true
    done
    rm -rf "$scratch"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

# the cluster
mkdir "$scratch/state" "$scratch/suite"
dd if=/dev/urandom of="$scratch/munge.key" bs=128 count=1 2>/dev/null
chmod 400 "$scratch/munge.key"
munged --force --num-threads=2 --key-file="$scratch/munge.key" --socket="$scratch/munge.socket" \
    --pid-file="$scratch/munge.pid" --log-file="$scratch/munge.log" --seed-file="$scratch/munge.seed" 2>/dev/null ||
    skip "munged does not start: $(tail -n 1 "$scratch/munge.log" 2>/dev/null)"
host=$(hostname -s 2>/dev/null || hostname)
port=$((20000 + $$ % 20000))
nodes=
for node in 1 2 3; do
    nodes="${nodes}NodeName=node$node NodeHostname=$host Port=$((port + node)) CPUs=2 RealMemory=8000 State=UNKNOWN\\
"
done
sed -e "s|@DIR@|$scratch|g" -e "s|@HOST@|$host|" -e "s|@PORT@|$port|" -e "s|@USER@|$(id -un)|" \
    -e "s|@NODES@|$nodes|" "$root/tests/slurm/slurm.conf.in" >"$scratch/slurm.conf"
export SLURM_CONF=$scratch/slurm.conf
slurmctld -f "$SLURM_CONF" || skip "slurmctld does not start"
for node in 1 2 3; do slurmd -f "$SLURM_CONF" -N "node$node" || skip "slurmd cannot act as several nodes"; done

# wait_for SECONDS WHAT COMMAND... (asked often: a task that trains for two seconds is to be disturbed in the middle)
wait_for() {
    left=$(($1 * 5))
    what=$2
    shift 2
    until "$@"; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || { say "$what did not happen"; exit 1; }
        sleep 0.2
    done
}
idle() { [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = 3 ]; }
wait_for 30 "a cluster of three nodes" idle
say "$(slurmctld -V): three nodes are up"

# 24 training runs of a moment each
cd "$scratch/suite"
for split in "train 0 80" "val 80 100" "test 100 120"; do
    set -- $split
    awk -v from="$2" -v to="$3" 'BEGIN { print "Source\tTarget"; for (i = from; i < to; i++) {
        a = i % 10; b = int(i / 10) % 10; m = a > b ? a : b
        printf "( ( ( [MAX %d ) %d ) ] )\t%d\n", a, b, m } }' >"basic_$1.tsv"
done
cat >listops.toml <<'SUITE'
title = "Six mechanisms and four seeds"
protocol = "lra"
source = "tests/slurm/run.sh"
[base]
task = ["listops"]
preset = "ls-lra"
len = [16]
batch = [8]
steps = 150
rate = 1e-3
seeds = [1, 2, 3, 4]
SUITE
for model in full linear cosformer ls:w=4,r=2 local performer; do
    printf '[[row]]\nlabel = "%s"\nmodel = "%s"\n' "$model" "$model" >>listops.toml
done
cells="lra --suite listops.toml --data-dir . --no-plot --threads 1"
"$program" $cells --quiet -o one >/dev/null
say "24 cells, undisturbed: $(wc -l <one/listops/latest/journal.jsonl)"

"$program" submit --shards 6 --cpus 1 --time 10min --memory 600MiB --submit $cells --save-every 1ms >submitted
array=$(sed -n 's/^array job \([0-9]*\),.*/\1/p' submitted)
merge=$(sed -n 's/.*merge job \([0-9]*\)$/\1/p' submitted)
[ -n "$array" ] && [ -n "$merge" ] || { cat submitted; exit 1; }
say "array $array, then $merge"

# every disturbed task has a checkpoint by then, and none is through
trained() { ls results/listops/plan-*/"$1"-of-6/*/cells/*/last.safetensors >/dev/null 2>&1; }
started() { for task in 1 2 3 4; do trained $task || return 1; done; }
wait_for 90 "training in tasks 1 to 4" started
scancel --signal=KILL "${array}_1" "${array}_2"
scontrol requeue "${array}_3"
node=$(squeue -h -r -j "${array}_4" -o %N)
[ -n "$node" ] || { say "task 4 was through before its node went down"; exit 1; }
scontrol update nodename="$node" state=down reason="a test"
say "killed tasks 1 and 2, requeued task 3, set $node down: $(squeue -h -r -j "$array" -o '%K %T' | tr '\n' ',')"
sleep 2
scontrol update nodename="$node" state=resume 2>/dev/null || true # it may be back by itself
"$program" status || exit 1

# Slurm holds a task that it started on a node at the very moment when this went down; whoever runs the cluster releases it.
ended() {
    for held in $(squeue -h -r -j "$1" -t pending -o '%K:%r' 2>/dev/null | sed -n 's/:.*held.*//p'); do
        say "Slurm holds task $held, whose launch failed: released"
        scontrol update nodename="$node" state=resume 2>/dev/null || true
        scontrol release "$1_$held"
    done
    [ -z "$(squeue -h -r -j "$1" -t pending,running,completing,configuring 2>/dev/null)" ]
}
wait_for 120 "the end of the array" ended "$array"
wait_for 60 "the end of the merge job" ended "$merge"
grep -h "cells left" jobs/listops/merge-"$merge".log || { say "the merge job does not say what is missing"; exit 1; }

# what the merge says is missing, again
left=$(sed -n 's/^shards that have cells left: //p' jobs/listops/merge-"$merge".log)
case "$left" in
1-2) ;;
1-3)
    # Slurm itself may end the requeued task: started again on the node at the moment that this goes down and comes back
    grep -q "credential revoked" ../slurmctld.log || { say "shard 3 was requeued, and is missing"; exit 1; }
    say "Slurm revoked the requeued task; it is started again with the killed ones"
    ;;
*)
    say "shards 1 and 2 were killed, and $left are missing"
    exit 1
    ;;
esac
array=$(sbatch --parsable --array="$left" jobs/listops/array.sbatch)
merge=$(sbatch --parsable --dependency=afterany:"$array" jobs/listops/merge.sbatch)
wait_for 120 "the end of the second array" ended "$array"
wait_for 60 "the end of the second merge job" ended "$merge"

plan=$(ls -d results/listops/plan-*)
grep -q "24 of 24 cells" jobs/listops/merge-"$merge".log
grep -q "<html" jobs/listops/report.html && grep -q cosformer jobs/listops/report.html
[ "$(grep -l "resuming after step" jobs/listops/*_*.log | wc -l)" -ge 1 ] || { say "no task went on from a checkpoint"; exit 1; }
cut -d, -f38 "$plan/rows.csv" | sort | uniq -c
for curve in one/listops/latest/cells/*/curve.csv; do
    cmp "$curve" "$plan/cells/$(basename "$(dirname "$curve")")/curve.csv"
done
# two results of one training run are joined only where rows, curves and weights are the same bit for bit
"$program" merge one results -o both
say "rows, curves and weights of 24 cells are those of the undisturbed run; the second job made the report"
