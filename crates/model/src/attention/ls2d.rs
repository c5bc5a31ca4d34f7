//! Long-short attention over a grid of image tokens (`SPEC-vision.md` section 2): a window of the grid, slots that a dynamic
//! projection makes of all image tokens, and global tokens in front, in one softmax; DualLN; the released code's relative
//! bias. Image models ([`crate::vision`]) build it with what only they have: global tokens, relative bias, sizes of
//! every stage.

use candle_core::{Result, Tensor, bail};

use super::knobs::{Knob, Knobs};
use super::ls::PAPER;
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Property, Shape, Support,
};
use crate::nn::norm::Norm;
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::class_token::class_token;
use effattn_kernel::heads::{Heads, Qkv, merge, split};
use effattn_kernel::linear::linear;
use effattn_kernel::norm::EPS;
use effattn_kernel::softmax::softmax;
use effattn_kernel::window_2d::{Keys, Window2d, bias_rows, key_side, window_2d};
use effattn_record::pattern::{Grid2d, Pattern, Rule};

/// Window of a mechanism that stands alone; an image model has its own in every stage.
const WINDOW: usize = 4;
/// Slots per head, likewise.
const SLOTS: usize = 8;

pub(crate) const W: Knob<Option<usize>> = Knob::auto_int("w", 0..=1 << 12)
    .doc("side of a square of queries; 0: no window; auto: that of every stage of an image model (4 without one)")
    .source("Transformer-LS section 4.3; SPEC-vision sections 4 and 5");
pub(crate) const R: Knob<Option<usize>> = Knob::auto_int("r", 0..=1 << 12)
    .doc("slots per head; 0: none; auto: that of every stage of an image model (8 without one)")
    .source("Transformer-LS section 4.3; SPEC-vision sections 4 and 5");
pub(crate) const DUAL_LN: Knob<bool> = Knob::bool("dual_ln", true)
    .doc("one LayerNorm for keys and values at positions, another for the slots")
    .source("Transformer-LS eq. 7");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "ls2d",
    title: "Transformer-LS on images",
    paper: PAPER,
    support: Support { bidirectional: true, ..Support::NONE },
    knobs: &[W.spec(), R.spec(), DUAL_LN.spec()],
    complexity: "O(n (r + w^2) d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "One softmax over [slots; window; global tokens]: logits q_i . kg_m / sqrt(D) and q_i . k_j / sqrt(D) (+ bias), applied to [vg; v]. \
        Window: with s = max(floor(w/2), 1), the query at row y, column x sees rows floor(y/w) w - s <= y' < floor(y/w) w + w + s, columns likewise. \
        Slots and DualLN as in ls. A global token attends to [itself; the outputs of the image tokens].",
    deviations: &[
        "The released relative bias gives different offsets one row of its table (a stride of 2w where 3w belongs); kept, released weights need it.",
        "The released code takes squares that w divides; here any grid, and what lies outside it is no key.",
    ],
    exceptions: &[Exception {
        property: Property::AnyLength,
        applies: |_, _| true,
        reason: "SPEC-vision section 2: positions stand on a grid",
    }],
    idle: &[],
    in_models: InModels { dual_norm: Some(DUAL_LN), ..InModels::PLAIN },
    validate,
    needs: |knobs| Needs { x: sizes(knobs).1 > 0, ..Needs::default() },
    cost,
    pattern,
    build,
};

/// Window and slots of a mechanism that stands alone.
fn sizes(knobs: &Knobs) -> (usize, usize) {
    (knobs.get(&W).unwrap_or(WINDOW), knobs.get(&R).unwrap_or(SLOTS))
}

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if shape.grid.is_none() {
        return Err(
            "reads images: choose a preset of images (effattn list presets), or a square number of positions"
                .to_owned(),
        );
    }
    if sizes(knobs) == (0, 0) {
        return Err("w=0,r=0 leaves nothing to attend to; set w or r".to_owned());
    }
    Ok(())
}

fn alone(knobs: &Knobs, grid: Grid2d, heads: usize, width: usize) -> LongShort2dConfig {
    let (w, r) = sizes(knobs);
    LongShort2dConfig { grid, w, r, g: 0, heads, width, dual_ln: knobs.get(&DUAL_LN), rel_pos: false }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Some(grid) = shape.grid else { return Cost::default() };
    let config = alone(knobs, grid, shape.heads, shape.heads * shape.head_dim);
    let macs = config.macs();
    Cost { core_macs: shape.batch as u64 * macs, flops: macs + 5 * config.normed(), state_bytes: 0 }
}

fn pattern(knobs: &Knobs, shape: &Shape) -> Option<Pattern> {
    let (grid, (w, r)) = (shape.grid?, sizes(knobs));
    let base = match w {
        0 => Pattern::blind(grid.len(), grid.len(), false),
        w => Pattern::window_2d(grid, w),
    };
    Some(base.with_slots(r, Rule::All))
}

