//! Published backbones, as data.
//!
//! A preset has one [`TaskForm`] per task. Without a task it gives the form that `speed` and `memory` measure: the
//! byte-level text classifier.

use super::batch::{DataShape, InputKind};
use super::{Backbone, ClassifierConfig, InitScheme, Pooling};
use crate::attention::MechanismEntry;
use crate::attention::knobs::Knobs;
use crate::nn::embedding::Positions;
use crate::nn::ffn::FfnActivation;

/// A named family of backbones.
#[derive(Debug)]
pub struct ClassifierPreset {
    /// Name on the command line and in suites.
    pub name: &'static str,
    /// What it is, in a line.
    pub title: &'static str,
    /// What it takes from its source and what it does not.
    pub description: &'static str,
    /// Where its values come from.
    pub source: &'static str,
    forms: &'static [(&'static str, TaskForm)],
    /// Forms that the source gives to one mechanism only: task, mechanism, form.
    own: &'static [(&'static str, &'static str, TaskForm)],
    /// The form without a task.
    bare: TaskForm,
}

/// The backbone of one task.
#[derive(Clone, Debug)]
pub struct TaskForm {
    /// Sizes and options.
    pub backbone: Backbone,
    /// Number of ids; the last one is the class id.
    pub vocab: usize,
    /// Number of classes.
    pub classes: usize,
    /// Longest document of the source's protocol.
    pub max_len: usize,
    /// Documents per example.
    pub towers: usize,
    /// Pooling; absent: the class token in the last layer where the mechanism has it, else in front.
    pub pooling: Option<Pooling>,
}

impl TaskForm {
    const fn new(backbone: Backbone, vocab: usize, classes: usize, max_len: usize) -> Self {
        Self { backbone, vocab, classes, max_len, towers: 1, pooling: None }
    }

    const fn pair(mut self) -> Self {
        self.towers = 2;
        self
    }

    const fn pool(mut self, pooling: Pooling) -> Self {
        self.pooling = Some(pooling);
        self
    }

    const fn inner(mut self, inner: usize) -> Self {
        self.backbone.inner = inner;
        self
    }

    const fn dropout(mut self, dropout: f64) -> Self {
        self.backbone.dropout = dropout;
        self
    }

    const fn attention_dropout(mut self, dropout: f64) -> Self {
        self.backbone.attention_dropout = dropout;
        self
    }

    /// The Long Range Arena's own block: projections without bias, Flax's starts and GELU, dropout 0.1 everywhere.
    const fn arena(mut self, positions: Positions) -> Self {
        self.backbone.bias = false;
        self.backbone.init = InitScheme::Flax;
        self.backbone.positions = positions;
        self.backbone.activation = FfnActivation::GeluTanh;
        self.backbone.dropout = 0.1;
        self.backbone.attention_dropout = 0.1;
        self
    }

    /// The model of `entry` in this form, for documents of up to `max_len` positions.
    pub fn model(&self, entry: &'static MechanismEntry, knobs: Knobs, max_len: usize) -> ClassifierConfig {
        let auto = if entry.support.cls { Pooling::ClsLastLayer } else { Pooling::ClsFront };
        ClassifierConfig {
            entry,
            knobs,
            backbone: self.backbone.clone(),
            vocab: self.vocab,
            max_len,
            classes: self.classes,
            pooling: self.pooling.unwrap_or(auto),
            towers: self.towers,
        }
    }
}

/// A preset that has no form for a task.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("preset {preset} has no backbone for {task}; it has {known}")]
pub struct NoForm {
    preset: &'static str,
    task: String,
    known: String,
}

impl ClassifierPreset {
    /// The backbone for `task`, or the one to measure where there is none. Some sources give single
    /// mechanisms a backbone of their own.
    pub fn form(&self, task: Option<&str>, mechanism: &str) -> Result<TaskForm, NoForm> {
        let Some(task) = task else { return Ok(self.bare.clone()) };
        let own = self.own.iter().find(|(of, only, _)| *of == task && *only == mechanism);
        let form = own.map(|(_, _, form)| form);
        let form = form.or_else(|| self.forms.iter().find(|(of, _)| *of == task).map(|(_, form)| form));
        form.cloned().ok_or_else(|| NoForm {
            preset: self.name,
            task: task.to_owned(),
            known: self.tasks().collect::<Vec<_>>().join(", "),
        })
    }

