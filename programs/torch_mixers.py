"""The mechanisms of SPEC-modern in PyTorch, for torch_program.py: f(T, knobs, causal, chunk), T the tensors by name. CPU.

Linear recurrences are chunked: matrix products over all chunks at once, one fused operation per chunk for the state.
"""
import functools, math

import torch
import torch.nn.functional as F

CHUNK = {"retention": 128, "gla": 32, "mamba2": 128, "deltanet": 64, "gated-deltanet": 64, "based": 128,
         "aft-simple": 64, "aft-local": 32, "streaming": 128, "s5": None, "lru": None}
CAUSAL_ONLY, BIDIR_ONLY = {"deltanet", "gated-deltanet", "streaming"}, {"luna", "fnet"}


# ------------------------------------------------------------------------------------------------ small parts
def table(f):
    """A constant, built once in float64, usable in both modes."""
    cached = functools.lru_cache(maxsize=None)(torch.inference_mode(False)(f))
    return cached


def pad_to(t, c, dim=2):
    p = -t.shape[dim] % c
    return F.pad(t, (0, 0) * (t.dim() - dim - 1) + (0, p)) if p else t


def split(t, c):
    """[B,H,N,..] -> contiguous [B,H,nc,c,..]"""
    return pad_to(t, c).unflatten(2, (-1, c)).contiguous()


def join(t, n):
    """[B,H,nc,c,D] -> [B,H,N,D] stored as [B,N,H,D], so that merging the heads afterwards is free"""
    b, h, m, c, d = t.shape
    return t.permute(0, 2, 3, 1, 4).reshape(b, m * c, h, d)[:, :n].transpose(1, 2)


def keep4(t, T):
    return t if "mask" not in T else t * T["mask"][:, None, :, None]


def keep3(t, T):
    return t if "mask" not in T else t * T["mask"][:, None, :]


def heads_of(x, w, bias=None):
    """x [B,N,E] with w [H,E,D] -> [B,N,H,D]"""
    y = x @ w.permute(1, 0, 2).flatten(1)
    y = y.unflatten(-1, (w.shape[0], w.shape[2]))
    return y if bias is None else y + bias


def out_stage(o, T, cfg):
    o = o.transpose(1, 2)
    if cfg["norm"] == "rms":
        o = F.rms_norm(o, o.shape[-1:], T.get("norm_w"), cfg["norm_eps"])
    elif cfg["norm"] == "ln":
        o = F.layer_norm(o, o.shape[-1:], None, None, cfg["norm_eps"])
        if "norm_w" in T:
            o = o * T["norm_w"]
    elif "norm_w" in T:
        o = o * T["norm_w"]
    if cfg["gate"] == "swish":
        o = o * F.silu(heads_of(T["x"], T["w_g"], T.get("b_g")))
    return o.transpose(1, 2)


@table
def low(c, dtype=torch.bool):
    return torch.ones(c, c, dtype=dtype).tril()


@table
def angles(n, freq, offset, style):
    a = (torch.arange(n, dtype=torch.float64) + offset)[:, None] * torch.tensor(freq, dtype=torch.float64)
    return torch.polar(torch.ones_like(a), a).to(torch.complex64) if style == "interleaved" else (a.cos().float(), a.sin().float())


def rotate(x, freq, style, offset=0, cap=None):
    """x [..,N,D]: its first 2*len(freq) entries by angle position * freq; positions above `cap` count as cap"""
    n, r = x.shape[-2], 2 * len(freq)
    t = angles(n if cap is None else min(n, cap + 1), freq, offset, style)
    if cap is not None and n > cap + 1:
        hold = lambda a: torch.cat([a, a[-1:].expand(n - cap - 1, -1)])
        t = hold(t) if style == "interleaved" else tuple(map(hold, t))
    y = x if r == x.shape[-1] else x[..., :r]
    if style == "interleaved":
        y = torch.view_as_real(torch.view_as_complex(y.float().unflatten(-1, (-1, 2))) * t).flatten(-2)
    else:
        a, b = y.chunk(2, -1)
        c, s = t
        y = torch.cat([a * c - b * s, b * c + a * s], -1)
    return y if r == x.shape[-1] else torch.cat([y, x[..., r:]], -1)


class Scan(torch.autograd.Function):
    """State before each chunk (dim 2), from the left or (reverse) from the right:
    S <- a_c * S + X_c, or (late) S <- a_c * (S + X_c)."""
    @staticmethod
    def forward(ctx, a, X, reverse, late):
        out = torch.empty_like(X)
        n = X.shape[2]
        order = range(n - 1, -1, -1) if reverse else range(n)
        al, xl, ol = a.unbind(2), X.unbind(2), out.unbind(2)
        ol[order[0]].zero_()
        for c, d in zip(order, order[1:]):
            if late:
                torch.add(ol[c], xl[c], out=ol[d]).mul_(al[c])
            else:
                torch.addcmul(xl[c], al[c], ol[c], out=ol[d])
        ctx.save_for_backward(a, out, X if late else None)
        ctx.reverse = reverse
        return out

    @staticmethod
    def backward(ctx, go):
        a, out, X = ctx.saved_tensors
        n = out.shape[2]
        order = range(n) if ctx.reverse else range(n - 1, -1, -1)
        ac = a.conj().resolve_conj()
        g = torch.empty_like(out)                               # gradient of the state after chunk c
        al, gl, dl = ac.unbind(2), g.unbind(2), go.unbind(2)
        gl[order[0]].zero_()
        for c, d in zip(order, order[1:]):
            torch.addcmul(dl[c], al[c], gl[c], out=gl[d])
        ga = None
        if ctx.needs_input_grad[0]:
            ga = (g * ((out if X is None else out + X).conj())).sum_to_size(a.shape)
        return ga, g if X is None else g * ac, None, None


