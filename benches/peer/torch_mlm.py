"""Training speed of PyTorch masked language models: the peer for `effattn mlm`.

RoBERTa's encoder (post-norm, exact GELU, tied output, logits of hidden words only) as a PyTorch user would write it, with
softmax or cosFormer attention and fairseq's Adam. One JSON object per mechanism on stdout: words per second of whole
updates on random words.

  python torch_mlm.py --models full,cosformer                     the small preset: 8 blocks of 128 of 8,192 words
  python torch_mlm.py --preset roberta-base --batch 8             one micro-batch of the large one

Install: pip install torch. Beside it: effattn speed --preset roberta-small --mode train --len 128 --batch 8 --model full,cosformer
Time on an idle machine, both programs with the same thread count, in alternation.
"""
import argparse, json, math, time
import torch, torch.nn as nn, torch.nn.functional as F

PRESETS = {  # layers, width, heads, feed-forward, words, positions, batch
    "roberta-small": (4, 128, 4, 512, 8192, 128, 8),
    "roberta-base": (12, 768, 12, 3072, 50265, 512, 8),
}


def softmax(q, k, v, m, drop):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=drop)


def cosformer(q, k, v, m, drop):
    n = q.shape[-2]
    angle = (math.pi / 2) * torch.arange(1, n + 1, device=q.device, dtype=q.dtype) / m
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    q, k = F.relu(q), F.relu(k)
    q, k = torch.cat([q * c, q * s], -1), torch.cat([k * c, k * s], -1)
    kv = k.transpose(-1, -2) @ v
    den = (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
    return (q @ kv) / den.clamp_min(1e-6)


class Layer(nn.Module):
    def __init__(self, core, d, h, ff, m, p):
        super().__init__()
        self.core, self.h, self.m, self.p = core, h, m, p
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2, self.drop = nn.Linear(d, ff), nn.Linear(ff, d), nn.Dropout(p)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.reshape(b, n, self.h, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = self.core(q, k, v, self.m, self.p if self.training else 0.0).transpose(1, 2).reshape(b, n, d)
        x = self.n1(x + self.drop(self.out(a)))
        return self.n2(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class Masked(nn.Module):
    def __init__(self, core, layers, d, h, ff, words, positions, p=0.1):
        super().__init__()
        self.words, self.places = nn.Embedding(words, d, padding_idx=1), nn.Embedding(positions + 2, d)
        self.kind = nn.Parameter(torch.zeros(1, d))
        self.norm, self.drop = nn.LayerNorm(d), nn.Dropout(p)
        self.layers = nn.ModuleList(Layer(core, d, h, ff, positions, p) for _ in range(layers))
        self.dense, self.head_norm, self.bias = nn.Linear(d, d), nn.LayerNorm(d), nn.Parameter(torch.zeros(words))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids, chosen):
        places = torch.arange(2, ids.shape[1] + 2, device=ids.device)
        x = self.drop(self.norm(self.words(ids) + self.places(places) + self.kind))
        for layer in self.layers:
            x = layer(x)
        x = self.head_norm(F.gelu(self.dense(x.flatten(0, 1)[chosen])))
        return F.linear(x, self.words.weight, self.bias)


class Adam(torch.optim.Optimizer):
    """fairseq's: eps before the bias correction, decoupled decay."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        self.k = 0

    @torch.no_grad()
    def step(self):
        self.k += 1
        b1, b2, eps, wd = 0.9, 0.98, 1e-6, 0.01
        size = math.sqrt(1 - b2**self.k) / (1 - b1**self.k)
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["m"], s["v"] = torch.zeros_like(p), torch.zeros_like(p)
                s["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                p.mul_(1 - group["lr"] * wd)
                p.addcdiv_(s["m"], s["v"].sqrt().add_(eps), value=-group["lr"] * size)


def measure(name, a):
    torch.manual_seed(0)
    layers, d, h, ff, words, n, batch = PRESETS[a.preset]
    batch = a.batch or batch
    model = Masked({"full": softmax, "cosformer": cosformer}[name], layers, d, h, ff, words, n).to(a.device)
    opt = Adam(model.parameters(), 1e-3)
    ids = torch.randint(4, words, (batch, n), device=a.device)
    chosen = torch.randperm(batch * n, device=a.device)[: int(0.15 * batch * n)]
    labels = ids.flatten()[chosen]
    sync = torch.cuda.synchronize if a.device.startswith("cuda") else lambda: None

    def update():
        opt.zero_grad(set_to_none=True)
        F.cross_entropy(model(ids, chosen), labels).backward()
        opt.step()

    for _ in range(a.warmup):
        update()
    times, end = [], time.perf_counter() + a.seconds
    while len(times) < 3 or time.perf_counter() < end:
        sync(); start = time.perf_counter(); update(); sync(); times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    parameters = sum(p.numel() for p in model.parameters())
    return dict(model=name, preset=a.preset, len=n, batch=batch, mode="train", parameters=parameters, ms=median * 1e3,
                steps_per_s=1 / median, words_per_s=batch * n / median, runs=len(times))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--models", default="full,cosformer"); p.add_argument("--preset", default="roberta-small")
    p.add_argument("--batch", type=int); p.add_argument("--threads", type=int, default=2)
    p.add_argument("--warmup", type=int, default=3); p.add_argument("--seconds", type=float, default=10)
    p.add_argument("--device", default="cpu")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    for name in a.models.split(","):
        print(json.dumps(measure(name, a)), flush=True)