    /// The backbone without a task, for `examples`; the class id is one more id.
    pub fn form_for(&self, examples: &DataShape) -> TaskForm {
        let DataShape { input, vocab, classes, len } = *examples;
        let towers = if input == InputKind::Pairs { 2 } else { 1 };
        TaskForm { vocab: vocab + 1, classes, max_len: len, towers, ..self.bare.clone() }
    }

    /// The tasks it has a backbone for.
    pub fn tasks(&self) -> impl Iterator<Item = &'static str> {
        self.forms.iter().map(|(task, _)| *task)
    }

    /// The only task with `len` as its protocol length and the sizes of the model that is measured. Tasks differ in
    /// their number of classes, which the exact count of FLOPs shows.
    pub fn task_of_len(&self, len: usize) -> Option<&'static str> {
        let same = |(_, form): &&(&str, TaskForm)| {
            form.max_len == len && form.backbone == self.bare.backbone && form.towers == 1
        };
        let mut tasks = self.forms.iter().filter(same);
        let (first, _) = tasks.next()?;
        tasks.next().is_none().then_some(*first)
    }

    /// The preset called `name`.
    pub fn find(name: &str) -> Option<&'static Self> {
        TABLE.iter().copied().find(|preset| preset.name == name)
    }
}

/// Every classifier preset.
pub static TABLE: &[&ClassifierPreset] = &[&LS_LRA, &LRA_REPO, &LRA_PAPER];

const TABLE_1: Backbone = Backbone::new(2, 64, 2, 128);
const BYTES: usize = 258; // padding, 256 bytes, the class id
const GREYS: usize = 257; // 256 intensities, the class id
const LIST_OPS: usize = 17; // padding, 15 words, the class id

const TABLE_1_RETRIEVAL: TaskForm = TaskForm::new(TABLE_1, 512, 2, 4096).pair().dropout(0.1);

static LS_LRA: ClassifierPreset = ClassifierPreset {
    name: "ls-lra",
    title: "Transformer-LS Table 1: 2 layers, d 64, 2 heads, FFN 128",
    description: "Pre-norm, learned positions, biases, exact GELU. Pooling: a class token in the last layer for \
                  mechanisms that have one (ls, dp), for others the class id in front with the last position dropped. \
                  Retrieval drops 0.1 of hidden activations and of attention weights (Linformer's code only the former).",
    source: "Transformer-LS, Table 1; its released code, folder lra",
    forms: &[
        ("listops", TaskForm::new(TABLE_1, 512, 10, 2048)),
        ("text", TaskForm::new(TABLE_1, 512, 2, 4096)),
        ("retrieval", TABLE_1_RETRIEVAL.attention_dropout(0.1)),
        ("image", TaskForm::new(TABLE_1, 512, 10, 1024)),
        ("pathfinder32", TaskForm::new(TABLE_1, 512, 2, 1024)),
        ("pathfinder64", TaskForm::new(TABLE_1, 512, 2, 4096)),
        ("pathfinder128", TaskForm::new(TABLE_1, 512, 2, 16384)),
    ],
    own: &[("retrieval", "linformer", TABLE_1_RETRIEVAL)],
    bare: TaskForm::new(TABLE_1, 512, 2, 4096),
};

const REPO_IMAGE: TaskForm = image(1, 128, 64, 128, 8);
const REPO_PATHFINDER: TaskForm = pathfinder(4, 4, 32, 16, 32).dropout(0.2);

const fn image(layers: usize, width: usize, inner: usize, ffn: usize, heads: usize) -> TaskForm {
    let form = TaskForm::new(Backbone::new(layers, width, heads, ffn), GREYS, 10, 1024);
    form.inner(inner).arena(Positions::Learned).dropout(0.3).attention_dropout(0.2).pool(Pooling::ClsVector)
}

const fn pathfinder(layers: usize, heads: usize, width: usize, inner: usize, ffn: usize) -> TaskForm {
    let form = TaskForm::new(Backbone::new(layers, width, heads, ffn), GREYS, 2, 1024);
    form.inner(inner).arena(Positions::Sinusoid).pool(Pooling::Mean)
}

