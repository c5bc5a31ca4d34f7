"""Lets effattn check and time PyTorch code: the other end of its pipe.

    import torch.nn.functional as F
    from effattn_program import mechanism, run

    @mechanism("full", causal=[False])
    def full(q, k, v, x, w, knobs, causal):
        keep = w["mask"].bool()[:, None, None] if "mask" in w else None
        return F.scaled_dot_product_attention(q, k, v, keep)

    run()

    effattn check --program ./mine.py --model full
    effattn speed --program ./mine.py --model full --len 1024..4096

q, k, v are [batch, heads, length, width], x [batch, length, heads * width] is the layer's input (None where the mechanism does
not read it). `w` has everything else under its name in the specification: weights, and `mask` [batch, length], 1 keep and 0
padding, where there is padding. `knobs` are the mechanism's settings. The result is `out`, or a tuple or dict where there are
several outputs. Gradients are autograd's. Needs torch and nothing else. The contract: docs/programs.md.
"""
import ctypes, json, math, os, struct, sys, time

import torch
import torch.nn.functional as F

MARK = b"effattn1"
CONTRACT = 1
MECHANISMS = {}
DTYPES = {"F32": torch.float32, "I64": torch.int64, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}


class Unsupported(Exception):
    """Raise it where the code does not do what is asked: `not answered` instead of red."""


def mechanism(name, knobs=None, causal=(False, True), train=True):
    """Registers f(q, k, v, x, w, knobs, causal) as `name`. `knobs`: values that it computes, {"guard": ["add"]}; a knob without
    entry may have any. `causal`: its forms. `train`: whether it has gradients."""
    def register(f):
        MECHANISMS[name] = (f, dict(knobs or {}), list(causal), ["infer", "train"] if train else ["infer"])
        return f
    return register


# ------------------------------------------------------------------------------------------------------- messages
def read(stream):
    front = stream.read(24)
    if len(front) < 24:
        return None, None
    header, body = struct.unpack("<QQ", front[8:])
    return json.loads(stream.read(header)), stream.read(body)


def write(stream, header, tensors=None):
    text, body = json.dumps(header).encode(), pack(tensors) if tensors else b""
    stream.write(MARK + struct.pack("<QQ", len(text), len(body)) + text + body)
    stream.flush()


def unpack(body, device):
    if not body:
        return {}
    n = int.from_bytes(body[:8], "little")
    head, tensors = json.loads(body[8:8 + n]), {}
    head.pop("__metadata__", None)
    for name, entry in head.items():
        a, b = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        flat = torch.frombuffer(bytearray(body[8 + n + a:8 + n + b]), dtype=dtype) if b > a else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(entry["shape"]).to(device)
    return tensors


def pack(tensors):
    names, head, parts, at = {v: k for k, v in DTYPES.items()}, {}, [], 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        data = ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        head[name] = dict(dtype=names[tensor.dtype], shape=list(tensor.shape), data_offsets=[at, at + len(data)])
        parts.append(data)
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


# ------------------------------------------------------------------------------------------------------- one mechanism
def call(f, given, knobs, causal):
    """The outputs of f by name, whatever it returns."""
    given = dict(given)
    q, k, v, x = (given.pop(name, None) for name in "qkvx")
    result = f(q, k, v, x, given, knobs, causal)
    if isinstance(result, dict):
        return result
    return dict(zip(("out", "out_p"), result if isinstance(result, (tuple, list)) else (result,)))


def chosen(request):
    name = request["mechanism"]
    if name not in MECHANISMS:
        raise Unsupported(f"it does not do {name}")
    return MECHANISMS[name][0]


def formats(request):
    """Sets up the device and the number format; gives the device and the context of a forward pass."""
    device = torch.device(request.get("device", "cpu"))
    torch.set_float32_matmul_precision("high" if request["dtype"] == "tf32" else "highest")
    low = request["dtype"] == "bf16"
    return device, lambda: torch.autocast(device.type, torch.bfloat16, enabled=low)


def evaluate(request, body, compiled):
    f = chosen(request)
    f = torch.compile(f) if compiled else f
    device, context = formats(request)
    given = unpack(body, device)
    leaves = request["leaves"]
    for name in leaves:
        given[name].requires_grad_(True)
    weights = {name: given.pop("grad_" + name) for name in request["outputs"] if "grad_" + name in given}
    with context():
        outputs = call(f, given, request["knobs"], request["causal"])
    answer = {name: outputs[name].detach() for name in request["outputs"] if outputs.get(name) is not None}
    if leaves:
        loss = sum((outputs[name].float() * weight).sum() for name, weight in weights.items())
        grads = torch.autograd.grad(loss, [given[name] for name in leaves], allow_unused=True)
        for name, grad in zip(leaves, grads):
            answer["grad_" + name] = torch.zeros_like(given[name]) if grad is None else grad
    if request["dtype"] != "f32":  # what was computed in less is sent as f32; else what the code gave
        answer = {name: tensor.float() for name, tensor in answer.items()}
    return {}, answer