/// The mechanism alone, on a square of positions.
struct Square {
    attention: LongShort2d,
    scores: Option<(Tensor, Tensor)>,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let Some(grid) = Grid2d::square(config.max_len) else {
        bail!("{} positions are no square", config.max_len)
    };
    let sizes = alone(&config.knobs, grid, config.heads, config.heads * config.head_dim);
    let scores = match config.heads * sizes.r {
        0 => None,
        slots => {
            let start = Init::fan_in(config.width);
            let weight = builder.param("dp.weight", &[slots, config.width], start)?;
            Some((weight, builder.param("dp.bias", &[slots], start)?))
        }
    };
    let names = Names { local: "ln_local", global: "ln_global", bias: "rel_bias" };
    Ok(Box::new(Square { attention: LongShort2d::new(sizes, names, builder)?, scores }))
}

impl Mechanism for Square {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        if input.mask.is_some() {
            bail!("an image has no padding");
        }
        let scores = match (&self.scores, input.x) {
            (Some((weight, bias)), Some(x)) => Some(linear(x, weight, Some(bias))?),
            _ => None,
        };
        let (q, k, v) = (input.qkv.q()?, input.qkv.k()?, input.qkv.v()?);
        let rows = self.attention.forward([&q, &k, &v], scores.as_ref())?;
        Ok(Heads::Merged { rows, heads: self.attention.config.heads }.into())
    }
}

/// Sizes of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongShort2dConfig {
    /// Rows and columns of the image tokens.
    pub grid: Grid2d,
    /// Side of a square of queries; 0: no window.
    pub w: usize,
    /// Slots per head; 0: none.
    pub r: usize,
    /// Global tokens in front.
    pub g: usize,
    /// Heads.
    pub heads: usize,
    /// Width of all heads.
    pub width: usize,
    /// Whether keys and values are normalised (DualLN).
    pub dual_ln: bool,
    /// Whether the window has a relative bias.
    pub rel_pos: bool,
}

/// Names of the parameters.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// LayerNorm of keys and values at positions.
    pub local: &'static str,
    /// LayerNorm of slots.
    pub global: &'static str,
    /// Table of the relative bias.
    pub bias: &'static str,
}

impl LongShort2dConfig {
    /// # Errors
    /// Settings that leave nothing to attend to, or a bias without a window.
    pub fn validate(&self) -> std::result::Result<(), String> {
        if self.grid.is_empty() {
            return Err("an image without tokens; choose a larger image".to_owned());
        }
        if self.w == 0 && self.r == 0 {
            return Err("w=0,r=0 leaves nothing to attend to; set w or r".to_owned());
        }
        if self.rel_pos && self.w < 2 {
            return Err(format!("a relative bias needs a window of 2 or more, not {}", self.w));
        }
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            return Err(format!("{} heads do not divide a width of {}", self.heads, self.width));
        }
        Ok(())
    }

    /// Multiply-adds for one image: the golden files' `macs` (the scores of the dynamic projection included).
    pub fn macs(&self) -> u64 {
        let (n, e, r, g) = (self.grid.len(), self.width, self.r, self.g);
        let up = |len: usize| len.div_ceil(self.w.max(1)) * self.w;
        let window = if self.w == 0 {
            0
        } else {
            2 * up(self.grid.rows) * up(self.grid.cols) * key_side(self.w).pow(2)
        };
        (n * e * self.heads * r + 4 * n * r * e + window * e + g * (3 * n + 2 * g) * e) as u64
    }

    /// Elements that DualLN normalises for one image.
    pub fn normed(&self) -> u64 {
        let tokens = self.grid.len() + self.g;
        if self.dual_ln { (2 * tokens * self.width + 2 * self.r * self.width) as u64 } else { 0 }
    }
}

/// One attention layer without its projections.
pub struct LongShort2d {
    config: LongShort2dConfig,
    local: Option<Norm>,
    global: Option<Norm>,
    bias: Option<Tensor>,
}

impl LongShort2d {
    /// Parameters below `builder` as `names` says.
    pub fn new(config: LongShort2dConfig, names: Names, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(candle_core::Error::msg)?;
        let norm = |name: &str, wanted: bool| {
            (config.dual_ln && wanted).then(|| Norm::new(builder, name, config.width, EPS)).transpose()
        };
        let table = [bias_rows(config.w.max(1)), config.heads];
        let bias =
            config.rel_pos.then(|| builder.param(names.bias, &table, Init::normal(0.02))).transpose()?;
        Ok(Self { config, local: norm(names.local, true)?, global: norm(names.global, config.r > 0)?, bias })
    }

