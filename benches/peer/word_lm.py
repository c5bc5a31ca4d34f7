"""Training speed of the small word language model in PyTorch: the peer of `effattn wordlm --task wikitext103-small`.

The model of docs/spec/SPEC-text.md, sections 1 and 2, at the sizes of section 10: adaptive input and softmax with tied
weights and projections, sinusoids, pre-norm layers with ReLU and no norm behind the last one, dropout as there, Nesterov's
SGD with a clipped gradient. One JSON object per mechanism on stdout; words are drawn at random with falling frequency, so
that every band has targets.

  python word_lm.py --models full,cosformer --threads 2 --seconds 60

Install: pip install torch. Time on an idle machine, both programs with the same thread count, in alternation.
"""
import argparse, json, math, time
import torch, torch.nn as nn, torch.nn.functional as F

PAD = 1


def full(q, k, v, drop):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)


def causal_linear(q, k, v, chunk=64):
    """sum_{j<=i} (q_i . k_j) v_j / clamp(sum_{j<=i} q_i . k_j) in chunks: a state from chunk to chunk, a small triangle within."""
    b, h, n, d = q.shape
    c = min(chunk, n)
    if n % c:
        raise SystemExit(f"{n} words are no multiple of the chunk of {c}")
    q, k, v = (t.reshape(b, h, n // c, c, -1) for t in (q, k, v))
    kv = (k.transpose(-1, -2) @ v).cumsum(2)
    ks = k.sum(-2).cumsum(2)
    kv = torch.cat([torch.zeros_like(kv[:, :, :1]), kv[:, :, :-1]], 2)
    ks = torch.cat([torch.zeros_like(ks[:, :, :1]), ks[:, :, :-1]], 2)
    w = (q @ k.transpose(-1, -2)).tril()
    den = w.sum(-1, keepdim=True) + q @ ks.unsqueeze(-1)
    return ((w @ v + q @ kv) / den.clamp_min(1e-6)).reshape(b, h, n, -1)


def cosformer(q, k, v, drop):
    n = q.shape[-2]
    ang = (math.pi / 2) * torch.arange(1, n + 1, device=q.device, dtype=q.dtype) / n  # M is the block
    c, s = ang.cos()[:, None], ang.sin()[:, None]
    q, k = F.relu(q), F.relu(k)
    return causal_linear(torch.cat([q * c, q * s], -1), torch.cat([k * c, k * s], -1), v)


def linear(q, k, v, drop):
    return causal_linear(F.elu(q) + 1, F.elu(k) + 1, v)


CORES = {"full": full, "cosformer": cosformer, "linear": linear}


class Adaptive(nn.Module):
    """Adaptive input and softmax, weights and projections tied."""
    def __init__(self, vocab, cutoffs, d, factor=4, drop=0.2):
        super().__init__()
        self.edges, self.drop = [0] + cutoffs + [vocab], drop
        dims = [d // factor**b for b in range(len(cutoffs) + 1)]
        self.tables = nn.ModuleList(nn.Embedding(e - s, w) for s, e, w in zip(self.edges, self.edges[1:], dims))
        self.projs = nn.ModuleList(nn.Linear(w, d, bias=False) for w in dims)
        self.cluster = nn.Linear(d, len(cutoffs), bias=False)
        for table, w in zip(self.tables, dims):
            nn.init.normal_(table.weight, std=w**-0.5)
            table.weight.data[PAD].zero_()
        for lin in [*self.projs, self.cluster]:
            nn.init.xavier_uniform_(lin.weight)

    def embed(self, ids):
        out = self.cluster.weight.new_zeros(*ids.shape, self.projs[0].out_features)
        for s, e, table, proj in zip(self.edges, self.edges[1:], self.tables, self.projs):
            inside = (ids >= s) & (ids < e)
            if inside.any():
                out[inside] = proj(table(ids[inside] - s))
        return out

    def loss(self, hidden, targets):
        """Sum of -log p over `targets` [rows], given `hidden` [rows, d]."""
        hidden = F.dropout(hidden, self.drop, self.training)
        head = targets.clone()
        total = hidden.new_zeros(())
        for b, (s, e, table, proj) in enumerate(zip(self.edges[1:], self.edges[2:], self.tables[1:], self.projs[1:])):
            inside = (targets >= s) & (targets < e)
            head[inside] = self.edges[1] + b
            if inside.any():
                reduced = F.dropout(hidden[inside] @ proj.weight, self.drop, self.training)
                total = total + F.cross_entropy(reduced @ table.weight.t(), targets[inside] - s, reduction="sum")
        logits = hidden @ torch.cat([self.tables[0].weight, self.cluster.weight]).t()
        return total + F.cross_entropy(logits, head, reduction="sum")


class Layer(nn.Module):
    def __init__(self, core, d, h, ff, drop):
        super().__init__()
        self.core, self.h, self.drop = core, h, drop
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        for lin in (self.q, self.k, self.v):
            nn.init.xavier_uniform_(lin.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.o.weight); nn.init.zeros_(self.o.bias)

    def forward(self, x):
        b, n, d = x.shape
        y = self.n1(x)
        q, k, v = (lin(y).reshape(b, n, self.h, -1).transpose(1, 2) for lin in (self.q, self.k, self.v))
        y = self.core(q, k, v, 0.1 if self.training else 0.0).transpose(1, 2).reshape(b, n, d)
        x = x + F.dropout(self.o(y), self.drop, self.training)
        y = F.dropout(F.relu(self.fc1(self.n2(x))), 0.1, self.training)
        return x + F.dropout(self.fc2(y), self.drop, self.training)


class WordLm(nn.Module):
    def __init__(self, core, a):
        super().__init__()
        d, self.drop = a.dim, a.dropout
        self.adaptive = Adaptive(a.vocab, [2000, 5000], d)
        self.layers = nn.ModuleList(Layer(core, d, a.heads, a.ff, a.dropout) for _ in range(a.layers))
        half = d // 2
        ang = torch.arange(2, a.len + 2)[:, None] * torch.exp(torch.arange(half) * (-math.log(1e4) / (half - 1)))
        self.register_buffer("positions", torch.cat([ang.sin(), ang.cos()], 1))

    def forward(self, ids, targets):
        x = self.adaptive.embed(ids) * math.sqrt(self.positions.shape[1]) + self.positions
        x = F.dropout(x, self.drop, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.adaptive.loss(x.flatten(0, 1), targets.flatten()) / targets.numel()


def measure(name, a):
    torch.manual_seed(0)
    model = WordLm(CORES[name], a).to(a.device).train()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.99, nesterov=True)
    run = torch.compile(model) if a.compile else model
    freq = 1 / (torch.arange(a.vocab, dtype=torch.float) + 10)
    cuda = a.device.startswith("cuda")
    sync = torch.cuda.synchronize if cuda else lambda: None

    def step():
        words = torch.multinomial(freq, a.batch * (a.len + 1), replacement=True).reshape(a.batch, -1).to(a.device)
        opt.zero_grad(set_to_none=True)
        loss = run(words[:, :-1], words[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()

    for _ in range(a.warmup):
        step()
    times, end = [], time.perf_counter() + a.seconds
    while len(times) < 3 or time.perf_counter() < end:
        sync(); t0 = time.perf_counter(); step(); sync(); times.append(time.perf_counter() - t0)
    times.sort()
    med = times[len(times) // 2]
    return dict(model=name, len=a.len, batch=a.batch, mode="train", parameters=sum(p.numel() for p in model.parameters()),
                ms=med * 1e3, words_per_s=a.batch * a.len / med, runs=len(times))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--models", default="full,cosformer"); p.add_argument("--vocab", type=int, default=8125)
    p.add_argument("--len", type=int, default=256); p.add_argument("--batch", type=int, default=8)
    p.add_argument("--dim", type=int, default=256); p.add_argument("--heads", type=int, default=4)
    p.add_argument("--ff", type=int, default=1024); p.add_argument("--layers", type=int, default=4)
    p.add_argument("--dropout", type=float, default=0.3); p.add_argument("--threads", type=int, default=2)
    p.add_argument("--warmup", type=int, default=3); p.add_argument("--seconds", type=float, default=30)
    p.add_argument("--device", default="cpu"); p.add_argument("--compile", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    for name in a.models.split(","):
        print(json.dumps(measure(name, a)), flush=True)
