//! `finetune`: encoders under the head of a classifier, from pretrained weights or from nothing, on GLUE's tasks, IMDb and
//! Amazon's reviews (cosFormer Tables 1 and 3, Transformer-LS Table 3; `docs/spec/SPEC-text.md` sections 8 to 10).

pub mod plan;
pub mod recipe;
pub mod request;
mod stored_input;
pub mod worker;

use super::definition::{ProtocolInfo, Quick, Tasks};
use super::own_data::{DATA, TABLES};
use effattn_data as data;
use effattn_model::family::masked_lm;
use effattn_record::Metric;
use effattn_record::config::settings::groups::{MACHINE, TRAINING};

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&DATA.setting],
    settings: &[
        TRAINING,
        &["preset", "layers", "width", "heads", "ffn", "dropout", "attention_dropout"],
        MACHINE,
        &[
            "timeout",
            "steps",
            "rate",
            "limit",
            "every",
            "accumulate",
            "from",
            "strict",
            "allow_partial",
            "data",
        ],
    ],
    help: &[
        ("preset", "[default: that of --from, else roberta-base]"),
        (
            "len",
            "Maximum tokens per input, instead of the protocol's; positions are repeated if the encoder has fewer",
        ),
        ("batch", "Batch size: texts per step, instead of the protocol's"),
        ("every", "Steps between evaluations [default: an epoch]"),
        ("data", TABLES),
        (
            "strict",
            "IMDb: select weights on the last tenth of the training reviews, not on the test split as RoBERTa's recipe does",
        ),
    ],
    presets: || masked_lm::FAMILY.names(),
    tasks: Some(Tasks { called: "Tasks", names: || data::texts().iter().map(|(set, _)| set.name).collect() }),
    quick: Some(Quick {
        help: "Train a small encoder from scratch on generated sentences (not the paper's protocol)",
        said: "2 layers, width 64, 2 heads, FFN 128 from scratch on generated sentences, at most 300 updates of 32 at a rate of 1e-3, unless \
               flags say otherwise: not the paper's protocol",
    }),
    metrics: &[Metric {
        name: "accuracy",
        title: "Accuracy on the dev split (GLUE) or the test split",
        unit: "accuracy %",
        lower_is_better: false,
    }],
    ..ProtocolInfo::new(
        "finetune",
        "Fine-tune pretrained encoders on GLUE, IMDb and Amazon (cosFormer, Tables 1 and 3; Transformer-LS, Table 3)",
    )
};

pub struct Finetune;

const EXAMPLES: &str = "\
Examples:
  # Generated sentences: less than a minute, no data needed
  effattn finetune --quick
  # Public weights: a folder with config.json, a tokenizer, model.safetensors
  effattn finetune --from ~/roberta-base --task sst-2
  # Texts of your own, with the columns text and label
  effattn finetune --from ~/roberta-base --data train.csv,val.csv,test.csv
  # Encoders that effattn mlm trained
  effattn finetune --from results/mlm/latest --task sst-2,imdb \\
      --model full,cosformer
  # Long inputs
  effattn finetune --from ~/roberta-base --task imdb --strict \\
      --model ls:w=256,r=32 --len 4096
  # What cosFormer Table 1 would take on this machine
  effattn finetune --suite cos-table1 --dry-run \\
      --from results/cos-figure4/latest

Weights of full attention can be converted to window, longformer and ls: positions are repeated, and the new parts of ls are calibrated on 64 batches. Every other mechanism starts from an encoder that was trained with it, or from scratch. A run that was stopped or killed resumes from its last checkpoint when the same command is given again.";