class MatScan(torch.autograd.Function):
    """State before each chunk: S <- M_c S + P_c;  M [nc,b,K,K], P [nc,b,K,D]"""
    @staticmethod
    def forward(ctx, M, P):
        out = torch.empty_like(P)
        out[0].zero_()
        for c in range(len(P) - 1):
            torch.baddbmm(P[c], M[c], out[c], out=out[c + 1])
        ctx.save_for_backward(M, out)
        return out

    @staticmethod
    def backward(ctx, go):
        M, out = ctx.saved_tensors
        g = torch.empty_like(out)
        g[-1].zero_()
        for c in range(len(out) - 1, 0, -1):
            torch.baddbmm(go[c], M[c].transpose(1, 2), g[c], out=g[c - 1])
        return g @ out.transpose(-1, -2), g


def late_scan(a, X, reverse=False):
    return Scan.apply(a.float(), X.float(), reverse, True)


# --------------------------------------------------------------------------- 1 retention, 3 mamba2: scalar decay
@table
def ret_tables(gamma, H, c, m, scale, causal):
    g = torch.tensor(gamma, dtype=torch.float64) if gamma else 1 - 2.0 ** (-5.0 - torch.arange(H, dtype=torch.float64))
    p = lambda t: torch.exp(g.log().view(-1, *[1] * t.dim()) * t)
    i, j = torch.arange(c, dtype=torch.float64), torch.arange(m, dtype=torch.float64)
    d, e = i[:, None] - i, j[:, None] - j
    intra = p(d.abs()) * (d >= 0 if causal else 1) * scale
    carry = p(c * (e - 1).clamp_min(0)) * (e > 0)
    up, down = p(i + 1)[:, None, :, None], p(c - 1 - i)[:, None, :, None]
    # query/key factors forward, query/key factors backward
    return [t.float() for t in (intra[:, None], carry, up, down * scale, p(c - i)[:, None, :, None], p(i)[:, None, :, None] * scale)]


