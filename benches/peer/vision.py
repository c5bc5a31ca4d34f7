"""Speed and peak memory of image classifiers in PyTorch, as a user would write them: the peer for `effattn speed` with
the presets vil-ls-medium, cvt-13, deit-s and resnet-50.

ViL-LS, CvT and CvT*-LS are written here from docs/spec/SPEC-vision.md (sections 2 to 5) in plain PyTorch; ViT and ResNet-50
are timm's and torchvision's where those are installed. One JSON object per cell on stdout.

  python benches/peer/vision.py --presets cvt-13 --models full,ls2d --batch 1,8 --mode both > peer.jsonl
  effattn speed --preset cvt-13 --model full,ls2d --batch 1,8 --reference peer.jsonl

Time on an idle machine, both programs with the same number of threads, in alternation. Install: pip install torch [timm torchvision]
"""
import argparse, json, math, os, resource, time
import torch, torch.nn as nn, torch.nn.functional as F

CLASSES = 1000


class LongShort2d(nn.Module):
    """Windows with their neighbours, dynamic projection over the grid, global tokens in front, DualLN (SPEC-vision 2)."""
    def __init__(self, grid, w, r, g, heads, width, bias):
        super().__init__()
        self.grid, self.w, self.r, self.g, self.h, self.s = grid, w, r, g, heads, max(w // 2, 1)
        self.dual_ln_full, self.dual_ln_dp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.table = None
        p = w // 2
        if bias:
            self.table = nn.Parameter(torch.zeros(2 * (w + p - 1) * (w + 2 * p + 1) + 1, heads))
            y = torch.arange(w)[:, None] - torch.arange(-p, w + p)[None]
            row = (y + w + p - 1)[:, None, :, None] * (w + 2 * p) + (y + w + p - 1)[None, :, None, :]
            self.register_buffer("index", row.reshape(w * w, -1), persistent=False)
        up = -(-grid // w) * w
        inside = F.pad(torch.ones(1, 1, grid, grid), (self.s, self.s + up - grid, self.s, self.s + up - grid))
        self.register_buffer("outside", self.windows(inside)[0, 0] == 0, persistent=False)

    def windows(self, t):                                # [b, c, ., .] -> [b, c, groups, (w + 2 s)^2]
        side = self.w + 2 * self.s
        t = t.unfold(2, side, self.w).unfold(3, side, self.w)
        return t.reshape(*t.shape[:2], -1, side * side)

    def split(self, t):
        return t.reshape(t.shape[0], t.shape[1], self.h, t.shape[2] // self.h).transpose(1, 2)

    def merge(self, t):
        return t.transpose(1, 2).reshape(t.shape[0], t.shape[2], -1)

    def forward(self, q, k, v, scores):                  # [b, g + n, e]; scores [b, n, h r]
        b, _, e = q.shape
        h, r, g, w, grid, d = self.h, self.r, self.g, self.w, self.grid, e // self.h
        n, up = grid * grid, -(-grid // w) * w
        q = self.split(q) / math.sqrt(d)
        k, v = self.dual_ln_full(k), self.dual_ln_full(v)
        kc, vc, k, v = self.split(k[:, :g]), self.split(v[:, :g]), k[:, g:], v[:, g:]
        p = scores.softmax(1).reshape(b, n, h, r).permute(0, 2, 3, 1)
        kg = self.split(self.dual_ln_dp(self.merge(p @ self.split(k))))
        vg = self.split(self.dual_ln_dp(self.merge(p @ self.split(v))))
        pad = (self.s, self.s + up - grid, self.s, self.s + up - grid)

        def keys(t):                                     # [b, h, groups, (w + 2 s)^2, d]
            t = F.pad(t.transpose(1, 2).reshape(b, e, grid, grid), pad)
            return self.windows(t).reshape(b, h, d, -1, (w + 2 * self.s) ** 2).permute(0, 1, 3, 4, 2)

        def grouped(t):                                  # [b, h, n, d] -> [b, h, groups, w^2, d]
            t = F.pad(t.reshape(b, h, grid, grid, d), (0, 0, 0, up - grid, 0, up - grid))
            return t.reshape(b, h, up // w, w, up // w, w, d).transpose(3, 4).reshape(b, h, -1, w * w, d)

        def flat(t):                                     # and back
            t = t.reshape(b, h, up // w, up // w, w, w, d).transpose(3, 4).reshape(b, h, up, up, d)
            return t[:, :, :grid, :grid].reshape(b, h, n, d)

        qw = grouped(q[:, :, g:])
        near = qw @ keys(k).transpose(-1, -2)
        if self.table is not None:
            near = near + self.table[self.index].permute(2, 0, 1)[None, :, None]
        near = near.masked_fill(self.outside[:, None], float("-inf"))
        far = qw @ torch.cat([kg, kc], 2)[:, :, None].transpose(-1, -2)
        a = torch.cat([far, near], -1).softmax(-1)
        out = flat(a[..., : r + g] @ torch.cat([vg, vc], 2)[:, :, None] + a[..., r + g:] @ keys(v))
        if g:
            qc = q[:, :, :g]
            all = torch.cat([kc, out], 2)
            c = (qc @ all.transpose(-1, -2)).softmax(-1) @ torch.cat([vc, out], 2)
            out = torch.cat([c, out], 2)
        return self.merge(out)


class Mlp(nn.Sequential):
    def __init__(self, e):
        super().__init__(nn.Linear(e, 4 * e), nn.GELU(), nn.Linear(4 * e, e))


class VilBlock(nn.Module):
    def __init__(self, grid, e, heads, g, long_short, w, r):
        super().__init__()
        self.h, self.g, self.grid = heads, g, grid
        self.n1, self.n2 = nn.LayerNorm(e, 1e-6), nn.LayerNorm(e, 1e-6)
        self.qkv, self.proj, self.mlp = nn.Linear(e, 3 * e), nn.Linear(e, e), Mlp(e)
        if long_short:
            self.dp, self.core = nn.Linear(e, heads * r), LongShort2d(grid, w, r, g, heads, e, True)
        else:
            self.core = None
            self.table = nn.Parameter(torch.zeros((2 * grid - 1) ** 2, heads))
            if g:
                self.g2l, self.g2g = nn.Parameter(torch.zeros(2, heads, g)), nn.Parameter(torch.zeros(heads, g, g))
            y = torch.arange(grid)[:, None] - torch.arange(grid)[None] + grid - 1
            row = y[:, None, :, None] * (2 * grid - 1) + y[None, :, None, :]
            self.register_buffer("index", row.reshape(grid * grid, -1), persistent=False)

    def attend(self, x):
        b, t, e = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.core is not None:
            return self.proj(self.core(q, k, v, self.dp(x[:, self.g:])))
        q, k, v = (a.reshape(b, t, self.h, -1).transpose(1, 2) for a in (q, k, v))
        bias = self.table[self.index].permute(2, 0, 1)
        if self.g:
            n, h, g = t - self.g, self.h, self.g
            above = torch.cat([self.g2g, self.g2l[0][:, :, None].expand(h, g, n)], 2)
            bias = torch.cat([above, torch.cat([self.g2l[1][:, None, :].expand(h, n, g), bias], 2)], 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].expand(b, -1, -1, -1))
        return self.proj(out.transpose(1, 2).reshape(b, t, e))

    def forward(self, x):
        x = x + self.attend(self.n1(x))
        return x + self.mlp(self.n2(x))


class Vil(nn.Module):
    def __init__(self, size, depths, w=7, r=8):
        super().__init__()
        self.embed, self.norms, self.stages, self.tokens = nn.ModuleList(), nn.ModuleList(), nn.ModuleList(), nn.ParameterList()
        inputs, grid = 3, size
        for patch, e, h, depth, g, ls in [(4, 96, 3, depths[0], 1, True), (2, 192, 3, depths[1], 1, True),
                                          (2, 384, 6, depths[2], 1, False), (2, 768, 12, depths[3], 0, False)]:
            grid //= patch
            self.embed.append(nn.Conv2d(inputs, e, patch, patch)); self.norms.append(nn.LayerNorm(e, 1e-6))
            if g:
                self.tokens.append(nn.Parameter(torch.zeros(1, g, e)))
            self.stages.append(nn.ModuleList(VilBlock(grid, e, h, g, ls, w, r) for _ in range(depth)))
            inputs = e
        self.norm, self.head = nn.LayerNorm(inputs, 1e-6), nn.Linear(inputs, CLASSES)

    def forward(self, x):
        for i, (embed, norm, blocks) in enumerate(zip(self.embed, self.norms, self.stages)):
            x = embed(x)
            b, e, grid, _ = x.shape
            x = norm(x.flatten(2).transpose(1, 2))
            g = 1 if i < len(self.tokens) else 0
            if g:
                x = torch.cat([self.tokens[i].expand(b, -1, -1), x], 1)
            for block in blocks:
                x = block(x)
            if g:
                x = x[:, g:].transpose(1, 2).reshape(b, e, grid, grid)
        return self.head(self.norm(x).mean(1))


class Separable(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs), nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 1))


class CvtBlock(nn.Module):
    def __init__(self, grid, e, heads, first, g, long_short):
        super().__init__()
        self.h, self.g, self.grid = heads, g, grid
        self.n1, self.n2, self.mlp = nn.LayerNorm(e), nn.LayerNorm(e), Mlp(e)
        self.q, self.k, self.v = (Separable(e, e) for _ in range(3))
        self.out = nn.Identity() if first else nn.Linear(e, e)
        self.core = None
        if long_short:
            w, r = long_short
            self.dp, self.core = Separable(e, heads * r), LongShort2d(grid, w, r, g, heads, e, False)

    def attend(self, x):
        b, t, e = x.shape
        c, image = x[:, : self.g], x[:, self.g:].transpose(1, 2).reshape(b, e, self.grid, self.grid)
        flat = lambda y: y.flatten(2).transpose(1, 2)
        q, k, v = (torch.cat([c, flat(f(image))], 1) for f in (self.q, self.k, self.v))
        if self.core is not None:
            return self.out(self.core(q, k, v, flat(self.dp(image))))
        q, k, v = (a.reshape(b, t, self.h, -1).transpose(1, 2) for a in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(b, t, e))

    def forward(self, x):
        x = x + self.attend(self.n1(x))
        return x + self.mlp(self.n2(x))


class Cvt(nn.Module):
    WINDOWS = {224: (8, 4, 2), 384: (12, 6, 3), 448: (16, 8, 4)}

    def __init__(self, size, depths, long_short):
        super().__init__()
        self.embed, self.norms, self.stages = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inputs, grid = 3, size
        for i, (k, s, p, e, h) in enumerate([(7, 4, 2, 64, 1), (3, 2, 1, 192, 3), (3, 2, 1, 384, 6)]):
            grid = (grid + 2 * p - k) // s + 1
            ls = (self.WINDOWS[size][i], (16, 16, 8)[i]) if long_short else None
            self.embed.append(nn.Conv2d(inputs, e, k, s, p)); self.norms.append(nn.LayerNorm(e))
            self.stages.append(nn.ModuleList(CvtBlock(grid, e, h, i == 0, int(i == 2), ls) for _ in range(depths[i])))
            inputs = e
        self.token = nn.Parameter(torch.randn(1, 1, inputs))
        self.norm, self.head = nn.LayerNorm(inputs), nn.Linear(inputs, CLASSES)

    def forward(self, x):
        for i, (embed, norm, blocks) in enumerate(zip(self.embed, self.norms, self.stages)):
            x = embed(x)
            b, e, grid, _ = x.shape
            x = norm(x.flatten(2).transpose(1, 2))
            if i == 2:
                x = torch.cat([self.token.expand(b, -1, -1), x], 1)
            for block in blocks:
                x = block(x)
            if i < 2:
                x = x.transpose(1, 2).reshape(b, e, grid, grid)
        return self.head(self.norm(x[:, 0]))


def build(preset, model, size):
    """The model that `effattn` builds for a preset with a mechanism."""
    if preset in ("vil-ls-medium", "vil-ls-base") and model == "ls2d":
        return Vil(size, (1, 4, 16, 1) if preset == "vil-ls-medium" else (1, 8, 24, 1), 8 if size >= 384 else 7)
    if preset in ("cvt-13", "cvt-21") and model in ("full", "ls2d"):
        return Cvt(size, (1, 2, 10) if preset == "cvt-13" else (1, 4, 16), model == "ls2d")
    if preset in ("deit-s", "deit-b") and model == "full":
        import timm
        name = "deit_small_patch16_224" if preset == "deit-s" else "deit_base_patch16_224"
        return timm.create_model(name, img_size=size)
    if preset == "resnet-50" and model == "full":
        import torchvision
        return torchvision.models.resnet50()
    raise SystemExit(f"no model {model} of preset {preset}")


def measure(preset, name, batch, mode, a):
    torch.manual_seed(0)
    torch.randn(8, 8) @ torch.randn(8, 8)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    model = build(preset, name, a.len).to(a.device)
    cuda = a.device.startswith("cuda")
    sync = torch.cuda.synchronize if cuda else lambda: None
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(batch, 3, a.len, a.len, device=a.device), torch.randint(0, CLASSES, (batch,), device=a.device)

    def train():
        opt.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        opt.step()

    def infer():
        with torch.inference_mode():
            model(x)

    step = train if mode == "train" else infer
    model.train(mode == "train")
    for _ in range(a.warmup):
        step()
    times, t_end = [], time.perf_counter() + a.seconds
    while len(times) < 3 or (time.perf_counter() < t_end and len(times) < 50):
        sync(); t0 = time.perf_counter(); step(); sync(); times.append(time.perf_counter() - t0)
    times.sort()
    med = times[len(times) // 2]
    return dict(preset=preset, model=name, len=a.len, batch=batch, mode=mode, ms=med * 1e3, steps_per_s=1 / med,
                runs=len(times), params=sum(p.numel() for p in model.parameters()),
                device_peak_mib=torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
                base_rss_mib=base, peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--presets", default="cvt-13"); p.add_argument("--models", default="full,ls2d")
    p.add_argument("--len", type=int, default=224); p.add_argument("--batch", default="1,8")
    p.add_argument("--mode", default="both"); p.add_argument("--threads", type=int, default=2)
    p.add_argument("--warmup", type=int, default=2); p.add_argument("--seconds", type=float, default=3)
    p.add_argument("--device", default="cpu")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    for preset in a.presets.split(","):
        for name in a.models.split(","):
            for batch in map(int, a.batch.split(",")):
                for mode in (["infer", "train"] if a.mode == "both" else [a.mode]):
                    pid = os.fork()      # a fresh process each, so that the peak memory is its own
                    if pid == 0:
                        cell = dict(preset=preset, model=name, len=a.len, batch=batch, mode=mode)
                        try:
                            print(json.dumps(measure(preset, name, batch, mode, a)), flush=True); os._exit(0)
                        except BaseException as e:
                            print(json.dumps(dict(cell, error=str(e)[:200])), flush=True); os._exit(1)
                    os.waitpid(pid, 0)
