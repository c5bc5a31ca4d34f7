"""effattn's shipped JAX program: linear, softmax and projected attention under jit, on the CPU. It shares no code with the
PyTorch programs; the contract is docs/programs.md."""
import json, math, os, resource, struct, sys, time

if "OMP_NUM_THREADS" in os.environ and hasattr(os, "sched_setaffinity"):  # XLA has a thread per core that it may use
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])])

import jax
import jax.numpy as jnp
import numpy as np

MARK = b"effattn1"
TYPES = {"F32": np.float32, "I64": np.int64}
LINEAR = {
    "linear": dict(feature="elu1", guard="add"),
    "relu-linear": dict(feature="relu", guard="clamp_min"),
    "cosformer": dict(feature="relu", reweight="cos", guard="clamp_min"),
}
KNOBS = {"full": {"mem": [0]}, "linformer": {"dual_ln": [False], "mem": [0]}, **{name: {} for name in LINEAR}}


class Unsupported(Exception):
    pass


def read(stream):
    front = stream.read(24)
    if len(front) < 24:
        return {"request": "end"}, b""
    header, body = struct.unpack("<QQ", front[8:])
    return json.loads(stream.read(header)), stream.read(body)


def write(stream, header, tensors):
    head, parts, at = {}, [], 0
    for name, value in tensors.items():
        data = np.asarray(value).tobytes()
        kind = next((word for word, of in TYPES.items() if of == value.dtype), str(value.dtype).upper())
        head[name] = dict(dtype=kind, shape=list(value.shape), data_offsets=[at, at + len(data)])
        parts.append(data)
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    body = struct.pack("<Q", len(text)) + text + b"".join(parts) if tensors else b""
    text = json.dumps(header).encode()
    stream.write(MARK + struct.pack("<QQ", len(text), len(body)) + text + body)
    stream.flush()


def unpack(body):
    n = int.from_bytes(body[:8], "little")
    head = json.loads(body[8:8 + n])
    head.pop("__metadata__", None)
    at = lambda e: body[8 + n + e["data_offsets"][0]:8 + n + e["data_offsets"][1]]
    return {name: np.frombuffer(at(e), TYPES[e["dtype"]]).reshape(e["shape"]) for name, e in head.items()}


# ------------------------------------------------------------------------------------------------------- mechanisms
def softmax(q, k, v, keep):
    logits = jnp.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    logits = logits if keep is None else jnp.where(keep, logits, -1e30)
    weights = jax.nn.softmax(logits, -1)
    weights = weights if keep is None else jnp.where(keep, weights, 0)  # a query that sees nothing gives 0
    return jnp.einsum("bhij,bhjd->bhid", weights, v)


def linear(t, knobs, causal, usual):
    knobs = {**usual, "eps": 1e-6, **knobs}
    # where both branches are finite: the gradient of the other one is multiplied by 0
    phi = jax.nn.relu if knobs["feature"] == "relu" else lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
    q, k, v = phi(t["q"]), phi(t["k"]), t["v"]
    if knobs.get("reweight") == "cos":
        m = knobs.get("m") or max(q.shape[2], k.shape[2])
        angle = lambda n: (math.pi / (2 * m) * np.arange(1, n + 1, dtype=np.float64))[:, None]
        weigh = lambda x: jnp.concatenate([x * np.cos(angle(x.shape[2])).astype(np.float32),
                                           x * np.sin(angle(x.shape[2])).astype(np.float32)], -1)
        q, k = weigh(q), weigh(k)
    if "mask" in t:
        k = k * t["mask"][:, None, :, None]
    if causal:
        a = jnp.tril(jnp.einsum("bhid,bhjd->bhij", q, k))
        num, den = a @ v, a.sum(-1, keepdims=True)
    else:
        num = q @ jnp.einsum("bhjd,bhje->bhde", k, v)
        den = jnp.einsum("bhid,bhd->bhi", q, k.sum(2))[..., None]
    return num / (den + knobs["eps"] if knobs["guard"] == "add" else jnp.maximum(den, knobs["eps"]))


def mechanism(name, t, knobs, causal):
    if name in LINEAR:
        return linear(t, knobs, causal, LINEAR[name])
    keep = t["mask"][:, None, None, :] > 0 if "mask" in t else None
    if name == "full":
        n = t["q"].shape[2]
        keep = keep if not causal else np.tri(n, dtype=bool) if keep is None else keep & np.tri(n, dtype=bool)
        return softmax(t["q"], t["k"], t["v"], keep)
    if name == "linformer":
        n = t["k"].shape[2]
        e, f = t["E"][..., :n], t.get("F", t["E"])[..., :n]
        k, v = (t["k"], t["v"]) if keep is None else (t["k"] * t["mask"][:, None, :, None], t["v"] * t["mask"][:, None, :, None])
        return softmax(t["q"], e @ k, f @ v, None)
    raise Unsupported(f"it does not do {name}")


def evaluate(request, tensors):
    weight = {name: tensors.pop("grad_" + name) for name in request["outputs"]}["out"]
    leaves = {name: tensors.pop(name) for name in request["leaves"]}
    f = lambda leaves: mechanism(request["mechanism"], {**tensors, **leaves}, request["knobs"], request["causal"])
    answer = {"out": jax.jit(f)(leaves)}
    if leaves:
        grads = jax.jit(jax.grad(lambda leaves: (f(leaves) * weight).sum()))(leaves)
        answer.update({"grad_" + name: grad for name, grad in grads.items()})
    return answer


