//! `lra`: the tasks of the Long Range Arena, trained and evaluated by the protocols of Transformer-LS Table 1 and
//! of the arena's own code (cosFormer Table 4).
//!
//! One worker trains one cell (mechanism, task, seed). It writes its own checkpoints into the folder of the cell; rows
//! and curves are written by the parent.

pub mod floor;
pub mod plan;
pub mod recipe;
pub mod request;
pub mod stored;
mod stored_input;
pub mod tasks;
pub mod weights;
pub mod worker;

use super::definition::{ProtocolInfo, Quick, Tasks};
use super::own_data::{DATA, TABLES, TOKENIZER};
use effattn_model::batch::InputKind;
use effattn_model::family::{self, Family, Objective};
use effattn_record::Metric;
use effattn_record::config::settings::groups::{MACHINE, MODEL, TRAINING};
use effattn_record::config::settings::{switch, word};
use effattn_record::own_setting;

own_setting! {
    /// ListOps: keep closing brackets as tokens, as LRA does today and Table 1 did not
    pub KEEP_CLOSE: bool = "keep_close", "Data", "", switch;
}

own_setting! {
    /// Instead of training, test the weights of this finished run on the rows of --data: a run folder, its name, or latest
    pub EVAL: String = "eval", "Evaluation", "RUN", word;
}

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&KEEP_CLOSE.setting, &DATA.setting, &TOKENIZER.setting, &EVAL.setting],
    settings: &[
        TRAINING,
        MODEL,
        MACHINE,
        &["timeout", "steps", "rate", "limit", "strict", "keep_close", "allow_partial", "floor"],
        &["data", "tokenizer", "eval"],
    ],
    help: HELP,
    presets: || family::names(documents),
    tasks: Some(Tasks { called: "Tasks", names: tasks::names }),
    quick: Some(Quick {
        help: "Train few steps on short documents at a high learning rate, to see learning soon (not the paper's protocol)",
        said: "at most 1500 steps on the first 64 tokens at a rate of 1e-3, unless flags say otherwise: not the paper's protocol",
    }),
    metrics: &[ACCURACY],
    ..ProtocolInfo::new(
        "lra",
        "Train and test on the Long Range Arena (Transformer-LS, Table 1; cosFormer, Table 4)",
    )
};

pub struct Lra;

/// Whether a family learns classes of documents or of pairs.
pub fn documents(family: &Family) -> bool {
    family.objective == Objective::Class && family.input != InputKind::Pixels
}

/// Accuracy on the test split.
pub const ACCURACY: Metric = Metric {
    name: "accuracy",
    title: "Accuracy on the test split",
    unit: "accuracy %",
    lower_is_better: false,
};

/// Help of what means something special for the arena's tasks.
pub const HELP: &[(&str, &str)] = &[
    ("len", "Number of tokens, instead of the protocol's"),
    ("batch", "Batch size: examples per step, instead of the protocol's"),
    ("data", TABLES),
    (
        "tokenizer",
        "What --data is cut into: bytes, words, or a tokenizer (tokenizer.json or its folder) [default: bytes]",
    ),
];

const EXAMPLES: &str = "\
Examples:
  # Learn ListOps visibly in less than a minute
  effattn lra --quick
  # Transformer-LS Table 1: 5,000 steps, about an hour
  effattn lra --task listops --model ls
  # Fewer steps on your own copy of the data
  effattn lra --task text --model ls,full --steps 2000 --data-dir ~/data
  # Texts of your own, with the columns text and label
  effattn lra --data train.csv,val.csv,test.csv --model ls,full
  # The same weights on other texts
  effattn lra --eval latest --data new.csv
  # What four seeds of the paper's row would take
  effattn lra --suite ls-table1 --task listops --seeds 1234..1237 --dry-run
  # What simple rules reach on the same test splits
  effattn lra --floor --task listops,text

ListOps and Pathfinder are generated if LRA's own files are not in --data-dir. A killed or stopped run resumes from its last checkpoint when the same command is given again. Accuracy is that of the test split with the weights of the best evaluation, in percent.";
