//! The program `candle-flash`: candle's own fused attention for CPUs (`candle_nn::attention::flash_attn`) in an encoder of candle's
//! own layers, as a user of candle writes it. Softmax attention and inference only: it has no backward pass.
//!
//! It runs in a process of its own as `effattn candle-flash` and shares nothing with our kernels but the pipe.

use std::io::{self, BufReader, BufWriter};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::wire::{CONTRACT, Message, Tensors};
use effattn_kernel::device::machine::Resident;
use effattn_record::{Outcome, Pass};

/// Version of candle, pinned by this package.
const VERSION: &str = "candle-nn 0.11.1";
/// Most numbers of a result that are sent.
const SENT: usize = 16;

/// Answers requests on standard input until `end`.
pub fn serve() -> Result<()> {
    let mut requests = BufReader::new(io::stdin().lock());
    let mut answers = BufWriter::new(io::stdout().lock());
    let mut model = None;
    while let Some(request) = Message::read(&mut requests).map_err(anyhow::Error::msg)? {
        let name = request.header.get("request").and_then(Value::as_str).unwrap_or_default().to_owned();
        if name == "end" {
            break;
        }
        let answer = match answer(&name, &request, &mut model) {
            Ok(answer) => answer,
            Err(error) => {
                let outcome = if error.is::<Unsupported>() { Outcome::Unsupported } else { Outcome::Failed };
                message(json!({"error": format!("{error:#}"), "outcome": outcome.word()}))
            }
        };
        answer.write(&mut answers)?;
    }
    Ok(())
}

/// What it does not do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Unsupported(String);

fn message(header: Value) -> Message {
    let header = if let Value::Object(header) = header { header } else { Map::new() };
    Message { header, body: Vec::new() }
}

fn answer(name: &str, request: &Message, model: &mut Option<Encoder>) -> Result<Message> {
    let header = || Value::Object(request.header.clone());
    Ok(match name {
        "version" => message(json!({"version": VERSION, "contract": CONTRACT})),
        "describe" => {
            let full = json!({"passes": [Pass::Infer.word()], "knobs": {"mem": [0]}});
            message(json!({"mechanisms": {"full": full}}))
        }
        "evaluate" => {
            let asked: Evaluate = serde_json::from_value(header())?;
            let given = request.tensors().map_err(anyhow::Error::msg)?;
            let get = |name: &str| given.get(name).with_context(|| format!("{name} is missing"));
            let [q, k, v] = [get("q")?, get("k")?, get("v")?].map(|x| x.transpose(1, 2));
            let out = attention(&q?, &k?, &v?, given.get("mask"), asked.causal)?;
            Message::default().with_tensors(&Tensors::from([("out".to_owned(), out)]))?
        }
        "prepare" => {
            *model = None; // two need not fit
            *model = Some(Encoder::new(serde_json::from_value(header())?, request)?);
            message(json!({}))
        }
        "steps" => {
            let asked: Steps = serde_json::from_value(header())?;
            let model = model.as_mut().context("no cell was prepared")?;
            model.steps(&asked)?
        }
        "memory" => {
            let model = model.as_ref().context("no cell was prepared")?;
            let grown = Resident::default().own_peak().saturating_sub(model.before);
            message(json!({"kind": "resident growth", "peak_bytes": grown}))
        }
        _ => bail!(Unsupported(format!("it does not know the request {name}"))),
    })
}

#[derive(Deserialize)]
struct Evaluate {
    causal: bool,
}

#[derive(Deserialize)]
struct Steps {
    n: usize,
    #[serde(default)]
    seconds: Option<f64>,
}

/// q, k, v [b, n, h, d], mask [b, keys] with 1 keep and 0 padding; the result is [b, h, n, d].
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, causal: bool) -> Result<Tensor> {
    let (_, queries, _, d) = q.dims4()?;
    let keys = k.dim(1)?;
    let scale = (1.0 / (d as f64).sqrt()) as f32;
    let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    let Some(mask) = mask else {
        let hidden = if causal { AttnMask::causal_with_offset(keys - queries) } else { AttnMask::None };
        return Ok(flash_attn::<f32>(&q, &k, &v, scale, hidden, None, None)?);
    };
    // a mask is for one sample
    let mut samples = Vec::new();
    for (sample, keep) in mask.to_vec2::<f32>()?.iter().enumerate() {
        let visible = |i: usize, j: usize| keep[j] != 0.0 && !(causal && j > i + keys - queries);
        let table = (0..queries * keys).map(|at| {
            let visible = visible(at / keys, at % keys);
            if visible { 0f32 } else { f32::NEG_INFINITY }
        });
        let table = Tensor::from_iter(table, q.device())?.reshape((queries, keys))?;
        let part = |x: &Tensor| x.i(sample..sample + 1)?.contiguous();
        let (q, k, v) = (part(&q)?, part(&k)?, part(&v)?);
        samples.push(flash_attn::<f32>(&q, &k, &v, scale, AttnMask::Mask(table), None, None)?);
    }
    Ok(Tensor::cat(&samples, 0)?)
}

/// What `prepare` says of the model; it has more.
#[derive(Deserialize)]
struct Prepare {
    mechanism: String,
    pass: Pass,
    dtype: String,
    layers: usize,
    heads: usize,
    pooling: String,
    class_id: u32,
    output: String,
}

