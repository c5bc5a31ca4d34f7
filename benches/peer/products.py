"""Products of the shapes of a step in NumPy (OpenBLAS) and PyTorch (MKL): the peers of `cargo bench --bench products`.

Rows of a document times the weights of a layer (forward), the gradient of its input, and that of its weight, in f32; the
least time of some rounds, as billions of floating point operations per second (a multiply-add is two). What is not installed
is left out. Lines of CSV on stdout: library, rows, inputs, outputs, part, rate. reproduction/products.sh runs it in turn with ours.

  taskset -c 1 python products.py --threads 1

Install: pip install numpy torch. OPENBLAS_CORETYPE=Haswell and MKL_ENABLE_INSTRUCTIONS=AVX2 hold them to AVX2.
"""
import argparse, os, time

args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument("--threads", type=int, default=1)
args.add_argument("--rounds", type=int, default=15)
args = args.parse_args()
for name in ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"]:
    os.environ[name] = str(args.threads)  # read when the libraries are loaded

ROWS = [1024, 4096]
LAYERS = [(256, 256), (256, 1024), (1024, 256), (64, 64), (64, 128)]


def rate(work, multiply):
    multiply()
    times = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - start)
    return round(work / min(times) / 1e9, 1)


def parts(x, w, dy):
    """Factors of y = x W^T, dx = dy W, dW = dy^T x."""
    return {"forward": (x, w.T), "input gradient": (dy, w), "weight gradient": (dy.T, x)}


def numpy_products():
    import numpy as np

    draw = np.random.default_rng(1)
    numbers = lambda *shape: draw.standard_normal(shape, dtype=np.float32)
    return numbers, lambda a, b: (lambda out: lambda: np.matmul(a, b, out=out))(np.empty((len(a), b.shape[1]), np.float32))


def torch_products():
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    return torch.randn, lambda a, b: (lambda out: lambda: torch.matmul(a, b, out=out))(torch.empty(len(a), b.shape[1]))


for library, load in {"numpy": numpy_products, "torch": torch_products}.items():
    try:
        numbers, product = load()
    except ImportError:
        continue
    for rows in ROWS:
        for inp, out in LAYERS:
            factors = parts(numbers(rows, inp), numbers(out, inp), numbers(rows, out))
            for part, (a, b) in factors.items():
                print(library, rows, inp, out, part, rate(2 * rows * inp * out, product(a, b)), sep=",", flush=True)
