#!/bin/sh
# PyTorch (eager and compiled, f32 and bf16) and candle's own operations on the encoder of docs/performance.md, then effattn beside
# them. Keep the machine idle: about three quarters of an hour.
#
#   sh benches/peer/all.sh FOLDER        run in the root of the repository
#
# FOLDER gets a file of JSON lines per peer and round, and the runs of effattn with their tables and charts. PYTHON and EFFATTN name
# the programs; MODELS, LENGTHS, THREADS and COMPILED (what is compiled, at 1024 and 4096 only: a cell takes half a minute) narrow it.
set -eu
out=${1:?"usage: sh benches/peer/all.sh FOLDER"}
python=${PYTHON:-python3}
effattn=${EFFATTN:-target/release/effattn}
models=${MODELS:-full,linear,cosformer,linformer,local,performer,nystrom,reformer,sinkhorn,ls}
lengths=${LENGTHS:-1024,2048,4096}
compiled=${COMPILED:-full,linear,linformer,ls}
threads=${THREADS:-2}
mkdir -p "$out"

torch() { # torch FILE MODELS LENGTHS [flags]: one round of PyTorch, in which ls is called ls-own
    file=$1 names=$(echo ",$2," | sed 's/,ls,/,ls-own,/; s/^,//; s/,$//') len=$3
    shift 3
    "$python" benches/peer/torch_speed.py --models "$names" --len "$len" --threads "$threads" --seconds 1 "$@" \
        > "$out/$file.jsonl"
}
speed() { # speed FOLDER [flags]: one run of effattn; a cell that failed (exit code 1) is a row that says so
    folder=$1
    shift
    "$effattn" speed --model "$models" --len "$lengths" --mode infer,train --threads "$threads" -o "$out/$folder" \
        --plots-dir "$out/$folder" --export-markdown "$out/$folder.md" "$@" || [ $? -eq 1 ]
}

torch f32-1 "$models" "$lengths"
torch bf16-1 "$models" "$lengths" --bf16
speed composed --kernel composed
torch f32-compiled "$compiled" 1024,4096 --compile
torch bf16-compiled "$compiled" 1024,4096 --bf16 --compile
composed=$out/composed/speed/latest/rows.csv
for dtype in f32 bf16; do
    speed "$dtype-before" --dtype "$dtype"
done
torch f32-2 "$models" "$lengths"
torch bf16-2 "$models" "$lengths" --bf16
for dtype in f32 bf16; do
    speed "$dtype" --dtype "$dtype" --reference \
        "$out/$dtype-1.jsonl,$out/$dtype-2.jsonl,$out/$dtype-compiled.jsonl,$composed"
done
