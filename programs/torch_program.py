"""effattn's shipped PyTorch programs: torch, torch-compile, torch-autocast. Mechanisms as a PyTorch user would write them."""
import math, sys

import torch
import torch.nn.functional as F
from effattn_program import mechanism, run

import torch_mixers


def visible(w):
    """[B,1,1,Nk] bool, or None where everything is."""
    return w["mask"].bool()[:, None, None] if "mask" in w else None


def pad(t, c):
    """[B,H,N,D] with zeros behind, to a multiple of c."""
    p = -t.shape[2] % c
    return F.pad(t, (0, 0, 0, p)) if p else t


@mechanism("full", knobs={"mem": [0]})
def full(q, k, v, x, w, knobs, causal):
    keep = visible(w)
    if keep is not None and causal:
        keep = keep & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, keep, is_causal=causal and keep is None)


# ---------------------------------------------------------------------------------------------- linear attention
# elu(t) + 1 loses exp(t) below -16 in float32, and its gradients with it (linear-bidir-04)
FEATURES = {"elu1": lambda t: torch.where(t > 0, t + 1, t.clamp_max(0).exp()), "relu": F.relu, "identity": lambda t: t, "leaky_relu": F.leaky_relu}


def divide(num, den, guard, eps):
    if guard == "add":
        return num / (den + eps)
    if guard == "clamp_min":
        return num / den.clamp_min(eps)
    sign = torch.where(den >= 0, eps, -eps)
    return num / torch.where(den.abs() >= eps, den, sign)