# ------------------------------------------------------------------------------------------------------- the encoder around it
class Encoder(torch.nn.Module):
    """effattn's pre-norm classifier around a mechanism, from effattn's weights under their names."""

    def __init__(self, f, request, weights):
        super().__init__()
        self.f, self.r = f, request
        self.names = {}
        self.fixed = set(request["constants"])
        sizes = [projection[1] * projection[2] for projection in request["projections"]]
        self.sizes = sizes
        for layer in range(request["layers"]):  # one product for all projections, as PyTorch's users write it
            for part in ("weight", "bias"):
                names = [f"layers.{layer}.attn.{name}.{part}" for name, _, _ in request["projections"]]
                if names and names[0] in weights:
                    weights[f"layers.{layer}.attn.qkv.{part}"] = torch.cat([weights.pop(name) for name in names])
        for index, (name, value) in enumerate(weights.items()):
            self.names[name] = f"p{index}"
            if name in self.fixed:
                self.register_buffer(f"p{index}", value)
            else:
                setattr(self, f"p{index}", torch.nn.Parameter(value))
        own = lambda layer: f"layers.{layer}.attn."
        around = {"qkv.weight", "qkv.bias", "o.weight", "o.bias", "o_gate.weight", "o_gate.bias"}
        around |= {f"{a}_global.{b}" for a in "qkv" for b in ("weight", "bias")}
        self.own = [[(name[len(own(layer)):], key) for name, key in self.names.items()
                     if name.startswith(own(layer)) and name[len(own(layer)):] not in around] for layer in range(request["layers"])]
        shared = [(name, key) for name, key in self.names.items() if "." not in name and name != "stream"]
        self.own = [own + shared for own in self.own]

    def at(self, name):
        key = self.names.get(name)
        return None if key is None else getattr(self, key)

    def linear(self, x, name):
        return F.linear(x, self.at(name + ".weight"), self.at(name + ".bias"))

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.at(name + ".weight"), self.at(name + ".bias"), 1e-5)

    def attention(self, x, layer, stream):
        r, name = self.r, f"layers.{layer}."
        h = self.norm(x, name + "norm1")
        given = {key: getattr(self, at) for key, at in self.own[layer]}
        given["x"] = h
        if r["projections"]:
            parts = self.linear(h, name + "attn.qkv").split(self.sizes, -1)
            for part, (key, heads, dim) in zip(parts, r["projections"]):
                given[key] = part.unflatten(-1, (heads, dim)).transpose(1, 2)
        if r["global"]:
            for key in "qkv":
                part = self.linear(h, f"{name}attn.{key}_global")
                given[key + "_global"] = part.unflatten(-1, (r["heads"], -1)).transpose(1, 2)
        if r["residual"]:
            given["res"] = x
        if stream is not None:
            given["p"] = self.norm(stream, name + "norm_p")
        outputs = call(self.f, given, r["knobs"], False)
        y = outputs["out"]
        y = y.transpose(1, 2).flatten(2) if r["projections"] else y
        if stream is not None:
            stream = stream + outputs["out_p"]
        form = r["output"]
        if form == "linear":
            return x + self.linear(y, name + "attn.o"), stream
        if form == "plain":
            return x + y, stream
        if form == "half_glu":
            y = F.gelu(y)
            return x + y * torch.sigmoid(self.linear(y, name + "attn.o")), stream
        if form == "glu":
            y = F.gelu(y)
            return x + self.linear(y, name + "attn.o") * torch.sigmoid(self.linear(y, name + "attn.o_gate")), stream
        return y, stream  # "whole": it added the residual itself

    def forward(self, ids):
        r = self.r
        if r["pooling"] == "cls-front":
            ids = torch.cat([torch.full_like(ids[:, :1], r["class_id"]), ids[:, :-1]], 1)
        x = F.embedding(ids, self.at("token_embedding.weight")) + self.at("position_embedding.weight")[: ids.shape[1]]
        stream = self.at("stream")
        stream = None if stream is None else stream.expand(len(ids), -1, -1)
        for layer in range(r["layers"]):
            x, stream = self.attention(x, layer, stream)
            h = self.linear(self.norm(x, f"layers.{layer}.norm2"), f"layers.{layer}.ffn.fc1")
            x = x + self.linear(F.gelu(h), f"layers.{layer}.ffn.fc2")
        x = self.norm(x, "norm").mean(1) if r["pooling"] == "mean" else self.norm(x[:, 0], "norm")
        return self.linear(F.relu(self.linear(x, "head.fc1")), "head.fc2")