const REPO_LISTOPS: TaskForm = TaskForm::new(Backbone::new(4, 512, 8, 1024), LIST_OPS, 10, 2000)
    .arena(Positions::Sinusoid)
    .pool(Pooling::ClsVector);
const REPO_TEXT: TaskForm = TaskForm::new(Backbone::new(4, 256, 4, 1024), BYTES, 2, 1000)
    .arena(Positions::Sinusoid)
    .pool(Pooling::ClsVector);
const REPO_RETRIEVAL: TaskForm = TaskForm::new(Backbone::new(4, 128, 4, 512), BYTES, 2, 4000)
    .pair()
    .arena(Positions::Sinusoid)
    .pool(Pooling::First);

static LRA_REPO: ClassifierPreset = ClassifierPreset {
    name: "lra-repo",
    title: "Long Range Arena, as its repository is configured; Text: 4 layers, d 256, 4 heads, FFN 1024",
    description: "With a task: projections without bias, fixed sinusoid positions (learned for Image and Path-X), Flax's \
                  starts and GELU (tanh), dropout 0.1 to 0.3 (of attention weights 0.1, Image 0.2), per-mechanism sizes for \
                  Image and Pathfinder. Not taken over: LayerNorm eps 1e-6 (1e-5 here), three-layer pair heads. Without a task (speed, memory): the Text \
                  sizes in the common form with biases and learned positions.",
    source: "google-research/long-range-arena, configs of each task",
    forms: &[
        ("listops", REPO_LISTOPS),
        ("text", REPO_TEXT),
        ("retrieval", REPO_RETRIEVAL),
        ("image", REPO_IMAGE),
        ("pathfinder32", REPO_PATHFINDER),
        ("pathfinder64", REPO_PATHFINDER),
        (
            "pathfinder128",
            TaskForm::new(Backbone::new(2, 32, 2, 32), GREYS, 2, 16384)
                .inner(16)
                .arena(Positions::Learned)
                .pool(Pooling::Mean),
        ),
    ],
    own: &[
        // its Sinkhorn encoder has no class vector
        ("listops", "sinkhorn", REPO_LISTOPS.pool(Pooling::Mean)),
        ("text", "sinkhorn", REPO_TEXT.pool(Pooling::Mean)),
        ("retrieval", "sinkhorn", REPO_RETRIEVAL.pool(Pooling::Mean)),
        ("image", "local", image(1, 128, 64, 128, 2).pool(Pooling::Mean)),
        ("image", "bigbird", image(1, 128, 64, 128, 1)),
        ("image", "longformer", image(4, 128, 64, 128, 4).pool(Pooling::Mean)),
        ("image", "reformer", image(4, 64, 32, 64, 8)),
        ("image", "sinkhorn", image(1, 32, 32, 64, 1).pool(Pooling::Mean).dropout(0.1)),
        ("pathfinder32", "bigbird", pathfinder(4, 2, 64, 32, 64).dropout(0.2)),
        ("pathfinder32", "linear", pathfinder(1, 2, 128, 64, 128).dropout(0.2)),
        ("pathfinder32", "linformer", pathfinder(1, 2, 32, 16, 32).dropout(0.2)),
        ("pathfinder32", "local", pathfinder(2, 4, 64, 32, 64)),
        ("pathfinder32", "longformer", pathfinder(2, 2, 32, 16, 32)),
        ("pathfinder32", "performer", pathfinder(4, 8, 32, 16, 32).dropout(0.2)),
        ("pathfinder32", "reformer", pathfinder(2, 8, 64, 32, 64).dropout(0.2)),
        ("pathfinder32", "sinkhorn", pathfinder(2, 4, 32, 16, 64).dropout(0.2)),
        ("pathfinder32", "sparse", pathfinder(1, 8, 32, 16, 32).dropout(0.2)),
        ("pathfinder32", "synthesizer", pathfinder(2, 4, 64, 32, 64).dropout(0.2)),
    ],
    bare: TaskForm::new(Backbone::new(4, 256, 4, 1024), BYTES, 2, 4096).pool(Pooling::ClsFront),
};

