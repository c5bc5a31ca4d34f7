//! What a model costs, computed from its configuration alone.
//!
//! FLOPs follow Transformer-LS Table 1 (one forward of one example; a multiply-add is 1, a LayerNorm 5 per
//! element, softmax, activations and element-wise operations are not counted) and count what the definition
//! computes at the padded length, the rows behind a class token included.

use super::char_lm::CharLmConfig;
use super::family::StageCost;
use super::{Backbone, ClassifierConfig, Pooling};
use crate::attention::knobs::Knobs;
use crate::attention::{Cost, MechanismEntry, Needs};

/// Bytes of the positions that the convolution of the projections keeps for one sequence; none for a mechanism without a state.
fn conv_state(backbone: &Backbone, needs: Needs, state_bytes: u64) -> u64 {
    let before = needs.conv.map_or(0, |conv| conv.taps - 1);
    let channels = needs.projections.width(backbone.heads, backbone.head_dim());
    if state_bytes == 0 { 0 } else { (4 * before * channels) as u64 }
}

/// FLOPs of a block besides the mechanism: `normed` rows pass the first LayerNorm, `rows` everything else.
fn block_flops(backbone: &Backbone, needs: Needs, normed: usize, rows: usize) -> u64 {
    let Backbone { width, ffn, heads, .. } = *backbone;
    let linear = rows * width * (needs.linear_width(width, heads, backbone.head_dim()) + 2 * ffn);
    let taps = needs.conv.map_or(0, |conv| conv.taps);
    let convolved = rows * taps * needs.projections.width(heads, backbone.head_dim());
    let stream = 5 * width * needs.stream.unwrap_or(0);
    (linear + convolved + stream + 5 * width * (normed + rows)) as u64
}

impl Backbone {
    /// Bytes that the convolution of the projections adds to the `state_bytes` of a mechanism.
    pub(crate) fn convolved_bytes(&self, needs: Needs, state_bytes: u64) -> u64 {
        conv_state(self, needs, state_bytes)
    }

    /// Costs of the layers of a plain model around the mechanism with these knobs.
    pub fn plain_layers(
        &self,
        (entry, knobs): (&MechanismEntry, &Knobs),
        batch: usize,
        len: usize,
        causal: bool,
    ) -> Vec<StageCost> {
        let block = block_flops(self, (entry.needs)(knobs), len, len);
        let cost = (entry.cost)(knobs, &self.shape(batch, len, causal));
        let layer = |layer| StageCost {
            name: format!("layer {layer}"),
            flops: block + cost.flops,
            core_macs: cost.core_macs,
            state_bytes: cost.state_bytes,
        };
        (0..self.layers).map(layer).collect()
    }
}

impl ClassifierConfig {
    /// Cost of the mechanism in layer `layer` for `batch` documents of `len` positions.
    pub fn attention_cost(&self, batch: usize, len: usize, layer: usize) -> Cost {
        let mut shape = self.backbone.shape(batch, self.positions(len), false);
        shape.cls = self.pooling == Pooling::ClsLastLayer && layer + 1 == self.backbone.layers;
        (self.entry.cost)(&self.knobs, &shape)
    }

    /// Costs of every layer and of the head for `batch` examples of length `len`; both documents of a pair count.
    pub fn layer_costs(&self, batch: usize, len: usize) -> Vec<StageCost> {
        let backbone = &self.backbone;
        let (d, needs, towers) = (backbone.width, (self.entry.needs)(&self.knobs), self.towers as u64);
        // all layers but the last are alike
        let [inner, last] =
            [0, backbone.layers.saturating_sub(1)].map(|layer| self.attention_cost(batch, len, layer));
        let len = self.positions(len);
        let layers = (0..backbone.layers).map(|layer| {
            let cls = self.pooling == Pooling::ClsLastLayer && layer + 1 == backbone.layers;
            let rows = if cls { len + 1 } else { len };
            let attention = if layer + 1 == backbone.layers { last } else { inner };
            StageCost {
                name: format!("layer {layer}"),
                flops: towers * (block_flops(backbone, needs, len, rows) + attention.flops),
                core_macs: towers * attention.core_macs,
                state_bytes: attention.state_bytes + conv_state(backbone, needs, attention.state_bytes),
            }
        });
        let normed = if self.pooling == Pooling::ClsLastLayer { 1 } else { len };
        let head = self.feature_width() * backbone.ffn + backbone.ffn * self.classes;
        let flops = towers * (5 * normed * d) as u64 + head as u64;
        layers.chain([StageCost { name: "head".to_owned(), flops, ..StageCost::default() }]).collect()
    }

