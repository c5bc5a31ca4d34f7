#!/bin/sh
# The products of a layer on one core, held to AVX2 where a library allows it: ours, the gemm crate's (which chooses for itself), NumPy's
# (OpenBLAS) and PyTorch's (MKL), three rounds in turn. Keep the machine idle.
#
#   sh reproduction/products.sh [FILE]     in the root of the repository; FILE gets the rates [default: docs/products.csv]
#
# EFFATTN_PYTHON is a Python with `pip install numpy torch`. Then `EFFATTN_BLESS=1 cargo test --release --test library tables` writes the
# table of docs/performance.md.
set -eu
out=${1:-docs/products.csv}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
export EFFATTN_SIMD=avx2 OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2
cargo bench --bench products --no-run
echo "round,library,rows,in,out,part,gflops" > "$out"
for round in 1 2 3; do
    # "test shapes/own/forward, 1024 rows, 64 to 128, 1 threads ... bench: 120,000 ns/iter (+/- 3)": operations of a nanosecond
    taskset -c 1 cargo bench -q --bench products -- 'shapes/.* 1 threads' --output-format bencher > "$lines"
    sed -n 's|^test shapes/\([a-z]*\)/\([a-z ]*\), \([0-9]*\) rows, \([0-9]*\) to \([0-9]*\), 1 threads .*bench: *\([0-9,]*\) ns.*|\1;\3;\4;\5;\2;\6|p' "$lines" |
        awk -F';' -v OFS=, -v round="$round" '{ gsub(",", "", $6); $6 = sprintf("%.1f", 2 * $2 * $3 * $4 / $6); print round, $0 }' >> "$out"
    taskset -c 1 "${EFFATTN_PYTHON:-python3}" benches/peer/products.py --threads 1 | sed "s/^/$round,/" >> "$out"
done