const PAPER_LONG: Backbone = Backbone::new(6, 512, 8, 2048);
const PAPER_PATHFINDER: TaskForm = TaskForm::new(Backbone::new(4, 128, 8, 128), GREYS, 2, 1024)
    .arena(Positions::Sinusoid)
    .pool(Pooling::Mean);

const PAPER_LISTOPS: TaskForm =
    TaskForm::new(PAPER_LONG, LIST_OPS, 10, 2000).arena(Positions::Sinusoid).pool(Pooling::ClsVector);
const PAPER_TEXT: TaskForm =
    TaskForm::new(PAPER_LONG, BYTES, 2, 4000).arena(Positions::Sinusoid).pool(Pooling::ClsVector);
const PAPER_RETRIEVAL: TaskForm = REPO_RETRIEVAL.pool(Pooling::ClsVector);
const PAPER_IMAGE: TaskForm = TaskForm::new(Backbone::new(3, 64, 4, 128), GREYS, 10, 1024)
    .arena(Positions::Learned)
    .dropout(0.3)
    .attention_dropout(0.2)
    .pool(Pooling::ClsVector);

static LRA_PAPER: ClassifierPreset = ClassifierPreset {
    name: "lra-paper",
    title: "Long Range Arena, as its paper describes it; Text: 6 layers, d 512, 8 heads, FFN 2048",
    description: "Sizes of the paper in the block of lra-repo; the same parts are not taken over. Where the paper gives \
                  only the width of the attention (Image 64, Pathfinder 128), the residual stream has that width too. \
                  The paper has no Path-X sizes of its own; Pathfinder's are used.",
    source: "Tay et al. 2021, Long Range Arena, appendix",
    forms: &[
        ("listops", PAPER_LISTOPS),
        ("text", PAPER_TEXT),
        ("retrieval", PAPER_RETRIEVAL),
        ("image", PAPER_IMAGE),
        ("pathfinder32", PAPER_PATHFINDER),
        ("pathfinder64", PAPER_PATHFINDER),
        ("pathfinder128", PAPER_PATHFINDER),
    ],
    own: &[
        ("listops", "sinkhorn", PAPER_LISTOPS.pool(Pooling::Mean)),
        ("text", "sinkhorn", PAPER_TEXT.pool(Pooling::Mean)),
        ("retrieval", "sinkhorn", PAPER_RETRIEVAL.pool(Pooling::Mean)),
        ("image", "sinkhorn", PAPER_IMAGE.pool(Pooling::Mean)),
    ],
    bare: TaskForm::new(PAPER_LONG, BYTES, 2, 4096).pool(Pooling::ClsFront),
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::find;
    use crate::family::Architecture;

    fn parameters(preset: &str, task: Option<&str>, len: usize) -> usize {
        let full = find("full").unwrap();
        let form = ClassifierPreset::find(preset).unwrap().form(task, "full").unwrap();
        form.model(full, Knobs::defaults(full.knobs), len).parameters().unwrap()
    }

    #[test]
    fn the_repository_forms_have_its_parameter_counts() {
        // the sources: ListOps 8.95 M, Text 3.49 M, Image 0.248 M, Pathfinder32 26.5 k
        let rounded = |task, len, unit: f64| (parameters("lra-repo", Some(task), len) as f64 / unit).round();
        assert_eq!(rounded("listops", 2000, 1e4), 895.0);
        assert_eq!(rounded("text", 1000, 1e4), 349.0);
        // one id more than the repository: that of `cls-front`
        assert_eq!(rounded("image", 1024, 1e3), 249.0);
        assert_eq!(rounded("pathfinder32", 1024, 1e2), 266.0);
    }

    #[test]
    fn forms_of_single_mechanisms_are_of_known_ones() {
        for (task, mechanism, _) in TABLE.iter().flat_map(|preset| preset.own) {
            assert!(find(mechanism).is_some(), "{task}: {mechanism}");
        }
    }

    #[test]
    fn presets_say_which_tasks_they_have() {
        let error =
            ClassifierPreset::find("ls-lra").unwrap().form(Some("enwik8"), "full").unwrap_err().to_string();
        assert!(error.contains("enwik8") && error.contains("listops"), "{error}");
    }
}
