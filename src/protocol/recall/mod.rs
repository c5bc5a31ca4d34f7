//! `recall`: small causal models on tasks with labels at some positions: recall (MQAR, MAD, induction heads) and state tracking (parity,
//! modular arithmetic).
//!
//! One worker trains a model at every learning rate of a grid, chooses the rate by the validation split and tests that one once. All
//! rates are in the rows.

pub mod floor;
pub mod plan;
pub mod recipe;
pub mod request;
mod selection;
mod stored_input;
pub mod worker;

use super::definition::{ProtocolInfo, Quick, Tasks};
use effattn_data::position_labels;
use effattn_model::family::labeler;
use effattn_record::Metric;
use effattn_record::config::settings::groups::MACHINE;
use effattn_record::config::settings::{number, within};
use effattn_record::own_setting;

own_setting! {
    /// Number of token ids
    pub VOCABULARY: u64 = "vocabulary", "Data", "N", |text| within(text, 2, 1 << 20);
}

own_setting! {
    /// Share of the free places that hold random tokens, from 0 to 1
    pub NOISE: f64 = "noise", "Data", "SHARE", |text| number(text, |share| (0.0..=1.0).contains(&share), "a number from 0 to 1");
}

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&VOCABULARY.setting, &NOISE.setting],
    settings: &[
        &[
            "task",
            "batch",
            "seeds",
            "preset",
            "layers",
            "width",
            "heads",
            "ffn",
            "dropout",
            "attention_dropout",
        ],
        MACHINE,
        &[
            "timeout",
            "jobs",
            "steps",
            "rates",
            "limit",
            "every",
            "segments",
            "test_segments",
            "vocabulary",
            "noise",
            "floor",
        ],
    ],
    help: &[
        ("batch", "Examples per update, instead of the protocol's"),
        (
            "layers",
            "Number of layers, or what each of them is: shortconv, mixer (that of --model) or a mechanism, as in shortconv,mixer",
        ),
        ("steps", "Most updates at each learning rate, instead of the protocol's"),
        ("limit", "Validate and test on at most N examples per segment"),
        ("floor", "Evaluate simple rules on the same examples instead of training"),
    ],
    presets: || labeler::FAMILY.names(),
    tasks: Some(Tasks {
        called: "Tasks",
        names: || position_labels::tasks().iter().map(|(set, _)| set.name).collect(),
    }),
    quick: Some(Quick {
        help: "Train two mechanisms on short sequences at two learning rates (not a protocol of any source)",
        said: "full and linear on MQAR with 4 pairs in 32 tokens of 64, at most 600 updates at rates of 3e-3 and 1e-2, unless flags say \
               otherwise: not a protocol of any source",
    }),
    metrics: &[ACCURACY, MACRO_ACCURACY],
    ..ProtocolInfo::new(
        "recall",
        "Train small causal models on recall and state tracking: accuracy against state and length",
    )
};

pub struct Recall;

/// Mean accuracy over the test segments.
pub const ACCURACY: Metric = Metric {
    name: "accuracy",
    title: "Accuracy on the test split",
    unit: "accuracy %",
    lower_is_better: false,
};
/// Mean accuracy over the classes of a batch, of protocols that take it (MAD).
pub const MACRO_ACCURACY: Metric = Metric {
    name: "macro_accuracy",
    title: "Accuracy by classes on the test split",
    unit: "accuracy by classes %",
    lower_is_better: false,
};
/// Seed of the validation and test examples, the same for every run: mechanisms and seeds are compared on the same ones.
pub const HELD_OUT_SEED: u64 = 0;
/// Accuracy on one segment of the test split, in rows.
pub const SEGMENT_ACCURACY: &str = "segment_accuracy";
/// Accuracy on the validation split at one rate of the grid, in rows.
pub const RATE_ACCURACY: &str = "rate_validation_accuracy";

const EXAMPLES: &str = "\
Examples:
  # Who can look up: less than a minute
  effattn recall --quick
  # Associative recall at a size for two CPU cores: what it would take
  effattn recall --suite mqar-small --dry-run
  # One knob decides whether parity can be learned
  effattn recall --task parity --steps 300 \\
      --model deltanet,deltanet:neg_eigval=true
  # Other sizes of the task, other rates
  effattn recall --model ls --segments 64:4,64:8 --test-segments 64:8,256:8 \\
      --rates 1e-3,3e-3,1e-2
  # What each layer is
  effattn recall --layers shortconv,window,mixer --model based
  # What simple rules reach
  effattn recall --floor --task mqar,parity

A segment 64:8 has sequences of 64 tokens with 8 key-value pairs; 3..40 has sequences of 3 to 40 tokens. Every learning rate is trained with the same seed; the rate with the best mean accuracy over the segments of the validation split is chosen, and only its model is tested, on examples of their own. Rows have the chosen rate and the validation accuracy of every rate. Training at a rate ends when the validation accuracy is above 99 % (MAD: 99.9 %; state tracking: only with the last step). A killed or stopped run resumes from its last checkpoint when the same command is given again.";
