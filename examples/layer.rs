//! A multi-head layer around long-short attention inside a candle model: `cargo run --release --example layer`.
//!
//! The layer is `x + Linear(attention(LayerNorm(x)))`; any mechanism of `effattn list mechanisms` can stand in it.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
use effattn::attention::{self, knobs::Knobs};
use effattn::model::layer::{AttentionLayer, BlockConfig, BlockStyle, ForwardArgs};
use effattn::nn::ffn::FfnConfig;
use effattn::nn::params::ParamBuilder;

const WIDTH: usize = 64;

/// Points in, classes out: candle's layers at both ends, ours between them.
struct Model {
    embed: Linear,
    attention: AttentionLayer,
    head: Linear,
}

impl Model {
    fn new(candle: VarBuilder, ours: &ParamBuilder) -> Result<Self> {
        let entry = attention::find("ls").expect("a mechanism of the table");
        let settings = [("w", "16"), ("r", "4")];
        let config = BlockConfig {
            entry,
            knobs: Knobs::parse(entry.name, entry.knobs, settings).map_err(candle_core::Error::wrap)?,
            width: WIDTH,
            heads: 4,
            head_dim: WIDTH / 4,
            ffn: 4 * WIDTH,
            bias: true,
            max_len: 512,
            causal: false,
            layer: 0,
            form: FfnConfig::default(),
            style: BlockStyle::default(),
        };
        Ok(Self {
            embed: linear(3, WIDTH, candle.pp("embed"))?,
            attention: AttentionLayer::new(&config, &ours.pp("attention"))?,
            head: linear(WIDTH, 10, candle.pp("head"))?,
        })
    }

    fn forward(&self, points: &Tensor) -> Result<Tensor> {
        let x = self.embed.forward(points)?; // [b, n, width]
        let x = self.attention.forward(&x, &ForwardArgs::default())?;
        self.head.forward(&x.mean(1)?) // [b, classes]
    }
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let (theirs, ours) = (VarMap::new(), ParamBuilder::seeded(1, &device, true));
    let model = Model::new(VarBuilder::from_varmap(&theirs, DType::F32, &device), &ours)?;
    let params = ours.finish();
    let points = Tensor::rand(-1f32, 1f32, (2, 300, 3), &device)?;
    let classes = Tensor::new(&[3u32, 7], &device)?;
    let loss = candle_nn::loss::cross_entropy(&model.forward(&points)?, &classes)?;
    let gradients = loss.backward()?;
    println!("loss {:.3}", loss.to_scalar::<f32>()?);
    for name in params.names() {
        let size = params.grad(&gradients, name)?.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
        println!("{name:32} gradient of norm {size:.2e}");
    }
    Ok(())
}