def retention(T, cfg, causal, C):
    q, k, v = T["q"], keep4(T["k"], T), T["v"]
    B, H, n, D = q.shape
    if cfg["rotary"] == "retnet":
        f, style = tuple(10000.0 ** (-m / (D // 2 - 1)) for m in range(D // 2)), "interleaved"
    elif cfg["rotary"] != "none":
        f, style = tuple(10000.0 ** (-2 * m / D) for m in range(D // 2)), cfg["rotary"][5:]
    if cfg["rotary"] != "none":
        q, k = rotate(q, f, style), rotate(k, f, style)
    gamma = tuple(cfg["gamma"]) if cfg["gamma"] else None
    if cfg["score_norm"] == "torchscale":                       # not linear: needs every row of scores
        dec = ret_tables(gamma, H, n, 1, 1.0, causal)[0][:, 0]
        a = q @ k.transpose(-1, -2) * (dec * D ** -0.5 / dec.sum(-1, keepdim=True).sqrt())
        return out_stage((a / a.detach().abs().sum(-1, keepdim=True).clamp(1, 5e4)) @ v, T, cfg)
    q, k, v = split(q, C), split(k, C), split(v, C)
    m = q.shape[2]
    intra, carry, qf, kf, qb, kb = ret_tables(gamma, H, C, m, D ** -0.5, causal)
    o = (q @ k.transpose(-1, -2) * intra) @ v
    if m > 1:
        state = lambda kk, L: (L @ ((k * kk).transpose(-1, -2) @ v).flatten(-2)).unflatten(-1, (D, -1))
        o = o + (q * qf) @ state(kf, carry)
        if not causal:
            o = o + (q * qb) @ state(kb, carry.transpose(-1, -2))
    return out_stage(join(o, n), T, cfg)


def segments(t):
    """t [..,m] -> [..,m,m]: sum of t over the chunks strictly between column and row, -inf unless column < row"""
    m = t.shape[-1]
    x = F.pad(t[..., :-1], (1, 0))                              # row c adds chunk c-1
    x = x[..., :, None].expand(*x.shape, m).tril(-2).cumsum(-2)  # direct sums, no differences of long ones
    return x.masked_fill(~low(m).tril(-1), float("-inf"))


def mamba2(T, cfg, causal, C):
    q, k, v = T["q"], T["k"], T["v"]
    B, H, n, D = v.shape
    R = H // q.shape[1]
    dt = F.softplus(T["x"] @ T["w_dt"].t() + T["dt_bias"]).transpose(1, 2).float()
    lo, hi = cfg.get("dt_limit") or (0.0, None)
    dt = dt.clamp(lo if lo > 0 else None, hi) if lo > 0 or hi is not None else dt
    dt = keep3(dt, T)
    dt = split(dt, C)                                           # [B,H,m,C]
    q, k, vc = split(q, C), split(k, C), split(v, C)
    lg = dt * -torch.exp(T["A_log"])[:, None, None]
    c = lg @ low(C, torch.float32).t()
    tot = c[..., -1:]
    s = q @ k.transpose(-1, -2)                                 # once per group
    rep = (lambda t: t) if R == 1 else (lambda t: t.repeat_interleave(R, 1) if t.shape[1] > 1 else t)
    d = c[..., :, None] - c[..., None, :]
    if causal:
        d = d.masked_fill(~low(C), float("-inf"))
    else:
        e = c - lg
        d = torch.where(low(C), d, e[..., None, :] - e[..., :, None])
    o = (rep(s) * (d.exp() * dt[..., None, :])) @ vc
    m = dt.shape[2]
    if m > 1:
        q, k, K = rep(q), rep(k), q.shape[-1]
        L = segments(tot[..., 0]).exp()

        def part(qw, kw, L):
            S = (k * kw[..., None]).transpose(-1, -2) @ vc
            S = (L @ S.flatten(-2)).unflatten(-1, (K, D))
            return (q * qw[..., None]) @ S
        o = o + part(c.exp(), (tot - c).exp() * dt, L)
        if not causal:
            o = o + part((tot - e).exp(), e.exp() * dt, L.transpose(-1, -2))
    o = join(o, n)
    o = o.transpose(1, 2) + T["D_skip"][:, None] * v.transpose(1, 2)
    if cfg["out_norm"] == "gated-rms":
        o = o * F.silu(heads_of(T["x"], T["w_z"]))
        o = F.rms_norm(o, o.shape[-2:], T["norm_w"], cfg["norm_eps"])
    return o.transpose(1, 2)


# ------------------------------------------------------------------------------------- 2 gla: decay per channel
@table
def middle(c):
    """[c+1,c]: row i sums from the middle to before entry i, with a minus in front of the middle"""
    i, j = torch.arange(c + 1)[:, None], torch.arange(c)
    return ((j >= c // 2) & (j < i)).float() - ((j < c // 2) & (j >= i)).float()


def gla_gate(T, cfg, suf=""):
    w2 = T["w_gk2" + suf]
    z = (T["x"] @ T["w_gk1" + suf]) @ w2.permute(1, 0, 2).flatten(1) + T["b_gk" + suf].flatten()
    g = F.logsigmoid(z.float()) / cfg["tau"]
    if cfg["clamp_min"] is not None:
        g = g.clamp_min(cfg["clamp_min"])
    return keep4(g.unflatten(-1, (w2.shape[0], -1)).transpose(1, 2), T)


def gla(T, cfg, causal, C):
    """Exponents are taken from the middle of each chunk, so that one scaled copy of q and of k serves both the scores
    inside the chunk and the state (kept scaled to the middles). The chunk is halved while half of it decays by more
    than exp(-60) in some channel, so nothing overflows."""
    n, D = T["q"].shape[2:]
    lg = gla_gate(T, cfg)
    shared = causal or cfg["bidir_gate"] == "shared"
    lb = lg if shared else gla_gate(T, cfg, "_bwd")
    with torch.no_grad():
        g = lg if shared else torch.minimum(lg, lb)
        while C > 2 and -pad_to(g, C // 2).unflatten(2, (-1, C // 2)).sum(3).amin() > 60:
            C //= 2
    q, k, v = split(T["q"] * D ** -0.5, C), split(keep4(T["k"], T), C), split(T["v"], C)
    m, tri = q.shape[2], middle(C)

    def one_way(lg, reverse):
        lg = split(lg, C)
        c = tri @ lg                                            # rows 0..C: sum from the middle to before/after the row
        c = c[..., :C, :] if reverse else c[..., 1:, :]
        f, r = c.exp(), (-c).exp()
        qs, ks = (q * r, k * f) if reverse else (q * f, k * r)
        a, S = qs @ ks.transpose(-1, -2), None
        if m > 1:                                               # decay from the middle of a chunk to that of the next
            half = lg.unflatten(3, (2, -1)).sum(4)              # [B,H,m,2,D]
            step = F.pad((half[:, :, :-1, 1] + half[:, :, 1:, 0]).exp(), (0, 0, 0, 1))
            if reverse:
                step = step.roll(1, 2)
            S = qs @ late_scan(step[..., None], ks.transpose(-1, -2) @ v, reverse)
        return a, S
    a, S = one_way(lg, False)
    if causal:
        a = a.masked_fill(~low(C), 0)
    else:
        b, Sb = one_way(lb, True)
        a = torch.where(low(C), a, b)
        S = None if S is None else S + Sb
    o = a @ v if S is None else a @ v + S
    return out_stage(join(o, n), T, cfg)


# ------------------------------------------------------------------------------- 4 deltanet, gated-deltanet
def delta(T, cfg, causal, C):
    q, k, v = T["q"], T["k"], T["v"]
    B, H, n, D = v.shape
    act = lambda t, a: F.silu(t) if a == "silu" else t

    def lead(t):                                                # [B,H,N,..] -> contiguous [nc,B*H,C,..]
        t = pad_to(t, C).unflatten(2, (-1, C))
        return t.permute(2, 0, 1, *range(3, t.dim())).flatten(1, 2).contiguous()
    q, k, v = (lead(act(t, a).float()) for t, a in ((q, cfg["qk_act"]), (k, cfg["qk_act"]), (v, cfg["v_act"])))
    unit = lambda t: t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + cfg["l2_eps"])
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    per_head = lambda w: (T["x"] @ w.t()).transpose(1, 2).float()
    beta = lead(keep3(torch.sigmoid(per_head(T["w_beta"])) * (2.0 if cfg["neg_eigval"] else 1.0), T))[..., None]
    with torch.autocast("cpu", enabled=False):
        kt = k.transpose(-1, -2)
        if "w_a" in T:
            lg = F.softplus(per_head(T["w_a"]) + T["dt_bias"][:, None]) * -torch.exp(T["A_log"])[:, None]
            c = lead(keep3(lg, T)) @ low(C, torch.float32).t()
            L = (c[..., :, None] - c[..., None, :]).masked_fill(~low(C), float("-inf")).exp()
            tot, up, down = c[..., -1:, None].exp(), c.exp()[..., None], (c[..., -1:] - c).exp()[..., None]
            kin, kout, qin = k * up, k * down, q * up
        else:
            L, tot, kin, kout, qin = low(C, torch.float32), 1.0, k, k, q
        A = beta * (k @ kt) * L                                 # the solver reads its strictly lower part only
        X = torch.linalg.solve_triangular(A, beta * torch.cat([v, kin], -1), upper=False, unitriangular=True)
        u = X[..., :D]
        s = (q @ kt) * L
        if len(q) > 1:
            W = X[..., D:]
            K2 = kout.transpose(-1, -2) @ X
            eye = torch.eye(W.shape[-1])
            S = MatScan.apply(eye * tot - K2[..., D:], K2[..., :D].contiguous())
            o = qin @ S + s @ (u - W @ S)
        else:
            o = s @ u
    o = o.unflatten(1, (B, H)).permute(1, 2, 0, 3, 4)
    return out_stage(join(o, n), T, cfg)


# ---------------------------------------------------------------------------------------------------- 5 based
@table
def based_maps(d):
    """Two linear maps (weight, bias) whose element-wise product is the folded second-order feature vector."""
    i, j = torch.triu_indices(d, d)
    one = torch.eye(d, dtype=torch.float64)
    z = torch.zeros(1, d, dtype=torch.float64)
    a = torch.cat([z, one * d ** -0.25, one[i]])
    b = torch.cat([z, z.expand(d, d), one[j] * torch.where(i == j, (2 * d) ** -0.5, d ** -0.5).double()[:, None]])
    ba, bb = torch.zeros(len(a), dtype=torch.float64), torch.zeros(len(a), dtype=torch.float64)
    ba[0], bb[:1 + d] = 1, 1
    return [t.float() for t in (a, ba, b, bb)]


def based(T, cfg, causal, C):
    q, k, v = T["q"], T["k"], T["v"]
    n, d, D = q.shape[2], q.shape[3], v.shape[3]
    a, ba, b, bb = based_maps(d)
    feat = lambda t: F.linear(t, a, ba) * F.linear(t, b, bb)
    v = keep4(F.pad(v, (0, 1), value=1.0), T)                   # last column: the denominator
    if not causal:
        o = feat(q) @ (feat(k).transpose(-1, -2) @ v)
    else:
        q, k, v = split(q, C), split(k, C), split(v, C)
        s = q @ k.transpose(-1, -2) * d ** -0.5
        o = (1 + s + 0.5 * s * s).masked_fill(~low(C), 0) @ v
        if q.shape[2] > 1:
            S = feat(k).transpose(-1, -2) @ v
            S = F.pad(S[:, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(2)
            o = o + feat(q) @ S
        o = join(o, n)
    return o[..., :D] / (o[..., D:] + cfg["eps"]) if cfg["normalise"] else o[..., :D]


# ----------------------------------------------------------------------------------------------------- 6 luna
def luna(T, cfg, causal, C):
    q, k = T["q"], T["k"]
    v = T["v"] if "v" in T else k
    B, H, n, D = q.shape
    heads = lambda t: t.unflatten(-1, (H, D)).transpose(1, 2)
    m = T.get("mask")
    pq = heads(T["p"] @ T["w_pq"] + T["b_pq"])
    yp = F.scaled_dot_product_attention(pq, k, v, None if m is None else (m > 0.5)[:, None, None, :])
    yp = yp.transpose(1, 2).flatten(2)
    kc = heads(yp @ T["w_k"] + T["b_k"])
    vc = heads(yp @ T["w_v"] + T["b_v"]) if "w_v" in T else kc
    vis = None
    if m is None and cfg["dynamic_p"]:
        kc, vc = kc[:, :, :n], vc[:, :, :n]  # no more rows than positions
    elif cfg["dynamic_p"]:
        vis = (torch.arange(yp.shape[1]) < m.sum(1, keepdim=True))[:, None, None, :]
    return F.scaled_dot_product_attention(q, kc, vc, vis), yp


# ----------------------------------------------------------------------------------------------------- 7 fnet
class FnetMix(torch.autograd.Function):
    """Real part of the two-dimensional transform of a real array; symmetric, so its own backward."""
    @staticmethod
    def op(x):
        e = x.shape[2]
        r = torch.fft.rfft2(x, dim=(1, 2)).real
        half = r[:, :, 1:(e + 1) // 2]                          # out[n, E-e] = out[-n, e]
        half = torch.cat([half[:, :1], half[:, 1:].flip(1)], 1).flip(2)
        return torch.cat([r, half], 2)

    @staticmethod
    def forward(ctx, x):
        return FnetMix.op(x)

    @staticmethod
    def backward(ctx, g):
        return FnetMix.op(g)


def fnet(T, cfg, causal, C):
    x = T["x"].float() if "mask" not in T else T["x"] * T["mask"][..., None]
    y = FnetMix.apply(x)
    return y / math.sqrt(x.shape[1] * x.shape[2]) if cfg["fft_norm"] == "ortho" else y


# ------------------------------------------------------------------------------------- 8 aft-simple, aft-local
@table
def band(c, window, causal):
    i, j = torch.arange(c)[:, None], torch.arange(c)
    tiles = [(i - j - o).abs() < window for o in ((-c, 0) if causal else (-c, 0, c))]
    return [tiles[0], tiles[1] & (j <= i)] if causal else tiles


def aft_tiles(T, cfg, n, C, causal):
    """Biases of a chunk's queries against the chunk before, the chunk itself, the chunk after: [h,nc,C,C] each, the
    first without row 0, the last without the last row."""
    if "w_u" in T:
        u, v = (pad_to(T[w][:, :n], C, 1).unflatten(1, (-1, C)) for w in ("w_u", "w_v"))
        v = v.transpose(-1, -2)
        return [u[:, 1:] @ v[:, :-1], u @ v] + ([] if causal else [u[:, :-1] @ v[:, 1:]])
    w, p = T["w_bias"][:, :n, :n], -n % C
    w = F.pad(w, (0, p, 0, p)).unflatten(2, (-1, C)).unflatten(1, (-1, C))
    return [w.diagonal(o, 1, 3).permute(0, 3, 1, 2) for o in ((-1, 0) if causal else (-1, 0, 1))]


def aft(T, cfg, causal, C):
    q, k, v = T["q"], T["k"], T["v"]
    B, H, n, D = q.shape
    local = cfg.get("window") is not None
    flat = H > 1 and not (local and cfg["per_head"])            # heads make no difference: all channels at once
    if flat:
        q, k, v = (t.transpose(1, 2).flatten(2)[:, None] for t in (q, k, v))
    if "mask" in T:
        k = k.masked_fill((T["mask"] < 0.5)[:, None, :, None], float("-inf"))
    if not local and not causal:
        o = (k.softmax(2) * v).sum(2, keepdim=True)
    else:
        if local:
            while C < min(cfg["window"], n):
                C *= 2
        p = -n % C
        k, vc = F.pad(k, (0, 0, 0, p), value=float("-inf")) if p else k, pad_to(v, C)
        k, vc = k.unflatten(2, (-1, C)), vc.unflatten(2, (-1, C))
        with torch.no_grad():                                   # maximum so far, at the end of each chunk
            mx = k.amax(3, keepdim=True)
            mx = mx.cummax(2).values if causal else mx.amax(2, keepdim=True)
            step = (mx[:, :, :-1] - mx[:, :, 1:]).exp() if causal else None
        e = (k - mx).exp()
        tiles = []
        if local:
            tiles = [torch.expm1(w).masked_fill(~b, 0) for w, b in zip(aft_tiles(T, cfg, n, C, causal), band(C, cfg["window"], causal))]

        def weighted(t):                                        # numerator (t = e*v) or denominator (t = e)
            if causal:
                s = low(C, torch.float32) @ t + late_scan(F.pad(step, (0, 0, 0, 0, 0, 1)), t.sum(3, keepdim=True))
            else:
                s = t.sum((2, 3), keepdim=True)
            if local:
                s = s + tiles[1] @ t
                if t.shape[2] > 1:
                    prev = t[:, :, :-1] * step if causal else t[:, :, :-1]
                    s = s + F.pad(tiles[0] @ prev, (0, 0, 0, 0, 1, 0))
                    if not causal:
                        s = s + F.pad(tiles[2] @ t[:, :, 1:], (0, 0, 0, 0, 0, 1))
            return s
        o = (weighted(e * vc) / weighted(e)).flatten(2, 3)
        o = o[:, :, :n] if o.shape[2] > 1 else o
    o = torch.sigmoid(q) * o
    return o[:, 0].unflatten(-1, (H, D)).transpose(1, 2) if flat else o


# ------------------------------------------------------------------------------------------------ 9 s5, lru
def ssm_parts(T, cfg):
    """log a [P], b [P,E], [C, C_bwd] [E,P], scale"""
    if cfg["kind"] == "s5":
        lam = torch.complex(T["Lambda_re"].clamp_max(-1e-4) if cfg["clip_eigs"] else T["Lambda_re"], T["Lambda_im"])
        dt = torch.exp(T["log_step"]) * cfg["step_rescale"]
        if cfg["discretization"] == "zoh":
            lg = lam * dt
            f = (lg.exp() - 1) / lam
        else:
            lg, f = ((1 + dt / 2 * lam) / (1 - dt / 2 * lam)).log(), dt / (1 - dt / 2 * lam)
        b = f[:, None] * torch.view_as_complex(T["B"].contiguous())
        return lg, b, [torch.view_as_complex(T[c].contiguous()) for c in ("C", "C_bwd") if c in T], 2.0 if cfg["conj_sym"] else 1.0
    lg = torch.complex(-torch.exp(T["nu_log"]), torch.exp(T["theta_log"]))
    b = torch.exp(T["gamma_log"])[:, None] * torch.complex(T["B_re"], T["B_im"])
    return lg, b, [torch.complex(T["C_re" + s], T["C_im" + s]) for s in ("", "_bwd") if "C_re" + s in T], 1.0


def real_map(t):
    """complex [P,i,o] -> real [P,2i,2o], acting on (re | im) rows from the right"""
    return torch.cat([torch.cat([t.real, t.imag], -1), torch.cat([-t.imag, t.real], -1)], -2)


def ssm(T, cfg, causal, C):
    """Inside a chunk one real product per state with its powers, between chunks a scan."""
    x = T["x"].float() if "mask" not in T else T["x"] * T["mask"][..., None]
    B, n, E = x.shape
    with torch.autocast("cpu", enabled=False):
        lg, b, cs, scale = ssm_parts(T, cfg)
        P = len(lg)
        if C is None:
            C = 32 if n <= 8192 else 64
        t = pad_to(x, C, 1)
        m = t.shape[1] // C
        u = torch.cat([b.real, b.imag]) @ t.transpose(1, 2)                         # [B,2P,N]
        u = u.view(B, 2, P, m, C).permute(2, 0, 3, 1, 4).reshape(P, B * m, 2 * C)
        pw = (lg[:, None] * torch.arange(C + 1)).exp()                              # a^0 .. a^C
        z = torch.cat([torch.zeros(P, C - 1, dtype=pw.dtype), pw[:, :C]], 1)        # [P,2C-1]
        toe = z.unfold(1, C, 1)                                                     # [r,s]: a^(r+s-C+1)
        maps, carry = [real_map(toe.flip(1))], [pw[:, 1:C + 1, None].transpose(1, 2)]     # row j = C-1-r, column i: a^(i-j)
        ends = [real_map(pw[:, :C].flip(1)[:, :, None])]
        if not causal:
            maps.append(real_map(toe.flip(2)))                                      # row j, column i: a^(j-i)
            carry.append(pw[:, 1:C + 1].flip(1)[:, None])
            ends.append(real_map(pw[:, :C, None]))
        rows = torch.cat(maps, -1)
        if m > 1:
            e = u @ torch.cat(ends, -1)                                             # [P,B*m,2*dirs]
            e = torch.view_as_complex(e.view(P, B, m, -1, 2).contiguous())
            if not causal:
                e = torch.stack([e[..., 0], e[..., 1].flip(2)], -1)
            h = Scan.apply(pw[:, C].view(P, 1, 1, 1).expand(P, 1, m, 1), e, False, False)
            h = [h[..., 0]] + ([] if causal else [h[..., 1].flip(2)])
            u = torch.cat([u] + [torch.view_as_real(c.contiguous()).view(P, B * m, 2) for c in h], -1)
            zero = torch.zeros(P, 2, 2 * C)
            rows = torch.cat([rows] + [torch.cat([real_map(c) if i == j else zero for i in range(len(h))], -1)
                                       for j, c in enumerate(carry)], 1)
        s = u @ rows                                                                # [P,B*m,dirs*2*C]
        s = s.view(P, B, m, -1, C).permute(1, 3, 0, 2, 4).reshape(B, -1, m * C)     # [B, dirs*2*P, N]
        w = torch.cat([p for c in cs[:1 if causal else 2] for p in (c.real, -c.imag)], 1) * scale
        y = s.transpose(1, 2) @ w.t()
        return y[:, :n] + T["D"] * x


# --------------------------------------------------------------------------------------------- 10 mega, mega-ema
@functools.lru_cache(maxsize=None)
def fft_len(n):
    best = 1 << (n - 1).bit_length()
    for odd in (3, 5, 9, 15):
        m = odd << max(0, (-(-n // odd) - 1).bit_length())
        best = min(best, m) if m >= n else best
    return best


def ema(T, cfg, causal, C=None):
    x = T["x"].float()
    u = (x if "mask" not in T else x * T["mask"][..., None]).transpose(1, 2)
    E, n = u.shape[1:]
    p = torch.sigmoid(T["ema_delta"])
    lc = torch.log1p(-p * torch.sigmoid(T["ema_alpha"]))
    w = p * T["ema_beta"] * T["ema_gamma"] * cfg["ndim"] ** -0.5
    s = 1 << max(2, round(math.log2(n) / 2))                     # c^t = c^(s*hi) c^lo: few exponentials
    hi = (lc[..., None] * (s * torch.arange(-(-n // s)))).exp() * w[..., None]
    with torch.autocast("cpu", enabled=False):
        ker = (hi.transpose(1, 2) @ (lc[..., None] * torch.arange(s)).exp()).flatten(1)[:, :n]
    if cfg["truncation"] is not None:
        ker = ker * (torch.arange(n) < cfg["truncation"])
    L = fft_len(2 * n)
    if not causal:                                              # both directions in one circular kernel
        f, b = ker[:E], ker[E:]
        ker = torch.cat([f[:, :1] + b[:, :1], f[:, 1:], torch.zeros(E, L - 2 * n + 1), b[:, 1:].flip(1)], 1)
    y = torch.fft.irfft(torch.fft.rfft(u, L) * torch.fft.rfft(ker, L), L)[..., :n].transpose(1, 2)
    return F.silu(y + x * T["ema_omega"])


def mega_bias(T, cfg, c):
    if cfg["rel_pos"] == "simple":
        b, L = T["rel_bias"], (len(T["rel_bias"]) + 1) // 2
        return b[L - c:L + c - 1].unfold(0, c, 1).flip(0)       # Toeplitz view: row i, column j: rel_bias[j - i + L - 1]
    z = cfg["zdim"]
    f = tuple(10000.0 ** (-i / (z // 2)) for i in range(z // 2))
    return rotate(T["rel_alpha"].expand(c, z), f, "half") @ rotate(T["rel_beta"].expand(c, z), f, "half").t()


def mega(T, cfg, causal, C=None):
    x, z, hd = T["x"], cfg["zdim"], cfg["hdim"]
    B, n, E = x.shape
    res = T.get("res", x)
    v = F.silu(torch.addmm(T["b_v"], x.flatten(0, 1), T["w_v"]).view(B, n, hd))
    base = torch.addmm(T["b_mx"], ema(T, cfg, causal).flatten(0, 1), T["w_mx"]).view(B, n, -1)
    u, zz, r, hx = base.split([E, z, hd, E], -1)
    zz = F.silu(zz)
    q, k = zz * T["gamma"][0] + T["beta"][0], zz * T["gamma"][1] + T["beta"][1]
    c = cfg["chunk"] if 0 < cfg["chunk"] < n else n
    q, k, v = (pad_to(t, c, 1).unflatten(1, (-1, c)) for t in (q, k, v))
    vis = None
    if "mask" in T or n % c:
        m = T.get("mask", torch.ones(B, n))
        vis = pad_to(m, c, 1).unflatten(1, (-1, c))[..., None, :] > 0.5
    if causal:
        vis = low(c) if vis is None else vis & low(c)
    bias = mega_bias(T, cfg, c)
    if cfg["attn"] == "softmax":
        if vis is not None:
            vis = vis | ~vis.any(-1, keepdim=True)              # nothing visible (padding only): anything finite
            bias = bias.masked_fill(~vis, float("-inf"))
        w = (q @ k.transpose(-1, -2) * z ** -0.5 + bias).softmax(-1)
    else:
        if causal:
            q = q / torch.arange(1, c + 1)[:, None]
        elif vis is None:
            q = q / c
        else:
            q = q / vis.sum(-1, keepdim=True).clamp_min(1)
        s = q @ k.transpose(-1, -2) + bias
        w = 0.5 + 0.5 * torch.erf((s - 0.707107) / (0.282095 * math.sqrt(2.0))) if cfg["attn"] == "laplace" else F.relu(s).square()
        if vis is not None:
            w = w.masked_fill(~vis, 0)
    h = (w @ v).flatten(1, 2)[:, :n] * F.silu(r)
    h = F.silu(hx + torch.addmm(T["b_h"], h.flatten(0, 1), T["w_h"]).view(B, n, E))
    return torch.lerp(res, h.to(res.dtype), torch.sigmoid(u).to(res.dtype))


def mega_ema(T, cfg, causal, C=None):
    return ema(T, cfg, causal)


# -------------------------------------------------------------------------------------- 11 rope, gqa, streaming
def rope_freq(cfg, D):
    r = cfg["rotary_dim"] or D
    return tuple(cfg["base"] ** (-2 * m / r) for m in range(r // 2))


def softmax_attention(T, cfg, causal, C):
    q, k, v = T["q"], T["k"], T["v"]
    n, D = q.shape[2:]
    if cfg["rotary"] != "none":
        f = rope_freq(cfg, D)
        q, k = rotate(q, f, cfg["rotary"], cfg["offset"]), rotate(k, f, cfg["rotary"], cfg["offset"])
    vis = None
    if "mask" in T:
        vis = (T["mask"] > 0.5)[:, None, None, :]
        vis = vis & low(n) if causal else vis
    g = q.shape[1] // k.shape[1]
    if g > 1:                                                   # the fused kernel wants as many key as query heads
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    return F.scaled_dot_product_attention(q, k, v, vis, is_causal=causal and vis is None)


def streaming_mask(n, C, window, sinks, extra, keep=None):
    """additive [B or 1, nc, C, slots]; slots: sinks, one for the sink logit if any, the last window-1+C keys"""
    m = -(-n // C)
    i = torch.arange(m * C).view(m, C, 1)
    j = torch.arange(m).view(m, 1, 1) * C - (window - 1) + torch.arange(window - 1 + C)
    s = torch.arange(sinks).view(1, 1, sinks)
    near, far = (j >= 0) & (j < n) & (j <= i) & (i - j < window), (s < n) & (i - s >= window)
    near, far = near[None], far[None]
    if keep is not None:
        near = near & keep[:, j.clamp(0, n - 1).squeeze(1)][:, :, None]
        far = far & F.pad(keep, (0, max(0, sinks - n)))[:, None, None, :sinks]
    vis = torch.cat([far, torch.ones(*far.shape[:-1], extra, dtype=torch.bool), near], -1)
    vis = vis | ~vis.any(-1, keepdim=True)
    return torch.zeros(vis.shape).masked_fill_(~vis, float("-inf"))


streaming_mask_cached = table(streaming_mask)


def streaming(T, cfg, causal, C):
    """Query blocks of C over sinks + window - 1 + C gathered keys, one fused call for all blocks. Logits that are no
    dot product of rotated q and k (sinks at their cache position, a learned sink logit) travel in extra columns of q
    that meet a one in the slot's key."""
    q, k, v = T["q"], T["k"], T["v"]
    B, H, n, D = q.shape
    w, ns = min(cfg["window"], n), cfg["sinks"]
    qs = ks = None
    if cfg["rotary"] != "none":
        f, style = rope_freq(cfg, D), cfg["rotary"]
        if cfg["positions"] == "cache" and ns:
            qs = rotate(q, f, style, 0, cfg["sinks"] + cfg["window"] - 1)
            ks = rotate(k[:, :, :ns], f, style)
        q, k = rotate(q, f, style, cfg["offset"]), rotate(k, f, style, cfg["offset"])
    g = H // k.shape[1]
    if g > 1:
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
        ks = None if ks is None else ks.repeat_interleave(g, 1)
    m, p = -(-n // C), -n % C
    extra = 1 if cfg["sink_logit"] else 0
    cols = []
    if qs is not None:
        cols.append(qs @ ks.transpose(-1, -2))
    if extra:
        cols.append((T["sink_logit"] * D ** 0.5)[None, :, None, None].expand(B, H, n, 1))
    wide = sum(c.shape[-1] for c in cols)
    wide += -wide % 4

    def tiles(t, sink, sink_logit):                             # [B,H,N,D] -> [B*nc,H,slots,D']
        near = F.pad(t, (0, wide, w - 1, p)).unfold(2, w - 1 + C, C).permute(0, 2, 1, 4, 3)
        parts = [F.pad(s, (0, D + wide - s.shape[-1]))[:, None].expand(B, m, H, -1, -1) for s in (sink, sink_logit) if s is not None]
        return torch.cat(parts + [near], 3).flatten(0, 1)
    unit = lambda at: F.one_hot(torch.as_tensor(at), D + wide).to(q.dtype).expand(B, H, -1, -1)
    ns_ = min(ns, n)
    sink_k = (unit([D + i for i in range(ns_)]) if qs is not None else k[:, :, :ns_]) if ns else None
    logit_k = unit([D + (ns_ if qs is not None else 0)]) if extra else None
    kt = tiles(k, sink_k, logit_k)
    vt = tiles(v, v[:, :, :ns_] if ns else None, torch.zeros(B, H, 1, D) if extra else None)
    qt = torch.cat([q] + cols, -1) if cols else q
    qt = F.pad(qt, (0, D + wide - qt.shape[-1], 0, p)).unflatten(2, (m, C)).transpose(1, 2).flatten(0, 1)
    if "mask" in T:
        bias = streaming_mask(n, C, w, ns_, extra, T["mask"] > 0.5)
    else:
        bias = streaming_mask_cached(n, C, w, ns_, extra)
    bias = bias.expand(B, -1, -1, -1).flatten(0, 1)[:, None]
    o = F.scaled_dot_product_attention(qt, kt, vt, bias, scale=D ** -0.5)[..., :D]
    return join(o.unflatten(0, (B, m)).transpose(1, 2), n)


CORE = {"retention": retention, "gla": gla, "mamba2": mamba2, "deltanet": delta, "gated-deltanet": delta, "based": based,
        "luna": luna, "fnet": fnet, "aft-simple": aft, "aft-local": aft, "s5": ssm, "lru": ssm, "mega": mega, "mega-ema": mega_ema,
        "rope": softmax_attention, "gqa": softmax_attention, "streaming": streaming}
