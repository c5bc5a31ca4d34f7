//! `mlm`: masked language models, RoBERTa's encoder around a bidirectional mechanism (cosFormer Table 1 and Figure 4;
//! `docs/spec/SPEC-text.md` sections 6, 7 and 10).
//!
//! One worker trains one cell. Its folder ends up with weights, configuration and tokenizer in Hugging Face's layout.

pub mod hf_export;
pub mod plan;
pub mod recipe;
pub mod request;
mod stored_input;
pub mod worker;

use super::definition::{ProtocolInfo, Quick, Tasks};
use super::own_data::TOKENIZER;
use effattn_data::running_text;
use effattn_record::Metric;
use effattn_record::config::settings::groups::{MACHINE, MODEL, TRAINING};

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&TOKENIZER.setting],
    settings: &[
        TRAINING,
        MODEL,
        MACHINE,
        &["timeout", "steps", "rate", "limit", "every", "accumulate", "from", "tokenizer", "allow_partial"],
    ],
    help: &[
        ("len", "Tokens per block, instead of the protocol's"),
        ("batch", "Batch size: blocks per step, instead of the protocol's"),
        ("rate", "Peak learning rate, instead of the protocol's"),
        ("limit", "Use the first N blocks of the training text and of each held-out text"),
    ],
    presets: || recipe::RECIPES.iter().map(|recipe| recipe.preset).collect(),
    tasks: Some(Tasks {
        called: "Corpora, or files and folders with your own text",
        names: running_text::names,
    }),
    quick: Some(Quick {
        help: "Train a small model on the built-in sample text (not the paper's protocol)",
        said: "cosformer with 2 layers, width 64, 2 heads and FFN 128 on the built-in sample text, at most 300 updates of 8 blocks of 64 \
               words, rate 3e-3, unless flags say otherwise: not the paper's protocol",
    }),
    metrics: &[
        Metric {
            name: NATS,
            title: "Loss on masked tokens of held-out text, nats",
            unit: "nat",
            lower_is_better: true,
        },
        Metric {
            name: BITS,
            title: "Loss on masked tokens of held-out text, bits",
            unit: "bit",
            lower_is_better: true,
        },
    ],
    ..ProtocolInfo::new(
        "mlm",
        "Train masked language models on running text (cosFormer, Table 1 and Figure 4)",
    )
};

pub struct Mlm;

/// The loss in nats, in rows.
pub const NATS: &str = "masked_loss";
/// The loss in bits, in rows.
pub const BITS: &str = "masked_loss_bits";

const EXAMPLES: &str = "\
Examples:
  # A small model on the built-in sample text: less than a minute
  effattn mlm --quick
  # cosFormer Figure 4 on IMDb, small enough for two cores
  effattn mlm --suite cos-figure4-small --dry-run
  # Your own text
  effattn mlm --task my-text.txt --model cosformer,full --steps 2000
  # As published; the folder contains RoBERTa's vocab.json and merges.txt
  effattn mlm --suite cos-figure4 --tokenizer roberta/
  # Continue from the weights of full attention, converted to longer inputs
  effattn mlm --from results/mlm/latest --model ls:w=32,r=8 --len 512 \\
      --steps 1000

15 % of the tokens are masked, different ones in every epoch. The loss is the mean over masked tokens, in nats and in bits (the paper does not say which it prints). Losses with different tokenizers are not comparable; every row records the checksum of its tokenizer. The folder of a finished cell, results/mlm/latest/cells/*, contains model.safetensors, config.json and tokenizer.json in Hugging Face's layout. A run that was stopped or killed resumes from its last checkpoint when the same command is given again.";