    /// Width of what the head reads: pairs give [u, v, u*v, u-v].
    pub fn feature_width(&self) -> usize {
        if self.towers == 2 { 4 * self.backbone.width } else { self.backbone.width }
    }
}

impl CharLmConfig {
    /// Cost of the mechanism in one layer for `batch` segments of `len` positions behind `held` cached ones.
    pub fn attention_cost(&self, batch: usize, len: usize, held: usize) -> Cost {
        let mut shape = self.backbone.shape(batch, len, true);
        shape.keys += held;
        (self.entry.cost)(&self.knobs, &shape)
    }

    /// Costs of every layer and of the logits for `batch` segments of `len` positions behind `held` cached ones, in the
    /// convention of [`ClassifierConfig::layer_costs`]: cached rows are normalised and projected to keys and values again.
    pub fn layer_costs(&self, batch: usize, len: usize, held: usize) -> Vec<StageCost> {
        let backbone = &self.backbone;
        let d = backbone.width;
        let cached = held * (2 * d * backbone.inner + 5 * d);
        let block = block_flops(backbone, (self.entry.needs)(&self.knobs), len, len) + cached as u64;
        let attention = self.attention_cost(batch, len, held);
        let state_bytes = self.attention_cost(1, len, 0).state_bytes;
        let state_bytes = state_bytes + conv_state(backbone, (self.entry.needs)(&self.knobs), state_bytes);
        let layers = (0..backbone.layers).map(|layer| StageCost {
            name: format!("layer {layer}"),
            flops: block + attention.flops,
            core_macs: attention.core_macs,
            state_bytes,
        });
        let flops = (len * d * self.vocab) as u64;
        layers.chain([StageCost { name: "logits".to_owned(), flops, ..StageCost::default() }]).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::attention;
    use crate::attention::knobs::Knobs;
    use crate::family::Architecture;
    use crate::preset::ClassifierPreset;
    use crate::{ClassifierConfig, Pooling};

    const TASKS: [&str; 3] = ["listops", "text", "retrieval"];

    /// The model of Transformer-LS Table 1 for `variant`, `name:knob=value,...`.
    fn table1(variant: &str, task: &str) -> ClassifierConfig {
        let (name, knobs) = variant.split_once(':').unwrap_or((variant, ""));
        let entry = attention::find(name).unwrap();
        let knobs = knobs.split(',').filter_map(|knob| knob.split_once('='));
        let knobs = Knobs::parse(entry.name, entry.knobs, knobs).unwrap();
        let form = ClassifierPreset::find("ls-lra").unwrap().form(Some(task), name).unwrap();
        form.model(entry, knobs, form.max_len)
    }

    #[test]
    fn ls_and_dp_have_the_published_flops_to_the_last_digit() {
        let rows = [
            (["ls", "ls", "ls"], [198_789_696, 397_493_824, 795_003_776]),
            (["ls:w=16,r=2", "ls:w=1,r=1", "ls:w=1,r=254"], [159_953_984, 286_305_088, 2_165_012_352]),
            (
                ["dp:r=4,dual_ln=true", "dp:r=128,dual_ln=true", "dp:r=256,dual_ln=true"],
                [146_325_056, 682_829_376, 2_171_308_928],
            ),
        ];
        for (variants, flops) in rows {
            for ((variant, task), flops) in variants.iter().zip(TASKS).zip(flops) {
                let model = table1(variant, task);
                assert_eq!(model.flops(model.max_len), flops, "{variant} {task}");
            }
        }
    }

    #[test]
    fn baselines_with_mean_pooling_have_the_published_flops() {
        let rows = [("full", [1.2112, 4.5700, 9.1399]), ("linformer:k=256", [0.4059, 0.8119, 1.6238])];
        for (variant, gflops) in rows {
            for (task, gflops) in TASKS.iter().zip(gflops) {
                let model = ClassifierConfig { pooling: Pooling::Mean, ..table1(variant, task) };
                let flops = model.flops(model.max_len) as f64 / 1e9;
                assert!((flops - gflops).abs() < 5e-5, "{variant} {task}: {flops}");
            }
        }
    }

    #[test]
    fn table_1_models_have_the_published_parameter_counts() {
        let rows = [
            ("ls", [249_418, 379_458, 404_034]),
            ("full", [240_522, 370_562, 395_138]),
            ("ls:w=16,r=2", [241_618, 371_658, 396_234]),
            ("ls:w=1,r=1", [241_358, 371_398, 395_974]),
            ("ls:w=1,r=254", [307_138, 437_178, 461_754]),
        ];
        for (variant, parameters) in rows {
            for (task, parameters) in TASKS.iter().zip(parameters) {
                assert_eq!(table1(variant, task).parameters().unwrap(), parameters, "{variant} {task}");
            }
        }
    }
}
