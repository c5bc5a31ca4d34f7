"""The next token of PyTorch language models after n tokens: the peer of `effattn speed --mode decode`.

The model of --preset charlm-small (12 pre-norm blocks, d 512, 8 heads, feed-forward 2048, tied output) as a PyTorch user would write
it: keys and values of all tokens in a buffer and scaled_dot_product_attention, or sums of fixed size. One JSON object per cell on
stdout, for --reference:

  python decode.py --len 1024,8192 --batch 1,16 > torch.jsonl
  effattn speed --mode decode --preset charlm-small --model full,linear,cosformer --len 1024,8192 --batch 1,16 --reference torch.jsonl

Install: pip install torch. Time on an idle machine, both programs with the same thread count, in alternation.
"""
import argparse, json, math, time
import torch, torch.nn as nn, torch.nn.functional as F

LAYERS, D, H, FF, VOCAB = 12, 512, 8, 2048, 256


class Softmax:
    def __init__(self, batch, room):
        self.k, self.v = (torch.randn(batch, H, room, D // H) for _ in range(2))

    def step(self, q, k, v, at):
        self.k[:, :, at : at + 1], self.v[:, :, at : at + 1] = k, v
        return F.scaled_dot_product_attention(q, self.k[:, :, : at + 1], self.v[:, :, : at + 1])


class Sums:
    """Linear attention; `angle` of a position turns its features, as cosFormer's do."""

    def __init__(self, batch, room, feature, turned):
        width = (2 if turned else 1) * D // H
        self.feature, self.turned, self.room = feature, turned, room
        self.kv, self.k = torch.rand(batch, H, width, D // H), torch.rand(batch, H, width, 1)

    def step(self, q, k, v, at):
        q, k = self.feature(q), self.feature(k)
        if self.turned:
            angle = math.pi / 2 * (at + 1) / self.room
            c, s = math.cos(angle), math.sin(angle)
            q, k = torch.cat([q * c, q * s], -1), torch.cat([k * c, k * s], -1)
        kv, total = self.kv + k.transpose(-1, -2) * v, self.k + k.transpose(-1, -2)  # not kept: every step is the same position
        return (q @ kv) / (q @ total).clamp_min(1e-6)


STATES = {
    "full": Softmax,
    "linear": lambda batch, room: Sums(batch, room, lambda x: F.elu(x) + 1, False),
    "cosformer": lambda batch, room: Sums(batch, room, F.relu, True),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.fc1, self.fc2 = nn.Linear(D, FF), nn.Linear(FF, D)

    def forward(self, x, state, at):
        b = x.shape[0]
        q, k, v = (t.view(b, 1, H, D // H).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(state.step(q, k, v, at).transpose(1, 2).reshape(b, 1, D))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


@torch.inference_mode()
def measure(name, batch, n, a):
    torch.manual_seed(0)
    words, blocks = nn.Embedding(VOCAB, D), nn.ModuleList(Block() for _ in range(LAYERS))
    states = [STATES[name](batch, n + 1) for _ in range(LAYERS)]
    ids = torch.randint(VOCAB, (batch, 1))

    def step():
        x = words(ids) * math.sqrt(D)
        for block, state in zip(blocks, states):
            x = block(x, state, n)
        return F.linear(x, words.weight)

    for _ in range(3):
        step()
    times, end = [], time.perf_counter() + a.seconds
    while len(times) < 10 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    ms, least = (sorted(times)[at] * 1e3 for at in (len(times) // 2, 0))
    return dict(program=f"torch {torch.__version__}", model=name, len=n, batch=batch, mode="decode", ms=ms, least_ms=least,
                tokens_per_second=batch / ms * 1e3, threads=torch.get_num_threads())


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--models", default=",".join(STATES))
    p.add_argument("--len", default="1024,8192")
    p.add_argument("--batch", default="1,16")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=1.0)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    for batch in map(int, a.batch.split(",")):
        for n in map(int, a.len.split(",")):
            for name in a.models.split(","):
                print(json.dumps(measure(name, batch, n, a)), flush=True)