def kernel_attention(q, k, v, causal, chunk=128):
    """Numerators and denominators of features q, k."""
    if not causal:
        return q @ (k.transpose(-1, -2) @ v), (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
    n = q.shape[2]
    v = F.pad(v, (0, 1), value=1.0)
    q, k, v = (pad(t, chunk).unflatten(2, (-1, chunk)) for t in (q, k, v))
    o = (q @ k.transpose(-1, -2)).tril() @ v
    if q.shape[2] > 1:
        state = k.transpose(-1, -2) @ v
        o = o + q @ F.pad(state[:, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(2)
    o = o.flatten(2, 3)[:, :, :n]
    return o[..., :-1], o[..., -1:]


def linear(q, k, v, x, w, knobs, causal):
    phi = FEATURES[knobs["feature"]]
    q, k, keep = phi(q), phi(k), visible(w)
    if knobs.get("reweight") == "cos":
        m = knobs.get("m") or max(q.shape[2], k.shape[2])

        def weigh(t):
            angle = (math.pi / (2 * m) * torch.arange(1, t.shape[2] + 1, dtype=torch.float64, device=t.device))[:, None]
            return torch.cat([t * angle.cos().to(t.dtype), t * angle.sin().to(t.dtype)], -1)
        q, k = weigh(q), weigh(k)
    if keep is not None:
        k = k * keep.squeeze(1).unsqueeze(-1).to(k.dtype)
    num, den = kernel_attention(q, k, v, causal)
    return divide(num, den, knobs["guard"], knobs["eps"])


USUAL = {
    "linear": dict(feature="elu1", guard="add"),
    "relu-linear": dict(feature="relu", guard="clamp_min"),
    "identity-linear": dict(feature="identity", guard="signed_clamp"),
    "leakyrelu-linear": dict(feature="leaky_relu", guard="signed_clamp"),
    "cosformer": dict(feature="relu", reweight="cos", guard="clamp_min"),
}
for name, usual in USUAL.items():
    def fixed(q, k, v, x, w, knobs, causal, usual=usual):
        return linear(q, k, v, x, w, {**usual, "eps": 1e-6, **knobs}, causal)
    mechanism(name, knobs={"negative_slope": [0.01]})(fixed)


@mechanism("performer", knobs={"lra_compat": [False], "mem": [0]})
def performer(q, k, v, x, w, knobs, causal):
    omega, keep, d = w["omega"], visible(w), q.shape[-1]
    eps = knobs["feature_eps"]
    eps = (0.0 if causal else 1e-4) if eps is None else eps  # what effattn resolves by itself
    q, k = q * d ** -0.25, k * d ** -0.25
    fixed = (lambda t: t.detach()) if knobs["detach"] else (lambda t: t)
    a, b = q @ omega.t(), k @ omega.t()
    hidden = None if keep is None else ~keep.transpose(-1, -2)
    seen = b if hidden is None else b.masked_fill(hidden, float("-inf"))
    feature = lambda t, y, c: (torch.exp(t - y.square().sum(-1, keepdim=True) / 2 - c) + eps) / len(omega) ** 0.5
    a = feature(a, q, fixed(a.amax(-1, keepdim=True)))
    b = feature(b, k, fixed(seen.amax((-1, -2), keepdim=True)))
    b = b if hidden is None else b.masked_fill(hidden, 0)
    num, den = kernel_attention(a, b, v, causal)
    return num / (den + (knobs["den_eps"] or 0) * a.sum(-1, keepdim=True))


# ---------------------------------------------------------------------------------------------- slots and windows
@mechanism("linformer", knobs={"dual_ln": [False], "mem": [0]}, causal=[False])
def linformer(q, k, v, x, w, knobs, causal):
    e, keep = w["E"][..., : k.shape[2]], visible(w)
    f = w["F"][..., : k.shape[2]] if "F" in w else e
    if keep is not None:
        keep = keep.transpose(-1, -2).to(k.dtype)
        k, v = k * keep, v * keep
    return F.scaled_dot_product_attention(q, e @ k, f @ v)


@mechanism("local", knobs={"layout": [None, "blocks"]})
def local(q, k, v, x, w, knobs, causal):
    n, b = q.shape[2], knobs["block"]
    keep = visible(w)
    if keep is None and n % b:
        keep = torch.ones(len(q), 1, 1, n, dtype=torch.bool, device=q.device)
    if keep is not None:
        keep = F.pad(keep, (0, -n % b)).unflatten(3, (-1, b)).transpose(2, 3)  # [B,1,blocks,1,b]
        keep = keep & torch.ones(b, b, dtype=torch.bool, device=q.device).tril() if causal else keep
    q, k, v = (pad(t, b).unflatten(2, (-1, b)) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, keep, is_causal=causal and keep is None)
    return o.flatten(2, 3)[:, :, :n]


def long_short(q, k, v, x, w, knobs, window):
    """Slots of the whole sequence (where there are dp.weight) and the keys of a window, one softmax; bidirectional."""
    b, h, n, d = q.shape
    keep = w.get("mask")
    merge = lambda t: t.transpose(1, 2).flatten(2)
    heads = lambda t: t.unflatten(-1, (h, d)).transpose(1, 2)
    norm = lambda t, name: heads(F.layer_norm(merge(t), (h * d,), w[name + ".weight"], w[name + ".bias"]))
    q = q * d ** -0.5
    if knobs.get("dual_ln"):
        k, v = norm(k, "ln_local"), norm(v, "ln_local")
    logits, values = [], []
    if "dp.weight" in w:
        p = F.linear(x, w["dp.weight"], w["dp.bias"])
        p = p if keep is None else p.masked_fill(keep[..., None] == 0, float("-inf"))
        p = p.softmax(1).unflatten(-1, (h, -1)).permute(0, 2, 3, 1)
        kg, vg = (p @ t if keep is None else p @ (t * keep[:, None, :, None]) for t in (k, v))
        if knobs.get("dual_ln"):
            kg, vg = norm(kg, "ln_global"), norm(vg, "ln_global")
        logits.append(q @ kg.transpose(-1, -2))
    if not window:
        return logits[0].softmax(-1) @ vg
    e, behind = max(window // 2, 1), -n % window
    tiles = lambda t: F.pad(t, (0, 0, e, e + behind)).unfold(2, window + 2 * e, window).transpose(-1, -2)
    seen = torch.ones(1, n, device=q.device) if keep is None else keep
    seen = F.pad(seen, (e, e + behind)).unfold(1, window + 2 * e, window) > 0  # [B,blocks,keys]
    near = pad(q, window).unflatten(2, (-1, window)) @ tiles(k).transpose(-1, -2)
    near = near.masked_fill(~seen[:, None, :, None], float("-inf" if logits else torch.finfo(near.dtype).min))
    logits.append(near.flatten(2, 3)[:, :, :n])
    s = torch.cat(logits, -1).softmax(-1)
    r = s.shape[-1] - near.shape[-1]
    out = (pad(s[..., r:], window).unflatten(2, (-1, window)) @ tiles(v)).flatten(2, 3)[:, :, :n]
    return out + s[..., :r] @ vg if r else out


@mechanism("ls", knobs={"rel_pos": [False], "cls": [False], "mem": [0]}, causal=[False])
def ls(q, k, v, x, w, knobs, causal):
    return long_short(q, k, v, x, w, knobs, knobs["w"])


@mechanism("dp", knobs={"cls": [False], "mem": [0]}, causal=[False])
def dp(q, k, v, x, w, knobs, causal):
    return long_short(q, k, v, x, w, knobs, 0)


@mechanism("window", knobs={"mem": [0]}, causal=[False])
def window(q, k, v, x, w, knobs, causal):
    return long_short(q, k, v, x, w, knobs, knobs["w"])


# ---------------------------------------------------------------------------------------------- the mixers
def mixer(name, core):
    def f(q, k, v, x, w, knobs, causal):
        tensors = {key: t for key, t in dict(q=q, k=k, v=v, x=x, **w).items() if t is not None}
        knobs = dict(knobs, kind=name)
        if name == "mega":  # what effattn resolves by itself
            knobs["chunk"] = knobs.get("chunk") or -1
            knobs["hdim"] = w["w_v"].shape[1]
        return core(tensors, knobs, causal, torch_mixers.CHUNK.get(name))
    causal = [True] if name in torch_mixers.CAUSAL_ONLY else [False] if name in torch_mixers.BIDIR_ONLY else [False, True]
    mechanism(name, causal=causal)(f)


for name, core in torch_mixers.CORE.items():
    mixer(name, core)

if __name__ == "__main__":
    dtypes = ["f32", "bf16"] if "--autocast" in sys.argv else ["f32"]
    run(dtypes, compiled="--compile" in sys.argv)