    /// Results [b, g + n, width] of unscaled queries, keys and values [b, h, g + n, d], global tokens in front. `scores`
    /// [b, n, heads * slots] are what the dynamic projection says of the image tokens.
    pub fn forward(&self, [q, k, v]: [&Tensor; 3], scores: Option<&Tensor>) -> Result<Tensor> {
        let LongShort2dConfig { grid, w, r, g, heads, .. } = self.config;
        let (b, _, total, d) = q.dims4()?;
        let n = grid.len();
        if total != g + n {
            bail!("{total} tokens are not {g} global ones and a grid of {} x {}", grid.rows, grid.cols);
        }
        let scaled = |start, len| q.narrow(2, start, len)? / (d as f64).sqrt();
        let [(own_k, global_k), (own_v, global_v)] = [self.keys(k)?, self.keys(v)?];
        let slots = match (r, scores) {
            (0, _) => None,
            (_, None) => bail!("slots need the scores of the dynamic projection"),
            (_, Some(scores)) => {
                let p = softmax(&scores.reshape((b, n, heads, r))?.permute((0, 2, 3, 1))?.contiguous()?)?; // [b, h, r, n]
                let slots = |x: &Tensor| self.slots(&p.matmul(x)?);
                Some((slots(&own_k)?, slots(&own_v)?))
            }
        };
        let mut everywhere = Vec::new();
        everywhere.extend(slots.as_ref().map(|(k, v)| Keys { k, v }));
        if g > 0 {
            everywhere.push(Keys { k: &global_k, v: &global_v });
        }
        let call = Window2d { grid, w, bias: self.bias.as_ref(), everywhere };
        let out = window_2d(&scaled(g, n)?, Keys { k: &own_k, v: &own_v }, &call)?;
        let rows = merge(&out)?;
        if g == 0 {
            return Ok(rows);
        }
        // a global token reads what the image tokens have become, and the global ones
        let own = Qkv::separate(scaled(0, g)?, global_k, global_v);
        let global = class_token(&Heads::Merged { rows: rows.clone(), heads }, &own, None, 1.0)?;
        Tensor::cat(&[&global.merged()?, &rows], 1)
    }

    /// Keys or values `x` [b, h, g + n, d], normalised: those of the image [b, h, n, d], and the global ones.
    fn keys(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let LongShort2dConfig { grid, g, heads, .. } = self.config;
        let x = match &self.local {
            Some(norm) => split(&norm.forward(&merge(x)?)?, heads)?,
            None => x.clone(),
        };
        Ok((x.narrow(2, g, grid.len())?.contiguous()?, x.narrow(2, 0, g)?))
    }

    /// Slots `x` [b, h, r, d], normalised.
    fn slots(&self, x: &Tensor) -> Result<Tensor> {
        match &self.global {
            Some(norm) => split(&norm.forward(&merge(x)?)?, self.config.heads)?.contiguous(),
            None => Ok(x.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use effattn_kernel::heads::Qkv;

    #[test]
    fn alone_it_sees_what_its_pattern_says() {
        let knobs =
            Knobs::parse("ls2d", ENTRY.knobs, [("w", "2"), ("r", "0"), ("dual_ln", "false")]).unwrap();
        let (heads, head_dim, side) = (2, 3, 5);
        let n = side * side;
        let config = MechanismConfig {
            knobs: knobs.clone(),
            heads,
            head_dim,
            width: 6,
            max_len: n,
            causal: false,
            layer: 0,
        };
        let mechanism = (ENTRY.build)(&config, &ParamBuilder::seeded(1, &Device::Cpu, false)).unwrap();
        let normal = |seed| {
            effattn_kernel::device::rng::RngStream::new(seed, "x").normal_tensor(
                (1, heads, n, head_dim),
                0.0,
                1.0,
                &Device::Cpu,
            )
        };
        let zero = Tensor::zeros((1, heads, n, head_dim), DType::F32, &Device::Cpu).unwrap();
        let grid = Grid2d { rows: side, cols: side };
        let shape = Shape { grid: Some(grid), queries: n, keys: n, ..Shape::default() };
        let (pattern, order) = ((ENTRY.pattern)(&knobs, &shape).unwrap(), grid.window_order(2));
        for key in [0, 7, 24] {
            let mut values = vec![0f32; heads * n * head_dim];
            values[key * head_dim] = 1.0;
            let v =
                (&zero + Tensor::from_vec(values, (1, heads, n, head_dim), &Device::Cpu).unwrap()).unwrap();
            let qkv = Qkv::separate(normal(1).unwrap(), normal(2).unwrap(), v);
            let out = mechanism.forward(&AttentionInput::new(&qkv)).unwrap().out.split().unwrap();
            let weights = out.get(0).unwrap().get(0).unwrap().narrow(1, 0, 1).unwrap().flatten_all().unwrap();
            let weights = weights.to_vec1::<f32>().unwrap();
            for (query, &position) in order.iter().enumerate() {
                let seen = pattern.visible(0, query).contains(&key);
                assert_eq!(weights[position] != 0.0, seen, "{position} sees {key}");
            }
        }
    }
}