class Cell:
    """A model with its inputs, ready to step."""

    def __init__(self, request, body, compiled):
        f = chosen(request)
        torch.set_num_threads(request["threads"])
        torch.randn(64, 64) @ torch.randn(64, 64)  # what PyTorch allocates once is none of the model's
        self.base = resident_peak(again=True)
        self.device, self.context = formats(request)
        weights = unpack(body, self.device)
        self.ids = weights.pop("ids").unbind(0)
        self.labels = weights.pop("labels").unbind(0)
        self.train = request["pass"] == "train"
        model = Encoder(f, request, weights).to(self.device).train(self.train)
        o = request["optimizer"]
        self.optimizer = torch.optim.AdamW(model.parameters(), o["lr"], tuple(o["betas"]), o["eps"], o["weight_decay"])
        self.run = torch.compile(model) if compiled else model
        self.next = 0

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self):
        ids, labels = self.ids[self.next % len(self.ids)], self.labels[self.next % len(self.ids)]
        self.next += 1
        self.sync()
        start = time.perf_counter()
        if self.train:
            self.optimizer.zero_grad(set_to_none=True)
            with self.context():
                result = F.cross_entropy(self.run(ids), labels)
            result.backward()
            self.optimizer.step()
        else:
            with torch.inference_mode(), self.context():
                result = self.run(ids)
        self.sync()
        seconds = time.perf_counter() - start
        if not math.isfinite(result.float().sum().item()):
            raise ArithmeticError("the loss or the logits are not finite")
        return seconds, result

    def steps(self, request):
        """At most n steps, none begun after `seconds`, at least one."""
        end, times = time.perf_counter() + request.get("seconds", math.inf), []
        while len(times) < request["n"] and (not times or time.perf_counter() < end):
            seconds, result = self.step()
            times.append(seconds)
        return {"seconds": times, "result": [float(x) for x in result.detach().flatten()[:16]]}

    def memory(self):
        if self.device.type == "cuda":
            return {"kind": "allocated", "peak_bytes": torch.cuda.max_memory_allocated(self.device)}
        return {"kind": "resident growth", "peak_bytes": max(0, resident_peak() - self.base)}


def resident_peak(again=False):
    """Highest resident bytes since the process began, or since the last call with `again` where the system can forget them."""
    import resource
    try:
        if again:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ------------------------------------------------------------------------------------------------------- the loop
def describe(dtypes, devices):
    devices = devices or ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    abilities = {name: dict(passes=passes, knobs=knobs, causal=causal) for name, (_, knobs, causal, passes) in MECHANISMS.items()}
    return dict(mechanisms=abilities, dtypes=dtypes, devices=devices)


def run(dtypes=("f32", "bf16"), compiled=False, devices=None, cell=Cell, evaluate=evaluate, version=f"torch {torch.__version__}"):
    """Answers effattn until it says `end` or is gone. What the code prints goes to standard error. `cell` and `evaluate` are for
    programs that compute with something else than PyTorch."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ready = None
    while True:
        request, body = read(requests)
        name = "end" if request is None else request["request"]
        try:
            tensors = None
            if name == "version":
                answer = dict(version=version, contract=CONTRACT)
            elif name == "describe":
                answer = describe(list(dtypes), devices)
            elif name == "evaluate":
                answer, tensors = evaluate(request, body, compiled)
            elif name == "prepare":
                ready = None  # two need not fit
                ready = cell(request, body, compiled)
                answer = {}
            elif name == "steps":
                answer = ready.steps(request)
            elif name == "memory":
                answer = ready.memory()
            elif name == "end":
                return
            else:
                raise Unsupported(f"it does not know the request {name}")
        except Unsupported as error:
            answer, tensors = dict(error=str(error), outcome="unsupported"), None
        except MemoryError as error:
            answer, tensors = dict(error=f"out of memory {error}", outcome="oom"), None
        except torch.OutOfMemoryError as error:
            answer, tensors = dict(error=str(error).split("\n")[0], outcome="oom"), None
        except ArithmeticError as error:
            answer, tensors = dict(error=str(error), outcome="diverged"), None
        except Exception as error:
            import traceback
            traceback.print_exc()
            answer, tensors = dict(error=f"{type(error).__name__}: {error}", outcome="failed"), None
        write(answers, answer, tensors)