/// The classifier around softmax attention (`docs/programs.md`), for inference.
struct Encoder {
    asked: Prepare,
    weights: Tensors,
    batches: Vec<Tensor>,
    next: usize,
    /// Resident bytes before it was there.
    before: u64,
}

impl Encoder {
    fn new(asked: Prepare, request: &Message) -> Result<Self> {
        let able = asked.mechanism == "full" && asked.pass == Pass::Infer && asked.dtype == "f32";
        if !able || asked.output != "linear" {
            bail!(Unsupported(format!(
                "it does not {} with {} in {}",
                asked.pass, asked.mechanism, asked.dtype
            )));
        }
        let before = Resident::default().own();
        let mut weights = request.tensors().map_err(anyhow::Error::msg)?;
        let ids = weights.remove("ids").context("ids are missing")?.to_dtype(DType::U32)?;
        let batches = (0..ids.dim(0)?).map(|at| ids.i(at)).collect::<candle_core::Result<Vec<_>>>()?;
        ensure!(!batches.is_empty(), "there is no batch");
        Ok(Self { asked, weights, batches, next: 0, before })
    }

    fn at(&self, name: &str) -> Result<&Tensor> {
        self.weights.get(name).with_context(|| format!("{name} is missing"))
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        use candle_core::Module;
        let bias = self.weights.get(&format!("{name}.bias")).cloned();
        Ok(candle_nn::Linear::new(self.at(&format!("{name}.weight"))?.clone(), bias).forward(x)?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let (weight, bias) = (self.at(&format!("{name}.weight"))?, self.at(&format!("{name}.bias"))?);
        Ok(candle_nn::ops::layer_norm(&x.contiguous()?, weight, bias, 1e-5)?)
    }

    /// Logits of `ids` [b, n].
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (b, n) = ids.dims2()?;
        let front = self.asked.pooling == "cls-front";
        let ids = match front {
            true => {
                let class = Tensor::full(self.asked.class_id, (b, 1), &Device::Cpu)?;
                Tensor::cat(&[&class, &ids.narrow(1, 0, n - 1)?], 1)?
            }
            false => ids.clone(),
        };
        let table = self.at("token_embedding.weight")?;
        let x = table.index_select(&ids.flatten_all()?, 0)?.reshape((b, n, table.dim(1)?))?;
        let mut x = x.broadcast_add(&self.at("position_embedding.weight")?.narrow(0, 0, n)?)?;
        for layer in 0..self.asked.layers {
            let at = format!("layers.{layer}.");
            let h = self.norm(&x, &format!("{at}norm1"))?;
            let part = |name: &str| -> Result<Tensor> {
                let rows = self.linear(&h, &format!("{at}attn.{name}"))?;
                Ok(rows.reshape((b, n, self.asked.heads, rows.dim(2)? / self.asked.heads))?)
            };
            let y = attention(&part("q")?, &part("k")?, &part("v")?, None, false)?;
            let y = y.transpose(1, 2)?.contiguous()?.flatten_from(2)?;
            x = (x + self.linear(&y, &format!("{at}attn.o"))?)?;
            let h = self.linear(&self.norm(&x, &format!("{at}norm2"))?, &format!("{at}ffn.fc1"))?;
            x = (x + self.linear(&h.gelu_erf()?, &format!("{at}ffn.fc2"))?)?;
        }
        let u = match self.asked.pooling.as_str() {
            "mean" => self.norm(&x, "norm")?.mean(1)?,
            _ => self.norm(&x.i((.., 0))?, "norm")?,
        };
        self.linear(&self.linear(&u, "head.fc1")?.relu()?, "head.fc2")
    }

    /// At most n steps, none begun after `seconds`, at least one.
    fn steps(&mut self, asked: &Steps) -> Result<Message> {
        let start = Instant::now();
        let (mut times, mut result) = (Vec::new(), Vec::new());
        while times.is_empty()
            || times.len() < asked.n && asked.seconds.is_none_or(|most| start.elapsed().as_secs_f64() < most)
        {
            let ids = &self.batches[self.next % self.batches.len()];
            let step = Instant::now();
            let logits = self.forward(ids)?;
            times.push(step.elapsed().as_secs_f64());
            self.next += 1;
            result = logits.flatten_all()?.to_vec1::<f32>()?;
            ensure!(result.iter().all(|x| x.is_finite()), "the logits are not finite");
        }
        result.truncate(SENT);
        Ok(message(json!({"seconds": times, "result": result})))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_package() {
        let pinned = VERSION.replace(' ', " = \"=") + "\"";
        assert!(include_str!("../../Cargo.toml").contains(&pinned), "{pinned}");
    }

    #[test]
    fn what_it_cannot_do_is_unsupported_and_what_is_wrong_failed() {
        let outcome = |name: &str| {
            let mut model = None;
            let error = answer(name, &Message::request(name), &mut model).err().unwrap();
            (error.is::<Unsupported>(), error.to_string())
        };
        assert_eq!(outcome("sing"), (true, "it does not know the request sing".to_owned()));
        assert!(!outcome("steps").0);
    }
}