# ------------------------------------------------------------------------------------------------------- a cell
def norm(x, w, name):
    mean = x.mean(-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return x * w[name + ".weight"] + w[name + ".bias"]


def project(x, w, name):
    y = x @ w[name + ".weight"].T
    return y + w[name + ".bias"] if name + ".bias" in w else y


def logits(w, ids, r):
    if r["pooling"] == "cls-front":
        ids = jnp.concatenate([jnp.full_like(ids[:, :1], r["class_id"]), ids[:, :-1]], 1)
    x = w["token_embedding.weight"][ids] + w["position_embedding.weight"][: ids.shape[1]]
    own = ("E", "F")
    for layer in range(r["layers"]):
        at = f"layers.{layer}."
        h = norm(x, w, at + "norm1")
        t = {name: project(h, w, f"{at}attn.{name}").reshape(*h.shape[:2], heads, dim).transpose(0, 2, 1, 3)
             for name, heads, dim in r["projections"]}
        t.update({name: w[place] for name in own for place in (f"{at}attn.{name}", name) if place in w})
        y = mechanism(r["mechanism"], t, r["knobs"], False).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + project(y, w, at + "attn.o")
        h = jax.nn.gelu(project(norm(x, w, at + "norm2"), w, at + "ffn.fc1"), approximate=False)
        x = x + project(h, w, at + "ffn.fc2")
    u = norm(x, w, "norm").mean(1) if r["pooling"] == "mean" else norm(x[:, 0], w, "norm")
    return project(jax.nn.relu(project(u, w, "head.fc1")), w, "head.fc2")


def resident_peak(again=False):
    """Highest resident bytes since the process began, or since the last call with `again` where the system can forget them."""
    try:
        if again:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Cell:
    def __init__(self, r, tensors):
        if r["output"] != "linear" or r["mechanism"] not in KNOBS:
            raise Unsupported(f"it has no model with {r['mechanism']}")
        jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()  # what JAX allocates once is none of the model's
        self.base = resident_peak(again=True)
        self.ids, self.labels, self.next = tensors.pop("ids"), tensors.pop("labels"), 0
        self.w = {name: jnp.array(value) for name, value in tensors.items()}
        o, self.train = r["optimizer"], r["pass"] == "train"
        zero = lambda: jax.tree.map(jnp.zeros_like, self.w)
        self.state = (self.w, zero(), zero(), jnp.zeros((), jnp.float32))
        self.infer = jax.jit(lambda w, ids: logits(w, ids, r))

        def loss(w, ids, labels):
            return -jnp.take_along_axis(jax.nn.log_softmax(logits(w, ids, r)), labels[:, None], 1).mean()

        def update(state, ids, labels):  # AdamW
            w, m, v, k = state
            value, g = jax.value_and_grad(loss)(w, ids, labels)
            (a, b), k = o["betas"], k + 1
            m = jax.tree.map(lambda m, g: a * m + (1 - a) * g, m, g)
            v = jax.tree.map(lambda v, g: b * v + (1 - b) * g * g, v, g)
            move = lambda w, m, v: w * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * (m / (1 - a**k)) / (
                jnp.sqrt(v / (1 - b**k)) + o["eps"])
            return (jax.tree.map(move, w, m, v), m, v, k), value
        self.update = jax.jit(update, donate_argnums=0)

    def memory(self):
        return {"kind": "resident growth", "peak_bytes": max(0, resident_peak() - self.base)}

    def step(self):
        ids, labels = self.ids[self.next % len(self.ids)], self.labels[self.next % len(self.ids)]
        self.next += 1
        start = time.perf_counter()
        if self.train:
            self.state, result = self.update(self.state, ids, labels)
            jax.block_until_ready((self.state, result))
        else:
            result = self.infer(self.w, ids).block_until_ready()
        return time.perf_counter() - start, result

    def steps(self, r):
        end, times = time.perf_counter() + r.get("seconds", math.inf), []
        while len(times) < r["n"] and (not times or time.perf_counter() < end):
            seconds, result = self.step()
            times.append(seconds)
        return {"seconds": times, "result": [float(x) for x in np.asarray(result).flatten()[:16]]}


def main():
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes to standard error
    cell = None
    while True:
        request, body = read(requests)
        name, answer, tensors = request["request"], {}, {}
        if name == "end":
            return
        try:
            if name == "version":
                answer = {"version": f"jax {jax.__version__}"}
            elif name == "describe":
                answer = {"mechanisms": {name: dict(passes=["infer", "train"], knobs=knobs,
                                                    causal=[False] if name == "linformer" else [False, True])
                                         for name, knobs in KNOBS.items()}}
            elif name == "evaluate":
                tensors = evaluate(request, unpack(body))
            elif name == "prepare":
                cell = Cell(request, unpack(body))
            elif name == "steps":
                answer = cell.steps(request)
            elif name == "memory":
                answer = cell.memory()
            else:
                raise Unsupported(f"it does not know the request {name}")
        except Unsupported as error:
            answer, tensors = dict(error=str(error), outcome="unsupported"), {}
        except Exception as error:
            answer, tensors = dict(error=f"{type(error).__name__}: {error}", outcome="failed"), {}
        write(answers, answer, tensors)


main()
