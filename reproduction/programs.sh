#!/bin/sh
# Other programs beside effattn on the encoder of docs/performance.md: PyTorch (eager, compiled, autocast), JAX, ONNX Runtime and
# candle's fused attention in turn with ours, after candle's own operations (--kernel composed). Keep the machine idle.
#
#   sh reproduction/programs.sh [FOLDER]   in the root of the repository; FOLDER gets the runs [default: reproduction/results/peer]
#
# EFFATTN is effattn and EFFATTN_PYTHON a Python with `pip install torch jax onnx onnxscript onnxruntime`. MODELS, LENGTHS, THREADS, TIME
# (per cell), FORMATS, PROGRAMS and PROGRAMS_BF16 narrow it; DRY=--dry-run only prints the plan. Then `EFFATTN_BLESS=1 cargo test --release
# --test library prose` writes the tables of README.md and docs/performance.md from the newest runs.
set -eu
out=${1:-reproduction/results/peer}
effattn=${EFFATTN:-target/release/effattn}
models=${MODELS:-full,linear,cosformer,linformer,ls,gla,mamba2:conv=0}
formats=${FORMATS:-f32 bf16}
programs=${PROGRAMS:-torch,torch-compile,jax,candle-flash,onnxruntime}
bf16=${PROGRAMS_BF16:-torch-autocast,torch-compile}

speed() { # speed FOLDER [flags]: a cell that failed (exit code 1) is a row that says so
    folder=$1
    shift
    "$effattn" speed --model "$models" --len "${LENGTHS:-1024,4096}" --mode infer,train --threads "${THREADS:-2}" \
        --max-time "${TIME:-2s}" -o "$folder" ${DRY:-} "$@" || [ $? -eq 1 ]
}

composed=target/measure/composed # manifests name its files: no folder of this machine
rm -rf "$composed"
speed "$composed" --kernel composed --no-plot
reference=
[ -n "${DRY:-}" ] || reference="--reference $composed/speed/latest/rows.csv"
for format in $formats; do
    case $format in
        f32) there=$programs ;;
        *) there=$bf16 ;;
    esac
    # shellcheck disable=SC2086 # words on purpose
    speed "$out/$format" --dtype "$format" --program "$there" --plots-dir "reproduction/plots/peer/$format" $reference
    for file in journal.jsonl lock plan.json; do # what an unfinished run needs
        rm -f "$out/$format/speed/latest/$file"
    done
done
