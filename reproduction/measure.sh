#!/bin/sh
# Measures every committed table of speed and memory again, by one build on one machine: keep it idle, for three to four
# hours. A run that was stopped goes on where it was when its part is named again; what was finished is measured again.
# words and images begin again: PyTorch runs before effattn there.
#
#   sh reproduction/measure.sh [PART...]   in the root of the repository [default: all of them, the shortest first]
#
# Parts: decode mixers image-latency listops-step memory words images formats growth speed figure3-composed peer figure3 table5. EFFATTN is effattn and EFFATTN_PYTHON a Python
# with `pip install torch` (for peer see programs.sh). DRY=--dry-run only prints the plans. Then `effattn report reproduction/results --brief
# --splice PAGE` and `EFFATTN_BLESS=1 cargo test --release --test library` write the pages, `effattn plot figures reproduction/results` and
# `effattn plot rows reproduction/results/speed` (and growth, peer) the charts.
set -eu
effattn=${EFFATTN:-target/release/effattn}
python=${EFFATTN_PYTHON:-python3}
results=reproduction/results
scratch=target/measure # manifests name its files: no folder of this machine
mkdir -p "$scratch"

measure() { # measure FOLDER COMMAND...: a cell that failed (exit code 1) is a row that says so
    folder=$results/$1
    shift
    "$effattn" "$@" --threads 2 --no-plot -q -o "$folder" ${DRY:-} || [ $? -eq 1 ]
}

keep() { # keep COUNT FOLDER: the newest runs take the place of all others, without what an unfinished run needs
    [ -z "${DRY:-}" ] || return 0
    for run in $(ls -d "$results/$2"/2* | sort -r | tail -n "+$(($1 + 1))"); do
        rm -r "$run"
    done
    for file in journal.jsonl lock plan.json; do
        rm -f "$results/$2"/2*/$file
    done
}

beside() { # beside SCRIPT FLAGS... > FILE: PyTorch in a script of its own, before effattn
    script=$1
    shift
    "$python" "benches/peer/$script" --threads 2 "$@"
}

decode() {
    beside decode.py --len 1024,8192 --batch 1,16 --seconds 1.5 > "$scratch/decode.jsonl"
    measure peer/decode speed --mode decode --preset charlm-small --model full,linear,cosformer --len 1024,8192 --batch 1,16 \
        --max-time 1500ms --reference "$scratch/decode.jsonl"
    keep 1 peer/decode/speed
}

mixers() {
    measure mixers speed --suite mixers-speed --max-time 400ms --min-runs 3 --warmup 1
    keep 1 mixers/mixers-speed
    models="retention,gla,mamba2:conv=0,based,luna,fnet,aft-simple,aft-local,s5:P=96,lru:P=192,mega,mega:chunk=128,rope,gqa:groups=2"
    measure peer/mixers speed --program torch --len 1024,4096 --mode infer,train --max-time 1500ms --min-runs 5 --warmup 1 --model "$models"
    keep 1 peer/mixers/speed
}

# Table 5 at its batch of 32, where a step takes seconds; without ViT-L, half a minute a step.
image_latency() {
    measure images speed --suite ls-table5 --exclude ViT-L --warmup 1 --min-runs 5 --runs 10 --max-time 30s
    keep 1 images/ls-table5
}

listops_step() {
    for dtype in f32 bf16; do
        program=$([ $dtype = f32 ] && echo torch || echo torch-autocast)
        measure listops-step/$dtype speed --dtype $dtype --model full,ls --preset ls-lra --set pooling=mean --len 2048 --batch 32 \
            --mode train --max-time 4s --program "$program"
        keep 1 listops-step/$dtype/speed
    done
}

memory() {
    measure peer memory --model full,linear,cosformer,linformer,local,performer,nystrom,reformer,sinkhorn,ls --len 1024,2048,4096 --batch 1
    keep 1 peer/memory
}

words() {
    beside word_lm.py --models full,cosformer > "$scratch/word-lm.jsonl"
    measure peer/words/word-lm speed --preset wikitext103-small --mode train --len 256 --batch 8 --model full,cosformer --max-time 6s \
        --reference "$scratch/word-lm.jsonl"
    keep 1 peer/words/word-lm/speed
    beside torch_mlm.py --models full,cosformer > "$scratch/masked-lm.jsonl"
    measure peer/words/masked-lm speed --preset roberta-small --mode train --len 128 --batch 8 --model full,cosformer --max-time 6s \
        --reference "$scratch/masked-lm.jsonl"
    keep 1 peer/words/masked-lm/speed
}

images() {
    for preset in cvt-13 vil-ls-medium; do
        models=$([ $preset = cvt-13 ] && echo full,ls2d || echo ls2d)
        beside vision.py --presets $preset --models "$models" --batch 1,8 --mode both > "$scratch/$preset.jsonl"
        measure peer/images/$preset speed --preset $preset --model "$models" --batch 1,8 --mode infer,train --max-time 2s --min-runs 3 \
            --reference "$scratch/$preset.jsonl"
        keep 1 peer/images/$preset/speed
    done
}

formats() {
    models=full,local,linear,cosformer,linformer,performer,rfa,nystrom,bigbird,longformer,sparse,reformer,sinkhorn,ls
    for dtype in f32 bf16; do
        measure formats/$dtype memory --model $models --len 1024,4096 --mode train --dtype $dtype
        keep 1 formats/$dtype/memory
    done
}

growth() {
    measure growth speed --model all --len 2048..32768 --mode infer --set layers=1 --max-time 800ms --min-runs 3 --warmup 1 --timeout 90s
    keep 1 growth/speed
}

speed() {
    measure . speed
    keep 1 speed
}

# The 12 layers of the figure, at the lengths whose steps take less than two minutes.
figure3() {
    figure="speed --suite ls-figure3 --max-time 3s"
    # shellcheck disable=SC2086 # words on purpose
    {
        measure figure3-fused $figure --len 512..4096 --batch 1,2
        measure figure3-fused $figure --len 512..2048 --batch 4
        measure figure3-fused $figure --len 8192 --batch 1 --model ls
    }
    keep 3 figure3-fused/ls-figure3
}

# Where full attention stores its scores, few lengths fit the memory.
figure3_composed() {
    measure figure3-composed speed --suite ls-figure3 --max-time 3s --kernel composed --len 512..2048 --batch 1,2,4
    keep 1 figure3-composed/ls-figure3
    measure figure3-fit memory --preset charlm-small --model ls,transformer-xl --fit 15GiB --mode train --kernel composed
    keep 1 figure3-fit/memory
}

# Ten steps where one takes less than twenty seconds.
table5() {
    measure table5 speed --suite cos-table5 --warmup 1 --min-runs 3 --runs 10 --max-time 200s
    keep 1 table5/cos-table5
}

peer() {
    sh reproduction/programs.sh
    keep 1 peer/f32/speed
    keep 1 peer/bf16/speed
}

for part in ${*:-decode mixers image-latency listops-step memory words images formats growth speed figure3-composed peer figure3 table5}; do
    case $part in
        image-latency) image_latency ;;
        listops-step) listops_step ;;
        figure3-composed) figure3_composed ;;
        decode | mixers | memory | words | images | formats | growth | speed | peer | figure3 | table5) "$part" ;;
        *) echo "measure.sh: no part $part" >&2 && exit 2 ;;
    esac
done
